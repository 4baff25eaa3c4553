"""DFlash 2: grouped dynamic convolutions in the layers, and a selector that walks 16 candidates a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import ConvConfig, DrafterConfig, SelectorConfig
from .drafting import DraftInputs, Drafts, Sampling, required, walk
from .rows import BlockOutput, DraftHead, Field, anchor_counted, row
from .values import Values, integer, only, rank

_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _spellings(key: str) -> tuple[str, str]:
    return f"dflash_config.{key}", key


def _groups_divide(values: Values) -> Iterator[str]:
    group, hidden = values["conv_group_size"], values["hidden_size"]
    if hidden % group:
        yield f"conv_group_size is {group}, but must divide hidden_size {hidden}"


def _whole_vocabulary(values: Values) -> Iterator[str]:
    draft, vocab = values["draft_vocab_size"], values["vocab_size"]
    if draft != vocab:
        yield (
            f"draft_vocab_size is {draft}, vocab_size {vocab}: the codebooks of DFlash 2 are keyed by target ids, "
            "so its head must score the whole vocabulary"
        )


def _causality_is_said(values: Values) -> Iterator[str]:
    slides = any(mask.window is not None for mask in values["layer_masks"])
    silent = values["is_causal"] is None and values["sliding_non_causal"] is None
    if slides and silent and not values["use_swa"]:  # use_swa is not causal by definition
        yield (
            "is_causal is missing, expected true or false: the authors' code would run the sliding layers causal, "
            "but the published DFlash 2 drafters are trained not causal"
        )


def draft(inputs: DraftInputs, sampling: Sampling | None = None) -> Drafts:
    """Walk the candidates with ``score_j(b) = value_j(b) + sum_q A[previous, q] * r_j[q] * S[b, q]``.

    A and S are the predecessor and successor codebooks ``[V, r]``, r_j the projected row.

    Raises:
        ValueError: no projected rows.

    Source: z-lab/dflash model.py, CandidateSelector.select.
    """
    projected = required(inputs.projected, "projected", "dflash2").float()
    predecessor, successor = inputs.tables["predecessor_codebook"], inputs.tables["successor_codebook"]
    weighted = successor[inputs.ids.long()].float() * projected[:, :, None]  # [S, m, 16, r]

    def edge(step: int, previous: Tensor) -> Tensor:
        return torch.einsum("skr,sr->sk", weighted[:, step], predecessor[previous].float())

    return walk(inputs, edge, sampling)


def _rank(config: DrafterConfig) -> int:
    return required(config.selector, "selector", "dflash2").rank


_CONV_DIMS = ("2 c H", "2*c*H/cg H")

SELECTOR = DraftHead(
    family="dflash2",
    architectures=("DFlash2DraftModel", "DFlash2Speculator"),
    default_block_size=16,
    block=anchor_counted,
    draft=draft,
    outputs=(BlockOutput("projected", weight="selector_projection", width=_rank),),
    tables=("predecessor_codebook", "successor_codebook"),
    witness={key: lambda value: True for key in _KEYS}
    | {"speculators_model_type": lambda value: value == "dflash2"},
    fields=(
        Field("conv_kernel_size", only(2), _spellings("conv_kernel_size")),
        Field("conv_group_size", integer(1), _spellings("conv_group_size")),
        Field("selector_rank", rank(8), _spellings("selector_rank")),
        Field("selector_top_k", only(16), _spellings("selector_top_k")),
    ),
    tensors=(
        row("attention_conv_base", _CONV_DIMS[0], "layers.{i}.attention_conv.base_kernel"),
        row("attention_conv_projection", _CONV_DIMS[1], "layers.{i}.attention_conv.kernel_projection.weight"),
        row("mlp_conv_base", _CONV_DIMS[0], "layers.{i}.mlp_conv.base_kernel"),
        row("mlp_conv_projection", _CONV_DIMS[1], "layers.{i}.mlp_conv.kernel_projection.weight"),
        row("selector_projection", "r H", "candidate_selector.hidden_projection.weight"),
        row("predecessor_codebook", "V r", "candidate_selector.predecessor_codebook",
            "candidate_selector.predecessor_codebook.weight"),
        row("successor_codebook", "V r", "candidate_selector.successor_codebook",
            "candidate_selector.successor_codebook.weight"),
    ),
    letters={"c": "conv_kernel_size", "cg": "conv_group_size", "r": "selector_rank"},
    rules=(_groups_divide, _whole_vocabulary, _causality_is_said),
    parts=lambda v: {
        "conv": ConvConfig(v["conv_kernel_size"], v["conv_group_size"]),
        "selector": SelectorConfig(v["selector_rank"], v["selector_top_k"]),
    },
    parameters=lambda facts: "L*2*2*c*H + L*2*2*c*H/cg*H + r*H + 2*V*r",
)  # fmt: skip
