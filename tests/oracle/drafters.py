"""Tiny random drafters for comparing the reference: resolved by hand, so that parser and loader are not involved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.tiny import Tiny
from trtllm_dflash.config import ConvConfig, DrafterConfig, LayerMask, RopeConfig, SelectorConfig, YarnScaling

FULL = LayerMask(None, causal=False)
PER_LAYER = {
    "input_norm": ("input_layernorm.weight",),
    "post_norm": ("post_attention_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
PER_LAYER_DFLASH2 = {
    f"{conv}_{part}": (f"{conv}.{name}",)
    for conv in ("attention_conv", "mlp_conv")
    for part, name in (("base", "base_kernel"), ("projection", "kernel_projection.weight"))
}
SELECTOR = {
    "selector_projection": "candidate_selector.hidden_projection.weight",
    "predecessor_codebook": "candidate_selector.predecessor_codebook",
    "successor_codebook": "candidate_selector.successor_codebook",
}


@dataclass(frozen=True)
class Case:
    """A checkpoint's words (``tiny``) and what they must mean (``masks``, ``yarn``), written down independently."""

    tiny: Tiny
    masks: tuple[LayerMask, ...]
    yarn: YarnScaling | None = None

    def config(self) -> DrafterConfig:
        """The drafter that the checkpoint's words mean."""
        t = self.tiny
        block_size = t.block_size or 8
        is_dflash2 = t.family == "dflash2"
        return DrafterConfig(
            family="dflash2" if is_dflash2 else "dflash",
            hidden_size=t.hidden_size, intermediate_size=t.intermediate_size, num_layers=t.num_layers,
            num_heads=t.num_heads, num_kv_heads=t.num_kv_heads, head_dim=t.head_dim, rms_norm_eps=t.rms_norm_eps,
            rope=RopeConfig(t.rope_theta, self.yarn), layer_masks=self.masks,
            block_size=block_size, max_draft_len=block_size - 1, first_draft_row=1, mask_token_id=t.mask_token_id,
            target_hidden_size=t.hidden_size, target_layer_ids=t.target_layer_ids,
            num_target_layers=t.num_target_layers, vocab_size=t.vocab_size, draft_vocab_size=t.vocab_size,
            dtype="float32", input_embedding_scale=t.input_embedding_scale or 1.0,
            output_multiplier=t.output_multiplier or 1.0, final_logit_softcapping=t.final_logit_softcapping,
            conv=ConvConfig(t.conv_kernel_size, t.conv_group_size) if is_dflash2 else None,
            selector=SelectorConfig(t.selector_rank, t.selector_top_k) if is_dflash2 else None,
        )  # fmt: skip

    def weights(self) -> dict[str, Tensor]:
        """The checkpoint's tensors in our layout."""
        tensors = self.tiny.tensors()
        is_dflash2 = self.tiny.family == "dflash2"
        names = PER_LAYER | (PER_LAYER_DFLASH2 if is_dflash2 else {})
        layers = range(self.tiny.num_layers)
        stacked = {
            ours: torch.stack([torch.cat([tensors[f"layers.{i}.{part}"] for part in theirs]) for i in layers])
            for ours, theirs in names.items()
        }
        whole = {name: f"{name}.weight" for name in ("fc", "hidden_norm", "norm")} | (SELECTOR if is_dflash2 else {})
        return stacked | {ours: tensors[theirs] for ours, theirs in whole.items()}


def v1_case(*masks: LayerMask, seed: int = 0) -> Case:
    """A v1 drafter with one layer per mask; 4 heads of 16 on hidden size 48, so that no two sizes are confused."""
    return Case(Tiny(hidden_size=48, num_layers=len(masks), seed=seed), masks)


def random_rows(seed: int, *shape: int) -> Tensor:
    """Normal noise that depends on nothing but its seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
