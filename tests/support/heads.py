"""Random input of the drafting rules, and the statistics that sampled drafts are judged by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.fakes import VOCAB, tiny_config
from trtllm_dflash.config import ConfidenceConfig, ConvConfig, DrafterConfig, MarkovConfig, SelectorConfig
from trtllm_dflash.heads.drafting import DraftInputs
from trtllm_dflash.reference import ops

HIDDEN, RANK = 64, 8
SHAPES: dict[str, tuple[int, ...]] = {
    "predecessor_codebook": (VOCAB, RANK), "successor_codebook": (VOCAB, RANK),
    "markov_w1": (VOCAB, RANK), "markov_w2": (VOCAB, RANK),
    "markov_gate": (RANK, HIDDEN + RANK), "markov_gate_bias": (RANK,),
    "markov_joint": (3 * RANK, 2 * RANK + HIDDEN), "markov_joint_bias": (3 * RANK,),
    "confidence": (1, HIDDEN + RANK), "confidence_bias": (1,),
}  # fmt: skip

TABLES_OF_KIND: dict[str, tuple[str, ...]] = {
    "vanilla": (), "gated": ("markov_gate", "markov_gate_bias"), "rnn": ("markov_joint", "markov_joint_bias"),
}  # fmt: skip


def selector_config() -> DrafterConfig:
    return tiny_config(family="dflash2", conv=ConvConfig(2, 16), selector=SelectorConfig(RANK, 16))


def markov_config(kind: str = "vanilla", *, with_markov: bool | None = True) -> DrafterConfig:
    """A DSpark drafter; ``with_markov=None`` is one without a confidence head."""
    confidence = None if with_markov is None else ConfidenceConfig(with_markov)
    markov = MarkovConfig(RANK, kind)  # type: ignore[arg-type]
    return tiny_config(family="dspark", block_size=7, first_draft_row=0, markov=markov, confidence=confidence)


def tables(config: DrafterConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tables that a drafter's rule reads; large enough to turn drafts away from the best candidate."""
    generator = torch.Generator().manual_seed(seed)
    names: tuple[str, ...] = ()
    if config.selector is not None:
        names += ("predecessor_codebook", "successor_codebook")
    if config.markov is not None:
        names += ("markov_w1", "markov_w2", *TABLES_OF_KIND[config.markov.kind])
    if config.confidence is not None:
        names += ("confidence", "confidence_bias")
    result = {}
    for name in names:
        matrix = torch.randn(SHAPES[name], generator=generator)
        small = name.startswith(("markov_gate", "markov_joint", "confidence"))
        result[name] = (matrix / 4 if small else matrix).to(dtype)
    if config.confidence is not None and not config.confidence.with_markov:
        result["confidence"] = result["confidence"][:, :HIDDEN]
    return result


def inputs(config: DrafterConfig, *, seed: int = 0, sequences: int = 3, drafts: int = 7, **given: Any) -> DraftInputs:
    """Candidates of random logits, with hidden states and projected rows."""
    generator = torch.Generator().manual_seed(1000 + seed)
    logits = torch.randn(sequences, drafts, VOCAB, generator=generator)
    ids, values = ops.top_k(logits.flatten(0, 1), 16)
    rows: dict[str, Any] = {
        "ids": ids.view(sequences, drafts, 16),
        "values": values.view(sequences, drafts, 16),
        "anchors": torch.randint(VOCAB, (sequences,), generator=generator),
        "tables": tables(config, seed=seed),
        "config": config,
        "hidden": torch.randn(sequences, drafts, HIDDEN, generator=generator),
        "projected": torch.randn(sequences, drafts, RANK, generator=generator),
    }
    return DraftInputs(**(rows | given))


def full_logits(*, seed: int = 0, sequences: int = 3, drafts: int = 7) -> Tensor:
    """The logits whose candidates ``inputs`` gives for the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(sequences, drafts, VOCAB, generator=generator)


def repeated(one: DraftInputs, times: int) -> DraftInputs:
    """The first sequence of ``one``, so many times."""

    def copies(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[:1].expand(times, *rows.shape[1:])

    first = {name: copies(getattr(one, name)) for name in ("ids", "values", "anchors", "hidden", "projected")}
    return DraftInputs(tables=one.tables, config=one.config, **first)  # type: ignore[arg-type]


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """How likely counts at least this far from the expected ones are; cells that expect fewer than 5 are merged.

    Shapes: counts and probabilities ``[n]``, any order.
    """
    expected = probabilities.double() * float(counts.sum())
    rare = expected < 5
    cells = torch.cat((counts[~rare].double(), counts[rare].double().sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    statistic = ((cells - wanted).square() / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), statistic / 2))
