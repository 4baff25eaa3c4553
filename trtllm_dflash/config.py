"""What a drafter is and what a build is asked for: frozen values and the sizes derived from them; no I/O.

``DrafterConfig`` is the resolved checkpoint: every alias, default and precedence rule has been applied by
``checkpoint.parse``, and nothing after it looks at a Hugging Face field again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["dflash", "dflash2", "dspark"]
DType = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension with Hugging Face semantics."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin; queries and keys both carry it, so attention scores scale by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: rotate-half pairing over the whole head, absolute token positions."""

    theta: float
    yarn: YarnScaling | None = None

    @property
    def magnitude(self) -> float:
        """Factor on cos and sin."""
        return 1.0 if self.yarn is None else self.yarn.magnitude

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Angle per position of each of the ``head_dim / 2`` dimension pairs, in radians, as float64 values.

        Source: transformers ``modeling_rope_utils._compute_yarn_parameters``.
        """
        plain = [self.theta ** (-2.0 * d / head_dim) for d in range(head_dim // 2)]
        if self.yarn is None:
            return plain
        yarn = self.yarn

        def correction(rotations: float) -> float:
            """Dimension whose wavelength makes ``rotations`` turns over the original context."""
            turns = yarn.original_max_position_embeddings / (2.0 * math.pi * rotations)
            return head_dim * math.log(turns) / (2.0 * math.log(self.theta))

        low = max(math.floor(correction(yarn.beta_fast)), 0)
        high = min(math.ceil(correction(yarn.beta_slow)), head_dim - 1)
        span = (high - low) or 0.001  # Hugging Face keeps the ramp finite in the same way
        ramp = [min(max((d - low) / span, 0.0), 1.0) for d in range(head_dim // 2)]
        return [f / yarn.factor * r + f * (1.0 - r) for f, r in zip(plain, ramp, strict=True)]


@dataclass(frozen=True)
class LayerMask:
    """Who sees whom in one layer, by true positions.

    A key at ``s`` is visible to a query at ``t`` when ``t - s < window`` and ``s <= t`` (causal) or
    ``s - t < window`` (not causal). ``window=None`` means no limit.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class ConvConfig:
    """DFlash 2's grouped dynamic causal convolution around attention and MLP."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash 2's candidate selector."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class MarkovConfig:
    """DSpark's Markov head."""

    rank: int
    kind: Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class ConfidenceConfig:
    """DSpark's confidence head; its input is the hidden state, with the predecessor's embedding if ``with_markov``."""

    with_markov: bool


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter, resolved. Sizes in elements, positions and widths in tokens."""

    family: Family
    # transformer
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_masks: tuple[LayerMask, ...]
    # block
    block_size: int  # the checkpoint's field exactly as read: counts the anchor in v1 / DFlash 2, drafts in DSpark
    max_draft_len: int  # drafts of a block at the trained width
    first_draft_row: int  # block row whose output is draft 1: 1 in v1 / DFlash 2, 0 in DSpark's shifted rows
    mask_token_id: int
    # target
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]  # 0-based blocks whose output is tapped, in concatenation order
    num_target_layers: int | None  # None: the checkpoint does not say
    vocab_size: int  # rows of the target's lm_head
    draft_vocab_size: int  # rows of the head the drafts come from
    # numerics
    dtype: DType  # of the checkpoint's weights
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    valid_vocab_size: int | None = None  # vocabulary columns from here on are padding; None: none are
    # what the tensors say
    owns_embedding: bool = False
    owns_lm_head: bool = False
    has_mask_embedding: bool = False
    # family parts
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None

    @property
    def num_taps(self) -> int:
        """K: target layers whose outputs make up a feature."""
        return len(self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """K * Ht: elements of one target feature."""
        return self.num_taps * self.target_hidden_size

    @property
    def valid_columns(self) -> int:
        """Columns of the head that can be drafted; those after them are padding."""
        return self.draft_vocab_size if self.valid_vocab_size is None else self.valid_vocab_size

    @property
    def q_size(self) -> int:
        """Elements of one row's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one row's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused qkv projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def max_block_rows(self) -> int:
        """B at the trained width."""
        return self.block_rows(self.max_draft_len)

    def block_rows(self, num_drafts: int) -> int:
        """Rows of the block forward that yields ``num_drafts`` drafts."""
        return num_drafts + self.first_draft_row

    @property
    def context_window(self) -> int | None:
        """Context rows that any layer can still see from the next block, W - 1; None when a layer sees all of them."""
        windows = [mask.window for mask in self.layer_masks]
        return None if None in windows else max(w for w in windows if w is not None) - 1

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``config.json``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """The inverse of ``to_json``. Raises TypeError or KeyError when the values are not of this shape."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise TypeError(f"unknown fields {', '.join(unknown)}")
        parts: dict[str, type] = {
            "conv": ConvConfig,
            "selector": SelectorConfig,
            "markov": MarkovConfig,
            "confidence": ConfidenceConfig,
        }
        given = dict(values)
        rope = dict(given["rope"])
        yarn = rope.pop("yarn")
        given["rope"] = RopeConfig(**rope, yarn=None if yarn is None else YarnScaling(**yarn))
        given["layer_masks"] = tuple(LayerMask(**mask) for mask in given["layer_masks"])
        given["target_layer_ids"] = tuple(given["target_layer_ids"])
        for name, part in parts.items():
            if given.get(name) is not None:
                given[name] = part(**given[name])
        return cls(**given)


@dataclass(frozen=True)
class TargetSpec:
    """What a drafter must know of its target."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of lm_head
    embedding_rows: int


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class BuildOptions:
    """What a build is asked for; flags, help texts and the manifest follow from these fields."""

    runtime: Literal["onnxruntime", "torch"] = _option("onnxruntime", "session that the engine is for")
    dtype: Literal["float32", "bfloat16"] = _option(
        "float32", "compute type; onnxruntime has only float32, weights keep the checkpoint's type on disk"
    )
    max_batch_size: int = _option(8, "sequences in one draft step")
    max_draft_len: int | None = _option(None, "drafts of a block; default: the trained width")
    max_seq_len: int = _option(4096, "tokens of a sequence, prompt and output together")
    max_num_tokens: int = _option(2048, "context rows in one ingest call")
    tokens_per_block: int = _option(64, "context rows in one cache page")
    valid_vocab_size: int | None = _option(
        None, "vocabulary columns from here on are padding and never drafted; default: none are"
    )
    window_size: int | None = _option(
        None, "tokens of a sliding window over all layers, in place of the checkpoint's; default: as it says"
    )
    ctx_window: int | None = _option(
        None, "newest context rows that a draft is conditioned on, at most; 0: none, an ablation; default: all"
    )
