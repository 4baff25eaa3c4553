"""What holds of every draft head, from checkpoint to output: lossless, nothing loaded in vain, one row a head."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.chain import LENGTH, chain_proposer, generate_on_chain
from tests.support.engines import SMALL, tiny_engine
from tests.support.fakes import VOCAB, tiny_target
from tests.support.tiny import Tiny, write_files
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.errors import BuildError, EngineMismatchError, UnsupportedError
from trtllm_dflash.heads import markov_walk
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs, Drafts, Sampling, choose, tie_ranks
from trtllm_dflash.heads.rows import BlockOutput, DraftHead, Field, anchor_counted, row
from trtllm_dflash.heads.values import boolean
from trtllm_dflash.pipeline import build_engine
from trtllm_dflash.runtime.block_drafts import Decline
from trtllm_dflash.runtime.decode import generate
from trtllm_dflash.runtime.hf_target import HFTarget
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.session_proposer import SessionProposer

RUNTIMES = ("onnxruntime", "torch")
# Between them they hold every table of every row.
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"family": "dflash2"},
    "dspark vanilla": {"family": "dspark"},
    "dspark gated": {"family": "dspark", "markov_head_type": "gated"},
    "dspark rnn": {"family": "dspark", "markov_head_type": "rnn"},
    "dspark without markov": {"family": "dspark", "markov_rank": 0, "confidence_with_markov": False},
    "dspark bare": {"family": "dspark", "markov_rank": 0, "confidence": False, "confidence_with_markov": False},
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """In float64, rows computed together and one by one choose the same tokens, so equality is exact."""
    return tiny_target(dtype=torch.float64, num_hidden_layers=5)


@pytest.fixture(scope="module")
def plain(target: HFTarget) -> list[tuple[list[int], list[int]]]:
    """60 random prompts and their plain continuations."""
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(60)]
    return [(prompt, generate(target, None, prompt, max_new_tokens=12).token_ids) for prompt in prompts]


def proposer_of(folder: Path, target: HFTarget, runtime: str, drafter: str, **options: Any) -> SessionProposer:
    session = open_session(tiny_engine(folder, {"runtime": runtime}, num_target_layers=5, **DRAFTERS[drafter]))
    session.bind_target(target.embedding, target.lm_head)
    return SessionProposer(session, **options)


@pytest.mark.parametrize(
    ("drafter", "runtime"),
    [
        *((drafter, "onnxruntime") for drafter in DRAFTERS),
        ("dflash", "torch"),
        ("dflash2", "torch"),
        ("dspark rnn", "torch"),
    ],
)
def test_output_is_the_targets_own_on_60_prompts(
    drafter: str, runtime: str, target: HFTarget, plain, tmp_path: Path
) -> None:
    proposer = proposer_of(tmp_path, target, runtime, drafter)
    for prompt, expected in plain:
        result = generate(target, proposer, prompt, max_new_tokens=12)
        assert result.token_ids == expected, f"prompt {prompt}"
        assert sum(result.statistics.drafted) > 0
    assert set(proposer.declines) <= {Decline.FORBIDDEN}


# --- nothing is loaded in vain ---------------------------------------------------------------------------------------


class Watched(Mapping[str, Tensor]):
    """Tables that remember which of them were read."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        self.tables, self.read = tables, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)


def test_T39_every_rule_reads_every_table_of_the_engine(target: HFTarget, tmp_path: Path) -> None:
    seen: dict[str, set[str]] = {family: set() for family in HEADS}
    for index, drafter in enumerate(DRAFTERS):
        proposer = proposer_of(tmp_path / str(index), target, "onnxruntime", drafter)
        proposer.session.tables = watched = Watched(proposer.session.tables)
        generate(target, proposer, [5, 6, 7], max_new_tokens=5)
        assert watched.read == set(watched), f"{drafter} leaves tables unread"
        seen[proposer.session.config.family] |= watched.read
    assert seen == {family: set(head.tables) for family, head in HEADS.items()}, "DRAFTERS must cover every table"


@pytest.mark.parametrize("drafter", ["dflash2", "dspark gated"])
def test_T39_a_head_tensor_that_nothing_reads_fails_the_build(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = DRAFTERS[drafter]["family"]
    silent = dataclasses.replace(HEADS[family], tables=())  # a build that knows of no walk
    monkeypatch.setitem(HEADS, family, silent)
    with pytest.raises(BuildError, match="the models read 0 of") as refusal:
        tiny_engine(tmp_path, **DRAFTERS[drafter])
    assert "markov_gate" in str(refusal.value) or "predecessor_codebook" in str(refusal.value)
    assert not (tmp_path / "engine").exists()


def test_T39_an_engine_without_its_tables_does_not_open(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, family="dflash2")
    (engine.directory / "sidecars.safetensors").unlink()
    with pytest.raises(EngineMismatchError, match=r"sidecars\.safetensors is missing"):
        open_session(engine.directory)


def test_T39_tables_of_another_head_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(tmp_path, family="dflash2")
    monkeypatch.setitem(HEADS, "dflash2", dataclasses.replace(HEADS["dflash2"], tables=("successor_codebook",)))
    with pytest.raises(EngineMismatchError, match="tables predecessor_codebook, successor_codebook, the head reads"):
        open_session(engine)


def test_tables_stay_in_the_checkpoints_type_and_out_of_the_weight_file(tmp_path: Path) -> None:
    session = open_session(tiny_engine(tmp_path, family="dflash2", dtype=torch.bfloat16))
    assert {name: table.dtype for name, table in session.tables.items()} == {
        "predecessor_codebook": torch.bfloat16, "successor_codebook": torch.bfloat16,
    }  # fmt: skip
    header = (tmp_path / "engine" / "weights.safetensors").read_bytes()[:4096]
    assert b"selector_projection" in header
    assert b"codebook" not in header


# --- DSpark on a target whose every token is known -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_T35_acceptance_does_not_fall_along_the_block(kind: str, tmp_path: Path) -> None:
    _, result = generate_on_chain(chain_proposer(tmp_path, kind))
    assert result.statistics.position_acceptance == [1.0] * 7


def test_T35_a_bias_that_forgets_the_last_draft_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = markov_walk._MarkovEdge.__call__
    first: list[Tensor] = []

    def forgetful(self: Any, step: int, previous: Tensor) -> Tensor:
        first[:] = [previous] if step == 0 else first
        return right(self, step, first[0])

    monkeypatch.setattr(markov_walk._MarkovEdge, "__call__", forgetful)
    _, result = generate_on_chain(chain_proposer(tmp_path, "vanilla"))
    assert result.statistics.position_acceptance == [1.0] + [0.0] * 6


def test_T46_unsure_drafts_are_cut_before_the_target_runs(tmp_path: Path) -> None:
    """Drafts after token 9 are unsure: a block never crosses it, and the verify has no row for what was cut."""
    unsure, tokens = 9, 80
    proposer = chain_proposer(tmp_path, "vanilla", unsure_after=unsure, draft_conf_tau=0.5)
    target, result = generate_on_chain(proposer, tokens, prompt=unsure - 1)
    emitted, rows = 1, []
    while emitted < tokens:
        anchor = result.token_ids[emitted - 1]
        drafts = min(7, (unsure - anchor) % LENGTH, tokens - emitted)
        rows.append(1 + drafts)
        emitted += min(drafts + 1, tokens - emitted)
    assert target.forwarded[1:] == rows, "prefill, then the anchor and the drafts that are sure"
    assert result.statistics.drafted == [count - 1 for count in rows]
    assert (rows[0], max(rows)) == (1, 8), "the anchor alone, up to a whole block"
    assert result.statistics.declines[Decline.UNSURE] > 0
    whole, _ = generate_on_chain(chain_proposer(tmp_path / "whole", "vanilla", unsure_after=unsure), tokens, unsure - 1)
    assert whole.forwarded[1:3] == [8, 8], "without the option nothing is cut"


# --- a head that is not there ----------------------------------------------------------------------------------------


def _bigram_draft(inputs: DraftInputs, sampling: Sampling | None = None) -> Drafts:
    assert inputs.projected is not None
    bias = inputs.tables["bigram_bias"][inputs.ids.long()].float()  # [S, m, 16, 8]
    scores = inputs.values + (bias * inputs.projected[:, :, None].float()).sum(-1)
    slots, q = choose(scores, tie_ranks(inputs.ids, inputs.values), sampling)
    return Drafts(inputs.ids.long().gather(-1, slots[..., None])[..., 0], scores, q=q)


BIGRAM = DraftHead(
    family="bigram",  # type: ignore[arg-type]
    architectures=("BigramDraftModel",),
    default_block_size=8,
    block=anchor_counted,
    draft=_bigram_draft,
    outputs=(BlockOutput("projected", weight="bigram_projection", width=lambda config: 8),),
    tables=("bigram_bias",),
    witness={"bigram": lambda value: value is True},
    fields=(Field("bigram", boolean, ("dflash_config.bigram",)),),
    tensors=(row("bigram_projection", "8 H", "bigram.projection.weight"), row("bigram_bias", "V 8", "bigram.bias")),
    parameters=lambda facts: "8*H + V*8",
)


def bigram_checkpoint(folder: Path) -> Path:
    tiny = Tiny()
    config, tensors = tiny.config(), tiny.tensors()
    config["architectures"] = ["BigramDraftModel"]
    config["dflash_config"]["bigram"] = True
    tensors |= {"bigram.projection.weight": torch.randn(8, 64) / 8, "bigram.bias": torch.randn(VOCAB, 8)}
    return write_files(folder, config, tensors)


def test_before_the_row_is_there_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="BigramDraftModel"):
        build_engine(bigram_checkpoint(tmp_path / "checkpoint"), tmp_path / "engine")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_fourth_head_is_one_row(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing, weights, graph outputs, sidecars, sessions, proposer and decoding loop follow from it."""
    monkeypatch.setitem(HEADS, BIGRAM.family, BIGRAM)
    checkpoint, target = bigram_checkpoint(tmp_path / "checkpoint"), tiny_target()
    engine = build_engine(checkpoint, tmp_path / "engine", BuildOptions(runtime=runtime, **SMALL))
    answers = []
    for kind in (None, "reference"):
        session = open_session(engine, kind)
        assert set(session.tables) == {"bigram_bias"}
        session.bind_target(target.embedding, target.lm_head)
        result = generate(target, SessionProposer(session), [5, 6, 7], max_new_tokens=30)
        assert result.token_ids == generate(target, None, [5, 6, 7], max_new_tokens=30).token_ids
        proposer = SessionProposer(session)
        state = proposer.alloc_state()
        proposer.prefill_drafter([5, 6], torch.randn(2, 192, generator=torch.Generator().manual_seed(0)), state)
        answers.append(proposer.propose(7, 2, 7, state))
    monkeypatch.setitem(HEADS, BIGRAM.family, dataclasses.replace(BIGRAM, draft=HEADS["dflash"].draft))
    without = SessionProposer(session)
    state = without.alloc_state()
    without.prefill_drafter([5, 6], torch.randn(2, 192, generator=torch.Generator().manual_seed(0)), state)
    assert answers[0] == answers[1] != without.propose(7, 2, 7, state)
