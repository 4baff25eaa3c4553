"""One contract for every ``DraftProposer``: what a decoding loop may do with it, and what it must not answer.

A new proposer, session or draft head brings its tests by one entry in ``PROPOSERS``.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.fakes import LIMITS, MASK, VOCAB, FakeProposer, FakeSession, tiny_target
from tests.support.tiny import write_checkpoint
from trtllm_dflash.checkpoint.parse import parse_checkpoint
from trtllm_dflash.checkpoint.weights import load_weights
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.runtime.block_drafts import Decline
from trtllm_dflash.runtime.decode import generate
from trtllm_dflash.runtime.hf_target import HFTarget
from trtllm_dflash.runtime.proposer import DraftProposer
from trtllm_dflash.runtime.reference_session import ReferenceSession
from trtllm_dflash.runtime.session_proposer import SessionProposer

Make = Callable[[HFTarget, Path], DraftProposer]
PROMPT = [5, 9, 11, 42, 7, 100, 13, 8, 21, 33, 2]


def reference(family: str, proposing: Mapping[str, Any] | None = None, **options: object) -> Make:
    """A tiny random drafter of a family, run by the oracle; ``proposing`` are options of the proposer."""

    def make(target: HFTarget, folder: Path) -> DraftProposer:
        checkpoint = parse_checkpoint(write_checkpoint(folder / "drafter", family, **options))
        session = ReferenceSession(checkpoint.config, LIMITS, load_weights(checkpoint))
        session.bind_target(target.embedding, target.lm_head)
        return SessionProposer(session, HEADS[family], **(proposing or {}))

    return make


def scripted(target: HFTarget, folder: Path) -> DraftProposer:
    rng = random.Random(0)
    return FakeProposer(lambda position, m: [rng.randrange(4, VOCAB) for _ in range(rng.randint(0, m))], (1, 2, 4))


PROPOSERS: dict[str, Make] = {
    "scripted": scripted,
    "fake session": lambda target, folder: SessionProposer(FakeSession(), HEADS["dflash"]),
    "dflash sliding": reference("dflash", sliding_layers=(0, 1), window=16),
    **{family: reference(family) for family in HEADS},
    "dflash2 sliding": reference("dflash2", sliding_layers=(0, 1), window=16, is_causal=False),
    "dspark gated, no confidence": reference("dspark", markov_head_type="gated", confidence=False),
    "dspark rnn, cut by confidence": reference("dspark", {"draft_conf_tau": 0.4}, markov_head_type="rnn"),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(dtype=torch.float64)


@pytest.fixture(params=PROPOSERS)
def proposer(request: pytest.FixtureRequest, target: HFTarget, tmp_path: Path) -> DraftProposer:
    return PROPOSERS[request.param](target, tmp_path)


def features(target: HFTarget, proposer: DraftProposer, tokens: list[int]) -> Tensor:
    return target.new_sequence(proposer.tapped_layers()).forward(tokens).features


def prefilled(target: HFTarget, proposer: DraftProposer, tokens: list[int]) -> object:
    state = proposer.alloc_state()
    taken = proposer.prefill_drafter(tokens, features(target, proposer, tokens), state)
    assert 0 < taken <= len(tokens)
    return state


def test_every_method_of_the_protocol_is_there(proposer: DraftProposer) -> None:
    for name, member in vars(DraftProposer).items():
        if callable(member) and not name.startswith("_"):
            ours = inspect.signature(getattr(type(proposer), name))
            assert list(ours.parameters) == list(inspect.signature(member).parameters), name
            assert getattr(type(proposer), name) is not member, f"{name} is only declared"


def test_it_fits_the_target(proposer: DraftProposer, target: HFTarget) -> None:
    proposer.validate_against_target(target.spec)


def test_drafts_are_few_enough_and_ids_that_the_target_emits(proposer: DraftProposer, target: HFTarget) -> None:
    for num_drafts in range(proposer.max_num_drafts() + 1):
        state = prefilled(target, proposer, PROMPT)
        drafts = proposer.propose(PROMPT[-1], len(PROMPT), num_drafts, state)
        assert isinstance(drafts, list)
        assert len(drafts) <= num_drafts
        assert all(type(d) is int and 0 <= d < VOCAB and d != MASK for d in drafts)
        proposer.after_verify(0, state)
        proposer.free_state(state)
    assert proposer.block_gamma() in (None, proposer.max_num_drafts(), proposer.max_num_drafts() + 1)


def test_eager_and_lazy_ingest_give_the_same_drafts(proposer: DraftProposer, target: HFTarget) -> None:
    if isinstance(proposer, FakeProposer):
        proposer.guess = lambda position, m: [position + j for j in range(m)]
    rng, tokens = random.Random(3), [*PROMPT, *range(40, 80)]
    rows = features(target, proposer, tokens)
    eager, lazy = prefilled(target, proposer, PROMPT), prefilled(target, proposer, PROMPT)
    position, stack = len(PROMPT), None
    while position + 9 < len(tokens):
        width = rng.randint(1, proposer.max_num_drafts())
        now = proposer.propose(tokens[position], position, width, eager)
        assert now == proposer.propose(tokens[position], position, width, lazy, target_hidden_stack=stack)
        accepted = rng.randint(0, len(now))
        stack = rows[position : position + accepted + 1]
        proposer.after_verify(accepted, eager, target_hidden_stack=stack)
        proposer.after_verify(accepted, lazy)
        position += accepted + 1
        assert proposer.last_pair_key(eager) == position - 1
    assert proposer.drafter_rows(eager) > 0


def test_interleaved_sequences_draft_as_if_alone(proposer: DraftProposer, target: HFTarget) -> None:
    if isinstance(proposer, FakeProposer):
        proposer.guess = lambda position, m: [position + j for j in range(m)]
    texts = [[*PROMPT, *range(40, 60)], list(range(100, 140))]
    rows = [features(target, proposer, text) for text in texts]
    starts = (len(PROMPT), 17)

    def steps(which: int, state: object, position: int) -> list[int]:
        drafts = proposer.propose(texts[which][position], position, proposer.max_num_drafts(), state)
        proposer.after_verify(0, state, target_hidden_stack=rows[which][position : position + 1])
        return drafts

    alone = []
    for which, start in enumerate(starts):
        state = prefilled(target, proposer, texts[which][:start])
        alone.append([steps(which, state, start + step) for step in range(10)])
        proposer.free_state(state)
    states = [prefilled(target, proposer, text[:start]) for text, start in zip(texts, starts, strict=True)]
    together = [[steps(which, states[which], starts[which] + step) for which in (0, 1)] for step in range(10)]
    assert [list(column) for column in zip(*together, strict=True)] == alone


def test_free_is_idempotent_and_leaves_nothing(proposer: DraftProposer, target: HFTarget) -> None:
    for _ in range(3 * LIMITS.num_pages):
        state = prefilled(target, proposer, PROMPT)
        assert proposer.drafter_rows(state) > 0
        proposer.free_state(state)
        proposer.free_state(state)
        assert (proposer.drafter_rows(state), proposer.last_pair_key(state)) == (0, None)


def test_a_batch_or_none(proposer: DraftProposer) -> None:
    assert proposer.propose_batch_max() >= 1
    if proposer.propose_batch_max() == 1:
        assert proposer.propose_batch([], [], [], []) is None


def test_a_carried_context_or_none(proposer: DraftProposer, target: HFTarget) -> None:
    state = prefilled(target, proposer, PROMPT)
    kv = proposer.take_drafter_kv(state)
    if kv is None:
        assert proposer.drafter_rows(state) > 0, "unsupported: the state keeps its context"
        assert not proposer.install_drafter_kv(proposer.alloc_state(), kv)
    proposer.free_drafter_kv(kv)


def test_confidence_gates_on_nothing_it_did_not_compute(proposer: DraftProposer, target: HFTarget) -> None:
    assert proposer.last_confidence() is None
    state = prefilled(target, proposer, PROMPT)
    drafts = proposer.propose(PROMPT[-1], len(PROMPT), proposer.max_num_drafts(), state)
    confidence = proposer.last_confidence()
    has_head = isinstance(proposer, SessionProposer) and proposer.session.config.confidence is not None
    assert (confidence is not None) == (has_head and drafts != [])
    assert confidence is None or 0.0 <= confidence <= 1.0
    proposer.after_verify(0, state)
    if has_head:
        assert proposer.propose(5, 0, 1, proposer.alloc_state()) == []
        assert proposer.last_confidence() is None, "no context, no drafts, no confidence"
    assert proposer.read_deferred_draft_token() == 0
    assert proposer.needs_comm() is False
    assert proposer.prefill_uses_shared_buffers() is False


def test_output_never_depends_on_it(proposer: DraftProposer, target: HFTarget) -> None:
    plain = generate(target, None, PROMPT, max_new_tokens=30, stop_ids=[2])
    drafted = generate(target, proposer, PROMPT, max_new_tokens=30, stop_ids=[2])
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == plain.finish_reason
    if not isinstance(proposer, FakeProposer):
        assert sum(drafted.statistics.drafted) > 0
        assert set(drafted.statistics.declines) <= {Decline.FORBIDDEN, Decline.UNSURE}
