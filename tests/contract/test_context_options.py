"""``window_size`` and ``ctx_window``: what a draft may see, changed by the build."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import tiny_engine
from tests.support.fakes import LIMITS, FakeSession, tiny_config
from trtllm_dflash.config import LayerMask
from trtllm_dflash.engine.manifest import open_engine
from trtllm_dflash.errors import BuildError, EngineMismatchError
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.runtime import open as opening
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.self_check import compare
from trtllm_dflash.runtime.session import ContextTables
from trtllm_dflash.runtime.session_proposer import SequenceState, SessionProposer

RUNTIMES = ("onnxruntime", "torch")


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_window_over_all_layers_equals_the_reference(family: str, runtime: str, tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, {"runtime": runtime, "window_size": 9}, family=family)
    results = compare(open_session(engine), open_session(engine, "reference"))
    assert results
    assert all(result.ok for result in results)


def test_the_window_is_recorded_and_causality_kept(tmp_path: Path) -> None:
    tiny_engine(tmp_path / "a", {"window_size": 9}, sliding_layers=(0,), window=20)
    config = open_engine(tmp_path / "a" / "engine").config
    assert config.layer_masks == (LayerMask(9, True), LayerMask(9, False))
    assert config.context_window == 8
    trained = tiny_engine(tmp_path / "b", sliding_layers=(0, 1), window=9, is_causal=False).config
    assert tiny_engine(tmp_path / "c", {"window_size": 9}, is_causal=False).config == trained


@pytest.mark.parametrize(("drafts", "rows"), [(None, 8), (3, 4)])
def test_a_window_narrower_than_the_block_is_refused(drafts: int | None, rows: int, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"window_size is {rows - 1}, but a block has {rows} rows"):
        tiny_engine(tmp_path / "a", {"window_size": rows - 1, "max_draft_len": drafts})
    tiny_engine(tmp_path / "b", {"window_size": rows, "max_draft_len": drafts})


@pytest.mark.parametrize("rows", [-1, 1, 15, 2**24 + 1])
def test_a_context_shorter_than_a_page_is_refused(rows: int, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"ctx_window is {rows}, expected 0 or tokens_per_block 16"):
        tiny_engine(tmp_path, {"ctx_window": rows})


# --- rows that are kept, on a session that shows them ----------------------------------------------------------------


def fake(ctx_window: int, **config: Any) -> tuple[SessionProposer, SequenceState]:
    session = FakeSession(tiny_config(**config), dataclasses.replace(LIMITS, ctx_window=ctx_window))
    proposer = SessionProposer(session)
    return proposer, proposer.alloc_state()


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, 192)


def positions(proposer: SessionProposer, state: SequenceState) -> list[int]:
    session = proposer.session
    assert isinstance(session, FakeSession)
    return [position for position, _ in session.held(proposer._cache.tables([state.context]))]


@pytest.mark.parametrize("most", [8, 13, 24])
def test_at_most_the_newest_rows_are_kept_at_their_true_positions(most: int) -> None:
    proposer, state = fake(most)
    assert proposer.prefill_hidden_rows(40) == most
    proposer.prefill_drafter(list(range(40)), rows_of(40), state)
    assert positions(proposer, state) == list(range(40 - most, 40))
    end = 40
    for accepted in (0, 7, 3, 7, 1, 0, 0):
        assert len(proposer.propose(5, end, 7, state)) == 7
        proposer.after_verify(accepted, state, target_hidden_stack=rows_of(accepted + 1))
        end += accepted + 1
        held = positions(proposer, state)
        assert held == list(range(end - len(held), end))
        assert max(accepted + 1, most - LIMITS.tokens_per_block - accepted) <= len(held) <= most
        assert proposer.drafter_rows(state) == len(held)
    assert not proposer.declines
    proposer.free_state(state)
    assert proposer._cache.num_free_pages == LIMITS.num_pages - 1


def test_a_bounded_context_needs_no_more_pages_however_long_the_sequence(tmp_path: Path) -> None:
    proposer, state = fake(16)
    for position in range(LIMITS.max_seq_len):
        proposer.catchup_drafter([1], rows_of(1), proposer.drafter_rows(state), position, state)
        assert state.context.num_pages <= 3


def test_without_context_nothing_is_ingested_and_blocks_stand_at_true_positions() -> None:
    proposer, state = fake(0)
    session = proposer.session
    assert isinstance(session, FakeSession)
    assert proposer.prefill_hidden_rows(40) == 0
    assert proposer.prefill_drafter(list(range(40)), rows_of(40), state) == 0
    for position, accepted in ((40, 7), (48, 0), (49, 3)):
        drafts = proposer.propose(5, position, 7, state)
        assert drafts == [session.token_at(position + 1 + j) for j in range(7)]
        assert isinstance(session.context, ContextTables)
        assert session.context.page_rows.sum() == 0
        proposer.after_verify(accepted, state, target_hidden_stack=rows_of(accepted + 1))
    assert session.ingested == []
    assert proposer.drafter_rows(state) == 0
    assert proposer.last_pair_key(state) is None
    assert not proposer.declines


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_without_context_drafts_do_not_depend_on_features(family: str, runtime: str, tmp_path: Path) -> None:
    answers = {}
    for rows in (0, None):
        engine = tiny_engine(tmp_path / str(rows), {"runtime": runtime, "ctx_window": rows}, family=family)
        drafts = []
        for seed in (0, 1):
            session = open_session(engine)
            torch.manual_seed(7)
            session.bind_target(torch.randn(160, 64), torch.randn(160, 64))
            proposer = SessionProposer(session)
            state = proposer.alloc_state()
            torch.manual_seed(seed)
            proposer.prefill_drafter(list(range(20)), rows_of(20), state)
            drafts.append(proposer.propose(9, 20, 7, state))
        answers[rows] = drafts
    assert answers[0][0] == answers[0][1] != []
    assert answers[None][0] != answers[None][1]


def test_a_window_of_one_row_drafts_from_the_block_alone(tmp_path: Path) -> None:
    options = {"window_size": 1, "max_draft_len": 1}
    proposer = SessionProposer(open_session(tiny_engine(tmp_path, options, family="dspark")))
    proposer.session.bind_target(torch.randn(160, 64), torch.randn(160, 64))
    state = proposer.alloc_state()
    proposer.prefill_drafter([1, 2], torch.randn(2, proposer.session.config.feature_size), state)
    assert len(proposer.propose(5, 2, 1, state)) == 1
    assert proposer.declines == {}


def test_tables_of_other_shapes_are_refused_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reached only by a manifest that somebody has stamped anew."""
    engine = tiny_engine(tmp_path, family="dspark")
    read = opening.read_sidecars
    monkeypatch.setattr(opening, "read_sidecars", lambda *a: {n: t[:10] for n, t in read(*a).items()})
    with pytest.raises(EngineMismatchError, match=r"markov_w1 is \[10, 8\], expected \[160, 8\]"):
        open_session(engine)
    monkeypatch.setattr(opening, "read_sidecars", read)
    (engine.directory / "sidecars.safetensors").write_bytes(b"garbage")
    with pytest.raises(EngineMismatchError, match=r"sidecars\.safetensors: cannot be read"):
        open_session(engine)
