"""Rotary position embedding of the reference: pairing, frequencies, YaRN, and shift consistency."""

from __future__ import annotations

import math

import pytest
import torch

from tests.golden.vectors import YARN, YarnVector
from tests.oracle.drafters import FULL, random_rows, v1_case
from tests.support.tolerance import assert_close
from trtllm_dflash.config import LayerMask, RopeConfig, YarnScaling
from trtllm_dflash.reference import ops
from trtllm_dflash.reference.drafter import ReferenceDrafter

FP32 = ("torch", "fp32")


@pytest.mark.parametrize("vector", YARN, ids=lambda v: f"factor{v.rope.yarn.factor:g}")
def test_yarn_equals_the_worked_values(vector: YarnVector) -> None:
    frequencies = vector.rope.inverse_frequencies(vector.head_dim)
    for dimension, expected in vector.frequencies.items():
        assert frequencies[dimension] == pytest.approx(expected, rel=1e-7)
    assert vector.rope.magnitude == pytest.approx(vector.magnitude, abs=1e-6)


@pytest.mark.parametrize("vector", YARN, ids=lambda v: f"factor{v.rope.yarn.factor:g}")
def test_yarn_ramps_between_its_two_dimensions(vector: YarnVector) -> None:
    plain = RopeConfig(vector.rope.theta).inverse_frequencies(vector.head_dim)
    scaled = vector.rope.inverse_frequencies(vector.head_dim)
    assert vector.rope.yarn is not None
    kept = [s == p for s, p in zip(scaled, plain, strict=True)]
    divided = [math.isclose(s, p / vector.rope.yarn.factor, rel_tol=1e-12) for s, p in zip(scaled, plain, strict=True)]
    assert kept == [d <= vector.low for d in range(vector.head_dim // 2)]
    assert divided == [d >= vector.high for d in range(vector.head_dim // 2)]


def test_a_stated_attention_factor_replaces_the_derived_one() -> None:
    assert RopeConfig(1e4, YarnScaling(8.0, 32)).magnitude == pytest.approx(0.1 * math.log(8.0) + 1.0)
    assert RopeConfig(1e4, YarnScaling(8.0, 32, attention_factor=1.0)).magnitude == 1.0
    assert RopeConfig(1e4).magnitude == 1.0


@pytest.mark.parametrize("dimension", range(8))
def test_T28_dimension_d_turns_with_d_plus_half(dimension: int) -> None:
    """Rotate-half (NeoX) pairing; the interleaved one would turn d with its neighbour."""
    frequencies = torch.tensor([1.0, 0.5, 0.25, 0.125])
    x = torch.zeros(1, 1, 8)
    x[0, 0, dimension] = 1.0
    out = ops.rope(x, torch.tensor([3]), frequencies)[0, 0]
    angle = 3.0 * float(frequencies[dimension % 4])
    expected = torch.zeros(8)
    expected[dimension] = math.cos(angle)
    expected[(dimension + 4) % 8] = math.sin(angle) if dimension < 4 else -math.sin(angle)
    assert_close(out, expected, FP32)


def test_position_zero_changes_nothing_but_the_magnitude() -> None:
    x = random_rows(1, 2, 3, 8)
    assert_close(ops.rope(x, torch.zeros(2, dtype=torch.int32), torch.ones(4), 1.5), 1.5 * x, FP32)


def test_scores_scale_by_the_square_of_the_magnitude_and_depend_on_distance_only() -> None:
    q, k = random_rows(1, 1, 1, 16), random_rows(2, 1, 1, 16)
    frequencies = torch.tensor(RopeConfig(1e4).inverse_frequencies(16), dtype=torch.float32)

    def score(query_position: int, key_position: int, magnitude: float = 1.0) -> torch.Tensor:
        query = ops.rope(q, torch.tensor([query_position]), frequencies, magnitude)
        key = ops.rope(k, torch.tensor([key_position]), frequencies, magnitude)
        return (query * key).sum()

    assert score(9, 4) == pytest.approx(float(score(105, 100)), abs=1e-4)
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-2
    assert score(9, 4, magnitude=1.5) == pytest.approx(2.25 * float(score(9, 4)), rel=1e-5)


@pytest.mark.parametrize("mask", [FULL, LayerMask(5, True), LayerMask(5, False)], ids=str)
def test_a_block_and_its_context_may_be_shifted_together(mask: LayerMask) -> None:
    case = v1_case(mask, mask)
    drafter = ReferenceDrafter(case.config(), case.weights())
    features, embeddings = random_rows(1, 9, 144), random_rows(2, 8, 48)

    def run(context_shift: int, block_shift: int) -> torch.Tensor:
        positions = torch.arange(9) + context_shift
        return drafter.block(embeddings, 9 + block_shift, *drafter.context_kv(features, positions), positions)

    assert (run(64, 64) - run(0, 0)).abs().max() < 1e-4  # fp32 angles at 64 carry errors near 4e-6
    assert (run(0, 1) - run(0, 0)).abs().max() > 1e-2
