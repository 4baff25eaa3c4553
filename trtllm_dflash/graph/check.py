"""What holds of every model once it is built. A violation is a bug in the graph builders, found before a runner is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx.checker
import onnx.shape_inference
from onnx import AttributeProto, TensorProto

from ..config import DrafterConfig
from ..errors import BuildError, Problems
from ..io_spec import ModelName, model_spec
from .functions import DOMAIN, OPSET
from .recorder import ELEMENT_TYPES, ComputeType, WeightFile

_INT32 = range(-(2**31), 2**31)


def check_model(
    model: onnx.ModelProto, name: ModelName, config: DrafterConfig, compute: ComputeType, weights: WeightFile
) -> None:
    """Raise BuildError unless the model's signature, ops, names and weights are what every runner relies on."""
    problems = Problems(f"{name} model")
    for problem in (
        *_signature(model, name, config, compute),
        *_opsets(model),
        *_custom_nodes(model),
        *_names(model),
        *_weights(model, weights),
    ):
        problems.add(problem)
    problems.raise_as(BuildError)


def check_file(path: Path) -> None:
    """Raise BuildError unless ONNX's own checker accepts the file, types, shapes and external data included."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BuildError(f"{path.name}: onnx.checker refuses the model: {error}") from error


def check_all_used(models: Iterable[onnx.ModelProto], weights: WeightFile) -> None:
    """Raise BuildError unless the models read every byte of the weight file.

    A head, or a layer, that is loaded and not run costs acceptance and nothing else; no other check would notice.
    """
    read: set[tuple[int, int]] = set()  # offset, length: whole tensors, or layers of stacked ones
    for tensor in (tensor for model in models for tensor in model.graph.initializer):
        data = {entry.key: entry.value for entry in tensor.external_data}
        if data:
            read.add((int(data["offset"]), int(data["length"])))
    problems = Problems(weights.name)
    for name, stored in weights.tensors.items():
        inside = range(stored.offset, stored.offset + stored.nbytes)
        used = sum(length for offset, length in read if offset in inside)
        problems.check(used >= stored.nbytes, f"{name}: the models read {used} of {stored.nbytes} bytes, expected all")
    problems.raise_as(BuildError)


def _signature(model: onnx.ModelProto, name: ModelName, config: DrafterConfig, compute: ComputeType) -> Iterator[str]:
    """Inputs and outputs are exactly those of io_spec."""
    spec = model_spec(name, config)
    for kind, found, expected in (
        ("input", model.graph.input, spec.inputs), ("output", model.graph.output, spec.outputs),
    ):  # fmt: skip
        declared = [_declared(value) for value in found]
        wanted = [(t.name, ELEMENT_TYPES[compute if t.dtype == "T" else t.dtype], t.dims) for t in expected]
        if declared != wanted:
            yield f"{kind}s are {declared}, io_spec says {wanted}"


def _declared(value: onnx.ValueInfoProto) -> tuple[str, int, tuple[int | str, ...]]:
    tensor = value.type.tensor_type
    return value.name, tensor.elem_type, tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)


def _opsets(model: onnx.ModelProto) -> Iterator[str]:
    opsets = {o.domain: o.version for o in model.opset_import}
    if opsets != {"": OPSET, DOMAIN: 1}:
        yield f"opsets are {opsets}, expected {OPSET} and {DOMAIN} 1"


def _custom_nodes(model: onnx.ModelProto) -> Iterator[str]:
    """Custom ops have a body here, their plugin namespace, no optional inputs, and integers that fit a plugin field."""
    bodies = {f.name for f in model.functions}
    inner = [node for function in model.functions for node in function.node]
    for node in (*model.graph.node, *inner):
        if node.domain == DOMAIN and node.op_type not in bodies:
            yield f"no function {node.op_type} in the model"
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        attributes = {a.name: a for a in node.attribute}
        if "" in node.input:
            yield f"node {node.name}: optional input {list(node.input).index('')} of {node.op_type}"
        if attributes.get("plugin_namespace", AttributeProto()).s != DOMAIN.encode():
            yield f"node {node.name}: plugin_namespace is not {DOMAIN}"
        for attribute in attributes.values():
            if attribute.type == AttributeProto.INT and attribute.i not in _INT32:
                yield f"node {node.name}: attribute {attribute.name} = {attribute.i} does not fit int32"


def _names(model: onnx.ModelProto) -> Iterator[str]:
    """Values are defined once; names inside a function carry its name, so that inlining in any tool is safe."""
    defined = [v.name for v in model.graph.input] + [t.name for t in model.graph.initializer]
    defined += [name for node in model.graph.node for name in node.output]
    for name in sorted({n for n in defined if defined.count(n) > 1}):
        yield f"value {name} is defined twice"
    for body in model.functions:
        outside = {*body.input, *body.output}
        for node in body.node:
            for name in node.output:
                if name not in outside and not name.startswith(f"{body.name}__"):
                    yield f"function {body.name}: internal name {name} lacks the prefix {body.name}__"


def _weights(model: onnx.ModelProto, weights: WeightFile) -> Iterator[str]:
    """External weights lie inside a tensor of the weight file; only small constants stand in the model."""
    ranges = [(t.offset, t.offset + t.nbytes) for t in weights.tensors.values()]
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            if (size := tensor.ByteSize()) > 65536:
                yield f"initializer {tensor.name}: {size} bytes stand in the model, expected in {weights.name}"
            continue
        data = {entry.key: entry.value for entry in tensor.external_data}
        begin = int(data["offset"])
        end = begin + int(data["length"])
        if data["location"] != weights.name or not any(low <= begin and end <= high for low, high in ranges):
            yield f"initializer {tensor.name}: {data} is not inside a tensor of {weights.name}"
