"""The seam to a serving loop: what a speculative decoding loop asks of a drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..config import TargetSpec


class ProposerState(Protocol):
    """What a proposer remembers of one sequence; opaque to callers."""


class DraftProposer(Protocol):
    """What a speculative decoding loop asks of a drafter; the loop never sees an engine.

    ``target_hidden_stack`` is ``[a + 1, K*Ht]``: the taps of the rows accepted since the last call, oldest first.
    """

    declines: Counter[str]  # steps that got fewer drafts than they asked for, by reason, over the proposer's life

    def block_gamma(self) -> int | None:
        """Block rows the drafter was built for; None when the proposer has no blocks."""

    def max_num_drafts(self) -> int:
        """Most drafts that one ``propose`` may be asked for; block rows minus one, except in DSpark."""

    def tapped_layers(self) -> Sequence[int]:
        """0-based target blocks whose outputs make up a feature, in feature order."""

    def validate_against_target(self, target: TargetSpec) -> None:
        """Raise EngineMismatchError, naming both values of everything that differs."""

    def alloc_state(self) -> ProposerState:
        """State of a new sequence of up to ``max_seq_len`` tokens."""

    def alloc_state_for(self, budget_tokens: int) -> ProposerState:
        """State of a new sequence of about ``budget_tokens`` tokens; safe when the budget is exceeded."""

    def free_state(self, state: ProposerState) -> None:
        """Give the sequence's pages back; idempotent."""

    def prefill_hidden_rows(self, max_seq_len: int) -> int:
        """How many of the newest prompt rows the drafter can use: W - 1 when every layer slides."""

    def prefill_drafter(
        self, prompt_tokens: Sequence[int], hiddens: Tensor, state: ProposerState, *, start_position: int = 0
    ) -> int:
        """Ingest prompt features ``[n, K*Ht]`` at ``start_position``; returns the rows taken."""

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
        """Drafts for the tokens after ``last_token``, which stands at ``position``; ``num_drafts`` or fewer."""

    def propose_batch_max(self) -> int:
        """Widest batch that ``propose_batch`` takes; 1 means no batching."""

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
        """``propose`` for several sequences in one forward; None means declined, the caller loops."""

    def after_verify(
        self, num_accepted: int, state: ProposerState, *, target_hidden_stack: Tensor | None = None
    ) -> None:
        """Note the verdict on the last drafts; with a stack, ingest its rows now instead of at the next ``propose``."""

    def last_confidence(self) -> float | None:
        """Smallest confidence among the last drafts; None: not computed, do not gate on it."""

    def drafter_rows(self, state: ProposerState) -> int:
        """Context rows held for the sequence."""

    def last_pair_key(self, state: ProposerState) -> int | None:
        """True position of the newest context row; None when there is none."""

    def catchup_drafter(
        self, tokens: Sequence[int], hiddens: Tensor, row_base: int, pos_base: int, state: ProposerState
    ) -> int:
        """Append rows of tokens that were decoded without the drafter; returns the rows taken, 0 for a refusal."""

    def take_drafter_kv(self, state: ProposerState) -> Any:
        """Move the sequence's context out of its state, to carry it over; None: unsupported."""

    def install_drafter_kv(self, state: ProposerState, kv: Any) -> bool:
        """The inverse; False: unsupported, the caller frees."""

    def free_drafter_kv(self, kv: Any) -> None:
        """Free context that was taken and not installed."""

    def needs_comm(self) -> bool:
        """Whether a forward needs the tensor-parallel communicator."""

    def prefill_uses_shared_buffers(self) -> bool:
        """Whether context prefill borrows the target's scratch memory."""

    def read_deferred_draft_token(self) -> int:
        """The draft that ``draft_embed_target`` deferred; 0 unless it was given."""
