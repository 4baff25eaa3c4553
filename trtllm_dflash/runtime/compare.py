"""Whether two token sequences of one target are the same, and if not, whether the target was undecided there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .target import Target

# In logits, by the target's dtype. Verifying m + 1 rows at once is not bit-equal to single rows, so closer calls may
# fall either way: a few units in the last place of logits around 20.
TIE_GAPS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Difference:
    """The first token in which speculative output differs from plain output."""

    index: int
    speculative: int | None  # None: the sequence had ended
    plain: int | None
    gap: float  # between the target's two best logits there
    tie_gap: float  # below this the target was undecided

    @property
    def is_tie(self) -> bool:
        """Whether the difference is numerical; if not, it is a bug."""
        return self.gap < self.tie_gap


def first_difference(
    target: Target, prompt_ids: Sequence[int], speculative: Sequence[int], plain: Sequence[int]
) -> Difference | None:
    """The first difference between two continuations of a prompt, with the target's top-2 logit gap; None if equal."""
    if list(speculative) == list(plain):
        return None
    pairs = zip(speculative, plain, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(speculative), len(plain)))
    logits = target.new_sequence().forward([*prompt_ids, *plain[:index]], last_only=True).logits[-1]
    best, second = logits.float().topk(2).values.tolist()
    return Difference(index, _at(speculative, index), _at(plain, index), best - second, TIE_GAPS[logits.dtype])


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
