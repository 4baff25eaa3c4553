"""The torch interpreter: what it folds, what it frees, what it runs instead of a body, and what it refuses."""

from __future__ import annotations

import onnx.inliner
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from tests.support.one_op import op_model
from trtllm_dflash.errors import UnsupportedError
from trtllm_dflash.graph import functions
from trtllm_dflash.graph.interpreter import Program
from trtllm_dflash.graph.torch_ops import OPS

CPU = torch.device("cpu")


def norm_linear_model() -> tuple[onnx.ModelProto, tuple[Tensor, Tensor, Tensor]]:
    tensors = torch.randn(2, 8), torch.randn(8), torch.randn(12, 8)
    return op_model("NormLinear", tensors, (torch.float32,), eps=1e-6), tensors


def test_every_op_of_the_table_is_used_by_a_body() -> None:
    used = {"RMSNormalization", "Cast"}  # these also stand in the models themselves
    for op in functions.OPS:
        for neutral in (frozenset(), frozenset({"output_multiplier", "soft_cap", "valid_vocab"})):
            used |= {node.op_type for node in functions.function(op, neutral).node if node.domain == ""}
    assert used == set(OPS)


def test_a_kernel_replaces_the_body() -> None:
    model, (x, norm, weight) = norm_linear_model()
    calls = []

    def kernel(*inputs: Tensor, eps: float) -> Tensor:
        calls.append(eps)
        return inputs[0] * 0 + 7

    program = Program(model, {}, CPU, kernels={"NormLinear": kernel})
    (y,) = program({"x": x, "norm": norm, "weight": weight})
    assert calls == [pytest.approx(1e-6)]
    assert y.eq(7).all()


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    model, (_, norm, weight) = norm_linear_model()
    for name, tensor in (("norm", norm), ("weight", weight)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, tensor.shape, tensor.flatten()))
        model.graph.input.remove(next(v for v in model.graph.input if v.name == name))
    program = Program(model, {}, CPU)
    # RMSNormalization and MatMul depend on x; the transposed weight does not.
    assert len(program._steps) == 2


def test_intermediate_values_are_freed_after_their_last_use() -> None:
    model, _ = norm_linear_model()
    program = Program(model, {}, CPU)
    freed = [name for step in program._steps for name in step.last_uses]
    produced = [name for step in program._steps for name in step.outputs]
    assert sorted(freed) == sorted(set(produced) - {"y"})
    assert len(freed) == len(set(freed))


def test_an_unknown_op_is_refused_by_name() -> None:
    graph = helper.make_graph(
        [helper.make_node("Erf", ["x"], ["y"], name="the_node")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    with pytest.raises(UnsupportedError, match="the_node: the torch interpreter has no ONNX op Erf"):
        Program(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), {}, CPU)
