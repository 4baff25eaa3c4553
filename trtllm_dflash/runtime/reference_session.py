"""The oracle as a session: fp32 on the CPU, one sequence at a time, pages gathered in a plain loop."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..checkpoint.weights import sidecar_names
from ..config import DrafterConfig
from ..heads.base import HEADS
from ..io_spec import NUM_CANDIDATES
from ..limits import Limits
from ..reference import ops
from ..reference.drafter import ReferenceDrafter
from .session import ContextTables, Session


class ReferenceSession(Session):
    """Runs the three models on ``ReferenceDrafter``; slow, and right by construction.

    The gather below is written from the meaning of ``ContextTables`` and shares nothing with the graph's, so that each
    checks the other.
    """

    def __init__(self, config: DrafterConfig, limits: Limits, weights: Mapping[str, Tensor]) -> None:
        sidecars = {name: weights[name] for name in sidecar_names(config)}
        super().__init__(config, limits, torch.device("cpu"), torch.float32, sidecars)
        self._drafter = ReferenceDrafter(config, weights)
        self._projections = {output.name: weights[output.weight] for output in HEADS[config.family].outputs}

    def _run_context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._drafter.context_kv(features, positions)

    def _run_block(self, embeddings: Tensor, positions: Tensor, context: ContextTables) -> dict[str, Tensor]:
        blocks = []
        for sequence, anchor_position in enumerate(positions.tolist()):
            keys, values, context_positions = self._gather(sequence, context)
            blocks.append(self._drafter.block(embeddings[sequence], anchor_position, keys, values, context_positions))
        hidden = torch.stack(blocks)
        projected = {name: ops.linear(hidden, weight) for name, weight in self._projections.items()}
        return {"hidden": hidden, **projected}

    def _run_head(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._drafter.head(hidden, lm_head)
        ids, values = ops.top_k(logits, NUM_CANDIDATES)
        return ids, values, ops.logsumexp(logits)

    def _gather(self, sequence: int, context: ContextTables) -> tuple[Tensor, Tensor, Tensor]:
        """One sequence's written rows in table order: keys, values ``[N, L, nkv, D]`` and true positions ``[N]``."""
        config = self.config
        nothing = torch.empty(0, config.num_layers, config.num_kv_heads, config.head_dim)
        keys, values, positions = [nothing], [nothing], [torch.empty(0, dtype=torch.int64)]
        pages = zip(
            context.page_table[sequence].tolist(),
            context.page_position[sequence].tolist(),
            context.page_rows[sequence].tolist(),
            strict=True,
        )
        for page, first_position, num_rows in pages:
            keys.append(self.k_cache[page, :, :num_rows].transpose(0, 1))
            values.append(self.v_cache[page, :, :num_rows].transpose(0, 1))
            positions.append(torch.arange(first_position, first_position + num_rows))
        return torch.cat(keys), torch.cat(values), torch.cat(positions)
