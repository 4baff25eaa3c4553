"""FIELDS: every fact that ``config.json`` states, its spellings and its default; and reading a table of fields.

Published checkpoints come from four writers (z-lab, SpecForge, ModelOpt, speculators), who put the same fact in
different places. Engines disagree on which place wins, so none does: spellings that are present must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..heads.base import HEADS
from ..heads.rows import REQUIRED, Field
from ..heads.values import NotImplementedValue, Unread, Values, boolean, integer, integers, number, text, words
from .findings import Findings
from .rope import rope_scaling

LAYER_TYPES = ("full_attention", "sliding_attention")
SPECULATORS = "transformer_layer_config."  # speculators nests the geometry
SECTIONS = ("dflash_config", "dspark_config")  # every key in these is read or refused; top levels hold anything

# Facts of training, which change nothing in a forward pass; and SGLang's text form of mask_token_id, never alone.
TRAINING_ONLY = frozenset({
    "confidence_head_alpha", "num_anchors", "attention_mode", "loss_decay_gamma", "mask_token", "max_anchors",
})  # fmt: skip


def _layer(*keys: str) -> tuple[str, ...]:
    return keys + tuple(f"{SPECULATORS}{key}" for key in keys)


def _nested(*keys: str) -> tuple[str, ...]:
    return tuple(f"{place}{key}" for key in keys for place in ("dflash_config.", "dspark_config.", ""))


def _rope(key: str) -> tuple[str, ...]:
    return _layer(f"rope_parameters.{key}", f"rope_scaling.{key}")


def _off_or_positive(value: Any) -> float | None:
    """A soft cap; 0 means none, as in the reference."""
    return number(0.0, exclusive=False)(value) or None


def _proposal_length(value: Any) -> int:
    """Length in speculators' list of proposal methods."""
    methods = value if isinstance(value, list) else []
    lengths = {method.get("speculative_tokens") for method in methods if isinstance(method, dict)}
    if len(lengths) != 1:
        raise ValueError("a list of proposal methods with one speculative_tokens")
    length: int = integer(1)(lengths.pop())
    return length


def default_layer_ids(values: Values) -> tuple[int, ...]:
    """Taps of a checkpoint that does not list them: spread over the target, one for each drafter layer.

    Python's half-to-even rounding is part of the rule. Source: z-lab/dflash model.py, build_target_layer_ids.
    """
    target, layers = values["num_target_layers"], values["num_layers"]
    if target is None:
        raise ValueError("a list of layer numbers, or num_target_layers to derive one from")
    if layers == 1:
        return (target // 2,)
    return tuple(round(1 + i * (target - 4) / (layers - 1)) for i in range(layers))


# fmt: off
FIELDS: tuple[Field, ...] = (
    # geometry
    Field("hidden_size", integer(1), _layer("hidden_size")),
    Field("intermediate_size", integer(1), _layer("intermediate_size")),
    Field("num_layers", integer(1, 1024), _layer("num_hidden_layers")),
    Field("num_heads", integer(1), _layer("num_attention_heads")),
    Field("num_kv_heads", integer(1), _layer("num_key_value_heads")),
    Field("head_dim", integer(2), _layer("head_dim"), lambda v: v["hidden_size"] // v["num_heads"]),
    Field("hidden_act", text("silu"), _layer("hidden_act"), "silu"),
    Field("rms_norm_eps", number(0.0), _layer("rms_norm_eps"), lambda v: 1e-6),
    # position
    Field("rope_theta", number(1.0), _layer("rope_theta") + _rope("rope_theta")),
    Field("yarn", rope_scaling, _layer("rope_scaling", "rope_parameters"), None),
    # masks
    Field("layer_types", words(LAYER_TYPES), _layer("layer_types"), None),
    Field("window", integer(-1), (*_layer("sliding_window"), *_nested("swa_window_size")), None),
    Field("use_sliding_window", boolean, _layer("use_sliding_window"), None),
    Field("max_window_layers", integer(0), _layer("max_window_layers"), None),
    Field("use_swa", boolean, _nested("use_swa"), False),
    Field("is_causal", boolean, ("is_causal", "dflash_config.is_causal", "dflash_config.causal",
                                 "dspark_config.causal"), None),
    Field("sliding_non_causal", boolean, _nested("sliding_window_non_causal", "contiguous_query_swa"), None),
    # target
    Field("num_target_layers", integer(1, 4096), _nested("num_target_layers"), None),
    Field("target_layer_ids", integers(), (*_nested("target_layer_ids"), "dspark_target_layer_ids"),
          default_layer_ids,
          # EAGLE counts hidden states, and hidden state 0 is the embedding: one more than the block that made it.
          foreign=dict.fromkeys(_nested("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
                                integers(first=1))),
    Field("given_target_hidden_size", integer(1), ("target_hidden_size", "dflash_config.target_hidden_size"), None),
    Field("vocab_size", integer(1), _layer("vocab_size")),
    Field("draft_vocab_size", integer(1), ("draft_vocab_size", "dflash_config.draft_vocab_size"),
          lambda v: v["vocab_size"], noted=False),
    # block
    Field("block_size", integer(1, 1024), (*_nested("block_size"), "dspark_block_size"),
          lambda v: HEADS[v["family"]].default_block_size),
    Field("mask_token_id", integer(0), (*_nested("mask_token_id"), "dspark_noise_token_id")),
    Field("sample_from_anchor", boolean, _nested("sample_from_anchor", "shift_label"), None),
    Field("num_speculative_tokens", integer(1), _nested("num_speculative_tokens"), None,
          foreign={"speculators_config.proposal_methods": _proposal_length}),
    # A witness of the family (heads/) or of a variant (domino); any other projector is unknown.
    Field("projector_type", text("dspark", "domino"), _nested("projector_type"), None),
    # numerics and ownership
    Field("input_embedding_scale", number(0.0), _nested("input_embedding_scale"), 1.0),
    Field("output_multiplier", number(0.0), _nested("output_multiplier", "logit_scale"), 1.0),
    Field("final_logit_softcapping", _off_or_positive, _nested("final_logit_softcapping"), None),
    Field("tie_word_embeddings", boolean, _layer("tie_word_embeddings"), False),
)
# fmt: on


def read_fields(config: Mapping[str, Any], fields: Iterable[Field], values: Values, findings: Findings) -> list[str]:
    """Resolve the fields in order into ``values``; returns what was assumed. A bad field leaves no value behind."""
    assumed = []
    for field in fields:
        found = _spelled(config, field, findings)
        if found is None:
            continue
        told = {path: value for path, value in found.items() if value != next(iter(found.values()))}
        for path, value in told.items():
            first = next(iter(found))
            findings.add(f"{first} is {found[first]} but {path} is {value}; the two must agree")
        if found and not told:
            values[field.name] = next(iter(found.values()))
        elif not found:
            assumed += _default(field, values, findings)
    return assumed


def _spelled(config: Mapping[str, Any], field: Field, findings: Findings) -> dict[str, Any] | None:
    """Path -> value of every spelling that is present; None when one of them is bad."""
    found: dict[str, Any] = {}
    good = True
    for path, convert in field.paths.items():
        raw = lookup(config, path)
        if raw is None:
            continue
        try:
            found[path] = convert(raw)
        except NotImplementedValue as error:
            findings.unsupported(f"{path} is {shown(raw)}; implemented: {error}")
            good = False
        except ValueError as error:
            findings.add(f"{path} is {shown(raw)}, expected {error}")
            good = False
    return found if good else None


def _default(field: Field, values: Values, findings: Findings) -> list[str]:
    if field.default is REQUIRED:
        findings.add(f"{field.spellings[0]} is missing, expected a value; it has no safe default")
        return []
    if not callable(field.default):
        values[field.name] = field.default
        return []
    try:
        values[field.name] = field.default(values)
    except Unread:
        return []
    except ValueError as error:
        findings.add(f"{field.spellings[0]} is missing, expected {error}")
        return []
    return [f"{field.spellings[0]} is not given; {shown(values[field.name])} is assumed"] if field.noted else []


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value at ``section.key``, None when absent; null is absent too."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def shown(value: Any) -> str:
    """A value in a message, cut where a file holds a novel."""
    text_ = repr(value)
    return text_ if len(text_) <= 120 else text_[:117] + "..."


def unknown_keys(config: Mapping[str, Any], fields: Iterable[Field], explained: Iterable[str]) -> Iterator[str]:
    """Paths in ``SECTIONS`` that no field, training-only key or named variant accounts for."""
    known = {path for field in fields for path in field.paths} | set(explained)
    for section in SECTIONS:
        content = config.get(section)
        for key in content if isinstance(content, Mapping) else ():
            if f"{section}.{key}" not in known and key not in TRAINING_ONLY:
                yield f"{section}.{key}"
