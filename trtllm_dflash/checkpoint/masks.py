"""Window and causality of every layer: three questions of the configuration, answered once.

Which layers slide: ``use_swa`` (all of them), else ``layer_types``, else Hugging Face's old pair of fields.
How far: ``sliding_window`` or ``swa_window_size``.
Causal: ``use_swa`` says no; else ``is_causal`` for every layer; else sliding layers are causal and full ones are not.

Source: z-lab/dflash model.py, Qwen3DFlashAttention.__init__; use_swa from ModelOpt, whose exports carry it.
"""

from __future__ import annotations

from ..config import LayerMask
from ..heads.values import Values
from .findings import Findings


def layer_masks(values: Values, findings: Findings) -> tuple[LayerMask, ...]:
    """One mask a layer; every contradiction is noted. Raises Unread when a field could not be read."""
    slides = _sliding_layers(values, findings)
    window = values["window"]
    if any(slides) and (window is None or window < 1):
        findings.add(
            f"sliding_window is {window}, but layers {_numbers(slides)} slide; expected their window in tokens"
        )
        window = None
    sliding_causal, full_causal = _causality(values, any(slides), findings)
    return tuple(
        LayerMask(window=window, causal=sliding_causal) if slide else LayerMask(window=None, causal=full_causal)
        for slide in slides
    )


def _numbers(slides: list[bool]) -> str:
    return ", ".join(str(layer) for layer, slide in enumerate(slides) if slide)


def _sliding_layers(values: Values, findings: Findings) -> list[bool]:
    layers, types = values["num_layers"], values["layer_types"]
    if types is not None and len(types) != layers:
        findings.add(f"layer_types has {len(types)} entries, but num_hidden_layers is {layers}; the two must agree")
        types = (*types, *["full_attention"] * layers)[:layers]
    if values["use_swa"]:
        return [True] * layers
    declared = values["use_sliding_window"]
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types]
        if any(slides) and declared is False:
            findings.add(
                f"use_sliding_window is false, but layer_types makes layers {_numbers(slides)} slide; "
                "the two must agree"
            )
        return slides
    first = values["max_window_layers"] or 0
    return [bool(declared) and layer >= first for layer in range(layers)]


def _causality(values: Values, any_slides: bool, findings: Findings) -> tuple[bool, bool]:
    """(causal in sliding layers, causal in full layers)."""
    is_causal, non_causal = values["is_causal"], values["sliding_non_causal"]
    if values["use_swa"] and (is_causal or non_causal is False):
        findings.add(
            f"use_swa is true, which is not causal, but is_causal is {is_causal} and sliding_window_non_causal is "
            f"{non_causal}; the fields must agree"
        )
    if any_slides and None not in (is_causal, non_causal) and is_causal == non_causal:
        findings.add(f"is_causal is {is_causal} but sliding_window_non_causal is {non_causal}; the two must agree")
    if values["use_swa"]:
        return False, False
    if is_causal is not None:
        return is_causal, is_causal
    if non_causal is not None:
        return not non_causal, False
    return True, False
