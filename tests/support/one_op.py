"""Runs one op of ``graph.functions`` by itself: on ONNX Runtime, or on the torch interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

from trtllm_dflash.graph.functions import DOMAIN, OPSET, function, functions_for
from trtllm_dflash.graph.interpreter import Program
from trtllm_dflash.graph.recorder import IR_VERSION

RUNNERS = ("ort", "torch")
_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int8: TensorProto.INT8,
    torch.int32: TensorProto.INT32,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
}


def op_model(op: str, inputs: Sequence[Tensor], out_types: Sequence[torch.dtype], **attributes: Any) -> onnx.ModelProto:
    """A model of one node whose inputs have these tensors' types and shapes."""
    signature = function(op)
    node = helper.make_node(op, signature.input, signature.output, domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(name, _TYPES[tensor.dtype], tensor.shape)
            for name, tensor in zip(signature.input, inputs, strict=True)
        ],
        [
            helper.make_tensor_value_info(name, _TYPES[dtype], None)
            for name, dtype in zip(signature.output, out_types, strict=True)
        ],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions_for([node]), ir_version=IR_VERSION)


def run_op(
    runner: str,
    op: str,
    inputs: Sequence[Tensor],
    out_types: Sequence[torch.dtype] = (torch.float32,),
    **attributes: Any,
) -> list[Tensor]:
    """The op's outputs."""
    model = op_model(op, inputs, out_types, **attributes)
    names = [value.name for value in model.graph.input]
    if runner == "torch":
        return Program(model, {}, torch.device("cpu"))(dict(zip(names, inputs, strict=True)))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = {name: _ort_value(tensor) for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(value.numpy()) for value in session.run_with_ort_values(None, values)]


def _ort_value(tensor: Tensor) -> Any:
    if tensor.dtype == torch.float8_e4m3fn:  # numpy has no such type; the bytes go in with their ONNX type
        raw = np.ascontiguousarray(tensor.view(torch.uint8).numpy())
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.FLOAT8E4M3FN)
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())
