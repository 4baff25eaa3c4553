"""Records one model: weights by name, ops by name, inputs and outputs from ``io_spec``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import onnx
from onnx import TensorProto, helper

from ..config import DrafterConfig
from ..io_spec import ModelName, TensorSpec, model_spec
from .functions import DOMAIN, OPSET, function, functions_for

IR_VERSION = 10
ComputeType = Literal["float32", "bfloat16"]
ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "bfloat16": TensorProto.BFLOAT16,
    "float16": TensorProto.FLOAT16,
    "int32": TensorProto.INT32,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a weight lies in the weight file; ``offset`` in bytes from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class WeightFile:
    """The index of ``weights.safetensors``: the only place where weights are stored."""

    name: str
    tensors: Mapping[str, StoredTensor]

    def layer(self, name: str, layer: int) -> StoredTensor:
        """Layer ``layer`` of a stacked tensor, as a range of the same bytes."""
        stacked = self.tensors[name]
        count, *shape = stacked.shape
        nbytes = stacked.nbytes // count
        return StoredTensor(stacked.dtype, tuple(shape), stacked.offset + layer * nbytes, nbytes)


class Recorder:
    """The model under construction. Invariant: every value name is defined once, before its first use."""

    def __init__(self, model: ModelName, config: DrafterConfig, compute: ComputeType, weights: WeightFile) -> None:
        self.spec = model_spec(model, config)
        self.compute = compute
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._cast: set[str] = set()

    def op(self, op: str, *inputs: str, out: str | tuple[str, ...], **attributes: float | int) -> str:
        """Call an op of ``graph.functions``; ``out`` names its outputs, and the first one is returned."""
        signature = function(op)
        outputs = (out,) if isinstance(out, str) else out
        assert len(inputs) == len(signature.input), (op, inputs)
        assert len(outputs) == len(signature.output), (op, outputs)
        assert set(attributes) == set(signature.attribute), (op, sorted(attributes))
        # TensorRT looks plugins up by this attribute; every other runner ignores it.
        attributes_and_namespace = {**attributes, "plugin_namespace": DOMAIN}
        self._nodes.append(
            helper.make_node(op, inputs, outputs, name=outputs[0], domain=DOMAIN, **attributes_and_namespace)
        )
        return outputs[0]

    def standard(self, op: str, *inputs: str, out: str, **attributes: float | int) -> str:
        """Call a standard ONNX op."""
        self._nodes.append(helper.make_node(op, inputs, (out,), name=out, **attributes))
        return out

    def weight(self, name: str, layer: int | None = None) -> str:
        """A weight in the compute type, or one layer of a stacked weight; the bytes stay where they are stored."""
        stored = self._weights.tensors[name] if layer is None else self._weights.layer(name, layer)
        value = name if layer is None else f"layers.{layer}.{name}"
        if value not in self._initializers:
            self._initializers[value] = self._external(value, stored)
        if stored.dtype == self.compute:
            return value
        if value not in self._cast:
            self._cast.add(value)
            self.standard("Cast", value, out=f"{value}.{self.compute}", to=ELEMENT_TYPES[self.compute])
        return f"{value}.{self.compute}"

    def constant(self, name: str, values: list[float]) -> str:
        """A small float32 vector that stands in the model itself."""
        self._initializers[name] = helper.make_tensor(name, TensorProto.FLOAT, [len(values)], values)
        return name

    def model(self) -> onnx.ModelProto:
        """The finished model with the functions that it calls."""
        graph = helper.make_graph(
            self._nodes,
            self.spec.name,
            [self._declare(tensor) for tensor in self.spec.inputs],
            [self._declare(tensor) for tensor in self.spec.outputs],
            list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(
            graph,
            opset_imports=opsets,
            functions=functions_for(self._nodes),
            ir_version=IR_VERSION,
            producer_name="trtllm_dflash",
        )

    def _declare(self, tensor: TensorSpec) -> onnx.ValueInfoProto:
        dtype = self.compute if tensor.dtype == "T" else tensor.dtype
        return helper.make_tensor_value_info(tensor.name, ELEMENT_TYPES[dtype], tensor.dims)

    def _external(self, name: str, stored: StoredTensor) -> onnx.TensorProto:
        assert stored.nbytes == math.prod(stored.shape) * (4 if stored.dtype == "float32" else 2), stored
        tensor = TensorProto(
            name=name,
            data_type=ELEMENT_TYPES[stored.dtype],
            dims=stored.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", self._weights.name), ("offset", stored.offset), ("length", stored.nbytes),
        ):  # fmt: skip
            tensor.external_data.add(key=key, value=str(value))
        return tensor
