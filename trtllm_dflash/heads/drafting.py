"""What every drafting rule is given, what it answers, and the walk that two of the three families share.

A rule looks at 16 candidates a row and chooses one: greedily, or by drawing from ``q``, which it then returns. Rules
compute in fp32 whatever dtype candidates, hidden states and tables have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..config import DrafterConfig


@dataclass(frozen=True)
class DraftInputs:
    """What one draft step knows of S sequences and m drafts."""

    ids: Tensor  # [S, m, 16] int32 or int64, candidates of each draft in any order; ids of the target
    values: Tensor  # [S, m, 16] float32, their logits after multiplier and soft cap
    anchors: Tensor  # [S] int64, the token before draft 1
    tables: Mapping[str, Tensor]  # the row's ``tables``, shapes as in its ``tensors``
    config: DrafterConfig
    hidden: Tensor | None = None  # [S, m, H], rows that yield drafts, after the final norm; None: the rule has no use
    projected: Tensor | None = None  # [S, m, r], the row's block output of this name
    draft_ids: Tensor | None = None  # [S, m, 16], the candidates in a reduced draft vocabulary; None: it is not reduced
    confidence_temperatures: Tensor | None = None  # [>= m] float32, divides the confidence's logit of draft j; None: 1

    @property
    def columns(self) -> Tensor:
        """The candidates as rows of tables over the draft vocabulary, ``[Vd, ...]``; int64 ``[S, m, 16]``."""
        return (self.ids if self.draft_ids is None else self.draft_ids).long()


@dataclass(frozen=True)
class Drafts:
    """What a rule answers."""

    tokens: Tensor  # [S, m] int64, among the candidates, hence ids of the target
    scores: Tensor  # [S, m, 16] float32, what the choice was made by, in the order of the candidates
    confidence: Tensor | None = None  # [S, m] float32, probability that draft j is accepted if those before it are
    q: Tensor | None = None  # [S, m, 16] float32, the distribution each token was drawn from; None: it is the best one


@dataclass(frozen=True)
class Sampling:
    """Draw drafts instead of taking the best ones. One request's stream: the sequences of a call draw from it in turn.

    Raises:
        ValueError: the temperature is not a positive number; 0 is written as no sampling at all.
    """

    temperature: float
    generator: torch.Generator

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, expected a positive number; pass no Sampling for 0")


class DraftRule(Protocol):
    """A family's way from candidates to drafts; the seam that a new head fills."""

    def __call__(self, inputs: DraftInputs, sampling: Sampling | None = None) -> Drafts:
        """Choose one candidate of every row, greedily or by ``sampling``."""


def tie_ranks(ids: Tensor, values: Tensor) -> Tensor:
    """Which of two candidates with equal scores comes first: the one with the larger value, then the lower id.

    Shapes: ids and values ``[..., 16]``; returns int64 ``[..., 16]``, 0 for the first.
    """
    by_id = ids.argsort(dim=-1, stable=True)
    by_value = values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
    return by_id.gather(-1, by_value).argsort(dim=-1)  # the inverse of a permutation sorts it


def choose(scores: Tensor, ranks: Tensor, sampling: Sampling | None) -> tuple[Tensor, Tensor | None]:
    """The chosen slot of every row, and the distribution it was drawn from.

    Greedy: the largest score, ties by ``ranks``; there is no distribution. Sampled: ``q = softmax(scores / T)`` over
    the candidates, with no other filter, so that a verifier can use exactly this q.

    Shapes: scores float32 and ranks ``[..., 16]``; returns slots int64 ``[...]`` and q float32 ``[..., 16]`` or None.
    Source: z-lab/dflash model.py, CandidateSelector.select; the tie rule is ours.
    """
    best = scores.amax(dim=-1, keepdim=True)
    if sampling is None:
        return ranks.masked_fill(scores < best, ranks.shape[-1]).argmin(dim=-1), None
    # The best score goes to 0 first: a small temperature must not overflow.
    q = ((scores - best) / sampling.temperature).softmax(dim=-1)
    drawn = torch.multinomial(q.flatten(end_dim=-2), 1, generator=sampling.generator)
    return drawn.view(scores.shape[:-1]), q


Edge = Callable[[int, Tensor], Tensor]
"""Draft index and the tokens before it ``[S]`` -> what these add to the candidates' values, float32 ``[S, 16]``."""


def walk(inputs: DraftInputs, edge: Edge, sampling: Sampling | None) -> Drafts:
    """Choose drafts one after the other; the one chosen last changes the scores of the next row's candidates.

    ``score_j(b) = value_j(b) + edge_j(previous)(b)``, with the anchor before draft 1. A greedy walk, not a search for
    the best path.
    """
    values, ids = inputs.values.float(), inputs.ids.long()
    ranks = tie_ranks(ids, values)
    previous = inputs.anchors
    tokens, all_scores, all_q = [], [], []
    for step in range(ids.shape[1]):
        scores = values[:, step] + edge(step, previous)
        slots, q = choose(scores, ranks[:, step], sampling)
        previous = ids[:, step].gather(1, slots[:, None])[:, 0]
        tokens.append(previous)
        all_scores.append(scores)
        if q is not None:
            all_q.append(q)
    return Drafts(
        torch.stack(tokens, dim=1), torch.stack(all_scores, dim=1), q=torch.stack(all_q, dim=1) if all_q else None
    )


T = TypeVar("T")


def required(value: T | None, what: str, family: str) -> T:
    """The value, which a head of this family cannot do without. Raises ValueError when it is None."""
    if value is None:
        raise ValueError(f"draft head {family}: {what} is missing; pass what the row of the head asks for")
    return value
