"""FORMATS: quantized drafters, recognised by their companion tensors and their configuration; not read yet.

Treating packed bytes or scaled weights as plain ones gives noise without an error, so every witness refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .fields import lookup
from .findings import Findings, listed

PLAIN_DTYPES = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True)
class Format:
    """One way to store quantized weights; the first row that fits names a checkpoint's format."""

    name: str
    tensors: str  # regular expression of companions that only this format has
    words: str  # regular expression of what quantization configurations call it
    dtypes: frozenset[str] = frozenset()  # of weights


_NEVER = r"(?!)"

FORMATS: tuple[Format, ...] = (
    Format("NVFP4 (compressed-tensors)", r"\.weight_(packed|global_scale)$|\.input_global_scale$", r"nvfp4-pack"),
    Format("NVFP4 (ModelOpt)", r"\.weight_scale_2$", r"nvfp4", frozenset({"U8", "F4"})),
    Format("MXFP4", _NEVER, r"mxfp4"),
    Format("FP8 in blocks of 128x128", r"\.weight_scale_inv$", r"weight_block_size"),
    Format("GPTQ or AWQ", r"\.(qweight|qzeros|scales|g_idx)$", r"gptq|awq|auto-?round"),
    Format("FP8 key/value cache scales", r"\.[kv]_(proj\.)?(output_)?scale$", r"kv_cache"),
    Format("FP8", r"\.(weight_scale|input_scale)$", r"fp8|float-quantized", frozenset({"F8_E4M3", "F8_E5M2"})),
    Format("INT8", _NEVER, r"int8|int-quantized|w8a8", frozenset({"I8"})),
)


def refuse_quantized(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    dtypes: Mapping[str, str],
    findings: Findings,
) -> frozenset[str]:
    """Refuse a quantized checkpoint, naming format and evidence; returns the tensors that this explains."""
    declared = _declared(config, quantization)
    anything = re.compile("|".join(format_.tensors for format_ in FORMATS))
    companions = [name for name in dtypes if anything.search(name)]
    packed_dtypes = frozenset().union(*(format_.dtypes for format_ in FORMATS))
    packed = [name for name, dtype in dtypes.items() if dtype in packed_dtypes]
    if not (declared or companions or packed):
        return frozenset()
    evidence = [f"{place} says {words}" for place, words in declared.items()]
    evidence += [f"tensors {listed(companions)}"] if companions else []
    evidence += [f"{dtypes[packed[0]]} weights {listed(packed)}"] if packed else []
    name = _format(" ".join(declared.values()).lower(), companions, {dtypes[p] for p in packed})
    findings.unsupported(
        f"quantized checkpoint, format {name}: reading it is not implemented ({'; '.join(evidence)}); "
        "use the drafter's bfloat16 checkpoint"
    )
    return frozenset(companions + packed)


def _declared(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> dict[str, str]:
    """Place -> what it says, for the places that ask for quantization at all."""
    own = config.get("quantization_config", config.get("compression_config"))
    told = {"quantization_config": own, "hf_quant_config.json": lookup(quantization or {}, "quantization")}
    if quantization is not None and "quantization" not in quantization:
        told["hf_quant_config.json"] = quantization
    return {place: _words(content) for place, content in told.items() if content and _words(content)}


def _words(content: Any) -> str:
    """The words that name an algorithm; empty when the section switches everything off."""
    if not isinstance(content, Mapping):
        return str(content)
    keys = ("quant_method", "quant_algo", "kv_cache_quant_algo", "format", "fmt", "weight_block_size")
    said = [f"{key} {content[key]}" for key in keys if content.get(key)]
    return ", ".join(said) or ("" if set(content) & set(keys) else ", ".join(map(str, content)))


def _format(words: str, companions: list[str], dtypes: set[str]) -> str:
    for format_ in FORMATS:
        if any(re.search(format_.tensors, name) for name in companions):
            return format_.name
    for format_ in FORMATS:
        if re.search(format_.words, words) or dtypes & format_.dtypes:
            return format_.name
    return "unknown"
