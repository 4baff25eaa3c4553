"""What decoding cost and what the drafter was worth: counts per verify, seconds per phase, alarms."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PHASES = ("prefill", "draft", "verify", "ingest", "own")  # target prefill, ..., and everything that is none of them
STEP_PHASES = PHASES[1:]  # those of a decode step
ALARM_STEPS = 64  # drafting steps after which a constant acceptance is no longer luck


@dataclass
class DecodeStatistics:
    """Counts of one or more decoded prompts; a step is one verify, and prefill's token belongs to none.

    Tokens of a step are cut at stop tokens and at the length limit, accepted drafts are not: a cut rejects nothing.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    acceptance_lengths: list[int] = field(default_factory=list)  # tokens emitted by each step, bonus included
    drafted: list[int] = field(default_factory=list)  # drafts of each step
    accepted: list[int] = field(default_factory=list)  # of these, confirmed by the target
    declines: Counter[str] = field(default_factory=Counter)  # steps with fewer drafts than asked for, by reason
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add_step(self, produced: int, drafted: int, accepted: int) -> None:
        """Count one verify."""
        self.acceptance_lengths.append(produced)
        self.drafted.append(drafted)
        self.accepted.append(accepted)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @property
    def num_steps(self) -> int:
        """Verifies."""
        return len(self.drafted)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify, bonus included; None without a verify."""
        return sum(self.acceptance_lengths) / self.num_steps if self.num_steps else None

    @property
    def position_acceptance(self) -> list[float]:
        """P(a >= j) over the steps that drafted at least j tokens, for j = 1, 2, ..."""
        shares = []
        for position in range(1, max(self.drafted, default=0) + 1):
            reached = [a >= position for a, m in zip(self.accepted, self.drafted, strict=True) if m >= position]
            shares.append(sum(reached) / len(reached))
        return shares

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens after the first, by the time after prefill; None before any."""
        decode = sum(self.seconds.values()) - self.seconds["prefill"]
        return sum(self.acceptance_lengths) / decode if self.num_steps and decode > 0 else None

    def alarms(self) -> list[str]:
        """Signs of a defect that leaves the output right and the drafter worthless, or too good to be true."""
        steps = [(a, m) for a, m in zip(self.accepted, self.drafted, strict=True) if m > 0]
        found = []
        if len(steps) >= ALARM_STEPS and all(a == 0 for a, _ in steps):
            found.append(
                f"acceptance length is exactly 1.00 over {len(steps)} drafting steps: no draft was ever accepted; "
                "check taps, mask token and that the drafter was trained for this target"
            )
        if len(steps) >= ALARM_STEPS and all(a == m for a, m in steps):
            found.append(
                f"every draft of {len(steps)} drafting steps was accepted: the drafter may be reading the target's "
                "own output; check which tensors the taps and the drafts come from"
            )
        return found

    @classmethod
    def merged(cls, parts: Iterable[DecodeStatistics]) -> DecodeStatistics:
        """The statistics of several prompts as one."""
        total = cls()
        for part in parts:
            total.prompts += part.prompts
            total.prompt_tokens += part.prompt_tokens
            total.new_tokens += part.new_tokens
            total.acceptance_lengths += part.acceptance_lengths
            total.drafted += part.drafted
            total.accepted += part.accepted
            total.declines += part.declines
            for name, seconds in part.seconds.items():
                total.seconds[name] += seconds
        return total

    def to_json(self) -> dict[str, Any]:
        """Plain values, rounded to what a clock can tell."""
        length, speed = self.acceptance_length, self.tokens_per_second
        return {
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.num_steps,
            "acceptance_length": None if length is None else round(length, 4),
            "position_acceptance": [round(share, 4) for share in self.position_acceptance],
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "declines": dict(self.declines),
            "tokens_per_second": None if speed is None else round(speed, 2),
            "seconds": {name: round(seconds, 6) for name, seconds in self.seconds.items()},
            "alarms": self.alarms(),
        }
