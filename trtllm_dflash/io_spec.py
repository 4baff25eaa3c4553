"""Every input and output of the three models: name, type, dimensions.

Graph builders declare from these tables, ``graph.check`` compares against them, sessions and build profiles read them.
What the block model yields beside hidden states, the head's row says.
``"T"`` is the engine's compute type. A dimension is a number or one of the symbols below; symbols are run-time sizes.

    S sequences - B block rows - n context rows of one call - R rows that need logits - P pages of the pool
    max_pages pages that the longest context of the call spans
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import DrafterConfig
from .heads.base import HEADS

ModelName = Literal["context", "block", "head"]
ElementType = Literal["T", "float32", "int32"]

MODELS: tuple[ModelName, ...] = ("context", "block", "head")
NUM_CANDIDATES = 16  # candidates per row that every head family gets; the published selectors use exactly 16


@dataclass(frozen=True)
class TensorSpec:
    """One input or output."""

    name: str
    dtype: ElementType
    dims: tuple[int | str, ...]


@dataclass(frozen=True)
class ModelSpec:
    """The signature of one model."""

    name: ModelName
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def model_spec(model: ModelName, config: DrafterConfig) -> ModelSpec:
    """The signature of ``model`` for this drafter."""
    return {"context": _context, "block": _block, "head": _head}[model](config)


def _context(c: DrafterConfig) -> ModelSpec:
    kv = ("n", c.num_layers, c.num_kv_heads, c.head_dim)
    return ModelSpec(
        "context",
        inputs=(TensorSpec("features", "T", ("n", c.feature_size)), TensorSpec("positions", "int32", ("n",))),
        outputs=(TensorSpec("context_k", "T", kv), TensorSpec("context_v", "T", kv)),
    )


def _block(c: DrafterConfig) -> ModelSpec:
    cache = ("P", c.num_layers, "page", c.num_kv_heads, c.head_dim)
    table = ("S", "max_pages")
    return ModelSpec(
        "block",
        inputs=(
            TensorSpec("embeddings", "T", ("S", "B", c.hidden_size)),
            TensorSpec("anchor_position", "int32", ("S",)),
            TensorSpec("k_cache", "T", cache),
            TensorSpec("v_cache", "T", cache),
            TensorSpec("page_table", "int32", table),
            TensorSpec("page_position", "int32", table),
            TensorSpec("page_rows", "int32", table),
        ),
        outputs=(
            TensorSpec("hidden", "T", ("S", "B", c.hidden_size)),
            *(TensorSpec(o.name, "T", ("S", "B", o.width(c))) for o in HEADS[c.family].outputs),
        ),
    )


def _head(c: DrafterConfig) -> ModelSpec:
    return ModelSpec(
        "head",
        inputs=(
            TensorSpec("hidden", "T", ("R", c.hidden_size)),
            TensorSpec("lm_head", "T", (c.draft_vocab_size, c.hidden_size)),
        ),
        outputs=(
            TensorSpec("topk_ids", "int32", ("R", NUM_CANDIDATES)),
            TensorSpec("topk_values", "float32", ("R", NUM_CANDIDATES)),
            TensorSpec("logsumexp", "float32", ("R",)),
        ),
    )
