"""Norms, projections and DFlash 2's convolution of the reference, against values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.golden.vectors import CONV
from tests.oracle.drafters import random_rows
from tests.support.tolerance import assert_close
from trtllm_dflash.reference import ops

FP32 = ("torch", "fp32")


def silu(z: float) -> float:
    return z / (1.0 + math.exp(-z))


def test_rms_norm_divides_by_the_root_mean_square_and_multiplies_by_the_plain_weight() -> None:
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    out = ops.rms_norm(x, torch.tensor([2.0, 0.5]), eps=1e-6)
    root = math.sqrt((9.0 + 16.0) / 2 + 1e-6)
    assert_close(out, torch.tensor([[6.0 / root, -2.0 / root], [0.0, 0.0]]), FP32)


def test_rms_norm_adds_eps_inside_the_root() -> None:
    out = ops.rms_norm(torch.tensor([[1.0, 1.0]]), torch.ones(2), eps=3.0)
    assert_close(out, torch.tensor([[0.5, 0.5]]), FP32)


def test_gate_up_reads_gate_rows_before_up_rows() -> None:
    x = torch.tensor([[1.0, 2.0]])
    gate, up = [[1.0, 0.0], [0.0, -1.0]], [[0.0, 3.0], [1.0, 1.0]]
    out = ops.gate_up(x, torch.tensor(gate + up))
    assert_close(out, torch.tensor([[silu(1.0) * 6.0, silu(-2.0) * 3.0]]), FP32)


def test_fused_ops_norm_first_and_add_the_residual_last() -> None:
    x, norm = torch.tensor([[3.0, -4.0]]), torch.tensor([2.0, 0.5])
    root = math.sqrt(12.5)
    first, second = 6.0 / root, -2.0 / root  # normalised x
    weight = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    projected = torch.tensor([[first + 2 * second, second]])
    assert_close(ops.norm_linear(x, norm, weight, 0.0), projected, FP32)
    gated = torch.tensor([[silu(first + 2 * second) * second]])
    assert_close(ops.norm_gate_up(x, norm, weight, 0.0), gated, FP32)
    added = torch.tensor([[10.0 + 3.0 - 8.0, 20.0 - 4.0]])
    assert_close(ops.linear_residual(x, weight, torch.tensor([[10.0, 20.0]])), added, FP32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands_are_computed_in_fp32(dtype: torch.dtype) -> None:
    x, weight = random_rows(1, 5, 64).to(dtype), random_rows(2, 32, 64).to(dtype)
    norm, half = torch.ones(64, dtype=dtype), weight[:, :16]
    for out, expected in (
        (ops.linear(x, weight), ops.linear(x.float(), weight.float())),
        (ops.rms_norm(x, norm, 1e-6), ops.rms_norm(x.float(), norm.float(), 1e-6)),
        (ops.gate_up(x, weight), ops.gate_up(x.float(), weight.float())),
        (ops.linear_residual(x[:, :16], half, x[:, :32]), x[:, :32].float() + x[:, :16].float() @ half.float().T),
    ):
        assert out.dtype == torch.float32
        assert torch.equal(out, expected)


def test_T52_features_and_activations_far_beyond_fp16_keep_their_precision() -> None:
    """Spikes above 2e4 whose sums leave fp16's 65504: the norm after fc takes the scale out again."""
    features, fc = random_rows(3, 4, 96), random_rows(4, 48, 96)
    qkv, k_norm = random_rows(5, 2, 8 * 16, 48), 1.0 + 0.1 * random_rows(6, 2, 16)
    frequencies = torch.linspace(1.0, 0.01, 8)

    def run(scale: float) -> tuple[Tensor, Tensor]:
        return ops.context_kv(
            features * scale, torch.arange(4), fc, torch.ones(48), qkv, k_norm, frequencies, num_kv_heads=2, eps=1e-6
        )

    assert (features * 2.0**15 @ fc.T).abs().max() > 65504
    for large, plain in zip(run(2.0**15), run(1.0), strict=True):
        assert_close(large, plain, FP32)


# ---- DFlash 2's convolution -----------------------------------------------------------------------------------------


def coefficients() -> tuple[Tensor, Tensor]:
    return ops.conv_coefficients(torch.tensor(CONV.x), torch.tensor(CONV.projection), CONV.num_taps)


def test_conv_equals_the_golden_vector() -> None:
    pre, post = coefficients()
    base = torch.tensor(CONV.base)
    assert_close(ops.grouped_dynamic_conv(torch.tensor(CONV.x), base[0], pre), torch.tensor(CONV.pre), FP32)
    assert_close(ops.grouped_dynamic_conv(torch.tensor(CONV.y), base[1], post), torch.tensor(CONV.post), FP32)


def test_T37_conv_projection_rows_are_side_then_tap_then_group() -> None:
    """Row 1 of the golden x is (0.5, -1, 2, 0); each projection row picks one of its channels."""
    pre, post = coefficients()
    assert_close(pre[1], torch.tensor([[0.05, -0.1], [0.2, 0.0]]), FP32)
    assert_close(post[1], torch.tensor([[-0.2, 0.1], [0.0, -0.2]]), FP32)


def test_conv_state_is_zero_at_the_block_edge() -> None:
    """Row 0 has its own tap only, and a block is computed alike whatever was computed before it."""
    x, base = random_rows(7, 6, 8), random_rows(8, 3, 8)
    dynamic = random_rows(9, 6, 3, 2)
    together = ops.grouped_dynamic_conv(x, base, dynamic)
    second = ops.grouped_dynamic_conv(x[3:], base, dynamic[3:])
    assert_close(second[0], (base[0] + dynamic[3, 0].repeat_interleave(4)) * x[3], FP32)
    assert (together[3:5] - second[:2]).abs().amax(dim=1).min() > 1e-2  # rows 3, 4 reached back into rows 1, 2
    assert torch.equal(together[5], second[2])  # row 5 reaches rows 3 and 4 only


def test_conv_is_causal_and_takes_blocks_shorter_than_its_taps() -> None:
    x, base, dynamic = random_rows(7, 6, 8), random_rows(8, 3, 8), random_rows(9, 6, 3, 2)
    whole = ops.grouped_dynamic_conv(x, base, dynamic)
    for num_rows in range(1, 6):
        assert torch.equal(ops.grouped_dynamic_conv(x[:num_rows], base, dynamic[:num_rows]), whole[:num_rows])


def test_conv_groups_share_the_dynamic_part_but_not_the_channels() -> None:
    """With base 0 and one nonzero group, exactly that group's channels pass, each with its own value."""
    x, dynamic = random_rows(10, 2, 8), torch.zeros(2, 1, 4)
    dynamic[:, 0, 2] = 3.0
    expected = torch.zeros(2, 8)
    expected[:, 4:6] = 3.0 * x[:, 4:6]
    assert_close(ops.grouped_dynamic_conv(x, torch.zeros(1, 8), dynamic), expected, FP32)
