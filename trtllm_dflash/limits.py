"""The sizes an engine is built for, resolved, and the memory that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import BuildOptions, DrafterConfig
from .errors import BuildError, Problems

MAX_SIZE = 2**24  # of one option; positions are exact in float32 up to here, which RoPE's angles need
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """Sizes that an engine was built for; a session allocates for exactly these. In tokens, rows and pages."""

    max_batch_size: int
    max_draft_len: int
    max_seq_len: int
    max_num_tokens: int
    tokens_per_block: int
    ctx_window: int | None = None  # newest context rows that a sequence keeps, at most; None: all that a layer sees

    @classmethod
    def of(cls, options: BuildOptions, config: DrafterConfig) -> Limits:
        """Resolve the options' defaults against a drafter. Raises BuildError when they do not fit it."""
        limits = cls(
            max_batch_size=options.max_batch_size,
            max_draft_len=config.max_draft_len if options.max_draft_len is None else options.max_draft_len,
            max_seq_len=options.max_seq_len,
            max_num_tokens=options.max_num_tokens,
            tokens_per_block=options.tokens_per_block,
            ctx_window=options.ctx_window,
        )
        limits._check(config)
        return limits

    def _check(self, config: DrafterConfig) -> None:
        problems = Problems("build options", "choose other values")
        least = {
            "max_batch_size": 1,
            "max_draft_len": 1,
            "max_seq_len": self.max_draft_len + 1,
            "max_num_tokens": self.max_draft_len + 1,  # one verify may accept all drafts and the anchor
            "tokens_per_block": 1,
        }
        for name, low in least.items():
            value = getattr(self, name)
            problems.check(low <= value <= MAX_SIZE, f"{name} is {value}, expected {low} to {MAX_SIZE}")
        # Rows go by whole pages, and the page of the newest row must stay.
        problems.check(
            self.ctx_window in (None, 0) or self.tokens_per_block <= self.ctx_window <= MAX_SIZE,
            f"ctx_window is {self.ctx_window}, expected 0 or tokens_per_block {self.tokens_per_block} to {MAX_SIZE}",
        )
        if not problems:
            rows = self.num_pages * self.tokens_per_block
            problems.check(
                rows <= _MAX_INT32,
                f"max_batch_size {self.max_batch_size} times max_seq_len {self.max_seq_len} makes {rows} context rows,"
                f" expected at most {_MAX_INT32}, as positions and pages are int32",
            )
        problems.check(
            self.max_draft_len <= config.max_draft_len,
            f"max_draft_len is {self.max_draft_len}, but the drafter was trained for {config.max_draft_len} drafts"
            f" (block_size {config.block_size}); wider blocks than trained are refused, choose at most that",
        )
        problems.raise_as(BuildError)

    @property
    def pages_per_sequence(self) -> int:
        """Pages that hold ``max_seq_len`` context rows without a gap in their positions."""
        return math.ceil(self.max_seq_len / self.tokens_per_block)

    @property
    def num_pages(self) -> int:
        """Pages of the pool; page 0 is the dummy that padding points at and no sequence ever owns."""
        return self.pages_per_sequence * self.max_batch_size + 1

    def context_bytes_per_token(self, config: DrafterConfig, element_bytes: int) -> int:
        """Bytes of K and V that one context token takes over all layers."""
        return 2 * config.num_layers * config.kv_size * element_bytes

    def pool_bytes(self, config: DrafterConfig, element_bytes: int) -> int:
        """Bytes of the whole context pool."""
        return self.num_pages * self.tokens_per_block * self.context_bytes_per_token(config, element_bytes)
