"""Rewrites a Gather by a table of indices as a Gather by one row of them and a Reshape, for OpenVINO.

`Tensor.unfold` (HaloNet's windows) and indexing with a tensor of two axes are a Gather whose result has more axes than
its input. OpenVINO moves the channel scales of the INT8 layer before such a Gather to its output without giving them
the new axes, and then refuses the file ("GatherTransformation ... CALLBACK HAS THROWN", 2026.4). A Reshape is handled.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph, attribute


def flat_gathers(proto: onnx.ModelProto) -> int:
    """Give every Gather of an activation one row of indices, in place; the results stay the same.

    A Gather of a constant, by computed indices, or of a tensor with two unknown sizes after the axis is left alone.

    Args:
        proto: model with the shapes of its tensors, as torch writes it.

    Returns:
        Number of nodes that were changed.
    """
    view = OnnxGraph(proto.graph)
    shapes = {
        value.name: [d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim]
        for value in (*proto.graph.value_info, *proto.graph.input)
    }
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        nodes.append(node)
        if node.op_type != "Gather" or node.input[0] in view.constants:
            continue
        index, source = view.array(node.input[1]), shapes.get(node.input[0])
        if index is None or index.ndim < 2 or source is None:
            continue
        axis = attribute(node, "axis", 0) % len(source)
        target = [0] * axis + [*index.shape, *source[axis + 1 :]]  # 0 copies the size of the input, -1 is the remainder
        if target.count(-1) > 1:
            continue
        output = node.output[0]
        node.output[0] = view.free(added_tensor(output, "row"))
        node.input[1] = view.add_constant(added_tensor(output, "index"), index.reshape(-1).copy())
        shape = view.add_constant(added_tensor(output, "shape"), np.asarray(target, np.int64))
        reshape = helper.make_node("Reshape", [node.output[0], shape], [output])
        reshape.metadata_props.extend(node.metadata_props)
        nodes.append(reshape)
        changed += 1
    view.replace_nodes(nodes)
    return changed
