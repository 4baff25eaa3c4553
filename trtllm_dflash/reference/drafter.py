"""The drafter in plain fp32 torch, one sequence at a time: what every other runner is compared with.

It reads next to the formulas: context rows become keys and values once; block rows go through the layers and see both.
Batches, pages and embeddings belong to the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import DrafterConfig
from . import ops

BACKBONE = (
    "fc", "hidden_norm", "norm", "input_norm", "post_norm", "qkv", "q_norm", "k_norm", "o", "gate_up", "down",
)  # fmt: skip
CONVOLUTIONS = ("attention_conv_base", "attention_conv_projection", "mlp_conv_base", "mlp_conv_projection")


@dataclass(frozen=True)
class _Context:
    """What a block sees besides itself, and where the block stands."""

    anchor_position: int
    keys: Tensor  # [N, L, nkv, D]
    values: Tensor  # [N, L, nkv, D]
    positions: Tensor  # [N]


class ReferenceDrafter:
    """A drafter's three models: context, block and head.

    ``weights`` has our layout's names and shapes (layers stacked in front), in any float dtype; the tensors used here
    are held in fp32, the rest of the mapping is not touched.
    """

    def __init__(self, config: DrafterConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        names = BACKBONE if config.conv is None else BACKBONE + CONVOLUTIONS
        self._weights = {name: weights[name].detach().float() for name in names}
        self._inverse_frequencies = torch.tensor(
            config.rope.inverse_frequencies(config.head_dim), dtype=torch.float32, device=self._weights["fc"].device
        )

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Final keys and values ``[n, L, nkv, D]`` of context rows: ``features [n, K*Ht]``, true ``positions [n]``."""
        w, config = self._weights, self.config
        return ops.context_kv(
            features, positions, w["fc"], w["hidden_norm"], w["qkv"], w["k_norm"], self._inverse_frequencies,
            num_kv_heads=config.num_kv_heads, eps=config.rms_norm_eps, magnitude=config.rope.magnitude,
        )  # fmt: skip

    def block(
        self,
        embeddings: Tensor,
        anchor_position: int,
        context_keys: Tensor,
        context_values: Tensor,
        context_positions: Tensor,
    ) -> Tensor:
        """Run one draft block; row i stands at ``anchor_position + i``.

        Shapes:
            embeddings                    [B, H]          anchor row, then mask rows
            context_keys, context_values  [N, L, nkv, D]  from ``context_kv``; N = 0 is legal
            context_positions             [N]             true positions, gaps allowed
            returns                       [B, H]          after the final norm
        """
        context = _Context(anchor_position, context_keys, context_values, context_positions)
        hidden = embeddings.float()
        for layer in range(self.config.num_layers):
            hidden = self._layer(layer, hidden, context)
        return ops.rms_norm(hidden, self._weights["norm"], self.config.rms_norm_eps)

    def head(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """Logits ``[R, V]`` of ``hidden [R, H]``; columns of ``lm_head [V, H]`` that are padding are -inf."""
        config = self.config
        return ops.lm_head_logits(
            hidden, lm_head, multiplier=config.output_multiplier, softcap=config.final_logit_softcapping,
            valid_vocab=config.valid_columns,
        )  # fmt: skip

    def _layer(self, layer: int, hidden: Tensor, context: _Context) -> Tensor:
        w, eps = self._weights, self.config.rms_norm_eps
        rows, post = self._convolve("attention_conv", layer, ops.rms_norm(hidden, w["input_norm"][layer], eps))
        attended = self._attend(layer, ops.linear(rows, w["qkv"][layer]), context)
        hidden = hidden + post(ops.linear(attended, w["o"][layer]))
        rows, post = self._convolve("mlp_conv", layer, ops.rms_norm(hidden, w["post_norm"][layer], eps))
        activated = ops.gate_up(rows, w["gate_up"][layer])
        return hidden + post(ops.linear(activated, w["down"][layer]))

    def _attend(self, layer: int, qkv: Tensor, context: _Context) -> Tensor:
        w, config, mask = self._weights, self.config, self.config.layer_masks[layer]
        return ops.block_attention(
            qkv, w["q_norm"][layer], w["k_norm"][layer], context.keys[:, layer], context.values[:, layer],
            context.positions, context.anchor_position, self._inverse_frequencies, window=mask.window,
            causal=mask.causal, eps=config.rms_norm_eps, magnitude=config.rope.magnitude,
        )  # fmt: skip

    def _convolve(self, name: str, layer: int, rows: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """DFlash 2: the rows after the "pre" convolution, and the "post" one; other families: identity twice."""
        conv = self.config.conv
        if conv is None:
            return rows, lambda output: output
        base = self._weights[f"{name}_base"][layer]
        projection = self._weights[f"{name}_projection"][layer]
        pre, post = ops.conv_coefficients(rows, projection, conv.kernel_size)
        return (
            ops.grouped_dynamic_conv(rows, base[0], pre),
            lambda output: ops.grouped_dynamic_conv(output, base[1], post),
        )
