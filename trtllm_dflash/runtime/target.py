"""The seam to the model that is being accelerated: prefill, verify, rollback, and taps of its blocks' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..config import TargetSpec


@dataclass(frozen=True)
class TargetOutput:
    """What one target forward yields for its n input rows."""

    logits: Tensor  # [n, V], or [1, V] of the last row when only that was asked for
    features: Tensor | None  # [n, K*Ht], taps concatenated in the order asked for; None without taps


class TargetSequence(Protocol):
    """One sequence of the target with its own KV cache. Invariant: ``length`` rows are in the cache."""

    length: int

    def forward(self, token_ids: Sequence[int], *, last_only: bool = False) -> TargetOutput:
        """Append the tokens; row i's logits predict the token after token i."""

    def rollback(self, num_rows: int) -> None:
        """Forget the newest ``num_rows`` rows."""


class Target(Protocol):
    """The model whose output decoding reproduces exactly."""

    spec: TargetSpec
    embedding: Tensor  # [Ve, Ht], raw rows
    lm_head: Tensor  # [V, Ht]

    def new_sequence(self, tapped_layers: Sequence[int] = ()) -> TargetSequence:
        """An empty sequence that captures the outputs of these 0-based blocks, in this order."""
