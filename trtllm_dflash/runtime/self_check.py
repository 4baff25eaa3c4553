"""An engine against the reference on random input: the same weights, the same steps, two implementations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .context_cache import ContextCache, ContextExhausted, ContextSequence
from .session import Candidates, Session

NUM_STEPS = 7  # of a walk; fewer on an engine that is too small for it
# Largest relative difference of candidate values and logsumexp that rounding explains, by compute type.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class StepResult:
    """One draft step of both sessions. ``error`` is the worst of all outputs, each relative to its largest value."""

    context_rows: int
    first_gap: int | None  # true position at which positions jump, None before the jump
    error: float
    bound: float
    ids_equal: bool  # wherever the reference's neighbouring values differ by more than rounding

    @property
    def ok(self) -> bool:
        """Whether the sessions agree."""
        return self.ids_equal and self.error <= self.bound


def compare(session: Session, reference: Session, *, seed: int = 0) -> list[StepResult]:
    """Run both sessions through one growing context, with borders of pages and a gap in the positions, and compare.

    Neither session may be bound to a target or in use: random embeddings and a random head are bound here.
    """
    generator = torch.Generator().manual_seed(seed)
    config, limits = session.config, session.limits
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    head = torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator) * config.hidden_size**-0.5
    for runner in (session, reference):
        runner.bind_target(embedding, head)
    cache, context = ContextCache(limits), ContextSequence()
    page, gap = limits.tokens_per_block, None
    results: list[StepResult] = []
    position = 0
    for rows in _chunks(limits.max_num_tokens, page):
        if len(results) == 3:
            gap = position
            position += 3
        if rows:
            try:
                pages, slots = cache.append(context, position, rows)
            except ContextExhausted:  # a small engine ends the walk early
                break
            features = torch.randn(rows, config.feature_size, generator=generator)
            positions = torch.arange(position, position + rows, dtype=torch.int32)
            for runner in (session, reference):
                runner.ingest(features, positions, pages, slots)
            position += rows
        anchor = torch.randint(config.vocab_size, (1,), generator=generator)
        at = torch.tensor([position], dtype=torch.int32)
        actual, expected = (
            runner.draft(anchor, at, cache.tables([context]), limits.max_draft_len) for runner in (session, reference)
        )
        results.append(_result(actual, expected, context.num_rows, gap, BOUNDS[session.dtype]))
    return results


def _chunks(max_num_tokens: int, page: int) -> list[int]:
    """Rows of each ingest: none, one, up to a page border, over it, one row after a gap, many."""
    wanted = (0, 1, page - 2, 1, 1, 2 * page + 1, 3 * page)
    return [min(max(rows, 0), max_num_tokens) for rows in wanted]


def _result(actual: Candidates, expected: Candidates, rows: int, gap: int | None, bound: float) -> StepResult:
    size = _size(expected.values)
    pairs = [(actual.outputs[name], output, _size(output)) for name, output in expected.outputs.items()]
    pairs += [(actual.values, expected.values, size), (actual.logsumexp, expected.logsumexp, size)]
    # torch's maximum, unlike Python's, keeps a NaN.
    error = float(torch.stack([(found.float() - wanted).abs().max() / scale for found, wanted, scale in pairs]).max())
    decided = _decided(expected.values, 2 * bound * size)
    return StepResult(rows, gap, error, bound, bool(((actual.ids == expected.ids) | ~decided).all()))


def _size(expected: Tensor) -> float:
    """What errors are relative to; a tensor of zeros has none of its own."""
    return float(expected.abs().max()) or 1.0


def _decided(values: Tensor, margin: float) -> Tensor:
    """Where a candidate's rank cannot change by rounding: its neighbours are further away than ``margin``."""
    steps = values[..., :-1] - values[..., 1:]
    # The 17th value is unknown, so the last candidate always counts as close to it.
    after = torch.cat([steps, torch.zeros_like(steps[..., :1])], dim=-1) > margin
    before = torch.cat([torch.full_like(steps[..., :1], torch.inf), steps], dim=-1) > margin
    return after & before
