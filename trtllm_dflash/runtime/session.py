"""The seam between request state and computation: a session owns device memory and launches, and nothing else.

A session runs the three models of an engine (context, block, head). It has never heard of requests: callers say which
pages and positions they mean. Subclasses say how one model is run; everything they share is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.weights import layout, own_names, sidecar_names
from ..config import DrafterConfig
from ..errors import EngineMismatchError, Problems
from ..limits import Limits


@dataclass(frozen=True)
class ContextTables:
    """Where the context of S sequences lies; all three are int32 ``[S, max_pages]``, max_pages >= 1.

    ``page_table`` holds page ids (padding: page 0), ``page_position`` the true position of a page's first row,
    ``page_rows`` how many of its rows are written (padding: 0). Positions are contiguous inside a page.
    """

    page_table: Tensor
    page_position: Tensor
    page_rows: Tensor


@dataclass(frozen=True)
class Candidates:
    """What a draft step yields for S sequences and m drafts, best candidate first, ties to the lowest id."""

    ids: Tensor  # [S, m, 16] int32, columns of the head: ids of the draft vocabulary
    values: Tensor  # [S, m, 16] float32, logits after multiplier and soft cap
    logsumexp: Tensor  # [S, m] float32, over the whole vocabulary
    hidden: Tensor  # [S, m, H] of the session's dtype, after the final norm
    outputs: Mapping[str, Tensor]  # [S, m, width] each, the block outputs that the head's row asks for


class Session(ABC):
    """A drafter that can be run. Invariant: the pools hold K/V of every row that ``ingest`` was given, final.

    ``k_cache`` and ``v_cache`` are ``[pages, L, page, nkv, D]`` of the session's dtype, zero until written.
    ``tables`` are what the head's rule reads, by the names of our layout, in the checkpoint's dtype. What the drafter
    owns (embedding, head, mask row, ``draft_to_target``) is in place from the beginning, and no target replaces it.

    ``sidecars`` are what an engine holds beside its models: those tables and the drafter's own tensors.

    Raises:
        EngineMismatchError: an own tensor is missing or of another shape, or the pool cannot be allocated.
    """

    def __init__(
        self,
        config: DrafterConfig,
        limits: Limits,
        device: torch.device,
        dtype: torch.dtype,
        sidecars: Mapping[str, Tensor],
    ) -> None:
        self.config = config
        self.limits = limits
        self.device = device
        self.dtype = dtype
        own = _own_tensors(config, sidecars)
        self.tables = {name: table.to(device) for name, table in sidecars.items() if name not in own}
        pool = (limits.num_pages, config.num_layers, limits.tokens_per_block, config.num_kv_heads, config.head_dim)
        try:
            self.k_cache = torch.zeros(pool, dtype=dtype, device=device)
            self.v_cache = torch.zeros(pool, dtype=dtype, device=device)
        except RuntimeError as error:
            size = limits.pool_bytes(config, dtype.itemsize)
            raise EngineMismatchError(
                f"context pool: {size / 2**30:,.1f} GiB for max_batch_size {limits.max_batch_size} and max_seq_len"
                f" {limits.max_seq_len} cannot be allocated on {device}; build with smaller ones"
            ) from error
        self._embedding: Tensor | None = None
        self._lm_head: Tensor | None = None
        self._mask_row: Tensor | None = None
        if "mask_embedding" in own:
            self._mask_row = self._scaled(own["mask_embedding"])
        self.draft_to_target = own["d2t"].to(device) if "d2t" in own else None  # target ids, int64 [Vd]
        if "embed_tokens" in own:
            self._use_embedding(own["embed_tokens"])
        if "lm_head" in own:
            self._use_head(own["lm_head"])

    def bind_target(self, embedding: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding ``[Ve, H]`` and head ``[V, H]``; nothing is copied when the dtype matches.

        Either is left alone where the drafter has its own: a drafter's head that is overwritten by the target's costs
        nearly all acceptance, without a message (T40).

        Raises:
            EngineMismatchError: a shape is not the drafter's.
        """
        config = self.config
        problems = Problems("target", "bind the target that the drafter was made for")
        head_shape = [config.draft_vocab_size, config.hidden_size]
        problems.check(
            config.owns_lm_head or list(lm_head.shape) == head_shape,
            f"lm_head is {list(lm_head.shape)}, expected {head_shape}",
        )
        fits = embedding.dim() == 2 and embedding.shape[1] == config.hidden_size
        fits = fits and (config.has_mask_embedding or len(embedding) > config.mask_token_id)
        mask_row = "" if config.has_mask_embedding else f" and a row for the mask token {config.mask_token_id}"
        problems.check(
            config.owns_embedding or fits,
            f"embedding is {list(embedding.shape)}, expected {config.hidden_size} columns{mask_row}",
        )
        problems.raise_as(EngineMismatchError)
        if not config.owns_embedding:
            self._use_embedding(embedding)
        if not config.owns_lm_head:
            self._use_head(lm_head)

    def _use_embedding(self, embedding: Tensor) -> None:
        self._embedding = embedding
        if not self.config.has_mask_embedding:
            self._mask_row = self._scaled(embedding[self.config.mask_token_id])

    def _use_head(self, lm_head: Tensor) -> None:
        self._lm_head = lm_head.to(self.device, self.dtype).contiguous()

    def ingest(self, features: Tensor, positions: Tensor, pages: Tensor, rows: Tensor) -> None:
        """Store the context K/V of n accepted tokens.

        Shapes:
            features   [n, K*Ht]  target features, any float dtype; n <= max_num_tokens
            positions  [n]        int32, true positions
            pages      [n]        int64, page that takes each token
            rows       [n]        int64, row inside that page
        """
        keys, values = self._run_context(features.to(self.device, self.dtype), positions)
        self.k_cache[pages, :, rows] = keys
        self.v_cache[pages, :, rows] = values

    def draft(self, anchors: Tensor, positions: Tensor, context: ContextTables, num_drafts: int) -> Candidates:
        """Run one block for S sequences and return the candidates of every draft, with what the head asks for.

        Shapes:
            anchors    [S]  int64, last emitted token of each sequence
            positions  [S]  int32, true position of the anchor
            num_drafts      m, 1 <= m <= max_draft_len; the block has ``config.block_rows(m)`` rows
        """
        config = self.config
        if self._embedding is None or self._mask_row is None or self._lm_head is None:
            raise RuntimeError("bind_target comes before draft")
        sequences, block_rows = len(anchors), config.block_rows(num_drafts)
        embeddings = self._mask_row.repeat(sequences, block_rows, 1)
        embeddings[:, 0] = self._scaled(self._embedding[anchors])
        rows = self._run_block(embeddings, positions, context)
        outputs = {name: of_block[:, config.first_draft_row :] for name, of_block in rows.items()}
        hidden = outputs.pop("hidden")
        ids, values, logsumexp = self._run_head(hidden.reshape(-1, config.hidden_size), self._lm_head)
        return Candidates(
            ids.view(sequences, num_drafts, -1), values.view(sequences, num_drafts, -1),
            logsumexp.view(sequences, num_drafts), hidden, outputs,
        )  # fmt: skip

    def _block_inputs(self, embeddings: Tensor, positions: Tensor, context: ContextTables) -> dict[str, Tensor]:
        """The block model's inputs, by their names in ``io_spec``."""
        return {
            "embeddings": embeddings,
            "anchor_position": positions,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "page_table": context.page_table,
            "page_position": context.page_position,
            "page_rows": context.page_rows,
        }

    def _scaled(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.device, self.dtype)
        scale = self.config.input_embedding_scale
        return rows if scale == 1.0 else rows * scale

    @abstractmethod
    def _run_context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The context model: K and V ``[n, L, nkv, D]`` with k_norm and RoPE applied."""

    @abstractmethod
    def _run_block(self, embeddings: Tensor, positions: Tensor, context: ContextTables) -> dict[str, Tensor]:
        """The block model: every output by name, ``[S, B, width]``; ``hidden`` after the final norm is one of them."""

    @abstractmethod
    def _run_head(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The head model on ``[R, H]``: ids ``[R, 16]`` int32, values ``[R, 16]`` and logsumexp ``[R]`` float32.

        ``lm_head [Vd, H]`` is the target's or the drafter's own, in the session's dtype, contiguous.
        """


def _own_tensors(config: DrafterConfig, sidecars: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The drafter's own tensors among the sidecars, all of which must have the shapes that the layout says."""
    problems, shapes = Problems("sidecars", "rebuild the engine with this version"), layout(config)
    names = own_names(config)
    for name in names:
        problems.check(name in sidecars, f"{name} is missing, expected {list(shapes[name])}")
    for name in sidecar_names(config):
        if name in sidecars:
            found, expected = list(sidecars[name].shape), list(shapes[name])
            problems.check(found == expected, f"{name} is {found}, expected {expected}")
    problems.raise_as(EngineMismatchError)
    return {name: sidecars[name] for name in names}
