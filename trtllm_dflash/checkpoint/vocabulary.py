"""Reduced draft vocabularies: ``d2t`` as an offset table or a direct map, told apart by its values.

speculators and EAGLE-3 store offsets (``target = draft + d2t[draft]``), runtimes store the map itself. A table read the
wrong way gives drafts that are valid tokens and never accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CheckpointError


def target_ids(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> Tensor:
    """Target id of every draft id, int64 ``[Vd]``, strictly increasing.

    Shapes:
        d2t  [Vd]  any integer type, offsets or target ids
        t2d  [V]   bool or 0/1, which target ids have a draft id; None when the file has none

    Raises:
        CheckpointError: neither reading gives increasing ids below ``vocab_size``, or both do and no t2d decides, or
            t2d marks other ids.
    """
    table = d2t.to(torch.int64)
    readings = {"offsets": table + torch.arange(len(table)), "target ids": table}
    valid = {name: ids for name, ids in readings.items() if _is_map(ids, vocab_size)}
    if not valid:
        raise CheckpointError(
            f"d2t starts {table[:4].tolist()}: neither as offsets nor as target ids is it strictly increasing within "
            f"0 to {vocab_size - 1}; expected one of the two"
        )
    if t2d is not None:
        kept = t2d.nonzero().flatten()
        fitting = {name: ids for name, ids in valid.items() if torch.equal(ids, kept)}
        if not fitting:
            raise CheckpointError(
                f"t2d marks {len(kept)} target ids, d2t has {len(table)}, read as {' or '.join(valid)}; "
                "expected the same ids in both"
            )
        valid = fitting
    elif len(valid) > 1:
        raise CheckpointError(
            f"d2t starts {table[:4].tolist()}, which can be offsets or target ids, and t2d is missing; "
            "expected t2d to decide"
        )
    return next(iter(valid.values()))


def _is_map(ids: Tensor, vocab_size: int) -> bool:
    increasing = bool((ids[1:] > ids[:-1]).all())
    return increasing and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
