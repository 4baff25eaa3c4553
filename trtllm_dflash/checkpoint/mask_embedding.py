"""``mask_embedding.pt``: a learned mask row that some writers store beside the weights, as a pickled dictionary.

It is read with ``weights_only``, so code inside the file is refused, not run.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .fields import shown
from .findings import listed

NAME = "mask_embedding.pt"
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

_MAX_BYTES = 64 * 2**20  # a row has some kilobytes
_KEYS = {"embedding", "mask_token_id"}


@dataclass(frozen=True)
class MaskEmbedding:
    """What the file says; shape and id are compared with ``config.json`` while parsing."""

    embedding: Tensor  # one of DTYPES
    mask_token_id: int


def read_mask_embedding(path: Path) -> MaskEmbedding:
    """Read ``{embedding, mask_token_id}``.

    Raises:
        CheckpointError: too large, unreadable, holds code, or something else than these two.
    """
    where = f"{path}: expected a dictionary of embedding, a tensor [H], and mask_token_id, written by torch.save"
    if not path.is_file():
        raise CheckpointError(f"{where}; it is not a file")
    if (size := _unpacked_bytes(path)) > _MAX_BYTES:
        raise CheckpointError(f"{where}; it has {size} bytes, at most {_MAX_BYTES} are read")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{where}; it holds code or damage, which is not loaded") from error
    except Exception as error:  # whatever torch makes of a damaged archive: RuntimeError, EOFError, ValueError, ...
        raise CheckpointError(f"{where}; it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict) or set(content) != _KEYS:
        found = listed(map(shown, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(f"{where}; found {found}")
    embedding, token = content["embedding"], content["mask_token_id"]
    if not isinstance(embedding, Tensor) or embedding.dtype not in DTYPES:
        kind = embedding.dtype if isinstance(embedding, Tensor) else type(embedding).__name__
        raise CheckpointError(f"{where}; embedding is {kind}, expected a tensor of {', '.join(DTYPES.values())}")
    if embedding.is_nested or embedding.layout != torch.strided or embedding.device.type != "cpu":
        raise CheckpointError(f"{where}; embedding is sparse, nested or without values, expected a plain tensor")
    if not isinstance(token, int) or isinstance(token, bool):
        raise CheckpointError(f"{where}; mask_token_id is {shown(token)}, expected an integer")
    return MaskEmbedding(embedding.detach(), token)


def _unpacked_bytes(path: Path) -> int:
    """Size of the file or, of an archive, of what it unpacks to."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            size = max(size, sum(entry.file_size for entry in archive.infolist()))
    return size
