"""Tiny random drafter checkpoints of every family, as Hugging Face would store them.

``write_checkpoint(directory, family="dflash2", window=16)`` writes ``config.json`` and ``model.safetensors``.
``Tiny(...)`` gives the same two things as plain values, for tests that change one of them before writing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}


@dataclass(frozen=True)
class Tiny:
    """One tiny drafter; the defaults fit a Llama-like target with 6 layers, hidden size 64 and 160 tokens."""

    family: str = "dflash"
    # geometry
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: dict[str, Any] | None = None  # e.g. {"factor": 8.0, "original_max_position_embeddings": 32}
    # block and target
    block_size: int | None = None  # default: 8, in DSpark 7
    mask_token_id: int = 3
    target_layer_ids: tuple[int, ...] = (1, 2, 4)
    target_hidden_size: int | None = None  # default: hidden_size
    num_target_layers: int | None = 6
    vocab_size: int = 160
    draft_vocab_size: int | None = None  # smaller than vocab_size: a reduced vocabulary with d2t and t2d
    # masks: which layers slide, over how many tokens, and the checkpoint's word on causality (None: silent)
    sliding_layers: tuple[int, ...] = ()
    window: int | None = None
    is_causal: bool | None = None
    # numerics
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    # the drafter's own tensors
    own_embedding: bool = False
    own_lm_head: bool = False
    mask_embedding: bool = False
    # DFlash 2
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 8
    selector_top_k: int = 16
    # DSpark
    markov_rank: int = 8
    markov_head_type: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    # storage
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        nested: dict[str, Any] = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        top: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": "qwen3",
            "dtype": str(self.dtype).removeprefix("torch."),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.yarn is None else {"rope_type": "yarn", **self.yarn},
            "max_position_embeddings": 4096,
            "vocab_size": self.vocab_size,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": [
                "sliding_attention" if layer in self.sliding_layers else "full_attention"
                for layer in range(self.num_layers)
            ],
            "sliding_window": self.window,
            "block_size": self.block_size or (7 if self.family == "dspark" else 8),
            "dflash_config": nested,
        }
        optional = {
            "num_target_layers": self.num_target_layers,
            "is_causal": self.is_causal,
            "draft_vocab_size": self.draft_vocab_size,
        }
        top.update({name: value for name, value in optional.items() if value is not None})
        multipliers = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
        nested.update({name: getattr(self, name) for name in multipliers if getattr(self, name) is not None})
        if self.family == "dflash2":
            names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
            nested.update({name: getattr(self, name) for name in names})
        if self.family == "dspark":
            nested.update(
                projector_type="dspark",
                markov_rank=self.markov_rank,
                markov_head_type=self.markov_head_type,
                enable_confidence_head=self.confidence,
                confidence_head_with_markov=self.confidence_with_markov,
            )
        return top

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every floating-point tensor of the file."""
        h, inner, d = self.hidden_size, self.intermediate_size, self.head_dim
        target_hidden = self.target_hidden_size or h
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, len(self.target_layer_ids) * target_hidden),
            "hidden_norm.weight": (h,),
            "norm.weight": (h,),
        }
        layer = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (self.num_heads * d, h),
            "self_attn.k_proj.weight": (self.num_kv_heads * d, h),
            "self_attn.v_proj.weight": (self.num_kv_heads * d, h),
            "self_attn.o_proj.weight": (h, self.num_heads * d),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
            "mlp.gate_proj.weight": (inner, h),
            "mlp.up_proj.weight": (inner, h),
            "mlp.down_proj.weight": (h, inner),
        }
        if self.family == "dflash2":
            taps = self.conv_kernel_size
            for conv in ("attention_conv", "mlp_conv"):
                layer[f"{conv}.base_kernel"] = (2, taps, h)
                layer[f"{conv}.kernel_projection.weight"] = (2 * taps * (h // self.conv_group_size), h)
        for index in range(self.num_layers):
            shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
        return shapes | self._head_shapes()

    def _head_shapes(self) -> dict[str, tuple[int, ...]]:
        h, vocab, draft_vocab = self.hidden_size, self.vocab_size, self.draft_vocab_size or self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.family == "dflash2":
            shapes["candidate_selector.hidden_projection.weight"] = (self.selector_rank, h)
            shapes["candidate_selector.predecessor_codebook"] = (vocab, self.selector_rank)
            shapes["candidate_selector.successor_codebook"] = (vocab, self.selector_rank)
        if self.family == "dspark":
            r = self.markov_rank
            if r:
                shapes["markov_head.markov_w1.weight"] = (vocab, r)
                shapes["markov_head.markov_w2.weight"] = (draft_vocab, r)
            if self.markov_head_type == "gated":
                shapes |= {"markov_head.gate_proj.weight": (r, h + r), "markov_head.gate_proj.bias": (r,)}
            if self.markov_head_type == "rnn":
                shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + h), "markov_head.joint_proj.bias": (3 * r,)}
            if self.confidence:
                shapes["confidence_head.proj.weight"] = (1, h + r * self.confidence_with_markov)
                shapes["confidence_head.proj.bias"] = (1,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (vocab, h)
        if self.own_lm_head:
            shapes["lm_head.weight"] = (draft_vocab, h)
        if self.mask_embedding:
            shapes["mask_embedding"] = (h,)
        return shapes

    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype, as safetensors names it, and shape of every tensor of the file; nothing is allocated."""
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[self.dtype]
        headers = {name: (dtype, shape) for name, shape in self.shapes().items()}
        if self.draft_vocab_size is not None:
            headers |= {"d2t": ("I64", (self.draft_vocab_size,)), "t2d": ("BOOL", (self.vocab_size,))}
        return headers

    def tensors(self) -> dict[str, Tensor]:
        """Random tensors that keep activations near 1: norms and embeddings around 1, matrices of fan-in scale."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors = {}
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=generator)
            is_norm, is_row = name.endswith("norm.weight"), name in ("embed_tokens.weight", "mask_embedding")
            scale = 1.0 if is_row else 1.0 / math.sqrt(shape[-1])
            tensors[name] = (1.0 + 0.1 * noise if is_norm else noise * scale).to(self.dtype)
        if self.draft_vocab_size is not None:
            kept = torch.randperm(self.vocab_size, generator=generator)[: self.draft_vocab_size].sort().values
            tensors["d2t"] = kept - torch.arange(self.draft_vocab_size)  # an offset table, as speculators writes it
            tensors["t2d"] = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
        return tensors


def write_files(directory: str | Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write ``config.json`` and ``model.safetensors``; returns the directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_checkpoint(directory: str | Path, family: str = "dflash", **options: Any) -> Path:
    """Write a tiny checkpoint; ``options`` are the fields of ``Tiny``. Returns the directory."""
    tiny = Tiny(family=family, **options)
    return write_files(directory, tiny.config(), tiny.tensors())
