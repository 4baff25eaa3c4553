"""What ``generate`` found out: acceptance, speed against plain decoding, identity; as tables or as JSON."""

from __future__ import annotations

import resource
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ..runtime.compare import Difference
from ..runtime.decode import Generation
from ..runtime.statistics import STEP_PHASES, DecodeStatistics
from .output import print_table, size

ALL = "all"  # the row of every prompt, beside those of the kinds


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``kind`` groups prompts in the tables."""

    text: str
    kind: str
    token_ids: list[int]


@dataclass
class Answer:
    """A prompt's speculative output and, where it was asked for, the plain one."""

    prompt: Prompt
    speculative: Generation
    plain: Generation | None = None
    difference: Difference | None = None


def has_difference(answers: list[Answer]) -> bool:
    """Whether any output differs from plain decoding by more than a numerical tie."""
    return any(answer.difference is not None and not answer.difference.is_tie for answer in answers)


def _by_kind(answers: list[Answer]) -> dict[str, list[Answer]]:
    kinds: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        kinds[answer.prompt.kind].append(answer)
    return {**kinds, ALL: answers} if len(kinds) > 1 else dict(kinds)


def _merged(answers: list[Answer]) -> tuple[DecodeStatistics, DecodeStatistics | None]:
    """Statistics of the speculative and of the plain runs."""
    plain = [answer.plain.statistics for answer in answers if answer.plain is not None]
    speculative = DecodeStatistics.merged(answer.speculative.statistics for answer in answers)
    return speculative, DecodeStatistics.merged(plain) if plain else None


def as_json(answers: list[Answer], tokenizer: Any) -> dict[str, Any]:
    """Everything, as plain values."""
    groups = {}
    for kind, group in _by_kind(answers).items():
        speculative, plain = _merged(group)
        groups[kind] = {"speculative": speculative.to_json(), "plain": plain.to_json() if plain else None}
    return {
        "answers": [
            {
                "kind": answer.prompt.kind,
                "prompt": answer.prompt.text,
                "text": tokenizer.decode(answer.speculative.token_ids, skip_special_tokens=True),
                "token_ids": answer.speculative.token_ids,
                "finish_reason": answer.speculative.finish_reason,
                "difference": None if answer.difference is None else vars(answer.difference),
            }
            for answer in answers
        ],
        "statistics": groups,
        "peak_memory_bytes": _peak_memory(),
        "identical": identity(answers) if all(answer.plain for answer in answers) else None,
    }


def identity(answers: list[Answer]) -> str:
    """Whether the output is the target's own: yes; yes but for ties; or no, with where."""
    found = [(i, a.difference) for i, a in enumerate(answers) if a.difference is not None]
    if not found:
        return "yes"
    places = ", ".join(f"prompt {i} token {d.index} (top-2 logit gap {d.gap:.1e})" for i, d in found)
    verdict = "yes, but for numerical ties" if all(d.is_tie for _, d in found) else "NO"
    return f"{verdict}: {places}"


def print_report(answers: list[Answer]) -> None:
    """Tables by kind, then the verdict on identity."""
    rows, shares = [], []
    for kind, group in _by_kind(answers).items():
        speculative, plain = _merged(group)
        speed, base = speculative.tokens_per_second, plain.tokens_per_second if plain else None
        rows.append(
            (
                kind,
                len(group),
                speculative.new_tokens,
                _number(speculative.acceptance_length),
                _number(speed, 1),
                _number(base, 1),
                f"{speed / base:.2f}x" if speed and base else "-",
            )
        )
        if positions := speculative.position_acceptance:
            shares.append((kind, *(f"{share:.3f}" for share in positions)))
    print_table(
        "Speculative against plain decoding",
        ("kind", "prompts", "new tokens", "acceptance length", "tokens/s", "plain tokens/s", "speed-up"),
        rows,
    )
    width = max((len(row) for row in shares), default=0)
    print_table(
        "Drafts accepted, by position",
        ("kind", *(str(position) for position in range(1, width))),
        [(*row, *("-",) * (width - len(row))) for row in shares],
    )
    total, _ = _merged(answers)
    steps = max(total.num_steps, 1)
    print_table(
        "Time of a step",
        ("phase", "ms"),
        [(name, f"{1000 * total.seconds[name] / steps:.2f}") for name in STEP_PHASES if total.num_steps],
    )
    print(f"peak memory of this process, target included: {size(_peak_memory())}")
    for reason, count in total.declines.items():
        print(f"steps with fewer drafts: {count} ({reason})")
    for alarm in total.alarms():
        print(f"warning: {alarm}")
    if all(answer.plain for answer in answers):
        print(f"identical to plain decoding: {identity(answers)}")


def _peak_memory() -> int:
    """Bytes that were resident at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
