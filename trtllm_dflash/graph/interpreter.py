"""A small interpreter that runs an ONNX model on torch tensors, on any device.

Custom ops run on the kernels they are given; every other one is replaced by its body first. What depends on weights
alone is computed once, when the program is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import onnx
import onnx.helper
import onnx.inliner
import torch
from torch import Tensor

from ..errors import UnsupportedError
from .functions import DOMAIN
from .torch_ops import OPS, Operation

Kernels = Mapping[str, Operation]


@dataclass(frozen=True)
class _Step:
    """One node, ready to run: results of ``run(*inputs, **attributes)`` get the names ``outputs``."""

    run: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    last_uses: tuple[str, ...]  # values that no later step reads


class Program:
    """A loaded model. Invariant: steps stand in an order in which every input is defined before it is read."""

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Mapping[str, Tensor],
        device: torch.device,
        kernels: Kernels = MappingProxyType({}),
    ) -> None:
        # Functions without a kernel are inlined; one that stands inside another function's body goes with that body.
        bodies = [(f.domain, f.name) for f in model.functions if f.name not in kernels]
        inlined = onnx.inliner.inline_selected_functions(model, bodies)
        self._outputs = [value.name for value in inlined.graph.output]
        values = {t.name: _initializer(t, weights, device) for t in inlined.graph.initializer}
        operations = [(node, _operation(node, kernels)) for node in inlined.graph.node]
        remaining = []
        for node, operation in operations:
            if all(name in values for name in node.input):
                arguments = [values[name] for name in node.input]
                _store(values, tuple(node.output), operation(*arguments, **_attributes(node, device)))
            else:
                remaining.append((node, operation))
        self._steps = _with_last_uses(remaining, {*values, *self._outputs}, device)
        read = {name for step in self._steps for name in step.inputs}
        self._constants = {name: value for name, value in values.items() if name in read or name in self._outputs}

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Run the model; outputs in the model's order."""
        values: dict[str, Any] = {**self._constants, **inputs}
        for step in self._steps:
            result = step.run(*[values[name] for name in step.inputs], **step.attributes)
            _store(values, step.outputs, result)
            for name in step.last_uses:
                del values[name]
        return [values[name] for name in self._outputs]


def _operation(node: onnx.NodeProto, kernels: Kernels) -> Operation:
    table = kernels if node.domain == DOMAIN else OPS
    if node.op_type not in table:
        domain = node.domain or "ONNX"
        raise UnsupportedError(f"node {node.name}: the torch interpreter has no {domain} op {node.op_type}")
    return table[node.op_type]


def _attributes(node: onnx.NodeProto, device: torch.device) -> dict[str, Any]:
    """Attributes as keyword arguments; tensors on the device."""
    attributes = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, onnx.TensorProto):
            value = torch.from_numpy(onnx.numpy_helper.to_array(value).copy()).to(device)
        attributes[attribute.name] = value
    if node.op_type == "Constant":
        attributes["device"] = device
    return attributes


def _initializer(tensor: onnx.TensorProto, weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """A weight by its name, a layer of a stacked weight by ``layers.<i>.<name>``, a constant from the model itself."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()).to(device)
    if tensor.name in weights:
        return weights[tensor.name].to(device)
    _, layer, name = tensor.name.split(".", 2)
    return weights[name][int(layer)].to(device)


def _store(values: dict[str, Any], names: tuple[str, ...], result: Any) -> None:
    if len(names) == 1:
        values[names[0]] = result
    else:
        values.update(zip(names, result, strict=True))


def _with_last_uses(nodes: list[tuple[onnx.NodeProto, Operation]], kept: set[str], device: torch.device) -> list[_Step]:
    """Steps that free each intermediate value after its last reader."""
    steps, seen = [], set(kept)
    produced = {name for node, _ in nodes for name in node.output}
    for node, operation in reversed(nodes):
        touched = dict.fromkeys((*node.input, *node.output))
        last = tuple(name for name in touched if name in produced and name not in seen)
        seen.update(last)
        steps.append(_Step(operation, tuple(node.input), tuple(node.output), _attributes(node, device), last))
    return steps[::-1]
