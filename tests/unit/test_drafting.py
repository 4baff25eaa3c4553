"""What all drafting rules share: tie rule, greedy and sampled choice, the walk; and v1's rule."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.fakes import tiny_config
from tests.support.heads import chi_square_p, inputs, markov_config, repeated, selector_config
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs, Sampling, choose, tie_ranks

CONFIGS = {"dflash": tiny_config(), "dflash2": selector_config(), "dspark": markov_config()}


def sampling(temperature: float = 1.0, seed: int = 0) -> Sampling:
    return Sampling(temperature, torch.Generator().manual_seed(seed))


def test_ties_go_to_the_larger_value_then_to_the_lower_id() -> None:
    ids = torch.tensor([[9, 4, 7, 2]], dtype=torch.int32)
    values = torch.tensor([[1.0, 2.0, 2.0, 1.0]])
    ranks = tie_ranks(ids, values)
    assert ranks.tolist() == [[3, 0, 1, 2]]
    for scores, slot in (
        ([5.0, 5.0, 5.0, 5.0], 1), ([5.0, 4.0, 5.0, 5.0], 2), ([5.0, 4.0, 4.0, 5.0], 3), ([6.0, 5.0, 5.0, 5.0], 0),
    ):  # fmt: skip
        assert choose(torch.tensor([scores]), ranks, None)[0].tolist() == [slot]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_order_of_the_candidates_changes_nothing(family: str) -> None:
    given = inputs(CONFIGS[family])
    given.values[:, :, 4:9] = given.values[:, :, 4:5]  # ties in the logits
    order = torch.randperm(16)
    shuffled = DraftInputs(**(vars(given) | {"ids": given.ids[..., order], "values": given.values[..., order]}))
    plain, other = HEADS[family].draft(given), HEADS[family].draft(shuffled)
    assert torch.equal(plain.tokens, other.tokens)
    assert torch.allclose(plain.scores[..., order], other.scores)


def test_dflash_takes_the_best_candidate_of_every_row() -> None:
    given = inputs(tiny_config())
    drafts = HEADS["dflash"].draft(given)
    assert torch.equal(drafts.tokens, given.ids[:, :, 0].long())
    assert torch.equal(drafts.scores, given.values)
    assert drafts.confidence is None
    assert drafts.q is None


@pytest.mark.parametrize("family", CONFIGS)
def test_drafts_have_the_promised_shapes_and_types(family: str) -> None:
    for width in (1, 7):
        given = inputs(CONFIGS[family], drafts=width)
        for drafts in (HEADS[family].draft(given), HEADS[family].draft(given, sampling())):
            assert (drafts.tokens.shape, drafts.tokens.dtype) == ((3, width), torch.int64)
            assert (drafts.scores.shape, drafts.scores.dtype) == ((3, width, 16), torch.float32)
            assert bool((given.ids == drafts.tokens[..., None]).any(-1).all()), "a draft is a candidate"
        assert drafts.q is not None
        assert (drafts.q.shape, drafts.q.dtype) == ((3, width, 16), torch.float32)


@pytest.mark.parametrize("family", CONFIGS)
def test_q_is_the_softmax_of_the_scores_at_the_temperature(family: str) -> None:
    drafts = HEADS[family].draft(inputs(CONFIGS[family]), sampling(0.7))
    torch.testing.assert_close(drafts.q, (drafts.scores / 0.7).softmax(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_tiny_temperature_is_greedy(family: str) -> None:
    given = inputs(CONFIGS[family])
    drafts = HEADS[family].draft(given, sampling(1e-30))
    assert torch.equal(drafts.tokens, HEADS[family].draft(given).tokens)
    assert drafts.q is not None
    assert torch.equal(drafts.q.amax(-1), torch.ones(3, 7))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_sampled_draft_follows_its_own_q(family: str) -> None:
    """Draft 1's q is the same in all sequences; for later ones the sequences that share a prefix are counted."""
    rule, times = HEADS[family].draft, 20000
    drafts = rule(repeated(inputs(CONFIGS[family], drafts=2), times), sampling(0.8, seed=3))
    ids = inputs(CONFIGS[family], drafts=2).ids[0].long()
    assert drafts.q is not None
    counts = (drafts.tokens[:, :1] == ids[0]).sum(0)
    assert chi_square_p(counts, drafts.q[0, 0]) > 1e-3
    assert chi_square_p(counts, drafts.q[0, 0].sqrt() / drafts.q[0, 0].sqrt().sum()) < 1e-6, "the test has power"
    most = int(drafts.tokens[:, 0].mode().values)
    shared = drafts.tokens[:, 0] == most
    assert chi_square_p((drafts.tokens[shared, 1:2] == ids[1]).sum(0), drafts.q[shared][0, 1]) > 1e-3


def test_the_same_seed_gives_the_same_drafts() -> None:
    given = inputs(selector_config())
    first, second, third = (HEADS["dflash2"].draft(given, sampling(1.5, seed)).tokens for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="expected a positive number"):
        Sampling(temperature, torch.Generator())


@pytest.mark.parametrize(("family", "field"), [("dflash2", "projected"), ("dspark", "hidden")])
def test_what_a_rule_cannot_do_without_is_named(family: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"draft head {family}: {field} is missing"):
        HEADS[family].draft(inputs(CONFIGS[family], **{field: None}))


@pytest.mark.parametrize("family", CONFIGS)
def test_sequences_of_a_batch_do_not_meet(family: str) -> None:
    given, names = inputs(CONFIGS[family]), ("ids", "values", "anchors", "hidden", "projected")
    together = HEADS[family].draft(given)
    for row in range(3):
        part = {name: getattr(given, name)[row : row + 1] for name in names}
        alone = HEADS[family].draft(DraftInputs(**(vars(given) | part)))
        assert torch.equal(alone.tokens, together.tokens[row : row + 1])
        torch.testing.assert_close(alone.scores, together.scores[row : row + 1])
