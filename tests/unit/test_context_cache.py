"""Page accounting, against a model that is a plain list of positions per sequence."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.fakes import LIMITS
from trtllm_dflash.limits import Limits
from trtllm_dflash.runtime.context_cache import ContextCache, ContextExhausted, ContextSequence

SMALL = Limits(max_batch_size=2, max_draft_len=3, max_seq_len=24, max_num_tokens=8, tokens_per_block=4)


class ContextCacheModel(RuleBasedStateMachine):
    """Three sequences on a pool for two: append, gap, drop, free and exhaustion in any order.

    The model keeps, for each sequence, its pages as lists of positions and the slot that every position was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = ContextCache(SMALL)
        self.sequences = [ContextSequence() for _ in range(3)]
        self.pages: list[list[list[int]]] = [[], [], []]
        self.slots: list[dict[int, tuple[int, int]]] = [{}, {}, {}]

    def _place(self, index: int, start: int, num_rows: int) -> list[list[int]]:
        """The pages after the append, by the rule: fill the last page if contiguous, else start a new one."""
        pages = [list(page) for page in self.pages[index]]
        for position in range(start, start + num_rows):
            if not pages or pages[-1][-1] != position - 1 or len(pages[-1]) == SMALL.tokens_per_block:
                pages.append([])
            pages[-1].append(position)
        return pages

    @rule(index=st.integers(0, 2), gap=st.sampled_from([0, 0, 0, 1, 3]), num_rows=st.integers(0, 9))
    def append(self, index: int, gap: int, num_rows: int) -> None:
        held = self.pages[index]
        start = (held[-1][-1] + 1 if held else 0) + gap
        wanted = self._place(index, start, num_rows)
        total = sum(len(pages) for pages in self.pages) - len(held) + len(wanted)
        fits = (
            start + num_rows <= SMALL.max_seq_len
            and len(wanted) <= SMALL.pages_per_sequence
            and total <= SMALL.num_pages - 1
        )
        if not fits:
            with pytest.raises(ContextExhausted):
                self.cache.append(self.sequences[index], start, num_rows)
            return
        pages, rows = self.cache.append(self.sequences[index], start, num_rows)
        self.pages[index] = wanted
        self.slots[index].update(
            zip(range(start, start + num_rows), zip(pages.tolist(), rows.tolist(), strict=True), strict=True)
        )

    @rule(index=st.integers(0, 2), back=st.integers(0, 3))
    def rows_never_go_back(self, index: int, back: int) -> None:
        if self.pages[index] and (newest := self.pages[index][-1][-1]) >= back:
            with pytest.raises(ValueError, match=f"row {newest} is there"):
                self.cache.append(self.sequences[index], newest - back, 1)

    @rule(index=st.integers(0, 2), position=st.integers(0, 25))
    def drop(self, index: int, position: int) -> None:
        self.cache.drop_before(self.sequences[index], position)
        while self.pages[index] and self.pages[index][0][-1] < position:
            for gone in self.pages[index].pop(0):
                del self.slots[index][gone]

    @rule(index=st.integers(0, 2), times=st.integers(1, 2))
    def free(self, index: int, times: int) -> None:
        for _ in range(times):
            self.cache.free(self.sequences[index])
        self.pages[index], self.slots[index] = [], {}

    @invariant()
    def tables_tell_where_every_row_is(self) -> None:
        tables = self.cache.tables(self.sequences)
        for index, sequence in enumerate(self.sequences):
            singles = self.cache.tables([sequence])
            for both, single in zip(dataclasses.astuple(tables), dataclasses.astuple(singles), strict=True):
                assert both[index, : single.shape[1]].tolist() == single[0].tolist()
                assert not both[index, single.shape[1] :].any()
            table = list(zip(*(t[0].tolist() for t in dataclasses.astuple(singles)), strict=True))
            if not self.pages[index]:
                assert table == [(0, 0, 0)]
                continue
            assert [list(range(start, start + rows)) for _, start, rows in table] == self.pages[index]
            found = {start + row: (page, row) for page, start, rows in table for row in range(rows)}
            assert found == self.slots[index]

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [page for slots in self.slots for page in {page for page, _ in slots.values()}]
        assert 0 not in owned
        assert len(owned) == len(set(owned))
        assert self.cache.num_free_pages == SMALL.num_pages - 1 - len(owned)
        for sequence, pages in zip(self.sequences, self.pages, strict=True):
            assert sequence.num_rows == sum(map(len, pages))
            assert sequence.newest_position == (pages[-1][-1] if pages else None)


ContextCacheModel.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestContextCacheModel = ContextCacheModel.TestCase


def test_exhaustion_leaves_nothing_half_allocated() -> None:
    cache = ContextCache(SMALL)
    first, second = ContextSequence(), ContextSequence()
    cache.append(first, 0, 6)
    before = first.table.copy()
    with pytest.raises(ContextExhausted, match="to position 26, max_seq_len is 24"):
        cache.append(first, 6, 20)
    assert (first.table == before).all()
    assert (first.num_rows, first.num_pages, cache.num_free_pages) == (6, 2, SMALL.num_pages - 3)
    cache.append(second, 0, 24)
    assert cache.num_free_pages == SMALL.pages_per_sequence - 2


def test_gaps_cannot_take_another_sequences_share() -> None:
    """T10: a pool for S sequences serves S of them, whatever one of them does."""
    cache = ContextCache(SMALL)
    greedy, other = ContextSequence(), ContextSequence()
    for position in range(0, 12, 2):
        cache.append(greedy, position, 1)
    with pytest.raises(ContextExhausted, match="a sequence has 6"):
        cache.append(greedy, 12, 1)
    cache.append(other, 0, 24)
    assert other.num_rows == 24


def test_sliding_forever_needs_a_bounded_table() -> None:
    limits = dataclasses.replace(LIMITS, max_seq_len=100_000, max_batch_size=1)
    cache, sequence = ContextCache(limits), ContextSequence()
    for position in range(20_000):
        cache.drop_before(sequence, position - 15)
        cache.append(sequence, position, 1)
    assert sequence.num_pages <= 3
    assert sequence.table.shape[1] <= 8
    assert cache.num_free_pages == limits.num_pages - 1 - sequence.num_pages


def test_a_step_costs_the_same_at_any_context_length() -> None:
    limits = dataclasses.replace(LIMITS, max_seq_len=200_000, max_batch_size=1)

    def step_seconds(context: int) -> float:
        cache, sequence = ContextCache(limits), ContextSequence()
        cache.append(sequence, 0, context)
        times = []
        for step in range(300):
            start = time.perf_counter()
            cache.append(sequence, context + 3 * step, 3)
            cache.tables([sequence])
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    short, long = step_seconds(64), step_seconds(160_000)
    assert long < 4 * short + 50e-6, f"{short * 1e6:.0f} us at 64 rows, {long * 1e6:.0f} us at 160000"
