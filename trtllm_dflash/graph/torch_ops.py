"""The standard ONNX ops that the function bodies use, on torch tensors: semantics of opset 23, no more than needed.

Shapes are values here as they are in ONNX: `Shape` yields an int64 tensor. They stay on the CPU on every device, so
that reading a size never waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Operation = Callable[..., Any]

_DTYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 16: torch.bfloat16}


def _constant(
    *,
    device: torch.device,
    value: Tensor | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_float: float | None = None,
) -> Tensor:
    if value is not None:
        return value
    if value_float is not None:
        return torch.tensor(value_float, dtype=torch.float32, device=device)
    return torch.tensor(value_int if value_ints is None else list(value_ints), dtype=torch.int64)


def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


def _reshape(x: Tensor, shape: Tensor) -> Tensor:
    """0 keeps the dimension at its place, -1 is inferred."""
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())])


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _squeeze(x: Tensor, axes: Tensor) -> Tensor:
    return x.squeeze(axes.tolist())


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor) -> Tensor:
    for start, end, axis in zip(starts.tolist(), ends.tolist(), axes.tolist(), strict=True):
        size = x.shape[axis]
        begin, stop = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
        x = x.narrow(axis, begin, max(stop - begin, 0))
    return x


def _split(x: Tensor, sizes: Tensor | None = None, *, axis: int, num_outputs: int = 0) -> tuple[Tensor, ...]:
    if sizes is not None:
        return torch.split(x, sizes.tolist(), axis)
    return torch.split(x, math.ceil(x.shape[axis] / num_outputs), axis)


def _pad(x: Tensor, pads: Tensor) -> Tensor:
    """Zeros before and after; ONNX lists all befores, then all afters, torch pairs them from the last axis."""
    before, after = pads.view(2, -1).tolist()
    pairs = [size for pair in zip(reversed(before), reversed(after), strict=True) for size in pair]
    return functional.pad(x, pairs)


def _gather(x: Tensor, index: Tensor, *, axis: int) -> Tensor:
    if index.dim() == 0:
        return x.select(axis, int(index))
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return x.index_select(axis, index.reshape(-1)).view(shape)


def _rms_normalization(x: Tensor, scale: Tensor, *, axis: int, epsilon: float) -> Tensor:
    """Statistics and the division in float32, then back to the input's type before the scale, as the op is defined."""
    assert axis == -1
    x32 = x.float()
    unit = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return unit.to(x.dtype) * scale


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """q [S, nq, B, D], k and v [S, nkv, T, D], mask [S, 1, B, T], True is visible; query head h reads h // (nq/nkv)."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _top_k(x: Tensor, k: Tensor, *, axis: int) -> tuple[Tensor, Tensor]:
    """Largest first, ties to the lowest index, which torch.topk leaves open: a stable sort does both.

    NaN counts as the largest value, as it does in torch, so that it shows up among the candidates.
    """
    assert axis == -1
    count = int(k)
    # Everything at or above the k-th value is a candidate; only these are sorted, not the whole vocabulary.
    threshold = torch.topk(x, count).values[..., -1:]
    candidate = ~(x < threshold)
    num_candidates = int(candidate.sum(-1).max())
    ids = candidate.int().topk(num_candidates).indices.sort().values
    values, order = x.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values[..., :count], ids.gather(-1, order)[..., :count]


OPS: dict[str, Operation] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Attention": _attention,
    "Cast": lambda x, *, to: x.to(_DTYPES[to]),
    "CastLike": lambda x, like: x.to(like.dtype),
    "Concat": lambda *x, axis: torch.cat(x, axis),
    "Constant": _constant,
    "Cos": torch.cos,
    "Div": torch.div,
    "Gather": _gather,
    "GreaterOrEqual": torch.ge,
    "Identity": lambda x: x,
    "Less": torch.lt,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Pad": _pad,
    "RMSNormalization": _rms_normalization,
    "Range": lambda first, limit, step: torch.arange(int(first), int(limit), int(step)),
    "ReduceLogSumExp": lambda x, axes, *, keepdims: torch.logsumexp(x, axes.tolist(), keepdim=bool(keepdims)),
    "ReduceMean": lambda x, axes, *, keepdims: x.mean(axes.tolist(), keepdim=bool(keepdims)),
    "Reshape": _reshape,
    "Shape": _shape,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Slice": _slice,
    "Split": _split,
    "Sqrt": torch.sqrt,
    "Squeeze": _squeeze,
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "TopK": _top_k,
    "Transpose": lambda x, *, perm: x.permute(list(perm)),
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
}
