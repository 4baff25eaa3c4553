"""The three models as sequences of ops: context, block, head. This is where the drafter's structure is written down."""

from __future__ import annotations

import onnx

from ..config import DrafterConfig
from ..heads.base import HEADS
from ..io_spec import NUM_CANDIDATES, ModelName
from .functions import NO_WINDOW
from .recorder import ComputeType, Recorder, WeightFile


def build_model(model: ModelName, config: DrafterConfig, compute: ComputeType, weights: WeightFile) -> onnx.ModelProto:
    """One of the three models, its weights pointing into the weight file."""
    recorder = Recorder(model, config, compute, weights)
    {"context": _context, "block": _block, "head": _head}[model](recorder, config)
    return recorder.model()


def _rope(r: Recorder, config: DrafterConfig) -> str:
    return r.constant("inv_freq", config.rope.inverse_frequencies(config.head_dim))


def _heads(config: DrafterConfig) -> dict[str, int]:
    return {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}


def _context(r: Recorder, config: DrafterConfig) -> None:
    r.op(
        "ContextKV", "features", "positions",
        r.weight("fc"), r.weight("hidden_norm"), r.weight("qkv"), r.weight("k_norm"), _rope(r, config),
        out=("context_k", "context_v"),
        eps=config.rms_norm_eps, magnitude=config.rope.magnitude, **_heads(config),
    )  # fmt: skip


def _block(r: Recorder, config: DrafterConfig) -> None:
    inv_freq = _rope(r, config)
    hidden = "embeddings"
    for layer in range(config.num_layers):
        hidden = _attention_sublayer(r, config, layer, hidden, inv_freq)
        hidden = _mlp_sublayer(r, config, layer, hidden)
    r.standard(
        "RMSNormalization", hidden, r.weight("norm"), out="hidden", axis=-1, epsilon=config.rms_norm_eps
    )  # fmt: skip
    for output in HEADS[config.family].outputs:
        r.op("Linear", "hidden", r.weight(output.weight), out=output.name)


def _attention_sublayer(r: Recorder, config: DrafterConfig, layer: int, hidden: str, inv_freq: str) -> str:
    mask, at = config.layer_masks[layer], f"layers.{layer}.attention"
    norm, qkv_weight, o_weight = r.weight("input_norm", layer), r.weight("qkv", layer), r.weight("o", layer)

    def attention(qkv: str) -> str:
        return r.op(
            "BlockAttention", qkv, r.weight("q_norm", layer), r.weight("k_norm", layer), inv_freq,
            "k_cache", "v_cache", "page_table", "page_position", "page_rows", "anchor_position",
            out=f"{at}.rows", layer=layer, window=mask.window or NO_WINDOW, causal=int(mask.causal),
            scale=config.head_dim**-0.5, eps=config.rms_norm_eps, magnitude=config.rope.magnitude, **_heads(config),
        )  # fmt: skip

    if config.conv is None:
        qkv = r.op("NormLinear", hidden, norm, qkv_weight, out=f"{at}.qkv", eps=config.rms_norm_eps)
        return r.op("LinearResidual", attention(qkv), o_weight, hidden, out=f"{at}.hidden")
    conv = _Convolution(r, config, layer, "attention_conv", hidden, norm)
    qkv = r.op("Linear", conv.before, qkv_weight, out=f"{at}.qkv")
    return conv.after(r.op("Linear", attention(qkv), o_weight, out=f"{at}.o"), hidden)


def _mlp_sublayer(r: Recorder, config: DrafterConfig, layer: int, hidden: str) -> str:
    at = f"layers.{layer}.mlp"
    norm, gate_up, down = r.weight("post_norm", layer), r.weight("gate_up", layer), r.weight("down", layer)
    if config.conv is None:
        activated = r.op("NormGateUp", hidden, norm, gate_up, out=f"{at}.activated", eps=config.rms_norm_eps)
        return r.op("LinearResidual", activated, down, hidden, out=f"{at}.hidden")
    conv = _Convolution(r, config, layer, "mlp_conv", hidden, norm)
    activated = r.op("GateUp", conv.before, gate_up, out=f"{at}.activated")
    return conv.after(r.op("Linear", activated, down, out=f"{at}.down"), hidden)


class _Convolution:
    """DFlash 2's convolution around one sublayer; both sides take their coefficients from the same normed input."""

    def __init__(self, r: Recorder, config: DrafterConfig, layer: int, name: str, hidden: str, norm: str) -> None:
        assert config.conv is not None
        self._r, self._group_size, self._at = r, config.conv.group_size, f"layers.{layer}.{name}"
        normed = r.standard(
            "RMSNormalization", hidden, norm, out=f"{self._at}.normed", axis=-1, epsilon=config.rms_norm_eps
        )  # fmt: skip
        self._dynamic = r.op("Linear", normed, r.weight(f"{name}_projection", layer), out=f"{self._at}.dynamic")
        self._base = r.weight(f"{name}_base", layer)
        self.before = r.op(
            "GroupedDynamicConv", normed, self._dynamic, self._base,
            out=f"{self._at}.before", side=0, group_size=self._group_size,
        )  # fmt: skip

    def after(self, output: str, residual: str) -> str:
        """The sublayer's output, convolved and added to the residual stream."""
        return self._r.op(
            "GroupedDynamicConvResidual", output, self._dynamic, self._base, residual,
            out=f"{self._at}.hidden", side=1, group_size=self._group_size,
        )  # fmt: skip


def _head(r: Recorder, config: DrafterConfig) -> None:
    padded = config.valid_columns < config.draft_vocab_size
    r.op(
        "LMHeadTopK", "hidden", "lm_head",
        out=("topk_ids", "topk_values", "logsumexp"),
        output_multiplier=config.output_multiplier, soft_cap=config.final_logit_softcapping or 0.0,
        valid_vocab=config.valid_columns if padded else 0, top_k=NUM_CANDIDATES,
    )  # fmt: skip
