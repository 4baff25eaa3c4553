"""Every op's body against the reference's formula, on ONNX Runtime and on the torch interpreter."""

from __future__ import annotations

import onnx.inliner
import pytest
import torch
from torch import Tensor

from tests.golden.vectors import CONV
from tests.support.one_op import RUNNERS, op_model, run_op
from tests.support.tolerance import assert_close, assert_ids_equal
from trtllm_dflash.config import LayerMask, RopeConfig
from trtllm_dflash.graph.functions import NO_WINDOW, OPS, function
from trtllm_dflash.reference import ops as reference

HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 16, 1e-6
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
INV_FREQ = torch.tensor(RopeConfig(1e4).inverse_frequencies(HEAD_DIM))
HEAD_COUNTS = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}

each_runner = pytest.mark.parametrize("runner", RUNNERS)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize("op", OPS)
def test_internal_names_carry_the_ops_name(op: str) -> None:
    body = function(op)
    outside = {*body.input, *body.output}
    for node in body.node:
        assert all(name in outside or name.startswith(f"{op}__") for name in node.output)
        assert "" not in node.input, "no optional inputs"


@each_runner
def test_norm_linear(runner: str) -> None:
    x, norm, weight = rand(2, 3, 24), rand(24), rand(40, 24)
    (y,) = run_op(runner, "NormLinear", (x, norm, weight), eps=EPS)
    assert_close(y, reference.norm_linear(x, norm, weight, EPS), (runner, "fp32"))


@each_runner
def test_linear_and_its_residual_form(runner: str) -> None:
    x, weight, residual = rand(2, 3, 24), rand(40, 24), rand(2, 3, 40)
    assert_close(run_op(runner, "Linear", (x, weight))[0], reference.linear(x, weight), (runner, "fp32"))
    (y,) = run_op(runner, "LinearResidual", (x, weight, residual))
    assert_close(y, reference.linear_residual(x, weight, residual), (runner, "fp32"))


@each_runner
def test_gate_up_with_and_without_norm(runner: str) -> None:
    x, norm, weight = rand(2, 3, 24), rand(24), rand(64, 24)
    assert_close(run_op(runner, "GateUp", (x, weight))[0], reference.gate_up(x, weight), (runner, "fp32"))
    (y,) = run_op(runner, "NormGateUp", (x, norm, weight), eps=EPS)
    assert_close(y, reference.norm_gate_up(x, norm, weight, EPS), (runner, "fp32"))


@each_runner
def test_context_kv_at_true_positions_with_gaps(runner: str) -> None:
    features, positions = rand(5, 72), torch.tensor([0, 1, 7, 4095, 200_000], dtype=torch.int32)
    fc, hidden_norm, qkv, k_norm = rand(24, 72), rand(24), rand(3, QKV, 24), rand(3, HEAD_DIM)
    inputs = (features, positions, fc, hidden_norm, qkv, k_norm, INV_FREQ)
    out = run_op(runner, "ContextKV", inputs, (torch.float32,) * 2, eps=EPS, magnitude=1.25, **HEAD_COUNTS)
    expected = reference.context_kv(*inputs, num_kv_heads=KV_HEADS, eps=EPS, magnitude=1.25)
    for actual, wanted in zip(out, expected, strict=True):
        assert_close(actual, wanted, (runner, "fp32"))


MASKS = [LayerMask(None, False), LayerMask(None, True), LayerMask(6, False), LayerMask(6, True), LayerMask(1, False)]


@each_runner
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("page", [1, 4, 64])
def test_block_attention_reads_written_rows_only(runner: str, mask: LayerMask, page: int) -> None:
    """Three sequences of different lengths, positions with a gap, pages in any order, NaN in every unwritten row."""
    layers, layer, block, lengths = 3, 1, 5, (0, 7, 10)
    num_pages = 2 + sum(-(-n // page) + 1 for n in lengths)
    caches = torch.full((2, num_pages, layers, page, KV_HEADS, HEAD_DIM), torch.nan)
    table = torch.zeros(3, 3, max(lengths) // page + 2, dtype=torch.int32)  # [page id, position, rows][S, max_pages]
    free = iter(torch.randperm(num_pages - 1).add(1).tolist())
    contexts, anchors = [], []
    for sequence, length in enumerate(lengths):
        gap = 5 if length > page else 0
        positions = torch.cat([torch.arange(0, page), torch.arange(page + gap, page + gap + length)])[:length]
        keys, values = rand(length, KV_HEADS, HEAD_DIM), rand(length, KV_HEADS, HEAD_DIM)
        for column, first in enumerate(range(0, length, page)):
            rows, page_id = min(page, length - first), next(free)
            caches[0, page_id, layer, :rows] = keys[first : first + rows]
            caches[1, page_id, layer, :rows] = values[first : first + rows]
            table[:, sequence, column] = torch.tensor([page_id, int(positions[first]), rows])
        contexts.append((keys, values, positions))
        anchors.append(int(positions[-1]) + 1 if length else 0)
    qkv, q_norm, k_norm = rand(3, block, QKV), rand(HEAD_DIM), rand(HEAD_DIM)
    (y,) = run_op(
        runner, "BlockAttention",
        (qkv, q_norm, k_norm, INV_FREQ, *caches, *table, torch.tensor(anchors, dtype=torch.int32)),
        layer=layer, window=mask.window or NO_WINDOW, causal=int(mask.causal), scale=HEAD_DIM**-0.5,
        eps=EPS, magnitude=1.1, **HEAD_COUNTS,
    )  # fmt: skip
    for sequence in range(3):
        expected = reference.block_attention(
            qkv[sequence], q_norm, k_norm, *contexts[sequence], anchors[sequence], INV_FREQ,
            window=mask.window, causal=mask.causal, eps=EPS, magnitude=1.1,
        )  # fmt: skip
        assert_close(y[sequence], expected, (runner, "fp32"))


@each_runner
def test_convolution_golden_vector(runner: str) -> None:
    vectors = (CONV.x, CONV.y, CONV.base, CONV.projection)
    x, y, base, projection = (torch.tensor(vector, dtype=torch.float32) for vector in vectors)
    x, y = x[None], y[None]
    (dynamic,) = run_op(runner, "Linear", (x, projection))
    (pre,) = run_op(runner, "GroupedDynamicConv", (x, dynamic, base), side=0, group_size=2)
    (post,) = run_op(
        runner, "GroupedDynamicConvResidual", (y, dynamic, base, torch.ones_like(y)), side=1, group_size=2
    )  # fmt: skip
    assert_close(pre[0], torch.tensor(CONV.pre), (runner, "fp32"))
    assert_close(post[0], torch.tensor(CONV.post) + 1, (runner, "fp32"))


@each_runner
def test_convolution_state_is_zero_at_each_sequences_block_edge(runner: str) -> None:
    x, dynamic, base = rand(3, 4, 12), rand(3, 4, 4 * 3), rand(2, 2, 12)
    (y,) = run_op(runner, "GroupedDynamicConv", (x, dynamic, base), side=1, group_size=4)
    for sequence in range(3):
        coefficients = dynamic[sequence].view(4, 2, 2, 3)[:, 1]
        expected = reference.grouped_dynamic_conv(x[sequence], base[1], coefficients)
        assert_close(y[sequence], expected, (runner, "fp32"))


# --- heads ------------------------------------------------------------------------------------------------------------

VOCAB, HIDDEN = 101, 32  # an odd vocabulary


def fp8_weight() -> tuple[tuple[Tensor, ...], Tensor]:
    dense = rand(VOCAB, HIDDEN)
    scale = dense.abs().amax(1) / 448
    packed = (dense / scale[:, None]).to(torch.float8_e4m3fn)
    return (packed, scale), packed.float() * scale[:, None]


def nvfp4_weight() -> tuple[tuple[Tensor, ...], Tensor]:
    """Random bytes decoded by the definition of E2M1: bit 3 sign, codes 0..7 = 0 .5 1 1.5 2 3 4 6, low nibble first."""
    packed = torch.randint(0, 256, (VOCAB, HIDDEN // 2))
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    block = torch.rand(VOCAB, HIDDEN // 16).mul(4).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.01)
    dense = values * block.float().repeat_interleave(16, dim=1) * scale
    return (packed.to(torch.uint8).view(torch.int8), block, scale), dense


def bf16_style_weight() -> tuple[tuple[Tensor, ...], Tensor]:
    dense = rand(VOCAB, HIDDEN)
    return (dense,), dense


FORMATS = {"": bf16_style_weight, "Fp8": fp8_weight, "Nvfp4": nvfp4_weight}
STEPS = {
    "plain": (1.0, 0.0, 0),
    "multiplier": (0.5, 0.0, 0),
    "capped": (1.0, 2.0, 0),
    "padded": (1.0, 0.0, 90),
    "all": (1.5, 3.0, 97),
}


@each_runner
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("steps", STEPS)
def test_head_of_every_format_and_its_full_logits_twin(runner: str, weights: str, steps: str) -> None:
    multiplier, cap, valid = STEPS[steps]
    stored, dense = FORMATS[weights]()
    hidden = rand(5, HIDDEN)
    expected = reference.lm_head_logits(
        hidden, dense, multiplier=multiplier, softcap=cap or None, valid_vocab=valid or None
    )
    attributes = {"output_multiplier": multiplier, "soft_cap": cap, "valid_vocab": valid}
    (logits,) = run_op(runner, f"LMHeadLogits{weights}", (hidden, *stored), **attributes)
    assert_close(logits, expected, (runner, "fp32"))
    types = (torch.int32, torch.float32, torch.float32)
    ids, values, logsumexp = run_op(runner, f"LMHeadTopK{weights}", (hidden, *stored), types, top_k=16, **attributes)
    wanted_ids, wanted_values = reference.top_k(expected, 16)
    assert_ids_equal(ids, wanted_ids, wanted_values, bound=1e-5)
    assert_close(values, wanted_values, (runner, "fp32"))
    assert_close(logsumexp, reference.logsumexp(expected), (runner, "fp32"))


@each_runner
def test_ties_go_to_the_lowest_id(runner: str) -> None:
    hidden, weight = torch.ones(1, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    weight[[90, 17, 55]] = 1.0
    weight[3] = -1.0
    attributes = {"output_multiplier": 1.0, "soft_cap": 0.0, "valid_vocab": 0, "top_k": 16}
    types = (torch.int32, torch.float32, torch.float32)
    ids, _, _ = run_op(runner, "LMHeadTopK", (hidden, weight), types, **attributes)
    assert ids[0].tolist() == [17, 55, 90, 0, 1, 2, *range(4, 14)]


def test_inlining_by_onnx_gives_the_same_result() -> None:
    """TensorRT's native form inlines everything; nothing may change by it."""
    x, norm, weight = rand(2, 3, 24), rand(24), rand(64, 24)
    model = op_model("NormGateUp", (x, norm, weight), (torch.float32,), eps=EPS)
    inlined = onnx.inliner.inline_local_functions(model)
    assert not inlined.functions
    assert all(node.domain == "" for node in inlined.graph.node)
