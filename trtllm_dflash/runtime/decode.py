"""The stand-alone decoding loop for one sequence: greedy, plain or speculative, with one body for both.

Plain decoding is a verify without drafts. What is emitted comes from the target's rows alone, so a drafter changes how
many tokens a step yields and never which.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import DFlashError
from .proposer import DraftProposer, ProposerState
from .statistics import DecodeStatistics
from .target import Target, TargetOutput
from .verify import accept_greedy

OnToken = Callable[[int, bool], None]


@dataclass
class Generation:
    """What one prompt gave."""

    token_ids: list[int] = field(default_factory=list)  # new tokens; a stop token is the last of them
    finish_reason: Literal["stop", "length"] | None = None  # None: not finished
    statistics: DecodeStatistics = field(default_factory=DecodeStatistics)


def generate(
    target: Target,
    proposer: DraftProposer | None,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    num_drafts: int | None = None,
    on_token: OnToken | None = None,
) -> Generation:
    """Continue a prompt greedily until a stop token or ``max_new_tokens``.

    ``proposer=None`` decodes plainly. ``num_drafts`` narrows the draft width (default: the proposer's); a step never
    drafts more than may still be emitted. ``on_token`` hears every token in order, and whether a drafter guessed it.

    Raises:
        DFlashError: an empty prompt, no tokens asked for, a wider draft than built, or a sequence too long for the
            drafter; all before anything runs.
    """
    if not prompt_ids:
        raise DFlashError("prompt: 0 tokens, at least 1 is needed; check the chat template or the input file")
    if max_new_tokens < 1:
        raise DFlashError(f"max_new_tokens: {max_new_tokens}, at least 1 is needed")
    start = time.perf_counter()
    result = Generation()
    with _Drafting(proposer, len(prompt_ids) + max_new_tokens, num_drafts) as drafting:
        decoding = _Decoding(target, drafting, result, max_new_tokens, frozenset(stop_ids), on_token)
        decoding.prefill(prompt_ids)
        while result.finish_reason is None:
            decoding.step()
    statistics = result.statistics
    statistics.prompts, statistics.prompt_tokens = 1, len(prompt_ids)
    statistics.new_tokens, statistics.declines = len(result.token_ids), drafting.declines()
    statistics.seconds["own"] = time.perf_counter() - start - sum(statistics.seconds.values())
    return result


class _Drafting:
    """A proposer with the state of one sequence; without a proposer it drafts nothing and asks for no taps."""

    def __init__(self, proposer: DraftProposer | None, budget_tokens: int, num_drafts: int | None) -> None:
        self._proposer = proposer
        self.taps: Sequence[int] = ()
        self.width = 0
        if proposer is None:
            return
        limit = proposer.max_num_drafts()
        self._declines_before = Counter(proposer.declines)
        self.taps, self.width = proposer.tapped_layers(), limit if num_drafts is None else num_drafts
        if not 0 <= self.width <= limit:
            raise DFlashError(f"num_drafts: {self.width}, the drafter was built for at most {limit}; ask for fewer")
        self._state: ProposerState = proposer.alloc_state_for(budget_tokens)

    def __enter__(self) -> _Drafting:
        return self

    def __exit__(self, *_: object) -> None:
        if self._proposer is not None:
            self._proposer.free_state(self._state)

    def declines(self) -> Counter[str]:
        return Counter() if self._proposer is None else self._proposer.declines - self._declines_before

    def prefill(self, prompt_ids: Sequence[int], output: TargetOutput) -> None:
        if self._proposer is not None and output.features is not None:
            rows = self._proposer.prefill_hidden_rows(len(prompt_ids))
            first = max(0, len(prompt_ids) - rows)
            self._proposer.prefill_drafter(
                prompt_ids[first:], output.features[first:], self._state, start_position=first
            )

    def propose(self, anchor: int, position: int, room: int) -> list[int]:
        if self._proposer is None:
            return []
        return self._proposer.propose(anchor, position, min(self.width, room), self._state)

    def after_verify(self, num_accepted: int, output: TargetOutput) -> None:
        if self._proposer is not None:
            rows = None if output.features is None else output.features[: num_accepted + 1]
            self._proposer.after_verify(num_accepted, self._state, target_hidden_stack=rows)


@dataclass
class _Decoding:
    """One sequence. Invariant between steps: the target and the drafter hold every token but the newest, the anchor."""

    target: Target
    drafting: _Drafting
    result: Generation
    max_new_tokens: int
    stop_ids: frozenset[int]
    on_token: OnToken | None

    def prefill(self, prompt_ids: Sequence[int]) -> None:
        """Run the prompt, emit its first token, and hand the prompt's features to the drafter."""
        self.sequence = self.target.new_sequence(self.drafting.taps)
        with self.result.statistics.phase("prefill"):
            output = self.sequence.forward(prompt_ids, last_only=True)
            _, first = accept_greedy([], output.logits)
        self._emit([first], 0)
        if self.result.finish_reason is None:
            with self.result.statistics.phase("ingest"):
                self.drafting.prefill(prompt_ids, output)

    def step(self) -> None:
        """Draft, verify, emit, and keep exactly the rows of emitted tokens, in the target and in the drafter."""
        statistics, tokens = self.result.statistics, self.result.token_ids
        anchor = tokens[-1]
        with statistics.phase("draft"):
            drafts = self.drafting.propose(anchor, self.sequence.length, self.max_new_tokens - len(tokens))
        with statistics.phase("verify"):
            output = self.sequence.forward([anchor, *drafts])
            accepted, bonus = accept_greedy(drafts, output.logits)
        produced = self._emit([*drafts[:accepted], bonus], accepted)
        statistics.add_step(produced, len(drafts), accepted)
        with statistics.phase("verify"):
            self.sequence.rollback(len(drafts) + 1 - produced)
        with statistics.phase("ingest"):
            self.drafting.after_verify(produced - 1, output)

    def _emit(self, tokens: Sequence[int], num_drafted: int) -> int:
        """Emit tokens up to the first stop token or the limit; returns how many."""
        result = self.result
        for index, token in enumerate(tokens):
            result.token_ids.append(token)
            if self.on_token is not None:
                self.on_token(token, index < num_drafted)
            if token in self.stop_ids:
                result.finish_reason = "stop"
            elif len(result.token_ids) == self.max_new_tokens:
                result.finish_reason = "length"
            if result.finish_reason is not None:
                return index + 1
        return len(tokens)
