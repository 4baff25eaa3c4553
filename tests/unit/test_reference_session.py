"""Pages, gaps, padding and row 0 through ``ReferenceSession``; parity with the direct path is in tests/oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.oracle.drafters import FULL, Case, random_rows, v1_case
from tests.support.tolerance import assert_close, assert_ids_equal
from trtllm_dflash.config import LayerMask
from trtllm_dflash.limits import Limits
from trtllm_dflash.reference import ops
from trtllm_dflash.reference.drafter import ReferenceDrafter
from trtllm_dflash.runtime.reference_session import ReferenceSession
from trtllm_dflash.runtime.session import Candidates, ContextTables

LIMITS = Limits(max_batch_size=2, max_draft_len=7, max_seq_len=64, max_num_tokens=32, tokens_per_block=4)
EMBEDDING, LM_HEAD = random_rows(11, 160, 48), random_rows(12, 160, 48)
FP32 = ("torch", "fp32")


def session_of(case: Case) -> ReferenceSession:
    session = ReferenceSession(case.config(), LIMITS, case.weights())
    session.bind_target(EMBEDDING, LM_HEAD)
    session.k_cache.fill_(torch.nan)  # nothing but written rows may be read
    session.v_cache.fill_(torch.nan)
    return session


def direct(case: Case, features: Tensor, positions: Tensor, anchor: int, anchor_position: int, m: int) -> Tensor:
    """Logits ``[m, V]`` of the draft rows, without pages."""
    drafter = ReferenceDrafter(case.config(), case.weights())
    embeddings = EMBEDDING[[anchor] + [case.config().mask_token_id] * m]
    hidden = drafter.block(embeddings, anchor_position, *drafter.context_kv(features, positions), positions)
    return drafter.head(hidden[1:], LM_HEAD)


def tables(*rows: tuple[list[int], list[int], list[int]]) -> ContextTables:
    return ContextTables(*(torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True)))


def assert_candidates(candidates: Candidates, sequence: int, logits: Tensor) -> None:
    ids, values = ops.top_k(logits, 16)
    assert_ids_equal(candidates.ids[sequence], ids, values)
    assert_close(candidates.values[sequence], values, FP32)
    assert_close(candidates.logsumexp[sequence], ops.logsumexp(logits), FP32)


@pytest.mark.parametrize("mask", [FULL, LayerMask(6, True), LayerMask(6, False)], ids=str)
def test_a_gap_in_positions_starts_a_new_page_and_positions_stay_true(mask: LayerMask) -> None:
    """Positions 0..5 and 9..11 in pages 5, 2 (half full) and 7; then the front page is evicted."""
    case = v1_case(mask, mask)
    session = session_of(case)
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 9, 10, 11])
    features = random_rows(1, 9, 144)
    pages, rows = torch.tensor([5] * 4 + [2] * 2 + [7] * 3), torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2])
    session.ingest(features, positions.to(torch.int32), pages, rows)
    anchors, anchor_positions = torch.tensor([42, 42]), torch.tensor([12, 12], dtype=torch.int32)
    context = tables(([5, 2, 7], [0, 4, 9], [4, 2, 3]), ([2, 7, 0], [4, 9, 0], [2, 3, 0]))
    candidates = session.draft(anchors, anchor_positions, context, 7)
    assert_candidates(candidates, 0, direct(case, features, positions, 42, 12, 7))
    assert_candidates(candidates, 1, direct(case, features[4:], positions[4:], 42, 12, 7))


def test_an_empty_context_drafts_beside_a_full_one() -> None:
    case = v1_case(FULL, FULL)
    session = session_of(case)
    features = random_rows(1, 4, 144)
    session.ingest(features, torch.arange(4, dtype=torch.int32), torch.tensor([3] * 4), torch.arange(4))
    context = tables(([0], [0], [0]), ([3], [0], [4]))
    candidates = session.draft(torch.tensor([7, 8]), torch.tensor([0, 4], dtype=torch.int32), context, 3)
    assert candidates.ids.shape == (2, 3, 16)
    assert_candidates(candidates, 0, direct(case, features[:0], torch.arange(0), 7, 0, 3))
    assert_candidates(candidates, 1, direct(case, features, torch.arange(4), 8, 4, 3))


def test_T33_T34_row_0_holds_the_anchor_and_its_output_is_no_draft() -> None:
    """The anchor reaches every draft; a block fed with the mask row only, or read from row 0 on, is another one."""
    case = v1_case(FULL)
    session, context = session_of(case), tables(([0], [0], [0]))
    position = torch.zeros(1, dtype=torch.int32)
    candidates = session.draft(torch.tensor([42]), position, context, 7)
    assert_candidates(candidates, 0, direct(case, torch.empty(0, 144), torch.arange(0), 42, 0, 7))
    masked = session.draft(torch.tensor([case.config().mask_token_id]), position, context, 7)
    assert (masked.values[0, :, 0] - candidates.values[0, :, 0]).abs().min() > 1e-3


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    case = v1_case(LayerMask(6, False), FULL)
    session = session_of(case)
    for page in (1, 2):
        session.ingest(
            random_rows(page, 4, 144), torch.arange(4, dtype=torch.int32), torch.full((4,), page), torch.arange(4)
        )
    first, second = ([1], [0], [4]), ([2], [0], [3])
    positions = torch.tensor([4, 3], dtype=torch.int32)
    both = session.draft(torch.tensor([7, 8]), positions, tables(first, second), 7)
    alone = session.draft(torch.tensor([8]), positions[1:], tables(second), 7)
    assert_ids_equal(both.ids[1], alone.ids[0], alone.values[0])
    assert_close(both.values[1], alone.values[0], FP32)
