"""Which page holds which context position: accounting only, the K/V themselves live in the session's pools.

Invariants: page 0 belongs to nobody; every other page belongs to one sequence or to the free list; positions rise
strictly within a sequence and are contiguous inside a page. One writer at a time: callers serialise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..limits import Limits
from .session import ContextTables

_PAGE, _POSITION, _ROWS = range(3)  # rows of a sequence's table, in the order of ContextTables


class ContextExhausted(Exception):
    """The context does not fit; nothing was appended."""


@dataclass(eq=False, slots=True)
class ContextSequence:
    """The pages of one sequence, oldest first: columns ``first`` to ``end`` of a table that grows by doubling."""

    table: NDArray[np.int32] = field(default_factory=lambda: np.zeros((3, 8), np.int32))
    first: int = 0
    end: int = 0
    num_rows: int = 0

    @property
    def num_pages(self) -> int:
        """Pages owned."""
        return self.end - self.first

    @property
    def newest_position(self) -> int | None:
        """True position of the newest row; None without rows."""
        if self.end == self.first:
            return None
        return int(self.table[_POSITION, self.end - 1] + self.table[_ROWS, self.end - 1]) - 1

    def reserve(self, columns: int) -> None:
        """Make room for so many new pages, and drop the columns that eviction has left behind."""
        if self.end + columns > self.table.shape[1]:
            grown = np.zeros((3, 2 * (self.num_pages + columns)), np.int32)
            grown[:, : self.num_pages] = self.table[:, self.first : self.end]
            self.table, self.first, self.end = grown, 0, self.num_pages


class ContextCache:
    """Hands the pages of a session's pool to sequences. The cost of a call does not depend on the context length."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._free = list(range(limits.num_pages - 1, 0, -1))  # a stack; page 0 stays the dummy

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    def append(self, sequence: ContextSequence, start_position: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Take room for rows at ``start_position`` and after; returns the page and the row of each, ``[n]`` int64.

        A position that does not follow the newest row starts a new page and leaves the old one partly filled.

        Raises:
            ContextExhausted: the pool is empty, or the sequence is past ``max_seq_len`` or its share of the pool.
            ValueError: the rows lie before the end of the context.
        """
        newest, size = sequence.newest_position, self.limits.tokens_per_block
        if newest is not None and start_position <= newest:
            raise ValueError(
                f"context rows from position {start_position}, but row {newest} is there; rows only follow"
            )
        follows = newest is not None and start_position == newest + 1
        used = int(sequence.table[_ROWS, sequence.end - 1]) if follows else size  # of the last page; a gap closes it
        needed = -(-(used + num_rows) // size) - 1
        self._check_room(sequence, start_position + num_rows, needed)
        sequence.reserve(needed)
        table, old, new = sequence.table, sequence.end, sequence.end + needed
        if follows:
            table[_ROWS, old - 1] = min(used + num_rows, size)
        if needed:
            table[_PAGE, old:new] = self._free[: -needed - 1 : -1]
            table[_POSITION, old:new] = start_position + (size - used) + size * np.arange(needed)
            table[_ROWS, old:new] = size
            table[_ROWS, new - 1] = (used + num_rows - 1) % size + 1
            del self._free[-needed:]
        sequence.end, sequence.num_rows = new, sequence.num_rows + num_rows
        offsets = np.arange(used, used + num_rows)  # counted from the start of the last old page
        pages = table[_PAGE, old - 1 + offsets // size].astype(np.int64)
        return torch.from_numpy(pages), torch.from_numpy(offsets % size)

    def _check_room(self, sequence: ContextSequence, end_position: int, num_pages: int) -> None:
        limits = self.limits
        if end_position > limits.max_seq_len:
            raise ContextExhausted(f"context to position {end_position}, max_seq_len is {limits.max_seq_len}")
        if sequence.num_pages + num_pages > limits.pages_per_sequence:  # more would starve other sequences
            owned = sequence.num_pages
            raise ContextExhausted(f"{owned} + {num_pages} pages, a sequence has {limits.pages_per_sequence}")
        if num_pages > len(self._free):
            raise ContextExhausted(f"{num_pages} pages needed, {len(self._free)} of {limits.num_pages - 1} are free")

    def drop_before(self, sequence: ContextSequence, position: int) -> None:
        """Free the pages at the front whose rows all lie before ``position``."""
        table = sequence.table
        while sequence.num_pages:
            if table[_POSITION, sequence.first] + table[_ROWS, sequence.first] > position:
                break
            self._drop_page(sequence)

    def drop_to(self, sequence: ContextSequence, num_rows: int) -> None:
        """Free pages at the front until no more than ``num_rows`` rows are left."""
        while sequence.num_rows > num_rows:
            self._drop_page(sequence)

    def _drop_page(self, sequence: ContextSequence) -> None:
        """Free the page at the front."""
        page_id, _, rows = (int(value) for value in sequence.table[:, sequence.first])
        self._free.append(page_id)
        sequence.first += 1
        sequence.num_rows -= rows

    def free(self, sequence: ContextSequence) -> None:
        """Take every page back; the sequence is empty afterwards. Idempotent."""
        self._free.extend(sequence.table[_PAGE, sequence.first : sequence.end].tolist())
        sequence.first = sequence.end = sequence.num_rows = 0

    def tables(self, sequences: Sequence[ContextSequence]) -> ContextTables:
        """Tables of these sequences, padded with page 0; for one sequence they are views, valid until it changes."""
        if len(sequences) == 1 and sequences[0].num_pages:
            only = sequences[0]
            table = torch.from_numpy(only.table[:, None, only.first : only.end])
            return ContextTables(*table)
        width = max(1, max(sequence.num_pages for sequence in sequences))
        padded = np.zeros((3, len(sequences), width), np.int32)
        for index, sequence in enumerate(sequences):
            padded[:, index, : sequence.num_pages] = sequence.table[:, sequence.first : sequence.end]
        return ContextTables(*torch.from_numpy(padded))
