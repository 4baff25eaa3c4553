"""The op set: every custom op as an ONNX function, its body written in ONNX's textual form.

This is the single description of the drafter's arithmetic. A runner that knows an op by name (a CUDA kernel, a
TensorRT plugin) uses that; every other runner executes the body. An op never writes to its inputs, has no optional
inputs, and has one name per input list. Bodies are free of dtypes where they can be: they run in float32 and bfloat16,
with statistics, angles, softmax and logits in float32.

Shape letters: S sequences, B block rows, n context rows, R rows, P pages, L layers, H hidden, I MLP width, D head dim,
V vocabulary, K*Ht feature width, G convolution groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import onnx
import onnx.parser

from .head_functions import HEAD_OPS, head_text, neutral_steps

DOMAIN = "trtllm_dflash"
OPSET = 23
NO_WINDOW = 2**31 - 1  # `window` of a layer that sees everything; plugin fields carry int32

# RMSNorm over the head dimension, then rotate-half RoPE at absolute positions, all in float32.
# x [..., heads, D], weight broadcasts against x, position [...], inv_freq [D/2] float32
_NORM_ROPE = """
NormRope <eps, magnitude> (x, weight, position, inv_freq) => (y) {
    x32 = Cast <to = 1> (x)
    square = Mul (x32, x32)
    last = Constant <value_ints = [-1]> ()
    mean_square = ReduceMean <keepdims = 1> (square, last)
    epsilon = Constant <value_float: float = @eps> ()
    regular = Add (mean_square, epsilon)
    rms = Sqrt (regular)
    unit = Div (x32, rms)
    weight32 = Cast <to = 1> (weight)
    normed = Mul (unit, weight32)
    position32 = Cast <to = 1> (position)
    inner = Constant <value_ints = [-2, -1]> ()
    position_column = Unsqueeze (position32, inner)
    angle = Mul (position_column, inv_freq)
    factor = Constant <value_float: float = @magnitude> ()
    cos_unit = Cos (angle)
    cos = Mul (cos_unit, factor)
    sin_unit = Sin (angle)
    sin = Mul (sin_unit, factor)
    first, second = Split <axis = -1, num_outputs = 2> (normed)
    first_cos = Mul (first, cos)
    second_sin = Mul (second, sin)
    rotated_first = Sub (first_cos, second_sin)
    second_cos = Mul (second, cos)
    first_sin = Mul (first, sin)
    rotated_second = Add (second_cos, first_sin)
    rotated = Concat <axis = -1> (rotated_first, rotated_second)
    y = CastLike (rotated, x)
}"""

# Context K/V of all layers from target features: project, normalise, project with the K and V rows of every layer's
# qkv, normalise and rotate K. Context rows get no input_layernorm and no convolution.
# features [n, K*Ht], positions [n] int32, fc [H, K*Ht], qkv [L, (nq+2nkv)*D, H], k_norm [L, D]
# -> context_k, context_v [n, L, nkv, D]
_CONTEXT_KV = """
ContextKV <eps, magnitude, num_heads, num_kv_heads, head_dim>
(features, positions, fc, hidden_norm, qkv, k_norm, inv_freq) => (context_k, context_v) {
    fc_t = Transpose <perm = [1, 0]> (fc)
    projected = MatMul (features, fc_t)
    context = RMSNormalization <axis = -1, epsilon: float = @eps> (projected, hidden_norm)
    nq = Constant <value_int: int = @num_heads> ()
    d = Constant <value_int: int = @head_dim> ()
    q_rows = Mul (nq, d)
    zero = Constant <value_ints = [0]> ()
    kv_begin = Unsqueeze (q_rows, zero)
    kv_end = Constant <value_ints = [2147483647]> ()
    rows_axis = Constant <value_ints = [1]> ()
    kv_weight = Slice (qkv, kv_begin, kv_end, rows_axis)
    kv_weight_t = Transpose <perm = [0, 2, 1]> (kv_weight)
    kv = MatMul (context, kv_weight_t)
    keep = Constant <value_ints = [0, 0]> ()
    nkv = Constant <value_int: int = @num_kv_heads> ()
    two = Constant <value_int = 2> ()
    kv_heads = Mul (nkv, two)
    kv_heads_dim = Unsqueeze (kv_heads, zero)
    d_dim = Unsqueeze (d, zero)
    by_head_shape = Concat <axis = 0> (keep, kv_heads_dim, d_dim)
    by_head = Reshape (kv, by_head_shape)
    token_major = Transpose <perm = [1, 0, 2, 3]> (by_head)
    k, context_v = Split <axis = 2, num_outputs = 2> (token_major)
    k_norm_column = Unsqueeze (k_norm, rows_axis)
    position_column = Unsqueeze (positions, rows_axis)
    context_k = NormRope <eps: float = @eps, magnitude: float = @magnitude>
        (k, k_norm_column, position_column, inv_freq)
}"""

# x [..., H], norm [H], weight [N, H] -> [..., N]
_NORM_LINEAR = """
NormLinear <eps> (x, norm, weight) => (y) {
    normed = RMSNormalization <axis = -1, epsilon: float = @eps> (x, norm)
    weight_t = Transpose <perm = [1, 0]> (weight)
    y = MatMul (normed, weight_t)
}"""

# x [..., H], weight [N, H] -> [..., N]; DFlash 2 convolves between norm and projection
_LINEAR = """
Linear (x, weight) => (y) {
    weight_t = Transpose <perm = [1, 0]> (weight)
    y = MatMul (x, weight_t)
}"""

# x [..., N], weight [H, N], residual [..., H] -> [..., H]
_LINEAR_RESIDUAL = """
LinearResidual (x, weight, residual) => (y) {
    weight_t = Transpose <perm = [1, 0]> (weight)
    product = MatMul (x, weight_t)
    y = Add (residual, product)
}"""

# x [..., H], weight [2I, H] (gate rows, then up rows) -> SiLU(gate) * up [..., I]
_GATE_UP = """
GateUp (x, weight) => (y) {
    weight_t = Transpose <perm = [1, 0]> (weight)
    both = MatMul (x, weight_t)
    gate, up = Split <axis = -1, num_outputs = 2> (both)
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    y = Mul (silu, up)
}"""

_NORM_GATE_UP = """
NormGateUp <eps> (x, norm, weight) => (y) {
    normed = RMSNormalization <axis = -1, epsilon: float = @eps> (x, norm)
    y = GateUp (normed, weight)
}"""

# Attention of one block over its paged context and over itself, by true positions.
# A key at s is visible to a query at t if t - s < window and (causal ? s <= t : s - t < window).
# qkv [S, B, (nq+2nkv)*D] before q/k norm and RoPE, caches [P, L, page, nkv, D],
# page_table, page_position, page_rows [S, max_pages] int32, anchor_position [S] int32 -> [S, B, nq*D]
# Rows of a page beyond page_rows are replaced by zeros, so what lies there never matters, NaN included.
_BLOCK_ATTENTION = """
BlockAttention <layer, window, causal, scale, eps, magnitude, num_heads, num_kv_heads, head_dim>
(qkv, q_norm, k_norm, inv_freq, k_cache, v_cache, page_table, page_position, page_rows, anchor_position) => (y) {
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    minus_one = Constant <value_ints = [-1]> ()
    keep_two = Constant <value_ints = [0, 0]> ()
    d_scalar = Constant <value_int: int = @head_dim> ()
    d = Unsqueeze (d_scalar, zero)
    nq_scalar = Constant <value_int: int = @num_heads> ()
    nq = Unsqueeze (nq_scalar, zero)
    nkv_scalar = Constant <value_int: int = @num_kv_heads> ()
    nkv = Unsqueeze (nkv_scalar, zero)

    heads_shape = Concat <axis = 0> (keep_two, minus_one, d)
    by_head = Reshape (qkv, heads_shape)
    head_counts = Concat <axis = 0> (nq, nkv, nkv)
    q_raw, k_raw, v_block = Split <axis = 2> (by_head, head_counts)
    block_rows = Shape <start = 1, end = 2> (qkv)
    block_rows_scalar = Squeeze (block_rows, zero)
    first_row = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    row64 = Range (first_row, block_rows_scalar, step)
    row = Cast <to = 6> (row64)
    anchor_column = Unsqueeze (anchor_position, one)
    block_position = Add (anchor_column, row)
    q = NormRope <eps: float = @eps, magnitude: float = @magnitude> (q_raw, q_norm, block_position, inv_freq)
    k_block = NormRope <eps: float = @eps, magnitude: float = @magnitude> (k_raw, k_norm, block_position, inv_freq)

    page_shape = Shape <start = 2> (k_cache)
    flat_shape = Concat <axis = 0> (minus_one, page_shape)
    k_pages = Reshape (k_cache, flat_shape)
    v_pages = Reshape (v_cache, flat_shape)
    num_layers = Shape <start = 1, end = 2> (k_cache)
    layer_index = Constant <value_int: int = @layer> ()
    page_table64 = Cast <to = 7> (page_table)
    page_base = Mul (page_table64, num_layers)
    page_index = Add (page_base, layer_index)
    k_gathered = Gather <axis = 0> (k_pages, page_index)
    v_gathered = Gather <axis = 0> (v_pages, page_index)
    page_size = Shape <start = 2, end = 3> (k_cache)
    page_size_scalar = Squeeze (page_size, zero)
    slot64 = Range (first_row, page_size_scalar, step)
    slot = Cast <to = 6> (slot64)
    page_rows_column = Unsqueeze (page_rows, two)
    written = Less (slot, page_rows_column)
    cell_axes = Constant <value_ints = [3, 4]> ()
    written_cell = Unsqueeze (written, cell_axes)
    zero_cell = Constant <value_float = 0.0> ()
    zero_like = CastLike (zero_cell, qkv)
    k_written = Where (written_cell, k_gathered, zero_like)
    v_written = Where (written_cell, v_gathered, zero_like)
    sequences = Shape <start = 0, end = 1> (qkv)
    context_shape = Concat <axis = 0> (sequences, minus_one, nkv, d)
    k_context = Reshape (k_written, context_shape)
    v_context = Reshape (v_written, context_shape)
    k_rows = Concat <axis = 1> (k_context, k_block)
    v_rows = Concat <axis = 1> (v_context, v_block)

    page_position_column = Unsqueeze (page_position, two)
    slot_position = Add (page_position_column, slot)
    row_shape = Concat <axis = 0> (sequences, minus_one)
    context_position = Reshape (slot_position, row_shape)
    key_position = Concat <axis = 1> (context_position, block_position)
    context_written = Reshape (written, row_shape)
    block_seen = GreaterOrEqual (block_position, anchor_column)
    key_written = Concat <axis = 1> (context_written, block_seen)
    query_column = Unsqueeze (block_position, two)
    key_line = Unsqueeze (key_position, one)
    behind = Sub (query_column, key_line)
    ahead = Neg (behind)
    window64 = Constant <value_int: int = @window> ()
    window_rows = Cast <to = 6> (window64)
    causal64 = Constant <value_int: int = @causal> ()
    is_causal = Cast <to = 9> (causal64)
    step32 = Cast <to = 6> (step)
    reach_ahead = Where (is_causal, step32, window_rows)
    near_behind = Less (behind, window_rows)
    near_ahead = Less (ahead, reach_ahead)
    in_reach = And (near_behind, near_ahead)
    key_written_line = Unsqueeze (key_written, one)
    visible = And (in_reach, key_written_line)
    mask = Unsqueeze (visible, one)

    q_heads = Transpose <perm = [0, 2, 1, 3]> (q)
    k_heads = Transpose <perm = [0, 2, 1, 3]> (k_rows)
    v_heads = Transpose <perm = [0, 2, 1, 3]> (v_rows)
    attended = Attention <scale: float = @scale> (q_heads, k_heads, v_heads, mask)
    row_major = Transpose <perm = [0, 2, 1, 3]> (attended)
    y_shape = Concat <axis = 0> (keep_two, minus_one)
    y = Reshape (row_major, y_shape)
}"""

# Two dynamic taps a channel: y_t = sum_o (base[side][o] + dynamic[t][side][o][group]) * x_{t-o}, x_{-1} = 0.
# x [S, B, H], dynamic [S, B, 2*2*G] in the order side, tap, group, base [2, 2, H] -> [S, B, H]
_GROUPED_DYNAMIC_CONV = """
GroupedDynamicConv <side, group_size> (x, dynamic, base) => (y) {
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    minus_one = Constant <value_ints = [-1]> ()
    side_index = Constant <value_int: int = @side> ()
    dynamic_shape = Constant <value_ints = [0, 0, 2, 2, -1, 1]> ()
    dynamic_parts = Reshape (dynamic, dynamic_shape)
    dynamic_side = Gather <axis = 2> (dynamic_parts, side_index)
    dynamic32 = Cast <to = 1> (dynamic_side)
    base_side = Gather <axis = 0> (base, side_index)
    group_scalar = Constant <value_int: int = @group_size> ()
    group = Unsqueeze (group_scalar, zero)
    keep_one = Constant <value_ints = [0]> ()
    base_shape = Concat <axis = 0> (keep_one, minus_one, group)
    base_groups = Reshape (base_side, base_shape)
    base32 = Cast <to = 1> (base_groups)
    coefficient_groups = Add (dynamic32, base32)
    coefficient_shape = Constant <value_ints = [0, 0, 2, -1]> ()
    coefficient = Reshape (coefficient_groups, coefficient_shape)
    tap0_row, tap1_row = Split <axis = 2, num_outputs = 2> (coefficient)
    tap_axis = Constant <value_ints = [2]> ()
    tap0 = Squeeze (tap0_row, tap_axis)
    tap1 = Squeeze (tap1_row, tap_axis)
    x32 = Cast <to = 1> (x)
    all_but_last = Slice (x32, zero, minus_one, one)
    one_row_before = Constant <value_ints = [0, 1, 0, 0, 0, 0]> ()
    previous = Pad (all_but_last, one_row_before)
    now = Mul (tap0, x32)
    before = Mul (tap1, previous)
    sum = Add (now, before)
    y = CastLike (sum, x)
}"""

_GROUPED_DYNAMIC_CONV_RESIDUAL = """
GroupedDynamicConvResidual <side, group_size> (x, dynamic, base, residual) => (y) {
    convolved = GroupedDynamicConv <side: int = @side, group_size: int = @group_size> (x, dynamic, base)
    y = Add (residual, convolved)
}"""

_BODIES = {
    text.split(maxsplit=1)[0]: text
    for text in (
        _NORM_ROPE, _CONTEXT_KV, _NORM_LINEAR, _LINEAR, _LINEAR_RESIDUAL, _GATE_UP, _NORM_GATE_UP, _BLOCK_ATTENTION,
        _GROUPED_DYNAMIC_CONV, _GROUPED_DYNAMIC_CONV_RESIDUAL,
    )
}  # fmt: skip

OPS = (*_BODIES, *HEAD_OPS)


@functools.cache
def function(op: str, neutral: frozenset[str] = frozenset()) -> onnx.FunctionProto:
    """The body of an op. ``neutral`` is for heads: logit steps to leave out.

    Every internal name carries the op's name, because TensorRT's own function import and careless inliners confuse
    equal names of different scopes.
    """
    text = _BODIES[op] if op in _BODIES else head_text(op, neutral)
    header = f'<opset_import: ["": {OPSET}, "{DOMAIN}": 1], domain: "{DOMAIN}">'
    body = onnx.parser.parse_function(header + text)
    outside = {*body.input, *body.output}
    for node in body.node:
        for names in (node.input, node.output):
            names[:] = [name if name in outside else f"{op}__{name}" for name in names]
        if node.op_type in _BODIES:
            node.domain = DOMAIN
    return body


def functions_for(model_nodes: Iterable[onnx.NodeProto]) -> list[onnx.FunctionProto]:
    """The functions that these nodes need, those that they call in turn included."""
    found: dict[str, onnx.FunctionProto] = {}

    def visit(node: onnx.NodeProto) -> None:
        if node.domain != DOMAIN or node.op_type in found:
            return
        body = function(node.op_type, neutral_steps(node) if node.op_type in HEAD_OPS else frozenset())
        found[node.op_type] = body
        for inner in body.node:
            visit(inner)

    for node in model_nodes:
        visit(node)
    return list(found.values())
