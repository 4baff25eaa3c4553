"""Each postcondition of graph.check catches its violation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.tiny import write_checkpoint
from trtllm_dflash.checkpoint.parse import parse_checkpoint
from trtllm_dflash.checkpoint.weights import load_weights, sidecar_names
from trtllm_dflash.config import DrafterConfig
from trtllm_dflash.engine.weight_file import write_weights
from trtllm_dflash.errors import BuildError
from trtllm_dflash.graph import check, render
from trtllm_dflash.graph.recorder import WeightFile
from trtllm_dflash.heads.base import HEADS
from trtllm_dflash.io_spec import MODELS

Change = Callable[[onnx.ModelProto], object]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> tuple[DrafterConfig, WeightFile, Path]:
    directory = tmp_path_factory.mktemp("drafter")
    checkpoint = parse_checkpoint(write_checkpoint(directory / "checkpoint"))
    return checkpoint.config, write_weights(load_weights(checkpoint), directory), directory


@pytest.fixture
def block(drafter: tuple[DrafterConfig, WeightFile, Path]) -> onnx.ModelProto:
    config, weights, _ = drafter
    return render.render(render.RENDERINGS["onnxruntime"], config, "float32", weights)["block"]


def custom(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == "BlockAttention")


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


def external(model: onnx.ModelProto, key: str) -> onnx.StringStringEntryProto:
    tensor = next(t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    return next(entry for entry in tensor.external_data if entry.key == key)


VIOLATIONS: dict[str, tuple[Change, str]] = {
    "input renamed": (lambda m: setattr(m.graph.input[0], "name", "x"), "inputs are"),
    "output of another type": (
        lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", TensorProto.FLOAT16),
        "outputs are",
    ),
    "opset": (lambda m: setattr(m.opset_import[0], "version", 24), "opsets are"),
    "no body": (lambda m: m.functions.pop(), "no function"),
    "optional input": (lambda m: custom(m).input.__setitem__(1, ""), "optional input 1 of BlockAttention"),
    "no namespace": (
        lambda m: custom(m).attribute.remove(attribute(custom(m), "plugin_namespace")),
        "plugin_namespace",
    ),
    "attribute too large": (lambda m: setattr(attribute(custom(m), "window"), "i", 2**31), "does not fit int32"),
    "value defined twice": (lambda m: m.graph.node.append(m.graph.node[0]), "is defined twice"),
    "internal name without prefix": (
        lambda m: m.functions[0].node[0].output.__setitem__(0, "weight_t"),
        "lacks the prefix",
    ),
    "weights in the model": (
        lambda m: m.graph.initializer.append(helper.make_tensor("big", TensorProto.FLOAT, [20000], [0.0] * 20000)),
        "bytes stand in the model",
    ),
    "offset past the file": (lambda m: setattr(external(m, "offset"), "value", str(2**40)), "is not inside a tensor"),
    "another file": (lambda m: setattr(external(m, "location"), "value", "../other"), "is not inside a tensor"),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_violation_is_named(case: str, block: onnx.ModelProto, drafter: tuple[DrafterConfig, WeightFile, Path]) -> None:
    change, message = VIOLATIONS[case]
    config, weights, _ = drafter
    check.check_model(block, "block", config, "float32", weights)
    change(block)
    with pytest.raises(BuildError, match=message):
        check.check_model(block, "block", config, "float32", weights)


def test_onnx_checker_is_asked_too(block: onnx.ModelProto, drafter: tuple[DrafterConfig, WeightFile, Path]) -> None:
    _, _, directory = drafter
    block.graph.node[-1].input[0] = "nowhere"
    path = directory / "broken.onnx"
    path.write_bytes(block.SerializeToString())
    with pytest.raises(BuildError, match=r"onnx\.checker refuses"):
        check.check_file(path)


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("rendering", render.RENDERINGS)
def test_every_rendering_of_every_model_holds(family: str, rendering: str, tmp_path: Path) -> None:
    checkpoint = parse_checkpoint(write_checkpoint(tmp_path / "checkpoint", family))
    tensors = load_weights(checkpoint)
    for name in sidecar_names(checkpoint.config):
        del tensors[name]
    weights = write_weights(tensors, tmp_path)
    row = render.RENDERINGS[rendering]
    for compute in row.compute_types:
        models = render.render(row, checkpoint.config, compute, weights)
        assert tuple(models) == MODELS
        render.write(models, tmp_path)


def test_a_layer_that_no_model_reads_is_named(drafter: tuple[DrafterConfig, WeightFile, Path]) -> None:
    config, weights, _ = drafter
    shallow = dataclasses.replace(config, num_layers=1, layer_masks=config.layer_masks[:1])
    with pytest.raises(BuildError, match="down: the models read 24576 of 49152 bytes") as refusal:
        render.render(render.RENDERINGS["onnxruntime"], shallow, "float32", weights)
    assert "qkv" not in str(refusal.value), "the context model reads qkv of all layers"
