"""Repeats Q/DQ pairs after operations that pass them, for ONNX Runtime.

A pair before a concat, a split or a flattening also gives the range of what follows it, and TensorRT and OpenVINO use
it so. ONNX Runtime (1.31) moves pairs through a few operations by itself; after all others it takes the tensor for a
float one, and the convolution or product that consumes it computes in float: 8 of the 26 convolutions of a SqueezeNet,
and the classifier of a file with a Flatten before it. The second pair has the scale of the first, so that no value
changes.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import PASSES, WEIGHTED_OPS, OnnxGraph, attribute, consumed_as

_MOVED_THROUGH = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"})
"""Operations through which ONNX Runtime moves a pair (its QDQPropagationTransformer), to one consumer of the result."""
_PASSES = PASSES | {"Pad"}
_SCALE_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
_WANTED = WEIGHTED_OPS | {"Add", "AveragePool", "GlobalAveragePool", "QuantizeLinear"}
"""Operations that compute in integers if what they consume is quantized."""


def repeat_pairs(proto: onnx.ModelProto) -> int:
    """Add a pair after each concat, split or flattening of quantized tensors that a layer consumes; in place.

    Results of other moves get one where they have several consumers.

    Returns:
        Number of pairs.
    """
    view = OnnxGraph(proto.graph)
    wanted = _wanted(view)
    first: dict[str, onnx.NodeProto] = {}  # by tensor, the pair whose integers it holds
    nodes: list[onnx.NodeProto] = []
    added = 0
    for node in proto.graph.node:
        nodes.append(node)
        if _dequantizes_activation(node, view):
            first[node.output[0]] = node
        pair = _common_pair(node, first, view)
        if pair is not None and node.op_type == "Cast":
            pair = _cast_pair(node, pair, view)
        if pair is None:
            continue
        for name in node.output:
            first[name] = pair
            alone = len(view.consumers.get(name, ())) < 2
            if (node.op_type in _MOVED_THROUGH and alone) or name not in wanted:
                continue
            again = _pair(name, pair, view)
            nodes += again
            first[again[1].output[0]] = pair
            for consumer in view.consumers.get(name, ()):
                consumed_as(consumer, name, again[1].output[0])
            added += 1
    _shapes_of_integers(nodes)
    view.replace_nodes(nodes)
    return added


def _shapes_of_integers(nodes: list[onnx.NodeProto]) -> None:
    """Take shapes of quantized tensors from their integers, so that nothing is computed in float for its shape."""
    integers: dict[str, str] = {}
    for node in nodes:
        if node.op_type == "QuantizeLinear":
            integers[node.input[0]] = node.output[0]
        elif node.op_type == "DequantizeLinear":
            integers[node.output[0]] = node.input[0]
        elif node.op_type == "Shape":
            node.input[0] = integers.get(node.input[0], node.input[0])


def _wanted(view: OnnxGraph) -> set[str]:
    """Return the tensors that reach an operation in integers through operations that pass pairs."""
    found: set[str] = set()
    for node in reversed(view.graph.node):
        if node.op_type in _WANTED or (node.op_type in _PASSES and found.intersection(node.output)):
            found.update(node.input)
    return found


def _dequantizes_activation(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    producer = view.producers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
    return producer is not None and producer.op_type == "QuantizeLinear"


def _common_pair(node: onnx.NodeProto, first: dict[str, onnx.NodeProto], view: OnnxGraph) -> onnx.NodeProto | None:
    """Return the pair whose scale and zero point all tensors that a node moves have; None if they have no such."""
    if node.op_type not in _PASSES or (node.op_type == "Pad" and not _pads_within_range(node, view)):
        return None
    pairs = [first.get(name) for name in (node.input if node.op_type == "Concat" else node.input[:1])]
    if not pairs or pairs[0] is None or not all(p is not None and _alike(p, pairs[0], view) for p in pairs):
        return None
    return pairs[0]


def _pads_within_range(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    """Return True for a Pad with zeros, or with values of the tensor itself."""
    if attribute(node, "mode", b"constant") != b"constant":
        return True
    value = view.array(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
    return value is not None and not value.any()


def _cast_pair(node: onnx.NodeProto, pair: onnx.NodeProto, view: OnnxGraph) -> onnx.NodeProto | None:
    """Return a pair like that before a Cast, with a scale of the new type; None if the type has no such scale."""
    scale, to = view.array(pair.input[1]), attribute(node, "to", 0)
    if scale is None or to not in _SCALE_TYPES:
        return None
    made = scale.astype(helper.tensor_dtype_to_np_dtype(to))
    if made.dtype == scale.dtype:
        return pair
    if not np.isfinite(made).all() or not made.all():
        return None  # half precision does not hold it
    like = onnx.NodeProto()
    like.CopyFrom(pair)
    like.input[1] = view.add_constant(added_tensor(node.output[0], "scale_again"), made)
    return like


def _alike(a: onnx.NodeProto, b: onnx.NodeProto, view: OnnxGraph) -> bool:
    if list(a.input[1:]) == list(b.input[1:]):
        return True
    values = [(view.array(x), view.array(y)) for x, y in zip(a.input[1:], b.input[1:], strict=False)]
    return len(a.input) == len(b.input) and all(
        x is not None and y is not None and x.dtype == y.dtype and np.array_equal(x, y) for x, y in values
    )


def _pair(name: str, like: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto]:
    parts = ("quantized_again", "dequantized_again", "QuantizeLinear_again", "DequantizeLinear_again")
    integers, result, quantize, dequantize = (view.free(added_tensor(name, part)) for part in parts)
    return [
        helper.make_node("QuantizeLinear", [name, *like.input[1:]], [integers], name=quantize),
        helper.make_node("DequantizeLinear", [integers, *like.input[1:]], [result], name=dequantize),
    ]
