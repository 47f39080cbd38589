"""Keeps the largest and smallest values along axes apart from quantizers, for OpenVINO.

OpenVINO's CPU plugin computes ReduceMax and ReduceMin together with the quantizer after them, and then gets other
values: the signal to noise is 0 to 20 dB (2026.4, any shape). Global maxima are such a reduction (PointNet, CBAM, text
networks). The other reductions are right. With an operation in between that no quantizer is fused with, these are too.
"""

from __future__ import annotations

import onnx

from compress.export.onnx_graph import OnnxGraph
from compress.export.unfused import FLOATS, unfused


def extremes_apart(proto: onnx.ModelProto) -> int:
    """Put a Max that changes no value after every ReduceMax and ReduceMin of a quantized model; in place.

    Args:
        proto: model with the types of its tensors, as torch writes it.

    Returns:
        Number of reductions that were changed.
    """
    view = OnnxGraph(proto.graph)
    types = {v.name: v.type.tensor_type.elem_type for v in (*proto.graph.value_info, *proto.graph.output)}
    quantized = any(node.op_type == "QuantizeLinear" for node in proto.graph.node)
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        nodes.append(node)
        dtype = types.get(node.output[0]) if node.op_type in {"ReduceMax", "ReduceMin"} else None
        if quantized and dtype in FLOATS and view.consumers.get(node.output[0]):
            nodes.append(unfused(view, node, dtype, "reduced"))
    changed = len(nodes) - len(proto.graph.node)
    view.replace_nodes(nodes)
    return changed
