"""``TorchSession``: the engine's graphs interpreted over torch.

On the CPU the custom ops run their function bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import torch
from torch import Tensor

from ..config import DrafterConfig
from ..engine.weight_file import read_weights
from ..graph.interpreter import Program
from ..io_spec import ModelName, model_spec
from ..limits import Limits
from .session import ContextTables, Session


class TorchSession(Session):
    """A drafter on torch, in float32 or bfloat16."""

    def __init__(
        self,
        config: DrafterConfig,
        limits: Limits,
        directory: Path,
        sidecars: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, limits, device, dtype, sidecars)
        weights = read_weights(directory)

        def load(name: ModelName) -> Program:
            # Weights come by name from the mapped weight file, never through the model's external data.
            model = onnx.load(directory / f"{name}.onnx", load_external_data=False)
            return Program(model, weights, device)

        self._context = load("context")
        self._block = load("block")
        self._head = load("head")
        self._block_outputs = [output.name for output in model_spec("block", config).outputs]

    @torch.inference_mode()
    def _run_context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._context({"features": features, "positions": positions})
        return keys, values

    @torch.inference_mode()
    def _run_block(self, embeddings: Tensor, positions: Tensor, context: ContextTables) -> dict[str, Tensor]:
        outputs = self._block(self._block_inputs(embeddings, positions, context))
        return dict(zip(self._block_outputs, outputs, strict=True))

    @torch.inference_mode()
    def _run_head(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids, values, logsumexp = self._head({"hidden": hidden, "lm_head": lm_head})
        return ids, values, logsumexp
