"""The tensors of an engine directory, each in one of two files, read by mapping them.

``weights.safetensors`` is what the models point into, indexed by byte offset; ``sidecars.safetensors`` is what is used
outside the models (tables of the head's rule, the drafter's own embedding and head), and is there only when some is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import EngineMismatchError
from ..graph.recorder import StoredTensor, WeightFile

WEIGHTS_NAME = "weights.safetensors"
SIDECARS_NAME = "sidecars.safetensors"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}


def write_weights(weights: Mapping[str, Tensor], directory: Path) -> WeightFile:
    """Write our layout of a drafter's weights and return where each tensor lies."""
    path = directory / WEIGHTS_NAME
    _save(weights, path)
    return index_weights(path)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(f"{path.name}: {error}") from error


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


def write_sidecars(sidecars: Mapping[str, Tensor], directory: Path) -> list[Path]:
    """Write what is used outside the models; returns the files written, none when there is nothing."""
    if not sidecars:
        return []
    path = directory / SIDECARS_NAME
    _save(sidecars, path)
    return [path]


def read_sidecars(directory: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """What is used outside the models, by name; mapped, not copied.

    Raises:
        EngineMismatchError: the file does not hold exactly these.
    """
    if not names:
        return {}
    try:
        sidecars: dict[str, Tensor] = load_file(directory / SIDECARS_NAME)
    except (OSError, SafetensorError) as error:
        raise EngineMismatchError(
            f"{directory / SIDECARS_NAME}: cannot be read ({error}), expected {', '.join(names)}; rebuild the engine"
        ) from error
    if set(sidecars) != set(names):
        raise EngineMismatchError(
            f"{directory / SIDECARS_NAME}: found tables {', '.join(sorted(sidecars))}, the head reads"
            f" {', '.join(sorted(names))}; rebuild the engine with this version"
        )
    return sidecars
