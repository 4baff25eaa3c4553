"""DFlash 2 from the features on: an engine's drafts against the authors' ``DFlash2DraftModel.propose``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.oracle.test_reference_vs_authors import CASES, SEEDS, STEPS, Authors, World
from tests.support.engines import SMALL
from tests.support.heads import chi_square_p
from tests.support.tiny import Tiny, write_files
from tests.support.tolerance import assert_close
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.heads.drafting import DraftInputs, Sampling
from trtllm_dflash.pipeline import build_engine
from trtllm_dflash.reference import ops
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.session import Session
from trtllm_dflash.runtime.session_proposer import SessionProposer

LOUD = 3.0  # factor on the codebooks, so that the selector turns many drafts away from the best candidate
NAMES = [name for name in CASES if name.startswith("dflash2")]


class LoudTiny(Tiny):
    """A tiny drafter with large codebooks."""

    def tensors(self) -> dict[str, Tensor]:
        return {name: t * LOUD if name.endswith("codebook") else t for name, t in super().tensors().items()}


def loud_world(name: str, seed: int) -> World:
    case = CASES[name]
    world = World(replace(case, tiny=LoudTiny(**vars(case.tiny))), seed)
    world.lm_head = world.lm_head / world.config.hidden_size**0.5
    return world


def head_of(lm_head: Tensor) -> nn.Linear:
    head = nn.Linear(lm_head.shape[1], lm_head.shape[0], bias=False)
    head.weight.data.copy_(lm_head)
    return head


def open_world(world: World, runtime: str, folder: Path) -> Session:
    checkpoint = write_files(folder / "checkpoint", world.case.tiny.config(), world.case.tiny.tensors())
    options = BuildOptions(runtime=runtime, **SMALL)
    session = open_session(build_engine(checkpoint, folder / "engine", options))
    session.bind_target(world.embedding, world.lm_head)
    return session


@pytest.mark.parametrize("runtime", ["onnxruntime", "torch"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_greedy_paths_of_an_engine_equal_the_authors(name: str, seed: int, runtime: str, tmp_path: Path) -> None:
    world = loud_world(name, seed)
    authors, head = Authors(world.case.tiny), head_of(world.lm_head)
    proposer = SessionProposer(open_world(world, runtime, tmp_path))
    state, position, turned = proposer.alloc_state(), 0, 0
    for step, (rows, num_drafts) in enumerate(STEPS):
        features, embeddings = world.features(step), world.embeddings(step)
        proposer.prefill_drafter(range(rows), features, state, start_position=position)
        position += rows
        ours = proposer.propose(world.anchor(step), position, num_drafts, state)
        proposer.after_verify(0, state)
        hidden = authors.step(features, embeddings)[None, 1:]
        expected, _, _ = authors.model.propose(hidden, torch.tensor([world.anchor(step)]), head, 0.0)
        theirs = expected[0].tolist()
        if world.config.mask_token_id in theirs:  # never emitted, so our proposal ends before it
            theirs = theirs[: theirs.index(world.config.mask_token_id)]
        assert ours == theirs
        best = authors.model.compute_logits(hidden, head).argmax(-1)[0].tolist()
        turned += sum(a != b for a, b in zip(ours, best, strict=False))
    assert turned > 3, "the selector must matter"


def rows_of(world: World) -> tuple[Callable[[int, int, float], Tensor], DraftInputs]:
    """Their q of one row after a token, over the whole vocabulary; and our rule's input for the same rows."""
    authors, w = Authors(world.case.tiny), world.weights
    block = authors.step(world.features(0), world.embeddings(0))
    hidden, logits = block[1:], authors.logits(block, world.lm_head)
    ids, values = ops.top_k(logits, 16)

    def q_of(step: int, previous: int, temperature: float) -> Tensor:
        row = slice(step, step + 1)
        _, candidates, q = authors.model.candidate_selector.select(
            hidden[None, row], logits[None, row], torch.tensor([previous]), temperature
        )
        return torch.zeros(world.config.vocab_size).scatter(0, candidates[0, 0], q[0, 0])

    given = DraftInputs(
        ids=ids[None], values=values[None], anchors=torch.tensor([world.anchor(0)]), tables=w, config=world.config,
        projected=ops.linear(hidden, w["selector_projection"])[None],
    )  # fmt: skip
    return q_of, given


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_q_of_a_sampled_path_equals_the_authors(seed: int) -> None:
    """Their q along our path: row by row, with our previous draft as their anchor."""
    world, temperature = loud_world("dflash2", seed), 0.8
    theirs, given = rows_of(world)
    drafts = HEADS["dflash2"].draft(given, Sampling(temperature, torch.Generator().manual_seed(seed)))
    previous = [world.anchor(0), *drafts.tokens[0].tolist()]
    assert drafts.q is not None
    for step, q in enumerate(drafts.q[0]):
        ours = torch.zeros(world.config.vocab_size).scatter(0, given.ids[0, step].long(), q)
        assert_close(ours, theirs(step, previous[step], temperature), ("torch", "fp32"))


@torch.inference_mode()
def test_sampled_paths_are_distributed_as_the_authors() -> None:
    """Two drafts of 20,000 sequences against the exact joint distribution of the authors' rule."""
    world, temperature, times = loud_world("dflash2", 1), 1.0, 20000
    theirs, given = rows_of(world)
    vocab = world.config.vocab_size
    first = theirs(0, world.anchor(0), temperature)
    second = torch.stack([theirs(1, token, temperature) for token in range(vocab)])
    joint = first[:, None] * second
    assert given.projected is not None
    many = DraftInputs(
        given.ids[:, :2].expand(times, -1, -1), given.values[:, :2].expand(times, -1, -1), given.anchors.expand(times),
        given.tables, given.config, projected=given.projected[:, :2].expand(times, -1, -1),
    )  # fmt: skip

    def p_value(temperature: float) -> float:
        sampling = Sampling(temperature, torch.Generator().manual_seed(7))
        tokens = HEADS["dflash2"].draft(many, sampling).tokens
        counts = torch.zeros(vocab * vocab).index_add(0, tokens[:, 0] * vocab + tokens[:, 1], torch.ones(times))
        return chi_square_p(counts, joint.flatten())

    assert p_value(temperature) > 1e-3
    assert p_value(1.2 * temperature) < 1e-6, "the test must see a wrong temperature"
