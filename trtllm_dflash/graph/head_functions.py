"""The head ops, composed: weights of three formats, the steps on the logits, top-k or full logits.

hidden [R, H] -> topk_ids [R, k] int32, topk_values [R, k] float32, logsumexp [R] float32, or logits [R, V] float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx.helper


def _e2m1_pairs() -> str:
    """Values of the low and the high nibble of every byte, for signed bytes -128..127."""
    magnitude = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = np.concatenate([magnitude, -magnitude])
    byte = np.arange(-128, 128) & 0xFF
    return ", ".join(f"{value}" for value in np.stack([values[byte & 15], values[byte >> 4]], axis=1).ravel())


@dataclass(frozen=True)
class _Format:
    """How a weight is stored: its inputs, and the lines that leave it in hidden's dtype, [V, H], in `dense`."""

    inputs: str
    dense: str
    scale: str = ""  # of the float32 product, where one is applied per row of the weight


_FORMATS = {
    # weight [V, H] of hidden's dtype
    "": _Format("weight", "dense = Identity (weight)"),
    # weight [V, H] FLOAT8E4M3FN, row_scale [V] float32
    "Fp8": _Format("weight, row_scale", "dense = CastLike (weight, hidden)", scale="Mul (unscaled, row_scale)"),
    # weight [V, H/2] INT8, two E2M1 codes a byte, low nibble first; block_scale [V, H/16] FLOAT8E4M3FN;
    # global_scale [] float32, a multiplier
    "Nvfp4": _Format(
        "weight, block_scale, global_scale",
        f"""
    byte = Cast <to = 6> (weight)
    bias = Constant <value = int32 {{128}}> ()
    index = Add (byte, bias)
    table = Constant <value = float[256, 2] {{{_e2m1_pairs()}}}> ()
    pair = Gather <axis = 0> (table, index)
    block_shape = Constant <value_ints = [0, -1, 16]> ()
    block = Reshape (pair, block_shape)
    block_scale32 = Cast <to = 1> (block_scale)
    scale = Mul (block_scale32, global_scale)
    last = Constant <value_ints = [-1]> ()
    scale_column = Unsqueeze (scale, last)
    scaled = Mul (block, scale_column)
    row_shape = Constant <value_ints = [0, -1]> ()
    row = Reshape (scaled, row_shape)
    dense = CastLike (row, hidden)""",
    ),
}

# The vocabulary is the long operand: for the few rows of a draft step this is the faster side to put it on
# (benchmarks/head_orientation.py).
_PRODUCT = """
    hidden_t = Transpose <perm = [1, 0]> (hidden)
    product_t = MatMul (dense, hidden_t)
    product = Transpose <perm = [1, 0]> (product_t)
    unscaled = Cast <to = 1> (product)"""

# Steps on the logits, in this order: attribute, the value that makes the step a no-op (it is then left out of the
# body), and the lines that take {before} to {after}.
_STEPS: tuple[tuple[str, float, str], ...] = (
    (
        "output_multiplier",
        1.0,
        """
    multiplier = Constant <value_float: float = @output_multiplier> ()
    {after} = Mul ({before}, multiplier)""",
    ),
    (
        "soft_cap",
        0.0,
        """
    cap = Constant <value_float: float = @soft_cap> ()
    by_cap = Div ({before}, cap)
    squashed = Tanh (by_cap)
    {after} = Mul (squashed, cap)""",
    ),
    (
        "valid_vocab",  # columns from here on are padding; 0: none are
        0,
        """
    first = Constant <value_int = 0> ()
    step = Constant <value_int = 1> ()
    columns = Shape <start = 0, end = 1> (weight)
    axis = Constant <value_ints = [0]> ()
    num_columns = Squeeze (columns, axis)
    column = Range (first, num_columns, step)
    num_valid = Constant <value_int: int = @valid_vocab> ()
    is_valid = Less (column, num_valid)
    nothing = Constant <value_float = -inf> ()
    {after} = Where (is_valid, {before}, nothing)""",
    ),
)


@dataclass(frozen=True)
class _Output:
    """What a head returns, and the attributes beyond those of the steps."""

    outputs: str
    lines: str
    attributes: tuple[str, ...] = ()


_OUTPUTS = {
    # Best first, ties to the lowest id, as ONNX's TopK promises; logsumexp over the whole vocabulary.
    "TopK": _Output(
        "topk_ids, topk_values, logsumexp",
        """
    count_scalar = Constant <value_int: int = @top_k> ()
    count_axis = Constant <value_ints = [0]> ()
    count = Unsqueeze (count_scalar, count_axis)
    topk_values, topk_ids64 = TopK <axis = -1> ({logits}, count)
    topk_ids = Cast <to = 6> (topk_ids64)
    vocabulary = Constant <value_ints = [-1]> ()
    logsumexp = ReduceLogSumExp <keepdims = 0> ({logits}, vocabulary)""",
        ("top_k",),
    ),
    "Logits": _Output("logits", "\n    logits = Identity ({logits})"),
}

HEAD_OPS = {f"LMHead{output}{weights}": (weights, output) for output in _OUTPUTS for weights in _FORMATS}


def neutral_steps(node: onnx.NodeProto) -> frozenset[str]:
    """The logit steps that a head node's attributes make no-ops, so that its body can leave them out."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return frozenset(name for name, neutral, _ in _STEPS if attributes[name] == neutral)


def head_text(op: str, neutral: frozenset[str]) -> str:
    """The body of a head op in ONNX's textual form, without the steps named in ``neutral``."""
    weights, output = (_FORMATS[HEAD_OPS[op][0]], _OUTPUTS[HEAD_OPS[op][1]])
    lines = f"\n    {weights.dense.lstrip()}{_PRODUCT}"
    logits = "unscaled"
    steps = [("scale", f"\n    {{after}} = {weights.scale}")] if weights.scale else []
    steps += [(name, text) for name, _, text in _STEPS if name not in neutral]
    for name, text in steps:
        after = f"after_{name}"
        lines += text.format(before=logits, after=after)
        logits = after
    attributes = ", ".join((*(name for name, _, _ in _STEPS), *output.attributes))
    lines += output.lines.format(logits=logits)
    return f"{op} <{attributes}> (hidden, {weights.inputs}) => ({output.outputs}) {{{lines}\n}}"
