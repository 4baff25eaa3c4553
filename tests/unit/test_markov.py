"""DSpark's walk and confidence against the reference, which scores the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from tests.support.heads import TABLES_OF_KIND, full_logits, inputs, markov_config, tables
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs, Drafts
from trtllm_dflash.reference.heads import confidence, markov_walk

KINDS = tuple(TABLES_OF_KIND)
draft = HEADS["dspark"].draft


def reference(given: DraftInputs, row: int, seed: int) -> tuple[list[int], torch.Tensor]:
    assert given.config.markov is not None
    assert given.hidden is not None
    logits = full_logits(seed=seed)[row]
    return markov_walk(logits, given.hidden[row], given.tables, int(given.anchors[row]), given.config.markov.kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_over_the_candidates_it_drafts_as_over_the_whole_vocabulary_while_the_best_token_is_among_them(
    kind: str, dtype: torch.dtype
) -> None:
    config, compared, beyond, turned = markov_config(kind), 0, 0, 0
    for seed in range(12):
        scaled = {
            name: table / 2 if name == "markov_w2" else table
            for name, table in tables(config, seed=seed, dtype=dtype).items()
        }
        given = inputs(config, seed=seed, tables=scaled)
        drafts = draft(given)
        for row in range(3):
            expected, corrected = reference(given, row, seed)
            for step, token in enumerate(expected):
                candidates = given.ids[row, step].long()
                torch.testing.assert_close(drafts.scores[row, step], corrected[step][candidates], rtol=1e-4, atol=1e-5)
                if token not in candidates:
                    beyond += 1
                    break  # from here on the two walks have different predecessors
                assert int(drafts.tokens[row, step]) == token
                compared += 1
                turned += token != int(candidates[0])
    assert compared > 50, "the candidates must hold the best token often"
    assert beyond > 0, "and not always"
    assert turned > 10, "the bias must matter"


def test_the_state_starts_at_zero_in_every_block() -> None:
    given = inputs(markov_config("rnn"))
    assert torch.equal(draft(given).tokens, draft(given).tokens)
    first_row = {name: getattr(given, name)[:, :1] for name in ("ids", "values", "hidden")}
    alone = draft(DraftInputs(**(vars(given) | first_row)))
    torch.testing.assert_close(alone.scores, draft(given).scores[:, :1])


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_hidden_states_reach_the_bias_of_their_own_row(kind: str) -> None:
    given = inputs(markov_config(kind))
    assert given.hidden is not None
    changed = given.hidden.clone()
    changed[:, 3] += 1.0
    before, after = draft(given), draft(DraftInputs(**(vars(given) | {"hidden": changed})))
    torch.testing.assert_close(before.scores[:, :3], after.scores[:, :3])
    assert (before.scores[:, 3] - after.scores[:, 3]).abs().max() > 1e-3


def expected_confidence(given: DraftInputs, drafts: Drafts, row: int) -> torch.Tensor:
    assert given.config.confidence is not None
    assert given.hidden is not None
    t, factors = given.tables, given.confidence_temperatures
    previous = [int(given.anchors[row]), *drafts.tokens[row, :-1].tolist()]
    w1 = t["markov_w1"] if given.config.confidence.with_markov else None
    temperatures = None if factors is None else factors.tolist()
    return torch.tensor(
        confidence(given.hidden[row], previous, t["confidence"], t["confidence_bias"], w1, temperatures)
    )


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("temperatures", [None, torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25, 1.5, 4.0])], ids=["1", "given"])
def test_confidence_equals_the_reference(with_markov: bool, temperatures: torch.Tensor | None) -> None:
    given = inputs(markov_config("gated", with_markov=with_markov), confidence_temperatures=temperatures)
    drafts = draft(given)
    assert drafts.confidence is not None
    assert drafts.confidence.dtype == torch.float32
    for row in range(3):
        torch.testing.assert_close(drafts.confidence[row], expected_confidence(given, drafts, row))
    assert drafts.confidence.std() > 0.05


def test_a_narrow_block_takes_the_first_temperatures() -> None:
    temperatures = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25, 1.5, 4.0])
    wide = inputs(markov_config(), confidence_temperatures=temperatures)
    rows = {name: getattr(wide, name)[:, :2] for name in ("ids", "values", "hidden")}
    narrow, whole = draft(DraftInputs(**(vars(wide) | rows))).confidence, draft(wide).confidence
    assert narrow is not None
    assert whole is not None
    torch.testing.assert_close(narrow, whole[:, :2])


def test_without_a_confidence_head_there_is_none() -> None:
    assert draft(inputs(markov_config(with_markov=None))).confidence is None


def test_without_a_markov_head_the_best_candidates_are_drafted() -> None:
    given = inputs(markov_config(with_markov=False))
    config = {**vars(given.config), "markov": None}
    bare = DraftInputs(**(vars(given) | {"config": type(given.config)(**config)}))
    drafts = draft(bare)
    assert torch.equal(drafts.tokens, given.ids[:, :, 0].long())
    assert drafts.confidence is not None


def test_the_reference_refuses_another_kind() -> None:
    given = inputs(markov_config())
    assert given.hidden is not None
    with pytest.raises(ValueError, match="kind 'lstm', expected vanilla, gated or rnn"):
        markov_walk(full_logits()[0], given.hidden[0], given.tables, 1, "lstm")
