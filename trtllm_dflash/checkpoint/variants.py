"""VARIANTS: drafters that look like DFlash and compute something else; refused by name, with the reason.

Loading one of these as plain DFlash works everywhere and shows only as lost acceptance, so each witness is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .fields import lookup, shown
from .findings import Findings, listed

# Where a writer may have put a key.
PLACES = ("", "dflash_config.", "dspark_config.", "transformer_layer_config.", "rope_parameters.", "rope_scaling.",
          "transformer_layer_config.rope_parameters.", "transformer_layer_config.rope_scaling.")  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One model that is not implemented, and everything that gives it away."""

    name: str
    reason: str
    architectures: str = r"(?!)"  # regular expressions; this one matches nothing
    tensors: str = r"(?!)"
    keys: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)


def _on(value: Any) -> bool:
    return value not in (False, 0)


def _not(neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value != neutral


def _any(value: Any) -> bool:
    return True


# fmt: off
VARIANTS: tuple[Variant, ...] = (
    Variant("Laguna", "norms every tap before fc, passes context rows through input_layernorm and gates its heads",
            r"Laguna", r"aux_hidden_norms\.|fc_norm\.|self_attn\.g_proj\."),
    Variant("MiMo", "adds sink logits to the softmax and scales the values",
            r"MiMo", r"self_attn\.(sinks|attention_sink_bias)$",
            {"attention_sink_bias": _on, "add_swa_attention_sink_bias": _on, "add_full_attention_sink_bias": _on,
             "attention_value_scale": _not(1)}),
    Variant("Domino", "corrects its drafts with a GRU over the prefix",
            r"Domino", r"prefix_gru\.|embed_proj\.",
            {"projector_type": lambda value: value == "domino", "gru_hidden_dim": _any, "emb_dim": _any,
             "pure_draft_prefix_len": _any}),
    Variant("DeepSeek-V4 bundle", "is three multi-token-prediction blocks with latent attention and experts",
            r"DeepseekV4|DeepSeekV4", r"(^|\.)mtp\.\d+\.|main_(proj|norm)\.",
            {"model_type": lambda value: str(value).startswith("deepseek_v4")}),
    Variant("JetSpec", "masks the queries of a block causally in a head of its own",
            r"JetSpec", keys={"causal_head": _on, "dflash_query_causal": _on}),
    Variant("mixture-of-experts drafter", "routes its MLP", r"(?!)", r"mlp\.(experts\.|gate\.weight|router\.)"),
    Variant("attention with biases", "adds biases that the attention kernels do not have",
            tensors=r"self_attn\.(q|k|v|o|qkv)_proj\.bias$", keys={"attention_bias": _on, "qkv_bias": _on}),
    Variant("MLP with biases", "adds biases that the MLP kernels do not have",
            tensors=r"mlp\.(gate|up|down|gate_up)_proj\.bias$", keys={"mlp_bias": _on}),
    Variant("partial rotary embedding", "rotates a part of the head only, or the field leaked from a verifier's "
            "configuration into a drafter that was trained with full rotation; the two cannot be told apart",
            keys={"partial_rotary_factor": _not(1), "rope_dim": _any}),
    Variant("interleaved rotary embedding", "pairs neighbouring dimensions", keys={"is_neox_style": _not(True)}),
    Variant("Gemma norm", "multiplies by weight + 1", keys={"use_gemma_norm": _on}),
    Variant("adaptive tap fusion", "weights the taps of every layer", tensors=r"(^|\.)fusion_weights$"),
)
# fmt: on


@dataclass(frozen=True)
class Explained:
    """What the variants found account for, so that nothing is reported twice."""

    architectures: frozenset[str]
    keys: frozenset[str]  # paths; every key that a variant knows, found or not
    tensors: frozenset[str]


def refuse_variants(config: Mapping[str, Any], names: Iterable[str], findings: Findings) -> Explained:
    """Refuse every variant that the configuration, the tensor names or the names of extra files give away."""
    listed_architectures = config.get("architectures")
    candidates = listed_architectures if isinstance(listed_architectures, list) else []
    architectures: set[str] = set()
    tensors: set[str] = set()
    names = list(names)
    for variant in VARIANTS:
        named = [a for a in candidates if isinstance(a, str) and re.search(variant.architectures, a)]
        matching = [name for name in names if re.search(variant.tensors, name)]
        witnesses = [f"architecture {name}" for name in named]
        witnesses += [f"{path} {shown(value)}" for path, value in _present(config, variant)]
        witnesses += [f"tensors {listed(matching)}"] if matching else []
        if witnesses:
            findings.unsupported(f"{variant.name} is not implemented: it {variant.reason} ({'; '.join(witnesses)})")
        architectures.update(named)
        tensors.update(matching)
    keys = frozenset(f"{place}{key}" for variant in VARIANTS for key in variant.keys for place in PLACES)
    return Explained(frozenset(architectures), keys, frozenset(tensors))


def _present(config: Mapping[str, Any], variant: Variant) -> list[tuple[str, Any]]:
    places = [(f"{place}{key}", matches) for key, matches in variant.keys.items() for place in PLACES]
    told = [(path, lookup(config, path), matches) for path, matches in places]
    return [(path, value) for path, value, matches in told if value is not None and matches(value)]
