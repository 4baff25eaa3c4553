"""A DSpark drafter that has learnt a target whose every token is known, so that all its drafts are right.

The drafter's logits are all equal: candidates are the first 16 ids, and the Markov head alone decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.engines import SMALL
from tests.support.fakes import VOCAB, ChainTarget
from tests.support.tiny import Tiny, write_files
from trtllm_dflash.config import BuildOptions
from trtllm_dflash.pipeline import build_engine
from trtllm_dflash.runtime.decode import Generation, generate
from trtllm_dflash.runtime.open import open_session
from trtllm_dflash.runtime.session_proposer import SessionProposer

FIRST, LENGTH = 4, 12  # a ring of ids 4 to 15


def following(token: int) -> int:
    return FIRST + (token - FIRST + 1) % LENGTH


def chain_checkpoint(
    folder: Path, kind: str = "vanilla", *, unsure_after: int | None = None, kept: Tensor | None = None, **options: Any
) -> Path:
    """A drafter of the ring, unsure of drafts after ``unsure_after``; ``kept`` are the ids of a reduced vocabulary."""
    reduced = {} if kept is None else {"draft_vocab_size": len(kept), "own_lm_head": True}
    tiny = Tiny("dspark", **({"markov_rank": VOCAB, "markov_head_type": kind} | reduced | options))
    tensors = tiny.tensors()
    one_hot = torch.eye(VOCAB)
    tensors["markov_head.markov_w1.weight"] = one_hot
    scores = torch.stack([9 * one_hot[following(t)] for t in range(VOCAB)], dim=1)
    tensors["markov_head.markov_w2.weight"] = scores if kept is None else scores[kept]
    if kept is not None:
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    if tiny.own_lm_head:
        tensors["lm_head.weight"].zero_()
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"].zero_()
    if kind == "rnn":
        joint = torch.zeros(3 * VOCAB, 2 * VOCAB + tiny.hidden_size)
        joint[2 * VOCAB :, VOCAB : 2 * VOCAB] = 9 * one_hot
        tensors |= {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": torch.zeros(3 * VOCAB)}
    sure = torch.full((VOCAB,), 9.0)
    if unsure_after is not None:
        sure[unsure_after] = -9.0
    tensors["confidence_head.proj.weight"] = torch.cat((torch.zeros(tiny.hidden_size), sure))[None]
    tensors["confidence_head.proj.bias"].zero_()
    return write_files(folder, tiny.config(), tensors)


def chain_proposer(
    folder: Path, kind: str = "vanilla", *, build: dict[str, Any] | None = None, tiny: dict[str, Any] | None = None,
    unsure_after: int | None = None, **options: Any,
) -> SessionProposer:  # fmt: skip
    """``options`` are those of the proposer, ``tiny`` those of the checkpoint, ``build`` those of the build."""
    checkpoint = chain_checkpoint(folder / "checkpoint", kind, unsure_after=unsure_after, **(tiny or {}))
    engine = build_engine(checkpoint, folder / "engine", BuildOptions(**(SMALL | (build or {}))))
    return SessionProposer(open_session(engine), **options)


def generate_on_chain(
    proposer: SessionProposer, tokens: int = 80, prompt: int = FIRST, *, lm_head: Tensor | None = None
) -> tuple[ChainTarget, Generation]:
    """Generate and check the output; ``lm_head`` is what the target shares, default: all zero."""
    target = ChainTarget(following)
    proposer.session.bind_target(target.embedding, target.lm_head if lm_head is None else lm_head)
    result = generate(target, proposer, [prompt], max_new_tokens=tokens)
    assert result.token_ids == [FIRST + (prompt - FIRST + 1 + i) % LENGTH for i in range(tokens)]
    return target, result
