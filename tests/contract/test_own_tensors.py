"""A drafter's own embedding, head, mask row and vocabulary: used by every session, from the engine directory alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.chain import chain_proposer, generate_on_chain
from tests.support.engines import SMALL, tiny_engine
from tests.support.fakes import LIMITS, VOCAB, FakeSession, tiny_config, tiny_target
from tests.support.heads import markov_config, tables
from tests.support.tiny import Tiny, write_files
from tests.support.tolerance import assert_close
from trtllm_dflash.config import BuildOptions, TargetSpec
from trtllm_dflash.errors import BuildError, EngineMismatchError
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs, Sampling
from trtllm_dflash.pipeline import build_engine, plan_build
from trtllm_dflash.reference.heads import markov_walk
from trtllm_dflash.runtime.context_cache import ContextCache, ContextSequence
from trtllm_dflash.runtime.decode import generate
from trtllm_dflash.runtime.hf_target import HFTarget
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.session import Candidates, Session
from trtllm_dflash.runtime.session_proposer import SessionProposer
from trtllm_dflash.target_check import check_target

# name -> build options and the session that is asked for
RUNNERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "onnxruntime": ({"runtime": "onnxruntime"}, None),
    "torch": ({"runtime": "torch"}, None),
    "torch bfloat16": ({"runtime": "torch", "dtype": "bfloat16"}, None),
    "reference": ({}, "reference"),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """In float64, rows computed together and one by one choose the same tokens, so equality is exact."""
    return tiny_target(dtype=torch.float64)


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def session_of(folder: Path, tiny: Tiny, runner: str, **tensors: Tensor) -> Session:
    """A session of a tiny drafter, some of whose tensors are given; dots in names are written as two underscores."""
    options, kind = RUNNERS[runner]
    given = tiny.tensors() | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    checkpoint = write_files(folder / "checkpoint", tiny.config(), given)
    return open_session(build_engine(checkpoint, folder / "engine", BuildOptions(**(SMALL | options))), kind)


def draft(session: Session, anchor: int = 9) -> Candidates:
    """One block after five context rows."""
    cache, sequence = ContextCache(session.limits), ContextSequence()
    pages, rows = cache.append(sequence, 0, 5)
    features = torch.randn(5, session.config.feature_size, generator=torch.Generator().manual_seed(5))
    session.ingest(features, torch.arange(5, dtype=torch.int32), pages, rows)
    at = torch.tensor([5], dtype=torch.int32)
    return session.draft(torch.tensor([anchor]), at, cache.tables([sequence]), session.limits.max_draft_len)


def same(a: Candidates, b: Candidates) -> bool:
    return torch.equal(a.ids, b.ids) and torch.equal(a.values, b.values)


# --- embedding and head ----------------------------------------------------------------------------------------------


def test_T40_an_own_head_is_used_and_never_overwritten(runner: str, tmp_path: Path) -> None:
    session = session_of(tmp_path, Tiny(own_lm_head=True), runner)
    embedding, drafts = torch.randn(VOCAB, 64), []
    for head in (torch.randn(VOCAB, 64), torch.zeros(3, 5)):  # one that fits and one that does not
        session.bind_target(embedding, head)
        drafts.append(draft(session))
    assert same(*drafts)
    logits = drafts[0].hidden[0].float() @ Tiny(own_lm_head=True).tensors()["lm_head.weight"].T
    assert torch.allclose(logits.amax(-1), drafts[0].values[0, :, 0], rtol=0.05)


def test_T40_the_own_head_decides_acceptance(tmp_path: Path) -> None:
    """The target's head would put other candidates before the walk; the own one is what the walk was made for."""
    foreign = 5 * torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(0))
    own = chain_proposer(tmp_path / "own", tiny={"own_lm_head": True})
    assert generate_on_chain(own, lm_head=foreign)[1].statistics.position_acceptance == [1.0] * 7
    shared = chain_proposer(tmp_path / "shared")
    assert generate_on_chain(shared, lm_head=foreign)[1].statistics.acceptance_length < 2


def test_an_own_embedding_gives_anchor_and_mask_rows(runner: str, tmp_path: Path) -> None:
    session = session_of(tmp_path, Tiny(own_embedding=True, input_embedding_scale=0.5), runner)
    seen: list[Tensor] = []
    block = session._run_block
    session._run_block = lambda rows, *rest: seen.append(rows) or block(rows, *rest)  # type: ignore[method-assign,func-returns-value]
    drafts = []
    for embedding in (torch.randn(VOCAB, 64), torch.zeros(2, 7)):
        session.bind_target(embedding, torch.ones(VOCAB, 64).cumsum(0) / VOCAB)
        drafts.append(draft(session, anchor=9))
    own = Tiny(own_embedding=True).tensors()["embed_tokens.weight"] * 0.5
    assert same(*drafts)
    assert torch.allclose(seen[0][0].float(), own[[9] + [3] * 7], atol=0.01)


def test_a_drafter_with_both_needs_nothing_of_the_target(runner: str, tmp_path: Path) -> None:
    tiny = Tiny(own_embedding=True, own_lm_head=True, hidden_size=48, target_hidden_size=64)
    session = session_of(tmp_path, tiny, runner)
    before = draft(session)
    session.bind_target(torch.randn(VOCAB, 64), torch.randn(VOCAB, 64))
    assert same(before, draft(session))


@pytest.mark.parametrize("owned", ["own_embedding", "own_lm_head"])
def test_what_is_not_owned_must_be_bound(owned: str, runner: str, tmp_path: Path) -> None:
    session = session_of(tmp_path, Tiny(**{owned: True}), runner)
    with pytest.raises(RuntimeError, match="bind_target"):
        draft(session)
    with pytest.raises(EngineMismatchError, match=r"is \[160, 65\], expected"):
        session.bind_target(torch.zeros(VOCAB, 65), torch.zeros(VOCAB, 65))


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("runtime", ["onnxruntime", "torch"])
def test_own_tensors_equal_to_the_targets_draft_what_shared_ones_do(
    family: str, runtime: str, target: HFTarget, tmp_path: Path
) -> None:
    shared = session_of(tmp_path / "shared", Tiny(family), runtime)
    equal = {"embed_tokens__weight": target.embedding.float(), "lm_head__weight": target.lm_head.float()}
    own = session_of(tmp_path / "own", Tiny(family, own_embedding=True, own_lm_head=True), runtime, **equal)
    results = []
    for session in (shared, own):
        session.bind_target(target.embedding, target.lm_head)
        results.append(generate(target, SessionProposer(session), [5, 6, 7], max_new_tokens=40))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].statistics.accepted == results[1].statistics.accepted
    ours, theirs = draft(own), draft(shared)
    assert torch.equal(ours.ids, theirs.ids)
    assert_close(ours.values, theirs.values, ("torch", "fp32"))  # not by bits: torch rounds by a weight's alignment


def test_an_engine_without_an_own_tensor_does_not_run() -> None:
    config = tiny_config(owns_lm_head=True, owns_embedding=True)
    with pytest.raises(EngineMismatchError) as caught:
        FakeSession(config, LIMITS, {"lm_head": torch.zeros(VOCAB - 1, 64)})
    assert "lm_head is [159, 64], expected [160, 64]" in str(caught.value)
    assert "embed_tokens is missing, expected [160, 64]" in str(caught.value)


def test_memory_counts_what_the_drafter_owns(tmp_path: Path) -> None:
    tiny = Tiny(own_embedding=True, own_lm_head=True, dtype=torch.bfloat16)
    checkpoint = write_files(tmp_path / "checkpoint", tiny.config(), tiny.tensors())
    memory = plan_build(checkpoint, tmp_path / "engine", BuildOptions(**SMALL)).memory
    assert memory["the drafter's own embed_tokens in bfloat16"] == 2 * VOCAB * 64
    assert memory["the drafter's own lm_head in float32"] == 4 * VOCAB * 64


# --- mask row --------------------------------------------------------------------------------------------------------


def rows_of_block(session: Session) -> Tensor:
    """The embeddings ``[B, H]`` that a block of anchor 9 is run on."""
    seen: list[Tensor] = []
    run = session._run_block
    session._run_block = lambda rows, *rest: seen.append(rows) or run(rows, *rest)  # type: ignore[method-assign,func-returns-value]
    draft(session, anchor=9)
    return seen[0][0].float()


@pytest.mark.parametrize("own_embedding", [False, True])
def test_T17_a_learned_mask_embedding_replaces_the_mask_row(own_embedding: bool, runner: str, tmp_path: Path) -> None:
    tiny = Tiny(mask_embedding=True, own_embedding=own_embedding, input_embedding_scale=0.5)
    session, tensors = session_of(tmp_path, tiny, runner), tiny.tensors()
    embedding = tensors["embed_tokens.weight"] if own_embedding else torch.randn(VOCAB, 64)
    session.bind_target(embedding, torch.randn(VOCAB, 64))
    rows = rows_of_block(session)
    assert torch.allclose(rows[0], 0.5 * embedding[9], atol=0.01)
    assert torch.allclose(rows[1:], 0.5 * tensors["mask_embedding"].expand(7, -1), atol=0.01)


def test_T17_a_pickled_mask_embedding_is_loaded_like_a_tensor(runner: str, tmp_path: Path) -> None:
    learned = torch.randn(64, generator=torch.Generator().manual_seed(4))
    tensor = session_of(tmp_path / "tensor", Tiny(mask_embedding=True), runner, mask_embedding=learned)
    weights = {name: t for name, t in Tiny(mask_embedding=True).tensors().items() if name != "mask_embedding"}
    checkpoint = write_files(tmp_path / "pickle", Tiny().config(), weights)
    torch.save({"embedding": learned, "mask_token_id": 3}, checkpoint / "mask_embedding.pt")
    options, kind = RUNNERS[runner]
    pickled = open_session(build_engine(checkpoint, tmp_path / "engine", BuildOptions(**(SMALL | options))), kind)
    embedding, head = torch.randn(VOCAB, 64), torch.randn(VOCAB, 64)
    for session in (tensor, pickled):
        session.bind_target(embedding, head)
    assert torch.equal(rows_of_block(tensor), rows_of_block(pickled))
    assert torch.equal(draft(tensor).ids, draft(pickled).ids)


def test_a_mask_embedding_needs_no_mask_row_of_the_target(tmp_path: Path) -> None:
    session = session_of(tmp_path, Tiny(mask_embedding=True, mask_token_id=150), "onnxruntime")
    spec = TargetSpec("short", hidden_size=64, num_layers=6, vocab_size=VOCAB, embedding_rows=140)
    check_target(session.config, spec)
    session.bind_target(torch.randn(140, 64), torch.randn(VOCAB, 64))
    assert draft(session).values.isfinite().all()
    with pytest.raises(EngineMismatchError, match="mask_token_id is 150, but the target's embedding has 140 rows"):
        check_target(tiny_config(mask_token_id=150), spec)


# --- reduced vocabulary ----------------------------------------------------------------------------------------------

# Draft id 1 is target id 4, ..., 12 is 15: no id of the ring is the same in both.
KEPT = torch.tensor([2, *range(4, 16), *range(30, 60)])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "torch"])
def test_drafts_of_a_reduced_vocabulary_are_all_right_when_the_walk_keeps_target_ids(
    kind: str, runtime: str, tmp_path: Path
) -> None:
    """W1 has rows by target id, W2 by draft id: mixing them up anywhere would leave the ring."""
    proposer = chain_proposer(tmp_path, kind, build={"runtime": runtime}, tiny={"kept": KEPT})
    assert generate_on_chain(proposer)[1].statistics.position_acceptance == [1.0] * 7


def test_a_confidence_reads_target_ids_too(tmp_path: Path) -> None:
    unsure = 9
    proposer = chain_proposer(tmp_path, tiny={"kept": KEPT}, unsure_after=unsure, draft_conf_tau=0.5)
    _, result = generate_on_chain(proposer, 13, prompt=unsure)
    assert result.statistics.drafted == [7, 3], "from 10 to 6, then up to the 9: what follows it is unsure"


def test_the_map_comes_from_the_engine_directory(runner: str, tmp_path: Path) -> None:
    tiny = Tiny(own_lm_head=True, draft_vocab_size=100)
    session, tensors = session_of(tmp_path, tiny, runner), tiny.tensors()
    kept = tensors["t2d"].nonzero().flatten()
    assert session.draft_to_target is not None
    assert session.draft_to_target.tolist() == kept.tolist()
    session.bind_target(torch.randn(VOCAB, 64), torch.zeros(1, 1))
    best = draft(session, anchor=9).ids[0, :, 0].long()
    proposer, features = SessionProposer(session), torch.randn(5, 192, generator=torch.Generator().manual_seed(5))
    state = proposer.alloc_state()
    proposer.prefill_drafter([1, 2, 3, 4, 5], features, state)
    proposed = proposer.propose(9, 5, 7, state)
    assert proposed == kept[best].tolist()[: len(proposed)]
    assert len(proposed) == 7 or kept[best][len(proposed)] == session.config.mask_token_id
    assert kept[best].tolist() != best.tolist()


def test_a_sampled_walk_of_a_reduced_vocabulary_answers_in_target_ids() -> None:
    """The candidates' target ids are what q is over: that is all a verifier needs."""
    config = markov_config("vanilla", with_markov=None)
    full = tables(config)
    kept = torch.arange(100).mul(3).remainder(VOCAB).unique()
    reduced = full | {"markov_w2": full["markov_w2"][kept]}
    logits = torch.randn(2, 7, len(kept), generator=torch.Generator().manual_seed(0))
    values, columns = logits.topk(16)
    given = DraftInputs(
        kept[columns], values, torch.tensor([5, 6]), reduced, config, torch.zeros(2, 7, 64), draft_ids=columns
    )
    same_in_full = DraftInputs(kept[columns], values, torch.tensor([5, 6]), full, config, torch.zeros(2, 7, 64))
    for sampling in (None, 1.0):
        answers = [
            HEADS["dspark"].draft(each, sampling and Sampling(sampling, torch.Generator().manual_seed(1)))
            for each in (given, same_in_full)
        ]
        assert torch.equal(answers[0].tokens, answers[1].tokens)
        assert torch.equal(answers[0].scores, answers[1].scores)
        assert (answers[0].tokens[..., None] == given.ids).any(-1).all()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_walk_over_a_reduced_vocabulary_equals_the_reference(kind: str) -> None:
    config = markov_config(kind, with_markov=None)
    full = tables(config)
    kept = torch.arange(20, 36)  # 16 columns: the candidates are the whole vocabulary
    reduced = full | {"markov_w2": full["markov_w2"][kept]}
    generator = torch.Generator().manual_seed(2)
    logits, hidden = torch.randn(7, 16, generator=generator), torch.randn(7, 64, generator=generator)
    expected, scores = markov_walk(logits, hidden, reduced, 9, kind, kept.tolist())
    columns = torch.arange(16).expand(1, 7, 16)
    given = DraftInputs(
        kept[columns], logits[None], torch.tensor([9]), reduced, config, hidden[None], draft_ids=columns
    )
    ours = HEADS["dspark"].draft(given)
    assert ours.tokens[0].tolist() == expected
    assert_close(ours.scores[0], scores, ("torch", "fp32"))


# --- padded vocabulary -----------------------------------------------------------------------------------------------


def padded_session(folder: Path, runner: str, valid: int | None) -> Session:
    options, kind = RUNNERS[runner]
    session = open_session(tiny_engine(folder, options | {"valid_vocab_size": valid}), kind)
    generator = torch.Generator().manual_seed(6)
    head = torch.randn(VOCAB, 64, generator=generator)
    head[150:] *= 20  # padding rows hold anything
    session.bind_target(torch.randn(VOCAB, 64, generator=generator), head)
    return session


def test_padding_columns_are_never_candidates(runner: str, tmp_path: Path) -> None:
    whole, valid = padded_session(tmp_path / "whole", runner, None), padded_session(tmp_path / "valid", runner, 150)
    drafts = draft(valid)
    assert draft(whole).ids.ge(150).any(), "without the option they win"
    assert not drafts.ids.ge(150).any()
    logits = drafts.hidden[0].float() @ valid._lm_head[:150].float().T
    assert torch.allclose(drafts.values[0, :, 0], logits.amax(-1), rtol=0.02)
    assert torch.allclose(drafts.logsumexp[0], logits.logsumexp(-1), rtol=0.02)


@pytest.mark.parametrize("valid", [16, VOCAB])
def test_the_ends_of_the_range(valid: int, runner: str, tmp_path: Path) -> None:
    drafts = draft(padded_session(tmp_path, runner, valid))
    assert drafts.values.isfinite().all()
    assert valid == VOCAB or drafts.ids.sort(-1).values.tolist() == [[list(range(16))] * 7]


@pytest.mark.parametrize("valid", [0, 15, VOCAB + 1, -3])
def test_a_valid_vocabulary_out_of_range_is_refused_with_both_values(valid: int, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=rf"valid_vocab_size is {valid}, expected 16 .* to vocab_size 160"):
        tiny_engine(tmp_path, {"valid_vocab_size": valid})


def test_a_valid_vocabulary_beside_a_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"valid_vocab_size is 90, but .* 100 of 160 tokens listed in d2t"):
        tiny_engine(tmp_path, {"valid_vocab_size": 90}, own_lm_head=True, draft_vocab_size=100)


# --- output is the target's own --------------------------------------------------------------------------------------

LOSSLESS: dict[str, dict[str, Any]] = {
    **{
        f"{family}, own embedding and head, H != Ht": {
            "family": family, "own_embedding": True, "own_lm_head": True, "hidden_size": 48, "target_hidden_size": 64,
        }
        for family in HEADS
    },
    **{f"{family}, mask embedding": {"family": family, "mask_embedding": True} for family in HEADS},
    **{
        f"{family}, reduced vocabulary": {"family": family, "own_lm_head": True, "draft_vocab_size": 100}
        for family in ("dflash", "dspark")  # DFlash 2's codebooks have a row for every token of the target
    },
}  # fmt: skip

BUILDS: dict[str, dict[str, Any]] = {
    "padded vocabulary": {"valid_vocab_size": 100},
    "window": {"window_size": 9},
    "short context": {"ctx_window": 16},
    "no context": {"ctx_window": 0},
}


@pytest.fixture(scope="module")
def plain(target: HFTarget) -> list[tuple[list[int], list[int]]]:
    """30 random prompts and their plain continuations."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(30)]
    return [(prompt, generate(target, None, prompt, max_new_tokens=12).token_ids) for prompt in prompts]


@pytest.mark.parametrize("drafter", [*LOSSLESS, *BUILDS])
def test_output_is_the_targets_own(drafter: str, target: HFTarget, plain, tmp_path: Path) -> None:
    session = open_session(tiny_engine(tmp_path, BUILDS.get(drafter), **LOSSLESS.get(drafter, {})))
    session.bind_target(target.embedding, target.lm_head)
    proposer = SessionProposer(session)
    proposer.validate_against_target(target.spec)
    for prompt, expected in plain:
        result = generate(target, proposer, prompt, max_new_tokens=12)
        assert result.token_ids == expected, f"prompt {prompt}"
        assert sum(result.statistics.drafted) > 0
