"""DFlash v1: every draft is the best candidate of its own row."""

from __future__ import annotations

from torch import Tensor

from .rows import DraftHead, anchor_counted


def best_candidate(ids: Tensor, values: Tensor) -> Tensor:
    """Drafts ``[S, m]`` from candidates ``[S, m, 16]``, best first: slot 0. Values are not looked at."""
    return ids[:, :, 0]


TOP1 = DraftHead(
    family="dflash",
    architectures=("DFlashDraftModel", "DFlashSpeculator"),
    default_block_size=16,
    block=anchor_counted,
    draft=best_candidate,
    witness={"speculators_model_type": lambda value: value == "dflash"},
)
