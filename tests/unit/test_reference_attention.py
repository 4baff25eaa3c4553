"""Who sees whom, and what is done with it: the mask by true positions and the attention over it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.oracle.drafters import FULL, random_rows, v1_case
from tests.support.tolerance import assert_close
from trtllm_dflash.config import LayerMask
from trtllm_dflash.reference import ops
from trtllm_dflash.reference.drafter import ReferenceDrafter

W, B = 5, 8
COMBINATIONS = (LayerMask(None, False), LayerMask(None, True), LayerMask(W, False), LayerMask(W, True))
CONTEXT_LENGTHS = (0, 1, W - 1, W, W + B, 2 * W)


def seen_interval(mask: LayerMask, row: int, context_len: int) -> range:
    """Positions that row ``row`` of a block at ``context_len`` sees, as an interval."""
    t, end = context_len + row, context_len + B
    first = 0 if mask.window is None else max(0, t - mask.window + 1)
    if mask.causal:
        return range(first, t + 1)
    return range(first, end if mask.window is None else min(end, t + mask.window))


@pytest.mark.parametrize("context_len", CONTEXT_LENGTHS)
@pytest.mark.parametrize("mask", COMBINATIONS, ids=str)
def test_T22_T23_each_row_sees_one_interval_of_positions(mask: LayerMask, context_len: int) -> None:
    keys = torch.arange(context_len + B)
    seen = ops.visible(keys[context_len:], keys, mask.window, mask.causal)
    assert seen.dtype == torch.bool
    for row in range(B):
        assert seen[row].nonzero().flatten().tolist() == list(seen_interval(mask, row, context_len)), f"row {row}"


def test_T23_a_window_that_is_not_causal_reaches_as_far_forward_as_back() -> None:
    seen = ops.visible(torch.tensor([10]), torch.arange(21), W, causal=False)
    assert seen[0].nonzero().flatten().tolist() == [6, 7, 8, 9, 10, 11, 12, 13, 14]
    seen = ops.visible(torch.tensor([10]), torch.arange(21), W, causal=True)
    assert seen[0].nonzero().flatten().tolist() == [6, 7, 8, 9, 10]


def test_positions_decide_not_indices() -> None:
    """Rows 0..3 and 20..22 with a query at 23: seven rows back by index, but positions 0..3 are out of the window."""
    positions = torch.tensor([0, 1, 2, 3, 20, 21, 22])
    seen = ops.visible(torch.tensor([23]), positions, window=10, causal=True)
    assert seen[0].tolist() == [False] * 4 + [True] * 3


# ---- the same questions asked of a whole drafter --------------------------------------------------------------------


def hidden_of(mask: LayerMask, features: Tensor, embeddings: Tensor) -> Tensor:
    """One-layer drafter, so that what a row sees is what its output depends on."""
    case = v1_case(mask)
    drafter = ReferenceDrafter(case.config(), case.weights())
    positions = torch.arange(len(features))
    keys, values = drafter.context_kv(features, positions)
    return drafter.block(embeddings, len(features), keys, values, positions)


def rows_that_change(before: Tensor, after: Tensor) -> list[int]:
    return (before - after).abs().amax(dim=1).gt(1e-6).nonzero().flatten().tolist()


@pytest.mark.parametrize("context_len", [W - 1, W, W + B, 2 * W])
@pytest.mark.parametrize("mask", COMBINATIONS, ids=str)
def test_T21_a_context_row_reaches_exactly_the_block_rows_whose_window_holds_it(
    mask: LayerMask, context_len: int
) -> None:
    features, embeddings = random_rows(1, context_len, 144), random_rows(2, B, 48)
    before = hidden_of(mask, features, embeddings)
    for position in range(context_len):
        changed = features.clone()
        changed[position] += 1.0
        expected = [row for row in range(B) if position in seen_interval(mask, row, context_len)]
        assert rows_that_change(before, hidden_of(mask, changed, embeddings)) == expected, f"position {position}"


@pytest.mark.parametrize("mask", COMBINATIONS, ids=str)
def test_T22_a_block_row_reaches_exactly_the_rows_that_see_it(mask: LayerMask) -> None:
    features, embeddings = random_rows(1, 3, 144), random_rows(2, B, 48)
    before = hidden_of(mask, features, embeddings)
    for source in range(B):
        changed = embeddings.clone()
        changed[source] += random_rows(3, 48)  # the norm would swallow a change of scale
        expected = [row for row in range(B) if 3 + source in seen_interval(mask, row, 3)]
        assert rows_that_change(before, hidden_of(mask, features, changed)) == expected, f"row {source}"


def test_the_published_default_differs_from_its_two_misreadings_only_beyond_the_window_or_in_the_block() -> None:
    """T21: a window read as full is invisible below W. T22: causality ignored is visible at once."""
    embeddings = random_rows(2, B, 48)
    wide = LayerMask(20, causal=False)
    short, long = random_rows(1, 20 - B, 144), random_rows(1, 40, 144)
    assert torch.equal(hidden_of(wide, short, embeddings), hidden_of(FULL, short, embeddings))
    assert rows_that_change(hidden_of(wide, long, embeddings), hidden_of(FULL, long, embeddings)) == list(range(B))
    causal = hidden_of(LayerMask(20, causal=True), short, embeddings)
    assert rows_that_change(causal, hidden_of(wide, short, embeddings)) == list(range(B - 1))  # the last row sees all


# ---- attention ------------------------------------------------------------------------------------------------------


def test_attention_equals_a_scalar_loop_in_float64() -> None:
    q, k, v = random_rows(1, 3, 4, 6), random_rows(2, 5, 2, 6), random_rows(3, 5, 2, 6)
    seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    expected = torch.zeros(3, 4, 6, dtype=torch.float64)
    for row in range(3):
        for head in range(4):
            keys = [t for t in range(5) if seen[row, t]]
            scores = [0.3 * sum(float(q[row, head, d]) * float(k[t, head // 2, d]) for d in range(6)) for t in keys]
            total = sum(math.exp(s) for s in scores)
            for score, t in zip(scores, keys, strict=True):
                expected[row, head] += math.exp(score) / total * v[t, head // 2].double()
    assert_close(ops.attention(q, k, v, seen, scale=0.3), expected, ("torch", "fp32"))


def test_attention_survives_scores_that_overflow_an_unshifted_softmax() -> None:
    q, k, v = torch.full((1, 1, 2), 100.0), torch.tensor([[[100.0, 100.0]], [[-100.0, 100.0]]]), random_rows(1, 2, 1, 2)
    out = ops.attention(q, k, v, torch.ones(1, 2, dtype=torch.bool), scale=1.0)
    assert_close(out[0], v[0], ("torch", "fp32"))


def test_a_query_that_sees_nothing_is_refused_by_row() -> None:
    rows = random_rows(1, 2, 1, 4)
    with pytest.raises(ValueError, match=r"query 1 sees 0 of 2 keys"):
        ops.attention(rows, rows, rows, torch.tensor([[True, False], [False, False]]), scale=0.5)
