"""``SessionProposer``: the proposer that answers from a session, one sequence at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import DrafterConfig, TargetSpec
from ..errors import EngineMismatchError, UnsupportedError
from ..heads.base import HEADS, DraftHead
from ..target_check import check_target
from .block_drafts import BlockDrafter, Decline
from .context_cache import ContextCache, ContextExhausted, ContextSequence
from .proposer import DraftProposer, ProposerState
from .session import Session


@dataclass(eq=False)
class SequenceState:
    """What ``SessionProposer`` remembers of a sequence. Invariant: its context holds rows of accepted tokens only."""

    owner: SessionProposer
    context: ContextSequence = field(default_factory=ContextSequence)
    anchor_position: int = -1  # of the last propose
    num_proposed: int | None = None  # drafts that wait for their verdict; None: there are none
    num_owed: int = 0  # rows that verdicts have accepted and no call has brought yet
    exhausted: bool = False
    freed: bool = False


class SessionProposer(DraftProposer):
    """Drafts from one session, sequence by sequence; any number of sequences may interleave.

    A sequence goes ``propose``, ``after_verify``, ``propose``, ... A verdict of ``a`` accepted drafts makes ``a + 1``
    feature rows known, those of the anchor and of the accepted drafts. They are brought exactly once: to
    ``after_verify`` (eager) or to the next ``propose`` (lazy), perhaps after rows of tokens decoded without drafts.

    Calls that break this contract (two verdicts, a missing one, a row short or twice, wider than built) raise
    ValueError or RuntimeError. Everything else that goes wrong costs drafts only, and ``declines`` counts the reason.

    Options:
        draft_conf_tau           drafts from the first one whose confidence is below it on are not even verified;
                                 0 or less: all are. Needs a confidence head.
        confidence_temperatures  one of each draft of a trained block, calibrated for a target; default: 1 each
    """

    def __init__(
        self,
        session: Session,
        head: DraftHead | None = None,
        *,
        draft_conf_tau: float = 0.0,
        confidence_temperatures: Sequence[float] | None = None,
    ) -> None:
        head = head or HEADS[session.config.family]
        self.session = session
        self.declines: Counter[str] = Counter()
        self._config: DrafterConfig = session.config
        self._drafter = BlockDrafter(
            session, head.draft, draft_conf_tau=draft_conf_tau, confidence_temperatures=confidence_temperatures,
        )  # fmt: skip
        self._last_confidence: float | None = None
        self._cache = ContextCache(session.limits)

    # What the drafter is

    def block_gamma(self) -> int:
        return self._config.block_rows(self.session.limits.max_draft_len)

    def max_num_drafts(self) -> int:
        return self.session.limits.max_draft_len

    def tapped_layers(self) -> Sequence[int]:
        return self._config.target_layer_ids

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        bounds = (self._config.context_window, self.session.limits.ctx_window)
        return min(bound for bound in (max_seq_len, *bounds) if bound is not None)

    def validate_against_target(self, target: TargetSpec) -> None:
        check_target(self._config, target)

    def needs_comm(self) -> bool:
        return False

    def prefill_uses_shared_buffers(self) -> bool:
        return False

    # Life of a sequence

    def alloc_state(self) -> SequenceState:
        return SequenceState(self)

    def alloc_state_for(self, budget_tokens: int) -> SequenceState:
        limit = self.session.limits.max_seq_len
        if budget_tokens > limit:
            raise EngineMismatchError(
                f"sequence of {budget_tokens} tokens: the drafter engine was built with max_seq_len {limit}; "
                f"ask for fewer tokens or build with --max_seq_len {budget_tokens}"
            )
        return SequenceState(self)  # pages are taken as rows come

    def free_state(self, state: ProposerState) -> None:
        own = self._own(state)
        self._cache.free(own.context)
        own.freed = True

    def drafter_rows(self, state: ProposerState) -> int:
        return self._own(state).context.num_rows

    def last_pair_key(self, state: ProposerState) -> int | None:
        return self._own(state).context.newest_position

    def take_drafter_kv(self, state: ProposerState) -> Any:
        return None

    def install_drafter_kv(self, state: ProposerState, kv: Any) -> bool:
        return False

    def free_drafter_kv(self, kv: Any) -> None:
        """Nothing can have been taken."""

    def _own(self, state: ProposerState) -> SequenceState:
        """Another proposer's pages must not reach this one's free list."""
        if not isinstance(state, SequenceState) or state.owner is not self:
            raise TypeError(f"state of type {type(state).__name__}, not of this proposer's alloc_state")
        return state

    def _open(self, state: ProposerState) -> SequenceState:
        own = self._own(state)
        if own.freed:
            raise RuntimeError("the state has been freed")
        return own

    # Context

    def prefill_drafter(
        self, prompt_tokens: Sequence[int], hiddens: Tensor, state: ProposerState, *, start_position: int = 0
    ) -> int:
        if len(hiddens) > len(prompt_tokens):
            raise ValueError(f"{len(hiddens)} feature rows for {len(prompt_tokens)} prompt tokens")
        return self._ingest(self._open(state), hiddens, start_position)

    def catchup_drafter(
        self, tokens: Sequence[int], hiddens: Tensor, row_base: int, pos_base: int, state: ProposerState
    ) -> int:
        if len(tokens) != len(hiddens):
            raise ValueError(f"{len(hiddens)} feature rows for {len(tokens)} tokens")
        own = self._open(state)
        newest = own.context.newest_position
        if row_base != own.context.num_rows or (newest is not None and pos_base <= newest):
            return 0
        return self._ingest(own, hiddens, pos_base)

    def _bring(self, state: SequenceState, features: Tensor, start: int) -> None:
        """Ingest the rows that verdicts have made known; one short would leave a hole for good."""
        if len(features) < state.num_owed:
            raise ValueError(f"{len(features)} feature rows, {state.num_owed} tokens were accepted since the last ones")
        self._ingest(state, features, start)

    @torch.inference_mode()
    def _ingest(self, state: SequenceState, features: Tensor, start: int) -> int:
        """Append rows at ``start``; returns how many the drafter can still see, 0 when they do not fit."""
        if features.ndim != 2 or features.shape[1] != self._config.feature_size:
            raise ValueError(f"features {list(features.shape)}, expected [n, {self._config.feature_size}]")
        newest = state.context.newest_position
        if start < 0:
            raise ValueError(f"feature rows from position {start}, positions begin at 0")
        if newest is not None and start <= newest:
            raise ValueError(f"feature rows from position {start}, the newest context row is {newest}; rows come once")
        state.num_owed = max(0, state.num_owed - len(features))
        if state.exhausted:
            return 0
        end = start + len(features)
        if (window := self._config.context_window) is not None:
            features = features[max(0, len(features) - window) :]
            self._cache.drop_before(state.context, end - window)
        if (most := self.session.limits.ctx_window) is not None:
            features = features[max(0, len(features) - most) :]
            self._cache.drop_to(state.context, most - len(features))
            if most == 0:  # a block is drafted from itself alone, wherever it stands
                return 0
        start = end - len(features)
        try:
            pages, rows = self._cache.append(state.context, start, len(features))
        except ContextExhausted:
            self._cache.free(state.context)  # a context with a hole is of no use to it, its pages are to others
            state.exhausted = True
            return 0
        positions = torch.arange(start, end, dtype=torch.int32)
        step = self.session.limits.max_num_tokens
        for first in range(0, len(features), step):
            part = slice(first, first + step)
            self.session.ingest(features[part], positions[part], pages[part], rows[part])
        return len(features)

    # Drafts

    def propose(
        self,
        last_token: int,
        position: int,
        num_drafts: int,
        state: ProposerState,
        *,
        target_hidden_stack: Tensor | None = None,
        grammar_bitmask: Tensor | None = None,
        grammar: Any = None,
        draft_embed_target: Any = None,
        sampling: Any = None,
    ) -> list[int]:
        options = {"grammar_bitmask": grammar_bitmask, "grammar": grammar}
        options |= {"draft_embed_target": draft_embed_target, "sampling": sampling}
        if given := [name for name, value in options.items() if value is not None]:
            raise UnsupportedError(f"propose: {', '.join(given)} given; this proposer drafts greedily, leave them out")
        if not 0 <= num_drafts <= self.max_num_drafts():
            raise ValueError(f"{num_drafts} drafts asked for, the engine was built for 0..{self.max_num_drafts()}")
        own = self._open(state)
        self._last_confidence = None
        if own.num_proposed is not None:
            raise RuntimeError("propose twice without after_verify between")
        if target_hidden_stack is not None:
            self._bring(own, target_hidden_stack, position - len(target_hidden_stack))
        drafts = self._draft(last_token, position, num_drafts, own) if num_drafts else []
        own.anchor_position, own.num_proposed = position, len(drafts)
        return drafts

    def after_verify(
        self, num_accepted: int, state: ProposerState, *, target_hidden_stack: Tensor | None = None
    ) -> None:
        own, stack = self._open(state), target_hidden_stack
        if own.num_proposed is None:
            raise RuntimeError("after_verify without a propose before it")
        if not 0 <= num_accepted <= own.num_proposed:
            raise ValueError(f"{num_accepted} drafts accepted, {own.num_proposed} were proposed")
        if stack is not None and len(stack) != num_accepted + 1:
            raise ValueError(f"{len(stack)} feature rows for {num_accepted} accepted drafts and their anchor")
        own.num_proposed = None
        own.num_owed += num_accepted + 1
        if stack is not None:
            self._bring(own, stack, own.anchor_position)

    @torch.inference_mode()
    def _draft(self, last_token: int, position: int, num_drafts: int, state: SequenceState) -> list[int]:
        if (reason := self._missing_context(position, state)) is not None:
            return self._decline(reason)
        block = self._drafter.draft(last_token, position, self._cache.tables([state.context]), num_drafts)
        self._last_confidence = min(block.confidence or [], default=None)
        if block.reason is not None:
            self.declines[block.reason] += 1
        return block.tokens

    def _missing_context(self, position: int, state: SequenceState) -> Decline | None:
        newest = state.context.newest_position
        if self.session.limits.ctx_window == 0 or self._config.context_window == 0:  # a block sees itself alone
            return None
        if state.exhausted or newest is None:
            return Decline.EXHAUSTED if state.exhausted else Decline.NO_CONTEXT
        return Decline.BEHIND if newest != position - 1 else None

    def _decline(self, reason: Decline) -> list[int]:
        self.declines[reason] += 1
        return []

    def last_confidence(self) -> float | None:
        return self._last_confidence

    def read_deferred_draft_token(self) -> int:
        return 0

    # Batches

    def propose_batch_max(self) -> int:
        return 1

    def propose_batch(
        self,
        last_tokens: Sequence[int],
        positions: Sequence[int],
        num_drafts: Sequence[int],
        states: Sequence[ProposerState],
        *,
        target_hidden_stacks: Sequence[Tensor | None] | None = None,
        out_conf: list[list[float]] | None = None,
    ) -> list[list[int]] | None:
        return None
