"""Averages that something other than a quantizer reads, kept in float behind the pool, for OpenVINO.

OpenVINO takes an average of INT8 values for INT8 itself where a sum, a product or a concat reads it (its low precision
transformations call AvgPool "precision preserved" then), and rounds it to the steps of its input: in every PoolFormer
block and behind every DenseNet transition (2026.4). In front of an operation that has no INT8 form it stays float. The
larger of the average and the lowest float is such an operation, and changes nothing; it costs no time that was seen.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compress.export.readers import readers_of


def float_averages(proto: onnx.ModelProto) -> int:
    """Put a Max that changes nothing behind every AveragePool that not only quantizers read; in place.

    Args:
        proto: with the types of its tensors, as torch writes it.

    Returns:
        How many were given one.
    """
    graph = proto.graph
    readers = readers_of(graph)
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "AveragePool":
            continue
        if all(reader.op_type == "QuantizeLinear" for reader in readers.get(node.output[0], ())):
            continue
        output = node.output[0]
        dtype = helper.tensor_dtype_to_np_dtype(types[output])
        node.output[0], lowest = f"{output}_average", f"{output}_lowest"
        graph.initializer.append(numpy_helper.from_array(np.asarray(np.finfo(dtype).min, dtype), lowest))
        maximum = helper.make_node("Max", [node.output[0], lowest], [output])
        maximum.metadata_props.extend(node.metadata_props)
        nodes.append(maximum)
        changed += 1
    del graph.node[:]
    graph.node.extend(nodes)
    return changed
