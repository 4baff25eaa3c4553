"""Rules for how many drafts are verified: threshold prefix, survival budget, and the budget itself."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from trtllm_dflash.heads.confidence import best_budget, survival, survival_budget, threshold_prefix


@pytest.mark.parametrize(
    ("tau", "kept"), [(-1.0, 4), (0.0, 4), (0.3, 4), (0.31, 3), (0.5, 1), (0.9, 1), (0.91, 0), (1.0, 0)]
)
def test_the_prefix_ends_before_the_first_unsure_draft(tau: float, kept: int) -> None:
    assert threshold_prefix([0.9, 0.4, 0.8, 0.3], tau) == kept


def test_nan_is_not_sure() -> None:
    assert threshold_prefix([0.9, math.nan, 0.9], 0.1) == 1
    assert threshold_prefix([], 0.5) == 0


def test_survival_is_the_product_so_far() -> None:
    assert survival([0.5, 0.5, 1.0, 0.0, 1.0]) == [0.5, 0.25, 0.25, 0.0, 0.0]


def test_the_most_probable_slots_win() -> None:
    confidence = [[0.9, 0.9, 0.9], [0.5, 1.0, 0.1], [0.95]]
    # survival: .9 .81 .729 | .5 .5 .05 | .95
    expected = [[0, 0, 0], [0, 0, 1], [1, 0, 1], [2, 0, 1], [3, 0, 1], [3, 1, 1], [3, 2, 1], [3, 3, 1], [3, 3, 1]]
    assert [survival_budget(confidence, budget) for budget in range(9)] == expected


def test_equal_slots_go_by_draft_then_by_request() -> None:
    confidence = [[1.0, 1.0], [1.0, 1.0]]
    assert [survival_budget(confidence, budget) for budget in range(5)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def test_hopeless_slots_are_never_verified() -> None:
    assert survival_budget([[1e-3, 1e-3, 0.9], [1e-7, 1.0]], 100) == [2, 0]
    assert survival_budget([[1e-3, 0.9e-3]], 100) == [1]
    assert survival_budget([[], [0.5]], 100) == [0, 1]
    assert survival_budget([], 3) == []


def test_no_other_set_of_prefixes_survives_better() -> None:
    """Against every choice of prefixes, on random confidences."""
    rng = random.Random(0)
    for _ in range(200):
        confidence = [[rng.random() for _ in range(3)] for _ in range(3)]
        curves = [survival(row) for row in confidence]

        def gain(kept: tuple[int, ...] | list[int], curves: list[list[float]] = curves) -> float:
            return sum(sum(curve[:k]) for curve, k in zip(curves, kept, strict=True))

        budget = rng.randrange(10)
        chosen = survival_budget(confidence, budget)
        assert sum(chosen) == min(budget, sum(s >= 1e-6 for curve in curves for s in curve))
        best = max(gain(kept) for kept in itertools.product(range(4), repeat=3) if sum(kept) <= budget)
        assert gain(chosen) == pytest.approx(best)


def test_the_best_budget_looks_beyond_the_first_descent() -> None:
    """A graph of 2 rows costs 1, one of up to 8 rows costs 1.5: the third row alone does not pay, all eight do."""
    confidence = [[0.95] * 7]
    assert best_budget(confidence, lambda drafts: 1.0 if drafts + 1 <= 2 else 1.5) == 7
    assert (1 + 0.95 + 0.95**2) / 1.5 < 1 + 0.95, "the rate falls first"
    assert best_budget(confidence, lambda drafts: 1.0 + drafts) == 0
    assert best_budget(confidence, lambda drafts: 1.0) == 7
    assert best_budget([[0.0, 1.0]], lambda drafts: 1.0) == 0


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_what_is_no_probability_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="request 1, draft 0"):
        survival_budget([[0.5], [value]], 1)
    with pytest.raises(ValueError, match="budget is -1"):
        survival_budget([[0.5]], -1)
