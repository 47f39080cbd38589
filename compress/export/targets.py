"""The passes over a quantized file that its target needs, in order: one list for exported models and users' files."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from compress.export.names import INT4_KEY, added_tensor
from compress.export.onnxruntime import bounded_softmaxes, clips_apart, integer_biases, repeat_pairs, room_for_biases
from compress.export.openvino import (
    batches_kept,
    bias_shared_convolutions,
    biases_apart,
    concatenated_pads,
    extremes_apart,
    flat_gathers,
    float_averages,
    joins_apart,
    products_apart,
    signs_apart,
    strides_kept,
    zero_points_into_biases,
)
from compress.onnx_graph.graph import WEIGHTED_OPS, OnnxGraph, opset_of


def shape_for(proto: onnx.ModelProto, target: str) -> None:
    """Rewrite operations that a target's engine ("" = of a float model) reads or computes otherwise; before tidying."""
    room_for_biases(proto)
    pack_int4(proto)
    if target != "onnxruntime":  # files for TensorRT are measured on OpenVINO too
        bias_shared_convolutions(proto)
    if target == "openvino":
        products_apart(proto)
        flat_gathers(proto)
        float_averages(proto)
        extremes_apart(proto)
        joins_apart(proto)
    if target != "onnxruntime":
        strides_kept(proto)
    if target in {"openvino", ""}:
        concatenated_pads(proto)


def finish_for(proto: onnx.ModelProto, target: str) -> None:
    """Write biases, zero points and pairs as a target's engine computes them, in place; after the graph is tidied."""
    if target == "openvino":
        signs_apart(proto)
        zero_points_into_biases(proto)
        batches_kept(proto)
        biases_apart(proto)
    if target == "onnxruntime":
        bounded_softmaxes(proto)
        clips_apart(proto)
        repeat_pairs(proto)
        integer_biases(proto)
    if target == "litert":
        integer_biases(proto, WEIGHTED_OPS)
    if target:
        _own_constants(proto, integers=target != "onnxruntime")


def _own_constants(proto: onnx.ModelProto, *, integers: bool) -> None:
    """Give each DequantizeLinear of a weight a zero point of its own, and integers of its own if `integers`.

    OpenVINO (2026.4) computes a product in float where its weight shares the zero point of a convolution's weight, and
    convolutions that share integers with other scales. ONNX Runtime (1.31) does not load a file with a shared zero
    point where it makes the weights unsigned, `x64quantprecision`.
    """
    view, seen = OnnxGraph(proto.graph), set[str]()
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and len(node.input) > 2 and node.input[0] in view.constants:
            for place, part in ((0, "integers"), (2, "zero_point")) if integers else ((2, "zero_point"),):
                value = view.array(node.input[place])
                if node.input[place] in seen and value is not None:
                    node.input[place] = view.add_constant(added_tensor(node.output[0], part), value)
                seen.add(node.input[place])


OPSET = 21
"""First opset whose QuantizeLinear and DequantizeLinear take INT4."""


def pack_int4(proto: onnx.ModelProto) -> int:
    """Write weights of 4 bits and fewer as INT4, in place; return their number, 0 below opset 21.

    torch has no 4-bit tensor, so `prepare` writes INT8 constants and marks their DequantizeLinear.
    """
    if opset_of(proto) < OPSET:
        return 0
    view, dtype = OnnxGraph(proto.graph), helper.tensor_dtype_to_np_dtype(TensorProto.INT4)
    marked = [node for node in proto.graph.node if any(prop.key == INT4_KEY for prop in node.metadata_props)]
    packed: dict[str, str] = {}
    for node in marked:
        for i in (0, 2):
            name = node.input[i]
            values = view.array(name)
            if name not in packed and values is not None:
                packed[name] = view.add_constant(added_tensor(name, "int4"), values.astype(dtype))
            node.input[i] = packed[name]
    return len(marked)
