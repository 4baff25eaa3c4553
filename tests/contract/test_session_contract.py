"""What every session does alike, against the reference: one suite, parametrised over the sessions that run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engines import tiny_engine
from tests.support.tolerance import TOLERANCES, assert_close, assert_ids_equal
from trtllm_dflash.checkpoint.weights import table_names
from trtllm_dflash.errors import EngineMismatchError
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs, Drafts
from trtllm_dflash.runtime.context_cache import ContextCache, ContextSequence
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.session import Candidates, Session

VOCAB, HIDDEN = 160, 64

# kind -> build options and the row of the tolerance table
SESSIONS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "ort": ({"runtime": "onnxruntime"}, ("ort", "fp32")),
    "torch": ({"runtime": "torch"}, ("torch", "fp32")),
    "torch-bf16": ({"runtime": "torch", "dtype": "bfloat16"}, ("torch", "bf16 model")),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding causal by default, mixed": {"sliding_layers": (0,), "window": 20},
    "sliding, is_causal false": {"sliding_layers": (0, 1), "window": 20, "is_causal": False},
    "full, is_causal true": {"is_causal": True},
    "YaRN": {"yarn": {"factor": 8.0, "original_max_position_embeddings": 32}},
    "bfloat16 weights, scale, multiplier, cap": {
        "dtype": torch.bfloat16, "input_embedding_scale": 0.5, "output_multiplier": 1.5, "final_logit_softcapping": 4.0,
    },
    "DFlash 2": {"family": "dflash2"},
    "DFlash 2, sliding both ways, bfloat16 weights": {
        "family": "dflash2", "sliding_layers": (0, 1), "window": 20, "is_causal": False, "dtype": torch.bfloat16,
    },
    "DSpark": {"family": "dspark"},
    "DSpark, rnn, sliding, no confidence": {
        "family": "dspark", "markov_head_type": "rnn", "sliding_layers": (1,), "window": 20, "confidence": False,
    },
    "DSpark, gated, bfloat16 weights, confidence of hidden states": {
        "family": "dspark", "markov_head_type": "gated", "dtype": torch.bfloat16, "confidence_with_markov": False,
    },
    "own embedding and head, H != Ht": {
        "hidden_size": 48, "target_hidden_size": 64, "own_embedding": True, "own_lm_head": True,
    },
    "DFlash 2, own head, bfloat16 weights": {"family": "dflash2", "own_lm_head": True, "dtype": torch.bfloat16},
    "mask embedding, scaled": {"mask_embedding": True, "input_embedding_scale": 0.5},
    "DFlash 2, mask embedding beside own embedding": {
        "family": "dflash2", "mask_embedding": True, "own_embedding": True,
    },
    "DSpark, mask embedding": {"family": "dspark", "mask_embedding": True},
    "reduced vocabulary": {"own_lm_head": True, "draft_vocab_size": 100},
    "DSpark, reduced vocabulary, rnn, bfloat16 weights": {
        "family": "dspark", "own_lm_head": True, "draft_vocab_size": 37, "markov_head_type": "rnn",
        "dtype": torch.bfloat16,
    },
    "DSpark, own embedding, scaled": {"family": "dspark", "own_embedding": True, "input_embedding_scale": 0.5},
}  # fmt: skip


@pytest.fixture(params=SESSIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class Pair:
    """A session and the reference on the same weights, fed the same rows."""

    def __init__(self, session: Session, reference: Session, tolerance: tuple[str, str]) -> None:
        self.session, self.reference, self.tolerance = session, reference, tolerance
        self.cache, self.head = ContextCache(session.limits), HEADS[session.config.family]
        assert set(session.tables) == set(reference.tables) == set(table_names(session.config))
        embedding, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN) / 8
        assert (session.draft_to_target is None) == (session.config.draft_vocab_size == VOCAB)
        for runner in (session, reference):
            # Whatever was never written must never matter.
            runner.k_cache.fill_(torch.nan)
            runner.v_cache.fill_(torch.nan)
            runner.bind_target(embedding, head)

    def ingest(self, sequence: ContextSequence, start: int, rows: int) -> None:
        features = torch.randn(rows, self.session.config.feature_size)
        pages, slots = self.cache.append(sequence, start, rows)
        positions = torch.arange(start, start + rows, dtype=torch.int32)
        for runner in (self.session, self.reference):
            runner.ingest(features, positions, pages, slots)

    def draft(self, sequences: list[ContextSequence], positions: list[int], num_drafts: int) -> Candidates:
        anchors = torch.randint(VOCAB, (len(sequences),))
        at = torch.tensor(positions, dtype=torch.int32)
        actual, expected = (
            runner.draft(anchors, at, self.cache.tables(sequences), num_drafts)
            for runner in (self.session, self.reference)
        )
        assert actual.ids.shape == (len(sequences), num_drafts, 16)
        assert (actual.ids.dtype, actual.values.dtype) == (torch.int32, torch.float32)
        assert_close(actual.values, expected.values, self.tolerance)
        assert_close(actual.logsumexp, expected.logsumexp, self.tolerance)
        assert_close(actual.hidden, expected.hidden, self.tolerance)
        assert set(actual.outputs) == set(expected.outputs) == {o.name for o in self.head.outputs}
        for name, output in expected.outputs.items():
            assert_close(actual.outputs[name], output, self.tolerance)
        if self.session.dtype == torch.float32:
            assert_ids_equal(actual.ids, expected.ids, expected.values, bound=1e-5)
            ours, theirs = (
                self.walk(runner, c, anchors) for runner, c in ((self.session, actual), (self.reference, expected))
            )
            assert torch.equal(ours.tokens, theirs.tokens)
            if theirs.confidence is not None:
                assert_close(ours.confidence, theirs.confidence, self.tolerance)
        return actual

    def walk(self, runner: Session, candidates: Candidates, anchors: Tensor) -> Drafts:
        to_target = torch.arange(VOCAB) if runner.draft_to_target is None else runner.draft_to_target
        return self.head.draft(
            DraftInputs(
                to_target[candidates.ids.long()], candidates.values, anchors, runner.tables, runner.config,
                candidates.hidden, draft_ids=candidates.ids, **candidates.outputs,
            )
        )  # fmt: skip


@pytest.fixture(params=DRAFTERS)
def pair(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Pair:
    options, tolerance = SESSIONS[kind]
    engine = tiny_engine(tmp_path, options, **DRAFTERS[request.param])
    of_family = (tolerance[0], f"{tolerance[1]} {engine.config.family}")
    tolerance = of_family if of_family in TOLERANCES else tolerance
    return Pair(open_session(engine), open_session(engine, "reference"), tolerance)


def test_one_sequence_grows_over_page_and_window_borders(pair: Pair) -> None:
    sequence, position = ContextSequence(), 0
    pair.draft([sequence], [0], 7)  # no context at all
    for rows in (1, 14, 1, 1, 3, 32, 7, 2):
        pair.ingest(sequence, position, rows)
        position += rows
        pair.draft([sequence], [position], 7)


def test_positions_may_have_gaps(pair: Pair) -> None:
    sequence = ContextSequence()
    pair.ingest(sequence, 3, 5)
    pair.ingest(sequence, 20, 2)
    pair.ingest(sequence, 100, 9)
    pair.draft([sequence], [109], 7)


def test_sequences_of_different_length_share_a_forward(pair: Pair) -> None:
    sequences = [ContextSequence() for _ in range(3)]
    pair.ingest(sequences[1], 0, 17)
    pair.ingest(sequences[2], 0, 32)
    pair.ingest(sequences[2], 32, 32)
    together = pair.draft(sequences, [0, 17, 64], 7)
    assert together.ids.shape[0] == 3


@pytest.mark.parametrize("num_drafts", [1, 2, 6])
def test_narrower_blocks_than_built(pair: Pair, num_drafts: int) -> None:
    sequence = ContextSequence()
    pair.ingest(sequence, 0, 20)
    pair.draft([sequence], [20], num_drafts)


def test_pages_of_a_freed_sequence_leave_no_trace(pair: Pair) -> None:
    first, second = ContextSequence(), ContextSequence()
    pair.ingest(first, 0, 30)
    pair.cache.free(first)
    pair.ingest(second, 0, 3)
    pair.draft([second], [3], 7)


def test_draft_before_bind_target_is_an_error(kind: str, tmp_path: Path) -> None:
    session = open_session(tiny_engine(tmp_path, SESSIONS[kind][0]))
    tables = ContextCache(session.limits).tables([ContextSequence()])
    with pytest.raises(RuntimeError, match="bind_target"):
        session.draft(torch.tensor([1]), torch.tensor([0], dtype=torch.int32), tables, 7)


def test_the_targets_head_is_not_copied(kind: str, tmp_path: Path) -> None:
    session = open_session(tiny_engine(tmp_path, SESSIONS[kind][0]))
    head = torch.randn(VOCAB, HIDDEN, dtype=session.dtype)
    session.bind_target(torch.randn(VOCAB, HIDDEN, dtype=session.dtype), head)
    assert session._lm_head.data_ptr() == head.data_ptr()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_context_shows_in_the_values_and_crashes_nothing(kind: str, poison: float, tmp_path: Path) -> None:
    """The proposer sees values that are not finite and declines; a session must get that far."""
    session = open_session(tiny_engine(tmp_path, SESSIONS[kind][0]))
    session.bind_target(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    cache, sequence = ContextCache(session.limits), ContextSequence()
    pages, slots = cache.append(sequence, 0, 1)
    features = torch.full((1, session.config.feature_size), poison)
    session.ingest(features, torch.zeros(1, dtype=torch.int32), pages, slots)
    at = torch.tensor([1], dtype=torch.int32)
    candidates = session.draft(torch.tensor([5]), at, cache.tables([sequence]), 7)
    assert not candidates.values.isfinite().all()


def test_a_target_of_other_shapes_is_refused_when_it_is_bound(kind: str, tmp_path: Path) -> None:
    session = open_session(tiny_engine(tmp_path, SESSIONS[kind][0]))
    with pytest.raises(EngineMismatchError) as caught:
        session.bind_target(torch.zeros(2, HIDDEN), torch.zeros(VOCAB, HIDDEN + 1))
    assert "lm_head is [160, 65], expected [160, 64]" in str(caught.value)
    assert "embedding is [2, 64], expected 64 columns and a row for the mask token 3" in str(caught.value)
