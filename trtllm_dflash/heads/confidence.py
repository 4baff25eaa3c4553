"""How many drafts are worth verifying: rules on the confidences of a head, in plain numbers, without tensors.

A confidence is the probability that a draft is accepted if all before it are, so a draft survives with the product of
the confidences up to its own. Every rule keeps a prefix, and is meant for before the verify: afterwards there is
nothing left to save.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence

LEAST_SURVIVAL = 1e-6  # a slot below it never takes part, whatever the budget


def threshold_prefix(confidence: Sequence[float], tau: float) -> int:
    """Drafts before the first one whose confidence is below ``tau``; all of them when ``tau <= 0``. May be 0.

    Source: DeepSpec, TensorRT-LLM and Edge-LLM use the same rule.
    """
    if tau <= 0.0:
        return len(confidence)
    # Written so that a NaN ends the prefix.
    return next((index for index, value in enumerate(confidence) if not value >= tau), len(confidence))


def survival(confidence: Sequence[float]) -> list[float]:
    """``S_j``: the product of the confidences of drafts 1 to j; never rises along j."""
    return list(itertools.accumulate(confidence, operator.mul))


def ranked_slots(confidence: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """Every slot worth verifying as (survival, draft index, request), the most probable first.

    Order: survival descending, draft index ascending, request ascending; slots below ``LEAST_SURVIVAL`` are left out.

    Raises:
        ValueError: a confidence is no probability.
    """
    for request, row in enumerate(confidence):
        for index, value in enumerate(row):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"confidence of request {request}, draft {index} is {value}, expected 0 to 1")
    slots = [(s, j, request) for request, row in enumerate(confidence) for j, s in enumerate(survival(row))]
    return sorted((slot for slot in slots if slot[0] >= LEAST_SURVIVAL), key=lambda slot: (-slot[0], *slot[1:]))


def survival_budget(confidence: Sequence[Sequence[float]], budget: int) -> list[int]:
    """How many drafts of each request are verified when all requests together may verify ``budget`` drafts.

    The ``budget`` best slots win. Survival never rises along a request, so what wins is a prefix of its drafts.

    Raises:
        ValueError: a negative budget, or a confidence outside 0 to 1.

    Source: DSpark paper, Algorithm 1; the order among equals is SGLang's.
    """
    if budget < 0:
        raise ValueError(f"budget is {budget}, expected 0 or more drafts")
    kept = [0] * len(confidence)
    for _, _, request in ranked_slots(confidence)[:budget]:
        kept[request] += 1
    return kept


def best_budget(confidence: Sequence[Sequence[float]], step_cost: Callable[[int], float]) -> int:
    """The budget with the most tokens for its cost: ``argmax (R + sum of the b best survivals) / step_cost(b)``.

    R requests yield their bonus token in any case. Costs are staircases (padding of captured graphs), so every budget
    is looked at, not only those before the first descent; equal rates go to the smaller budget.

    ``step_cost(b)`` is the time of a step that verifies ``b`` drafts, in any unit, positive.

    Source: DSpark paper, Algorithm 1; TensorRT-LLM#17056 for the global maximum.
    """
    gains = [slot[0] for slot in ranked_slots(confidence)]
    tokens = itertools.accumulate(gains, initial=float(len(confidence)))
    rates = [total / step_cost(budget) for budget, total in enumerate(tokens)]
    return max(range(len(rates)), key=rates.__getitem__)
