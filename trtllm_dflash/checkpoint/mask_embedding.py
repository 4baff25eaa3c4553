"""``mask_embedding.pt``: a learned mask row that some writers store beside the weights, as a pickled dictionary.

It is read with ``weights_only``, so code inside the file is refused, not run.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError

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
    if not path.is_file() or (size := path.stat().st_size) > _MAX_BYTES:
        found = f"has {size} bytes, at most {_MAX_BYTES} are read" if path.is_file() else "is not a file"
        raise CheckpointError(f"{where}; it {found}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{where}; it holds code or damage, which is not loaded ({reason})") from error
    except Exception as error:  # whatever torch makes of a damaged archive: RuntimeError, EOFError, ValueError, ...
        raise CheckpointError(f"{where}; it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict) or set(content) != _KEYS:
        found = ", ".join(map(repr, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(f"{where}; found {found}")
    embedding, token = content["embedding"], content["mask_token_id"]
    if not isinstance(embedding, Tensor) or embedding.dtype not in DTYPES:
        kind = embedding.dtype if isinstance(embedding, Tensor) else type(embedding).__name__
        raise CheckpointError(f"{where}; embedding is {kind}, expected a tensor of {', '.join(DTYPES.values())}")
    if not isinstance(token, int) or isinstance(token, bool):
        raise CheckpointError(f"{where}; mask_token_id is {token!r}, expected an integer")
    return MaskEmbedding(embedding.detach(), token)
