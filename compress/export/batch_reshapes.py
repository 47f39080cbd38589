"""Writes a Reshape that keeps the batch, `x.view(n, -1)`, with a 0 in the place of the size that exporters compute.

ONNX: a 0 in the shape of a Reshape copies that dimension of its input (operator Reshape, `allowzero` 0). A file that
computes with sizes nowhere else needs none of its biases apart (`biases_apart`), which are slow on ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx

from compress.export.onnx_graph import OnnxGraph, attribute, drop_unread, without_weights


def batches_kept(proto: onnx.ModelProto) -> int:
    """Rewrite every Reshape whose first size is computed and is the batch of its input, in place.

    Files with graphs inside nodes are left alone.

    Returns:
        Number of operations that were rewritten.
    """
    if any(a.HasField("g") or a.graphs for node in proto.graph.node for a in node.attribute):
        return 0
    view = OnnxGraph(proto.graph)
    found = [(node, source) for node in proto.graph.node if (source := _batch_of(node, view)) is not None]
    names = _first_sizes(proto) if found else {}
    changed = [(n, s) for n, s in found if names.get(s) and names[s] == names.get(n.input[0])]
    for node, _ in changed:
        shape = view.producers[node.input[1]]
        sizes = [view.array(name) for name in shape.input[1:]]
        whole = np.concatenate([np.zeros(1, np.int64), *(size.reshape(-1) for size in sizes if size is not None)])
        node.input[1] = view.add_constant(f"{node.output[0]}/batch_kept", whole)
    if changed:
        drop_unread(proto.graph)
    return len(changed)


def _batch_of(node: onnx.NodeProto, view: OnnxGraph) -> str | None:
    """Return the tensor whose first size a Reshape takes as its own first size, before constants; None if it is not so.

    As torch's exporters write it: Concat(Unsqueeze(Gather(Shape(tensor), 0)), constants), or with Shape(tensor, end=1).
    """
    shape = view.producers.get(node.input[1]) if node.op_type == "Reshape" else None
    if shape is None or shape.op_type != "Concat" or attribute(node, "allowzero", 0):
        return None
    if len(shape.input) < 2 or any(view.array(name) is None for name in shape.input[1:]):
        return None
    first = view.producers.get(shape.input[0])
    if first is not None and first.op_type == "Unsqueeze":
        first = view.producers.get(first.input[0])
    if first is not None and first.op_type == "Shape":
        return first.input[0] if (attribute(first, "start", 0), attribute(first, "end", 0)) == (0, 1) else None
    place = view.array(first.input[1]) if first is not None and first.op_type == "Gather" else None
    if first is None or place is None or place.size != 1 or place.item() != 0:
        return None
    asked = view.producers.get(first.input[0])
    return None if asked is None or asked.op_type != "Shape" or attribute(asked, "start", 0) else asked.input[0]


def _first_sizes(proto: onnx.ModelProto) -> dict[str, str]:
    """Return the names of the open first sizes of tensors, as far as ONNX's shape inference follows them."""
    model = without_weights(proto)
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].dim_param and not dims[0].HasField("dim_value"):
            dims[0].dim_param = f"first size of {value.name}"
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except onnx.shape_inference.InferenceError:  # an operation that ONNX cannot follow: the sizes stay computed
        return {}
    values = [*graph.value_info, *graph.output, *graph.input]
    return {v.name: v.type.tensor_type.shape.dim[0].dim_param for v in values if v.type.tensor_type.shape.dim}
