"""The drafter's operations in plain fp32 torch, one function per formula: the oracles of graph, kernels and engines.

Every function takes tensors of any float dtype and plain numbers, computes in fp32 and returns fp32. Weights are
``[out, in]``. Shape letters: B block rows, n and N context rows, H hidden, D head dim, L layers, V vocabulary.
Nothing here knows a configuration, a cache page or a batch; ``drafter.py`` puts the functions together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- norms and projections ------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; the weight is plain, not ``1 + w``.

    Shapes: x ``[..., H]``, weight ``[H]``; returns ``[..., H]``.
    Source: z-lab/dflash model.py, Qwen3RMSNorm.
    """
    x = x.float()
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T``. Shapes: x ``[..., in]``, weight ``[out, in]``; returns ``[..., out]``."""
    return x.float() @ weight.float().T


def gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """``silu(W_gate x) * (W_up x)``, silu(z) = z / (1 + exp(-z)).

    Shapes: x ``[..., H]``, weight ``[2*I, H]``, gate rows then up rows; returns ``[..., I]``.
    """
    gate, up = linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def norm_linear(x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``W rms_norm(x)``. Shapes: x ``[B, H]``, norm_weight ``[H]``, weight ``[out, H]``; returns ``[B, out]``."""
    return linear(rms_norm(x, norm_weight, eps), weight)


def norm_gate_up(x: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``gate_up(rms_norm(x))``. Shapes: x ``[B, H]``, weight ``[2*I, H]``; returns ``[B, I]``."""
    return gate_up(rms_norm(x, norm_weight, eps), weight)


def linear_residual(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """``residual + W x``. Shapes: x ``[B, in]``, weight ``[H, in]``, residual ``[B, H]``; returns ``[B, H]``."""
    return residual.float() + linear(x, weight)


# ---- positions and attention ----------------------------------------------------------------------------------------


def rope(x: Tensor, positions: Tensor, inverse_frequencies: Tensor, magnitude: float = 1.0) -> Tensor:
    """Rotate each pair (d, d + D/2) by ``positions * inverse_frequencies[d]`` radians and scale it by ``magnitude``.

    Shapes:
        x                    [n, heads, D]
        positions            [n]    any integer dtype, true positions; exact in fp32 below 2^24
        inverse_frequencies  [D/2]  angles are formed in fp32
        returns              [n, heads, D]

    Source: transformers rotate_half; the YaRN attention factor is the magnitude, on queries and keys alike.
    """
    angles = positions.float()[:, None, None] * inverse_frequencies.float()  # [n, 1, D/2]
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None, causal: bool) -> Tensor:
    """Who sees whom: a key at s is visible to a query at t when ``t - s < window`` and

    ``s <= t`` (causal) or ``s - t < window`` (not causal); ``window=None`` is no limit.

    Shapes: query_positions ``[Q]``, key_positions ``[T]``, true positions; returns bool ``[Q, T]``.
    Source: z-lab/dflash model.py, _attention_mask; there positions are indices, which is the same without gaps.
    """
    distance = query_positions[:, None] - key_positions[None, :]  # t - s
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance < window
    if causal:
        seen &= distance >= 0
    elif window is not None:
        seen &= -distance < window
    return seen


def attention(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """``softmax(scale * <q, k>) v`` over the keys that a query sees; query head h reads KV head ``h // (nq / nkv)``.

    Shapes:
        queries       [Q, nq, D]
        keys, values  [T, nkv, D]
        seen          [Q, T]      bool, True is visible
        returns       [Q, nq, D]

    Raises:
        ValueError: a query sees no key at all; softmax has no answer there.
    """
    if not bool(seen.any(dim=-1).all()):
        blind = int((~seen.any(dim=-1)).nonzero()[0])
        raise ValueError(f"attention: query {blind} sees 0 of {seen.shape[-1]} keys, needs 1; a block row sees itself")
    group = queries.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = scale * torch.einsum("qhd,thd->hqt", queries.float(), keys)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqt,thd->qhd", weights, values)


def context_kv(
    features: Tensor,
    positions: Tensor,
    fc: Tensor,
    hidden_norm: Tensor,
    qkv: Tensor,
    k_norm: Tensor,
    inverse_frequencies: Tensor,
    *,
    num_kv_heads: int,
    eps: float,
    magnitude: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Keys and values of context rows for every layer: ``c = hidden_norm(fc f)``, then per layer

    ``K = rope(k_norm(W_k c), position)`` and ``V = W_v c``. No input norm and no convolution: those are for block rows.

    Shapes:
        features     [n, K*Ht]
        positions    [n]                        true positions
        fc           [H, K*Ht]
        hidden_norm  [H]
        qkv          [L, (nq+2*nkv)*D, H]       rows q, k, v; the q rows are not read
        k_norm       [L, D]
        returns      two of [n, L, nkv, D]

    Source: z-lab/dflash model.py, DFlashDraftModel.forward and Qwen3DFlashAttention.forward.
    """
    context = rms_norm(linear(features, fc), hidden_norm, eps)
    num_rows, head_dim = len(features), k_norm.shape[-1]
    kv_size = num_kv_heads * head_dim
    keys, values = [], []
    for layer in range(len(qkv)):
        k = linear(context, qkv[layer, -2 * kv_size : -kv_size]).view(num_rows, num_kv_heads, head_dim)
        v = linear(context, qkv[layer, -kv_size:]).view(num_rows, num_kv_heads, head_dim)
        keys.append(rope(rms_norm(k, k_norm[layer], eps), positions, inverse_frequencies, magnitude))
        values.append(v)
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def block_attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    context_positions: Tensor,
    anchor_position: int,
    inverse_frequencies: Tensor,
    *,
    window: int | None,
    causal: bool,
    eps: float,
    magnitude: float = 1.0,
) -> Tensor:
    """Attention of one draft block over its context and over itself; row i stands at ``anchor_position + i``.

    Shapes:
        qkv                           [B, (nq+2*nkv)*D]  rows' q, k, v before q/k norm and RoPE
        q_norm, k_norm                [D]
        context_keys, context_values  [N, nkv, D]        of this layer, final; N = 0 is legal
        context_positions             [N]                true positions, gaps allowed
        returns                       [B, nq*D]

    Source: z-lab/dflash model.py, Qwen3DFlashAttention.forward.
    """
    num_rows, head_dim, num_kv_heads = len(qkv), len(q_norm), context_keys.shape[1]
    kv_size = num_kv_heads * head_dim
    sizes = [qkv.shape[1] - 2 * kv_size, kv_size, kv_size]
    q, k, v = (part.view(num_rows, -1, head_dim) for part in torch.split(qkv.float(), sizes, dim=1))
    positions = anchor_position + torch.arange(num_rows, device=qkv.device)
    q = rope(rms_norm(q, q_norm, eps), positions, inverse_frequencies, magnitude)
    k = rope(rms_norm(k, k_norm, eps), positions, inverse_frequencies, magnitude)
    keys = torch.cat((context_keys.float(), k))
    values = torch.cat((context_values.float(), v))
    seen = visible(positions, torch.cat((context_positions.to(positions), positions)), window, causal)
    return attention(q, keys, values, seen, head_dim**-0.5).flatten(start_dim=1)


# ---- DFlash 2: grouped dynamic causal convolution -------------------------------------------------------------------


def conv_coefficients(x: Tensor, projection: Tensor, num_taps: int) -> tuple[Tensor, Tensor]:
    """Dynamic coefficients of both sides, "pre" and "post", from the normalised rows *before* any convolution.

    Shapes: x ``[B, H]``, projection ``[2*taps*G, H]`` with rows ordered side, tap, group; returns two ``[B, taps, G]``.
    """
    pre, post = linear(x, projection).view(len(x), 2, num_taps, -1).unbind(dim=1)
    return pre, post


def grouped_dynamic_conv(x: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    """``out_t[c] = sum_o (base[o, c] + dynamic[t, o, group(c)]) * x_{t-o}[c]``, group(c) = floor(c / (H / G)).

    Row t's coefficients multiply all of its taps. Rows before the block are zero: nothing comes from the context, from
    the previous block or from another sequence.

    Shapes: x ``[B, H]``, base ``[taps, H]`` (tap 0 is the row itself), dynamic ``[B, taps, G]``; returns ``[B, H]``.
    Source: z-lab/dflash model.py, GroupedDynamicCausalConv.
    """
    num_rows, num_channels = x.shape
    num_taps, num_groups = dynamic.shape[1:]
    out = torch.zeros(num_rows, num_channels, device=x.device)
    for tap in range(num_taps):
        earlier = F.pad(x.float(), (0, 0, tap, 0))[:num_rows]  # row t holds x_{t-tap}, zeros at the top
        per_channel = dynamic[:, tap].float().repeat_interleave(num_channels // num_groups, dim=-1)
        out += (base[tap].float() + per_channel) * earlier
    return out


# ---- vocabulary head ------------------------------------------------------------------------------------------------


def lm_head_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    valid_vocab: int | None = None,
) -> Tensor:
    """``z = multiplier * (W h)``, then ``softcap * tanh(z / softcap)``; padded columns are -inf.

    Shapes: hidden ``[R, H]``, weight ``[V, H]``; returns ``[R, V]``. Columns from ``valid_vocab`` on are padding.
    Source: z-lab/dflash model.py, DFlashDraftModel.compute_logits.
    """
    logits = linear(hidden, weight) * multiplier
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if valid_vocab is not None:
        logits[:, valid_vocab:] = -torch.inf
    return logits


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, best first; equal values by ascending id; NaN ranks below -inf.

    A runner cannot raise in the middle of a decode, so NaN has a place in the order and shows up in the values.
    ``torch.topk`` promises no order among equals, hence the stable sort.

    Shapes: logits ``[R, V]``; returns ids int32 ``[R, k]`` and values float32 ``[R, k]``.

    Raises:
        ValueError: V < k.
    """
    if logits.shape[-1] < k:
        raise ValueError(f"top_k: {logits.shape[-1]} columns, needs at least k = {k}; mask columns instead of cutting")
    ids = torch.sort(-logits.float(), dim=-1, stable=True).indices[:, :k]  # ascending sort puts NaN last
    return ids.to(torch.int32), logits.float().gather(-1, ids)


def logsumexp(logits: Tensor) -> Tensor:
    """``max + log(sum(exp(z - max)))`` of each row; -inf columns add nothing. ``[R, V]`` -> float32 ``[R]``."""
    return torch.logsumexp(logits.float(), dim=-1)
