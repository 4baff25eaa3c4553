"""The tensors of a drafter in our layout, and loading them from a checkpoint.

One dtype, the checkpoint's, for all of them (parsing has refused mixtures); ``d2t`` alone is int64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..config import DrafterConfig
from ..errors import CheckpointError, Problems
from ..heads.base import HEADS
from ..heads.rows import TensorRow
from .names import rows_of, shape_of, sizes
from .parse import Checkpoint
from .vocabulary import target_ids

# What a session uses in place of the target's, and the target ids of a reduced vocabulary.
OWN_TENSORS = ("embed_tokens", "lm_head", "mask_embedding", "d2t")

_CHUNK_ELEMENTS = 1 << 22  # checked at once: isfinite makes temporaries of the size of its input

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def layout(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that ``load_weights`` returns for this drafter, in file order."""
    facts = _facts(config)
    letters = sizes(facts, config.family)
    shapes = {}
    for row in rows_of(config.family):
        if row.when(facts):
            shape = shape_of(row.dims, letters)
            shapes[row.name] = (config.num_layers, *shape) if row.per_layer else shape
    return shapes


def table_names(config: DrafterConfig) -> tuple[str, ...]:
    """Tensors of the layout that the head's rule reads itself."""
    tables = HEADS[config.family].tables
    return tuple(name for name in layout(config) if name in tables)


def own_names(config: DrafterConfig) -> tuple[str, ...]:
    """Tensors of the layout that a session itself uses, beside those of the models and of the rule."""
    return tuple(name for name in layout(config) if name in OWN_TENSORS)


def sidecar_names(config: DrafterConfig) -> tuple[str, ...]:
    """Tensors of the layout that are used outside the models; all others belong to the models."""
    return table_names(config) + own_names(config)


def _facts(config: DrafterConfig) -> dict[str, Any]:
    """Values by the names that parsing uses; family parts are flattened, as in ``conv_kernel_size``."""
    facts: dict[str, Any] = dict.fromkeys(field.name for field in HEADS[config.family].fields)
    facts |= vars(config) | {"num_taps": config.num_taps}
    for name, part in vars(config).items():
        if dataclasses.is_dataclass(part):
            facts |= {f"{name}_{key}": value for key, value in vars(part).items()}
    return facts


def load_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read a checkpoint's tensors into our layout, in its dtype, on the CPU.

    Each tensor is allocated once and filled from the mapped files, so the peak is the result itself and a few pages.

    Raises:
        CheckpointError: a weight is NaN or infinite (every such tensor, with its first index), or the vocabulary
            tables contradict each other.
    """
    config, problems = checkpoint.config, Problems(str(checkpoint.files.directory))
    rows = {row.name: row for row in rows_of(config.family)}
    weights = {}
    for name, shape in layout(config).items():
        if rows[name].integer:
            continue
        weights[name] = _gather(checkpoint, rows[name], shape, problems)
    d2t = _target_ids(checkpoint, problems)
    problems.raise_as(CheckpointError)
    return weights if d2t is None else {**weights, "d2t": d2t}


def _gather(checkpoint: Checkpoint, row: TensorRow, shape: tuple[int, ...], problems: Problems) -> Tensor:
    """One tensor of the layout: parts concatenated, layers stacked."""
    whole = torch.empty(shape, dtype=_DTYPES[checkpoint.config.dtype])
    per_layer = whole if row.per_layer else whole[None]
    for layer, names in zip(per_layer, checkpoint.sources[row.name], strict=True):
        start = 0
        for name in names:
            part = checkpoint.files.tensor(name)
            filled = layer[start : start + len(part)].copy_(part)
            _refuse_non_finite(name, filled, problems)  # after the copy: a narrower type may overflow
            start += len(part)
    return whole


def _refuse_non_finite(name: str, tensor: Tensor, problems: Problems) -> None:
    flat = tensor.flatten()
    starts = range(0, len(flat), _CHUNK_ELEMENTS)
    bad = [start + (~flat[start : start + _CHUNK_ELEMENTS].isfinite()).nonzero().flatten() for start in starts]
    if places := sum(len(found) for found in bad):
        first = int(torch.cat(bad)[0])
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)]
        problems.add(
            f"{name} is {flat[first].item()} at {index} and not finite in {places} places; "
            "expected finite weights, download the file again"
        )


def _target_ids(checkpoint: Checkpoint, problems: Problems) -> Tensor | None:
    """The direct map of a reduced vocabulary. With a full one a table may be there, but must not change anything."""
    config, sources = checkpoint.config, checkpoint.sources
    tables = {name: checkpoint.files.tensor(sources[name][0][0]) for name in ("d2t", "t2d") if name in sources}
    if "d2t" not in tables:
        return None
    try:
        ids = target_ids(tables["d2t"], tables.get("t2d"), config.vocab_size)
    except CheckpointError as error:
        problems.add(str(error))
        return None
    return ids if config.draft_vocab_size < config.vocab_size else None
