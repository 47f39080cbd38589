"""Keeps the largest and smallest values along axes apart from quantizers, for OpenVINO.

OpenVINO's CPU plugin computes ReduceMax and ReduceMin together with the quantizer after them, and then gets other
values: the signal to noise is 0 to 20 dB (2026.4, any shape). Global maxima are such a reduction (PointNet, CBAM, text
networks). The other reductions are right. With an operation in between that no quantizer is fused with, these are too.
"""

from __future__ import annotations

import onnx

from compress.export.onnx_graph import OnnxGraph
from compress.export.unfused import unfused


def extremes_apart(proto: onnx.ModelProto) -> int:
    """Put a Max that changes no value after every ReduceMax and ReduceMin of a quantized model; in place.

    Returns:
        Number of reductions that were changed.
    """
    bare = {node.output[0] for node in bare_extremes(proto)}
    nodes: list[onnx.NodeProto] = []
    view = OnnxGraph(proto.graph)
    for node in proto.graph.node:
        nodes.append(node)
        if node.output and node.output[0] in bare:
            nodes.append(unfused(node, "reduced", view))
    if bare:
        view.replace_nodes(nodes)
    return len(bare)


def bare_extremes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return each ReduceMax and ReduceMin of a quantized model whose result is read by more than such a Max."""
    found = [node for node in proto.graph.node if node.op_type in {"ReduceMax", "ReduceMin"}]
    if not found or all(node.op_type != "QuantizeLinear" for node in proto.graph.node):
        return []
    consumers = OnnxGraph(proto.graph).consumers
    read = {node.output[0]: consumers.get(node.output[0], []) for node in found}
    return [node for node in found if any(n.op_type != "Max" or len({*n.input}) > 1 for n in read[node.output[0]])]
