"""DFlash 2's walk: the worked vector, the reference's loops, and tables of any dtype."""

from __future__ import annotations

import pytest
import torch

from tests.golden.vectors import SELECTOR
from tests.support.heads import inputs, selector_config, tables
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs
from trtllm_dflash.reference.heads import selector_walk


def codebook(rows: dict[int, tuple[float, ...]]) -> torch.Tensor:
    """Rows that the vector does not name are NaN: nothing but the named ones may be read."""
    book = torch.full((8, 2), torch.nan)
    for token, row in rows.items():
        book[token] = torch.tensor(row)
    return book


def golden() -> DraftInputs:
    return DraftInputs(
        ids=torch.tensor([SELECTOR.candidates], dtype=torch.int32),
        values=torch.tensor([SELECTOR.unary]),
        anchors=torch.tensor([SELECTOR.anchor]),
        tables={
            "predecessor_codebook": codebook(SELECTOR.predecessor),
            "successor_codebook": codebook(SELECTOR.successor),
        },
        config=selector_config(),
        projected=torch.tensor([SELECTOR.projected]),
    )


def test_T37_the_worked_vector_of_the_selector() -> None:
    drafts = HEADS["dflash2"].draft(golden())
    assert tuple(drafts.tokens[0].tolist()) == SELECTOR.drafts
    torch.testing.assert_close(drafts.scores, torch.tensor([SELECTOR.scores]))
    assert SELECTOR.drafts != SELECTOR.plain_argmax


def test_T37_the_worked_vector_of_the_reference() -> None:
    g = golden()
    books = g.tables["predecessor_codebook"], g.tables["successor_codebook"]
    assert g.projected is not None
    drafts, scores = selector_walk(g.ids[0], g.values[0], g.projected[0], *books, SELECTOR.anchor)
    assert tuple(drafts) == SELECTOR.drafts
    torch.testing.assert_close(scores, torch.tensor(SELECTOR.scores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_the_walk_equals_the_references_loops(seed: int, dtype: torch.dtype) -> None:
    config = selector_config()
    given = inputs(config, seed=seed, tables=tables(config, seed=seed, dtype=dtype))
    drafts = HEADS["dflash2"].draft(given)
    books = given.tables["predecessor_codebook"], given.tables["successor_codebook"]
    assert given.projected is not None
    for row, anchor in enumerate(given.anchors.tolist()):
        expected, scores = selector_walk(given.ids[row], given.values[row], given.projected[row], *books, anchor)
        assert drafts.tokens[row].tolist() == expected
        torch.testing.assert_close(drafts.scores[row], scores)
    assert not torch.equal(drafts.tokens, given.ids[:, :, 0].long()), "the selector must matter"
