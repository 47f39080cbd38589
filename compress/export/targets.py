"""The passes over a quantized file that its target needs: one list for exported models and for users' files."""

from __future__ import annotations

import onnx

from compress.export.average_pools import float_averages
from compress.export.batch_reshapes import batches_kept
from compress.export.bias import integer_biases, room_for_biases
from compress.export.biases_apart import biases_apart
from compress.export.circular import concatenated_pads
from compress.export.extremes import extremes_apart
from compress.export.gathers import flat_gathers
from compress.export.int4 import pack_int4
from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph
from compress.export.openvino_forms import bias_products, bias_shared_convolutions, strides_kept
from compress.export.repeated_pairs import repeat_pairs
from compress.export.softmax import bounded_softmaxes
from compress.export.zero_points import zero_points_into_biases


def shape_for(proto: onnx.ModelProto, target: str) -> None:
    """Rewrite operations that a target's engine reads or computes otherwise, in place; before the graph is tidied.

    Args:
        proto: quantized model.
        target: that its quantizers were placed for; "" for a float model.
    """
    room_for_biases(proto)
    pack_int4(proto)
    if target != "onnxruntime":  # files for TensorRT are measured on OpenVINO too
        bias_shared_convolutions(proto)
    if target == "openvino":
        bias_products(proto)
        flat_gathers(proto)
        float_averages(proto)
        extremes_apart(proto)
    if target != "onnxruntime":
        strides_kept(proto)
    if target in {"openvino", ""}:
        concatenated_pads(proto)


def finish_for(proto: onnx.ModelProto, target: str) -> None:
    """Write biases, zero points and pairs as a target's engine computes them, in place; after the graph is tidied.

    Args:
        proto: as for `shape_for`.
        target: as for `shape_for`.
    """
    if target == "openvino":
        zero_points_into_biases(proto)
        batches_kept(proto)
        biases_apart(proto)
    if target == "onnxruntime":
        bounded_softmaxes(proto)
        repeat_pairs(proto)
        integer_biases(proto)
    if target:
        _own_zero_points(proto)


def _own_zero_points(proto: onnx.ModelProto) -> None:
    """Give each DequantizeLinear of a weight a zero point of its own.

    OpenVINO (2026.4) computes a product in float where its weight shares the zero point of a convolution's weight. ONNX
    Runtime (1.31) does not load a file with a shared one where it makes the weights unsigned, `x64quantprecision`.
    """
    view, seen = OnnxGraph(proto.graph), set[str]()
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and len(node.input) > 2 and node.input[0] in view.constants:
            value = view.array(node.input[2])
            if node.input[2] in seen and value is not None:
                node.input[2] = view.add_constant(added_tensor(node.output[0], "zero_point"), value)
            seen.add(node.input[2])
