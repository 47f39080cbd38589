"""Gathers by a table of indices as a Gather by a row of them and a Reshape, for OpenVINO.

`Tensor.unfold` (HaloNet's windows) and indexing with a tensor of two axes are a Gather whose result has more axes than
its input. OpenVINO carries the channel scales of the INT8 layer before such a Gather through it without giving them the
new axes, and then refuses the file ("GatherTransformation ... CALLBACK HAS THROWN", 2026.4); not so a Reshape.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper


def flat_gathers(proto: onnx.ModelProto) -> int:
    """Give every Gather of an activation a row of indices, in place; what is computed stays the same.

    Gathers of constants, by indices that are computed, and of tensors with two unknown sizes behind the axis stay.

    Args:
        proto: with the shapes of its tensors, as torch writes it.

    Returns:
        How many were changed.
    """
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {
        value.name: [d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.input)
    }
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "Gather" or node.input[0] in constants or node.input[1] not in constants:
            continue
        index, source = numpy_helper.to_array(constants[node.input[1]]), shapes.get(node.input[0])
        if index.ndim < 2 or source is None:
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % len(source)
        target = [0] * axis + [*index.shape, *source[axis + 1 :]]  # 0 copies the size of the input, -1 is what is left
        if target.count(-1) > 1:
            continue
        names = [f"{node.output[0]}_{part}" for part in ("row", "index", "shape")]
        graph.initializer.append(numpy_helper.from_array(index.reshape(-1).copy(), names[1]))
        graph.initializer.append(numpy_helper.from_array(np.asarray(target, np.int64), names[2]))
        reshape = helper.make_node("Reshape", [names[0], names[2]], [node.output[0]])
        reshape.metadata_props.extend(node.metadata_props)
        node.input[1], node.output[0] = names[1], names[0]
        nodes.append(reshape)
        changed += 1
    del graph.node[:]
    graph.node.extend(nodes)
    return changed
