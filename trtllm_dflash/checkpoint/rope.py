"""``rope_scaling`` and ``rope_parameters``: the two spellings of one thing.

Transformers 5 moved the base into ``rope_parameters``; verifier configurations leak multimodal keys into drafters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config import YarnScaling
from ..heads.values import NotImplementedValue, boolean, integer, number

_TYPE_KEYS = ("rope_type", "type")
# Judged elsewhere (theta, partial_rotary_factor), or of the target alone: a drafter rotates by plain token positions.
_OTHER_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_YARN_KEYS = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "truncate",
)  # fmt: skip


def rope_scaling(value: Any) -> YarnScaling | None:
    """The scaling that a dictionary asks for; None is plain RoPE.

    Raises ValueError for a wrong dictionary, NotImplementedValue for a type or key that nothing here follows.
    """
    if not isinstance(value, dict):
        raise ValueError("an object with rope_type, or null")
    types = {value[key] for key in _TYPE_KEYS if isinstance(value.get(key), str)} or {"default"}
    if len(types) > 1 or any(not isinstance(value.get(key, ""), str) for key in _TYPE_KEYS):
        raise ValueError("one rope_type; type and rope_type must agree")
    (kind,) = types
    if kind not in ("default", "yarn"):
        raise NotImplementedValue("rope_type default or yarn")
    known = set(_TYPE_KEYS + _OTHER_KEYS + (_YARN_KEYS if kind == "yarn" else ()))
    if unknown := sorted(set(value) - known):
        raise NotImplementedValue(f"no {', '.join(unknown)} in rope_type {kind}")
    return _yarn({key: value[key] for key in _YARN_KEYS if value.get(key) is not None}) if kind == "yarn" else None


def _yarn(given: Mapping[str, Any]) -> YarnScaling:
    if missing := [key for key in ("factor", "original_max_position_embeddings") if key not in given]:
        raise ValueError(f"{' and '.join(missing)} in rope_type yarn")
    if not boolean(given.get("truncate", True)):
        raise NotImplementedValue("truncate true: the ramp's ends are whole dimensions")
    factor = _read(given, "factor", 1.0)
    if factor < 1.0:
        raise NotImplementedValue("a YaRN factor of at least 1")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=integer(1)(given["original_max_position_embeddings"]),
        beta_fast=_read(given, "beta_fast", 32.0),
        beta_slow=_read(given, "beta_slow", 1.0),
        attention_factor=_attention_factor(given, factor),
    )


def _read(given: Mapping[str, Any], key: str, default: float) -> float:
    try:
        value: float = number(0.0)(given.get(key, default))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return value


def _attention_factor(given: Mapping[str, Any], factor: float) -> float | None:
    """Explicit, or the ratio that DeepSeek's two mscales make; None leaves ``0.1 ln(factor) + 1``.

    Source: transformers ``modeling_rope_utils._compute_yarn_parameters``, which ignores one mscale without the other;
    a single one that would change the result is refused instead.
    """
    if "attention_factor" in given:
        return _read(given, "attention_factor", 1.0)
    if "mscale" in given and "mscale_all_dim" in given:
        scales = [
            0.1 * _read(given, key, 1.0) * math.log(max(factor, 1.0)) + 1.0 for key in ("mscale", "mscale_all_dim")
        ]
        return scales[0] / scales[1]
    for key in ("mscale", "mscale_all_dim"):
        if _read(given, key, 1.0) != 1.0:
            raise NotImplementedValue(f"mscale and mscale_all_dim together, not {key} alone")
    return None
