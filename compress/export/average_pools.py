"""Keeps averages in float for OpenVINO where something other than a quantizer consumes them.

OpenVINO computes an average of INT8 values in INT8 where a sum, a product or a concat consumes it (its low precision
transformations call AvgPool "precision preserved" then) and rounds it to the steps of its input: in every PoolFormer
block and after every DenseNet transition (2026.4). Before an operation that has no INT8 form the average stays float.
The maximum of the average with itself is such an operation; it changes no value and took no measurable time.
"""

from __future__ import annotations

import onnx

from compress.export.onnx_graph import OnnxGraph
from compress.export.unfused import unfused


def float_averages(proto: onnx.ModelProto) -> int:
    """Put a Max that changes no value after every AveragePool that has a consumer other than quantizers; in place.

    Args:
        proto: model.

    Returns:
        Number of pools that were changed.
    """
    view = OnnxGraph(proto.graph)
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        nodes.append(node)
        output = node.output[0]
        quantized = all(consumer.op_type == "QuantizeLinear" for consumer in view.consumers.get(output, ()))
        if node.op_type != "AveragePool" or quantized:
            continue
        nodes.append(unfused(node, "average", view))
        changed += 1
    view.replace_nodes(nodes)
    return changed
