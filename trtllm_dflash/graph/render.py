"""Renderings: the same models written for different runners. A rendering is a row of a table, not a code path.

``ort`` and ``torch`` keep the functions: ONNX Runtime inlines them itself, ``TorchSession`` runs a kernel where it has
one and the body where it has none. TensorRT renderings add rows here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from ..config import DrafterConfig
from ..io_spec import MODELS, ModelName
from . import check
from .models import build_model
from .recorder import ComputeType, WeightFile


@dataclass(frozen=True)
class Rendering:
    """How models are written for one runner."""

    name: str
    compute_types: tuple[ComputeType, ...]


# One rendering a runtime: the key is BuildOptions.runtime.
RENDERINGS: dict[str, Rendering] = {
    # ONNX Runtime's CPU provider has no bfloat16 MatMul.
    "onnxruntime": Rendering("ort", compute_types=("float32",)),
    "torch": Rendering("torch", compute_types=("float32", "bfloat16")),
}


def render(
    rendering: Rendering, config: DrafterConfig, compute: ComputeType, weights: WeightFile
) -> dict[ModelName, onnx.ModelProto]:
    """All three models for one runner, checked. Raises BuildError when a postcondition does not hold."""
    models = {name: build_model(name, config, compute, weights) for name in MODELS}
    for name, model in models.items():
        check.check_model(model, name, config, compute, weights)
    check.check_all_used(models.values(), weights)
    return models


def write(models: dict[ModelName, onnx.ModelProto], directory: Path) -> list[Path]:
    """Write ``context.onnx``, ``block.onnx`` and ``head.onnx`` beside the weight file and have ONNX check each file."""
    paths = []
    for name, model in models.items():
        path = directory / f"{name}.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))
        check.check_file(path)
        paths.append(path)
    return paths
