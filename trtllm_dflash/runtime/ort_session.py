"""``OrtSession``: ONNX Runtime on the CPU, the embedded default.

Tensors go in and come out by address: inputs are torch tensors bound in place, outputs are torch tensors that ONNX
Runtime writes into, and the target's head is read where the target keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from ..config import DrafterConfig
from ..errors import EngineMismatchError
from ..io_spec import NUM_CANDIDATES, ModelName, model_spec
from ..limits import Limits
from .session import ContextTables, Session

# How ONNX Runtime's binding calls the element types that this session passes.
_ELEMENT_TYPES = {torch.float32: 1, torch.int32: 6}


class OrtSession(Session):
    """A drafter on ONNX Runtime's CPU provider, float32."""

    def __init__(self, config: DrafterConfig, limits: Limits, directory: Path, sidecars: Mapping[str, Tensor]) -> None:
        super().__init__(config, limits, torch.device("cpu"), torch.float32, sidecars)
        self._context = _Model(directory, "context")
        self._block = _Model(directory, "block")
        self._head = _Model(directory, "head")
        self._block_widths = {output.name: int(output.dims[-1]) for output in model_spec("block", config).outputs}

    def _run_context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        shape = (len(features), config.num_layers, config.num_kv_heads, config.head_dim)
        outputs = {"context_k": torch.empty(shape), "context_v": torch.empty(shape)}
        self._context.run({"features": features, "positions": positions}, outputs)
        return outputs["context_k"], outputs["context_v"]

    def _run_block(self, embeddings: Tensor, positions: Tensor, context: ContextTables) -> dict[str, Tensor]:
        outputs = {name: torch.empty(*embeddings.shape[:2], width) for name, width in self._block_widths.items()}
        self._block.run(self._block_inputs(embeddings, positions, context), outputs)
        return outputs

    def _run_head(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = len(hidden)
        outputs = {
            "topk_ids": torch.empty(rows, NUM_CANDIDATES, dtype=torch.int32),
            "topk_values": torch.empty(rows, NUM_CANDIDATES),
            "logsumexp": torch.empty(rows),
        }
        self._head.run({"hidden": hidden, "lm_head": lm_head}, outputs)
        return outputs["topk_ids"], outputs["topk_values"], outputs["logsumexp"]


class _Model:
    """One loaded model; runs on torch tensors in place."""

    def __init__(self, directory: Path, name: ModelName) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Idle workers must not spin: they would take the cores from the target's forward (measured on two cores: the
        # target slows down by two thirds beside a spinning session).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        path = directory / f"{name}.onnx"
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises classes of a private module
            raise EngineMismatchError(f"{path}: ONNX Runtime {onnxruntime.__version__} refuses it: {error}") from error

    def run(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        """Run once; every tensor is bound by address, so all must be contiguous and outlive the call."""
        binding: Any = self._session.io_binding()
        kept = []  # contiguous copies must live until the run is over
        for name, tensor in inputs.items():
            tensor = tensor.contiguous()
            kept.append(tensor)
            binding.bind_input(name, "cpu", 0, _ELEMENT_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        for name, tensor in outputs.items():
            binding.bind_output(name, "cpu", 0, _ELEMENT_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        self._session.run_with_iobinding(binding)
