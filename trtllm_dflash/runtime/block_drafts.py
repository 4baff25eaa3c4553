"""One block of one sequence: candidates from the session, the head's rule, and which drafts are worth verifying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ..config import DrafterConfig
from ..errors import UnsupportedError
from ..heads.confidence import threshold_prefix
from ..heads.drafting import DraftInputs, DraftRule
from .session import Candidates, ContextTables, Session


class Decline(StrEnum):
    """Why a ``propose`` returned fewer drafts than it was asked for."""

    EXHAUSTED = "context does not fit"  # for good: the sequence's pages are given back
    NO_CONTEXT = "no context row"
    UNKNOWN_ANCHOR = "anchor outside the target's vocabulary"
    BEHIND = "newest context row is not the one before the anchor"
    NOT_FINITE = "candidate values are not finite"
    OUT_OF_RANGE = "candidate id outside the draft vocabulary"
    FORBIDDEN = "draft is the mask token or unknown to the target"
    UNSURE = "confidence below draft_conf_tau"


@dataclass(frozen=True)
class BlockDrafts:
    """Drafts in target ids; their confidences, if the drafter has them; and the one reason why there are not more."""

    tokens: list[int]
    confidence: list[float] | None = None
    reason: Decline | None = None


class BlockDrafter:
    """Turns blocks of a session into drafts; remembers nothing between them.

    Options: those of ``SessionProposer``, which describes them.

    Raises:
        UnsupportedError: an option needs a confidence head, and the drafter has none.
        ValueError: an option makes no sense.
    """

    def __init__(
        self,
        session: Session,
        rule: DraftRule,
        *,
        draft_conf_tau: float = 0.0,
        confidence_temperatures: Sequence[float] | None = None,
    ) -> None:
        self._session, self._config, self._rule = session, session.config, rule
        self._tau = draft_conf_tau
        temperatures = _temperatures(self._config, draft_conf_tau, confidence_temperatures)
        self._temperatures = None if temperatures is None else temperatures.to(session.device)

    def draft(self, anchor: int, position: int, context: ContextTables, num_drafts: int) -> BlockDrafts:
        """Drafts after ``anchor``, which stands at ``position`` behind the context of one sequence."""
        if not 0 <= anchor < self._config.vocab_size:
            return BlockDrafts([], reason=Decline.UNKNOWN_ANCHOR)
        anchors = torch.tensor([anchor], device=self._session.device)
        candidates = self._session.draft(anchors, torch.tensor([position], dtype=torch.int32), context, num_drafts)
        if not _finite(candidates.values):
            return BlockDrafts([], reason=Decline.NOT_FINITE)
        if not bool(((candidates.ids >= 0) & (candidates.ids < self._config.draft_vocab_size)).all()):
            return BlockDrafts([], reason=Decline.OUT_OF_RANGE)
        drafts = self._rule(self._inputs(anchors, candidates))
        if not _finite(drafts.scores) or not _finite(drafts.confidence):
            return BlockDrafts([], reason=Decline.NOT_FINITE)
        tokens, reason = self._usable(drafts.tokens[0].tolist())
        if drafts.confidence is None:
            return BlockDrafts(tokens, reason=reason)
        confidence = drafts.confidence[0, : len(tokens)].tolist()
        # The cut comes before the verify; after it nothing would be saved (sglang#30204).
        kept = threshold_prefix(confidence, self._tau)
        return BlockDrafts(tokens[:kept], confidence[:kept], reason if kept == len(tokens) else Decline.UNSURE)

    def _inputs(self, anchors: Tensor, candidates: Candidates) -> DraftInputs:
        """What the rule chooses from. Candidates become ids of the target here: before any lookup by the last token."""
        to_target = self._session.draft_to_target
        ids = candidates.ids if to_target is None else to_target[candidates.ids.long()]
        return DraftInputs(
            ids, candidates.values, anchors, self._session.tables, self._config, candidates.hidden,
            draft_ids=None if to_target is None else candidates.ids,
            confidence_temperatures=self._temperatures, **candidates.outputs,
        )  # fmt: skip

    def _usable(self, drafts: list[int]) -> tuple[list[int], Decline | None]:
        """The drafts up to the first that the target never emits."""
        for index, draft in enumerate(drafts):
            if draft == self._config.mask_token_id or not 0 <= draft < self._config.vocab_size:
                return drafts[:index], Decline.FORBIDDEN
        return drafts, None


def _finite(values: Tensor | None) -> bool:
    return values is None or bool(torch.isfinite(values).all())


def _temperatures(config: DrafterConfig, tau: float, temperatures: Sequence[float] | None) -> Tensor | None:
    if (tau > 0.0 or temperatures is not None) and config.confidence is None:
        raise UnsupportedError(
            f"draft_conf_tau {tau}, confidence_temperatures {temperatures}: this {config.family} drafter has no"
            " confidence head; leave both out"
        )
    if not tau <= 1.0:
        raise ValueError(f"draft_conf_tau is {tau}, expected at most 1: it is compared with probabilities")
    if temperatures is None:
        return None
    if len(temperatures) != config.max_draft_len or not all(0.0 < value < math.inf for value in temperatures):
        raise ValueError(
            f"confidence_temperatures {list(temperatures)}, expected {config.max_draft_len} positive numbers, one for"
            " each draft of a trained block"
        )
    return torch.tensor(temperatures, dtype=torch.float32)
