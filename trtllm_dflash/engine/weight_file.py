"""``weights.safetensors`` of an engine directory: written once, indexed by byte offset, read by mapping it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from ..graph.recorder import StoredTensor, WeightFile

WEIGHTS_NAME = "weights.safetensors"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}


def write_weights(weights: Mapping[str, Tensor], directory: Path) -> WeightFile:
    """Write our layout of a drafter's weights and return where each tensor lies."""
    path = directory / WEIGHTS_NAME
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    return index_weights(path)


def index_weights(path: Path) -> WeightFile:
    """Byte ranges of the tensors in a safetensors file that this package wrote (ONNX external data points at them)."""
    with path.open("rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_size))
    begin = 8 + header_size
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            tensors[name] = StoredTensor(_DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + low, high - low)
    return WeightFile(path.name, tensors)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of an engine's weight file, mapped, not copied."""
    tensors: dict[str, Tensor] = load_file(directory / WEIGHTS_NAME)
    return tensors
