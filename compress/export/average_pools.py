"""Keeps averages in float for OpenVINO where something other than a quantizer consumes them.

OpenVINO computes an average of INT8 values in INT8 where a sum, a product or a concat consumes it (its low precision
transformations call AvgPool "precision preserved" then) and rounds it to the steps of its input: in every PoolFormer
block and after every DenseNet transition (2026.4). Before an operation that has no INT8 form the average stays float.
The maximum of the average and the lowest float is such an operation.
"""

from __future__ import annotations

import onnx

from compress.export.onnx_graph import OnnxGraph
from compress.export.unfused import unfused


def float_averages(proto: onnx.ModelProto) -> int:
    """Put a Max that changes no value after every AveragePool that has a consumer other than quantizers; in place.

    Args:
        proto: model with the types of its tensors, as torch writes it.

    Returns:
        Number of pools that were changed.
    """
    view = OnnxGraph(proto.graph)
    types = {v.name: v.type.tensor_type.elem_type for v in (*proto.graph.value_info, *proto.graph.output)}
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        nodes.append(node)
        output = node.output[0]
        quantized = all(consumer.op_type == "QuantizeLinear" for consumer in view.consumers.get(output, ()))
        if node.op_type != "AveragePool" or quantized:
            continue
        nodes.append(unfused(view, node, types[output], "average"))
        changed += 1
    view.replace_nodes(nodes)
    return changed
