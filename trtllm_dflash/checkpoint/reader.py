"""Opens a checkpoint directory: JSON files and tensor headers at once, tensors on demand.

What the files say is judged elsewhere; here they must be complete, readable and free of contradictions between them.
This is the only reader of safetensors in the package.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, Problems
from . import mask_embedding
from .mask_embedding import MaskEmbedding, read_mask_embedding
from .strict_json import read_object

CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class TensorHeader:
    """What a file says about one tensor without reading its values."""

    dtype: str  # as safetensors writes it: BF16, F16, F32, I64, BOOL, ...
    shape: tuple[int, ...]
    file: str = WEIGHTS


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint directory whose files fit together."""

    directory: Path
    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None  # hf_quant_config.json
    headers: Mapping[str, TensorHeader]
    extras: tuple[str, ...]  # files that are neither configuration nor weights
    mask_embedding: MaskEmbedding | None = None  # of mask_embedding.pt; among the headers under the file's name

    def tensor(self, name: str) -> Tensor:
        """One tensor, mapped from its file; treat it as read only."""
        if self.mask_embedding is not None and name == mask_embedding.NAME:
            return self.mask_embedding.embedding
        with safe_open(self.directory / self.headers[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def sha256(self) -> str:
        """Hash of configuration and weights, file by file; other files do not enter."""
        digest = hashlib.sha256()
        names = {CONFIG, *(header.file for header in self.headers.values())}
        if self.quantization is not None:
            names.add(QUANTIZATION)
        for name in sorted(names):
            path = self.directory / name
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()


def open_checkpoint(directory: str | Path) -> CheckpointFiles:
    """Read every JSON file and tensor header of a checkpoint directory.

    Raises:
        CheckpointError: a file is missing, unreadable, truncated, or contradicts another one.
    """
    folder = Path(directory)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: {found}; expected a checkpoint directory with {CONFIG} and {WEIGHTS}")
    names = _list_files(folder)
    if CONFIG not in names:
        raise CheckpointError(f"{folder}: {CONFIG} is missing; expected a Hugging Face checkpoint directory")
    config = read_object(folder / CONFIG)
    quantization = read_object(folder / QUANTIZATION) if QUANTIZATION in names else None
    headers = _read_headers(folder, names)
    mask_row = None
    if mask_embedding.NAME in names:
        mask_row = read_mask_embedding(folder / mask_embedding.NAME)
        dtype = mask_embedding.DTYPES[mask_row.embedding.dtype]
        headers[mask_embedding.NAME] = TensorHeader(dtype, tuple(mask_row.embedding.shape), mask_embedding.NAME)
    used = {CONFIG, QUANTIZATION, INDEX, *(header.file for header in headers.values())}
    return CheckpointFiles(folder, config, quantization, headers, tuple(sorted(names - used)), mask_row)


def _list_files(folder: Path) -> set[str]:
    """Names in the directory. Hugging Face's cache is made of symbolic links: fine, unless they point nowhere."""
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed ({error.strerror})") from error
    problems = Problems(str(folder))
    for entry in entries:
        if entry.is_symlink() and not entry.exists():
            problems.add(f"{entry.name} links to {entry.readlink()}, which does not exist; download the file again")
    problems.raise_as(CheckpointError)
    return {entry.name for entry in entries}


def _read_headers(folder: Path, names: set[str]) -> dict[str, TensorHeader]:
    if INDEX in names:
        return _read_shards(folder, names)
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    if WEIGHTS not in names:
        raise CheckpointError(f"{folder}: {WEIGHTS} is missing{_what_there_is(names, shards)}")
    if shards != [WEIGHTS]:
        others = ", ".join(name for name in shards if name != WEIGHTS)
        raise CheckpointError(f"{folder}: {others} beside {WEIGHTS} and no {INDEX}; keep one set of weights")
    return _read_header(folder, WEIGHTS)


def _what_there_is(names: set[str], shards: list[str]) -> str:
    if shards:
        return f": found {', '.join(shards)}; expected {INDEX} with them, or one file of that name"
    if pickles := sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))):
        return f": found {', '.join(pickles)}; pickled weights are not read, convert them to safetensors"
    return "; expected the drafter's weights in it"


def _read_shards(folder: Path, names: set[str]) -> dict[str, TensorHeader]:
    index = folder / INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is missing or no map of tensor names to file names")
    problems = Problems(str(folder))
    files = sorted(set(weight_map.values()))
    for file in files:
        problems.check(file in names, f"{INDEX} names {file}, which is missing; download the shard")
    for file in sorted(names):
        if file.endswith(".safetensors"):
            problems.check(file in files, f"{file} is not named in {INDEX}; keep one set of weights")
    problems.raise_as(CheckpointError)

    headers: dict[str, TensorHeader] = {}
    for file in files:
        for name, header in _read_header(folder, file).items():
            twice = headers.get(name)
            problems.check(twice is None, f"{name} is in {twice.file if twice else ''} and in {file}; expected one")
            headers[name] = header
    for name, header in headers.items():
        told = weight_map.get(name)
        problems.check(told is not None, f"{header.file} holds {name}, which {INDEX} does not name")
        problems.check(told in (None, header.file), f"{INDEX} places {name} in {told}, but it is in {header.file}")
    for name, file in weight_map.items():
        problems.check(name in headers, f"{INDEX} names {name} in {file}, but {file} does not hold it")
    problems.raise_as(CheckpointError)
    return headers


def _read_header(folder: Path, name: str) -> dict[str, TensorHeader]:
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file; expected safetensors weights")
    size = path.stat().st_size
    if not os.access(path, os.R_OK):  # safetensors would call it missing
        raise CheckpointError(f"{path}: cannot be read; expected read permission")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118  (not a dict)
            return {
                tensor: TensorHeader(str(part.get_dtype()), tuple(part.get_shape()), name)
                for tensor, part in slices.items()
            }
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file ({error}); it has {size} bytes, download it again"
        ) from error
