"""The vocabulary head of the reference: multiplier, soft cap, padding, and the order of candidates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.oracle.drafters import FULL, random_rows, v1_case
from tests.support.tolerance import assert_close, assert_ids_equal
from trtllm_dflash.reference import ops
from trtllm_dflash.reference.drafter import ReferenceDrafter

FP32 = ("torch", "fp32")
INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        ([1.0, 3.0, 3.0, 2.0, 3.0], 4, [1, 2, 4, 3]),
        ([5.0] * 40, 16, list(range(16))),  # torch.topk answers this one in no particular order
        ([0.0, -0.0, 0.0], 3, [0, 1, 2]),
        ([-INF, 1.0, -INF, -INF], 3, [1, 0, 2]),
        ([INF, 1.0, INF], 2, [0, 2]),
        ([NAN, 1.0, -INF, NAN], 4, [1, 2, 0, 3]),
    ],
)
def test_top_k_is_best_first_with_ties_to_the_lowest_id_and_nan_last(
    row: list[float], k: int, expected: list[int]
) -> None:
    ids, values = ops.top_k(torch.tensor([row]), k)
    assert (ids.dtype, values.dtype) == (torch.int32, torch.float32)
    assert_ids_equal(ids, torch.tensor([expected], dtype=torch.int32))
    torch.testing.assert_close(values, torch.tensor([[row[i] for i in expected]]), rtol=0, atol=0, equal_nan=True)


def test_top_k_of_random_rows_with_many_ties_equals_python_sorting() -> None:
    logits = (random_rows(1, 6, 300) * 3).round()
    ids, _ = ops.top_k(logits, 16)
    expected = [sorted(range(300), key=lambda i: (-row[i], i))[:16] for row in logits.tolist()]
    assert_ids_equal(ids, torch.tensor(expected, dtype=torch.int32))


def test_top_k_refuses_fewer_columns_than_candidates() -> None:
    with pytest.raises(ValueError, match=r"15 columns, needs at least k = 16"):
        ops.top_k(torch.zeros(1, 15), 16)


def test_the_multiplier_comes_before_the_soft_cap() -> None:
    hidden, weight = torch.tensor([[2.0]]), torch.tensor([[3.0], [-1.0]])
    logits = ops.lm_head_logits(hidden, weight, multiplier=0.5, softcap=4.0)
    assert_close(logits, torch.tensor([[4.0 * math.tanh(3.0 / 4.0), 4.0 * math.tanh(-1.0 / 4.0)]]), FP32)


def test_the_soft_cap_bounds_and_keeps_the_order() -> None:
    logits = ops.lm_head_logits(torch.tensor([[1.0]]), torch.tensor([[30.0], [60.0], [-90.0]]), softcap=50.0)
    assert logits.abs().max() < 50.0
    assert ops.top_k(logits, 3)[0].tolist() == [[1, 0, 2]]


def test_padded_columns_are_minus_infinity_and_weigh_nothing() -> None:
    hidden, weight = random_rows(1, 3, 8), random_rows(2, 20, 8)
    weight[17:] = 100.0 * hidden[0]  # padding that would win
    logits = ops.lm_head_logits(hidden, weight, softcap=9.0, valid_vocab=17)
    assert torch.equal(logits[:, 17:], torch.full((3, 3), -INF))
    assert_close(logits[:, :17], ops.lm_head_logits(hidden, weight[:17], softcap=9.0), FP32)
    assert_close(ops.logsumexp(logits), ops.logsumexp(logits[:, :17]), FP32)
    assert ops.top_k(logits, 17)[0].max() == 16


def test_logsumexp_is_shifted_by_the_maximum() -> None:
    logits = torch.tensor([[1000.0, 1000.0], [-1000.0, -INF]])
    assert_close(ops.logsumexp(logits), torch.tensor([1000.0 + math.log(2.0), -1000.0]), FP32)


def test_the_drafters_head_applies_its_config_and_masks_past_the_draft_vocabulary() -> None:
    case = v1_case(FULL)
    config = replace(case.config(), output_multiplier=0.25, final_logit_softcapping=3.0, draft_vocab_size=150)
    hidden, lm_head = random_rows(1, 4, 48), random_rows(2, 160, 48)
    logits = ReferenceDrafter(config, case.weights()).head(hidden, lm_head)
    assert_close(logits[:, :150], 3.0 * torch.tanh(0.25 * hidden @ lm_head[:150].T / 3.0), FP32)
    assert torch.equal(logits[:, 150:], torch.full((4, 10), -INF))
