"""The comparisons that every parity test trusts must themselves be able to fail, and say where."""

from __future__ import annotations

import pytest
import torch

from tests.oracle.drafters import random_rows
from tests.support.tolerance import TOLERANCES, assert_close, assert_ids_equal

FP32 = ("torch", "fp32")
INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize("row", TOLERANCES, ids=" ".join)
def test_each_row_allows_less_than_its_bound_and_refuses_more(row: tuple[str, str]) -> None:
    expected = random_rows(1, 64, 64)
    tolerance = TOLERANCES[row]
    bound = tolerance.absolute + tolerance.relative * float(expected.abs().max())
    for factor, fails in ((0.99, False), (1.01, True)):
        actual = expected.double()
        actual[3, 5] += factor * bound
        if fails:
            with pytest.raises(AssertionError, match=r"worst at \(3, 5\)"):
                assert_close(actual, expected, row)
        else:
            assert_close(actual, expected, row)


@pytest.mark.parametrize("row", TOLERANCES, ids=" ".join)
def test_many_small_errors_fail_the_scalar_bound(row: tuple[str, str]) -> None:
    expected = torch.ones(100, 100)
    tolerance = TOLERANCES[row]
    error = 0.9 * (tolerance.absolute + tolerance.relative)
    assert error**2 / 2 > tolerance.scalar, "the element bound would be the only one"
    with pytest.raises(AssertionError, match="scalar difference"):
        assert_close(expected.double() + error, expected, row)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [([1.0, NAN], [1.0, 2.0]), ([1.0, 2.0], [1.0, NAN]), ([NAN, 1.0], [NAN, 1.0]), ([1.0, INF], [1.0, 2.0]),
     ([1.0, 2.0], [1.0, -INF]), ([1.0, INF], [1.0, -INF])],
)  # fmt: skip
def test_nan_and_misplaced_infinities_fail(actual: list[float], expected: list[float]) -> None:
    with pytest.raises(AssertionError, match=r"worst at \([01],\)"):
        assert_close(torch.tensor(actual), torch.tensor(expected), FP32)


def test_matching_infinities_zeros_and_empty_tensors_pass() -> None:
    assert_close(torch.tensor([1.0, -INF, INF]), torch.tensor([1.0, -INF, INF]), FP32)
    assert_close(torch.zeros(3), torch.zeros(3), FP32)
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3), FP32)


def test_shapes_must_be_equal() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(1, 2\)"):
        assert_close(torch.zeros(2), torch.zeros(1, 2), FP32)
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(1, 2\)"):
        assert_ids_equal(torch.zeros(2), torch.zeros(1, 2))


def test_ids_name_the_first_coordinate_and_both_ids() -> None:
    with pytest.raises(AssertionError, match=r"at \(1, 0\): 9, expected 3"):
        assert_ids_equal(torch.tensor([[1, 2], [9, 8]]), torch.tensor([[1, 2], [3, 4]]))


def test_ids_may_be_swapped_only_within_twice_the_bound() -> None:
    expected, values = torch.tensor([[7, 3, 5]]), torch.tensor([[3.0, 2.9, 1.0]])
    swapped, foreign = torch.tensor([[3, 7, 5]]), torch.tensor([[7, 3, 8]])
    assert_ids_equal(swapped, expected, values, bound=0.06)
    assert_ids_equal(foreign, expected, values, bound=0.06)  # 8 may stand just below 5
    with pytest.raises(AssertionError, match=r"at \(0, 0\): 3, expected 7; oracle's gap 0.1, excused up to 0.08"):
        assert_ids_equal(swapped, expected, values, bound=0.04)
    with pytest.raises(AssertionError, match=r"at \(0, 0\): 8, expected 7; oracle's gap 2"):
        assert_ids_equal(torch.tensor([[8, 3, 5]]), expected, values, bound=0.06)
