"""Moves padding with zeros into the convolutions that alone read it.

Frameworks that pad unevenly ("same" padding at stride 2, as in TensorFlow's networks) write a Pad before the
convolution, which engines run in float; EfficientNet-Lite0 has 17 of them in front of INT8 convolutions. ONNX's Conv
pads each side by itself, and a padded zero is exact on every grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from compress.export.onnx_graph import OnnxGraph, attribute

Values = Callable[[str], NDArray[Any] | None]


def pads_into_convolutions(proto: onnx.ModelProto, value: Values | None = None) -> int:
    """Remove every Pad by zeros of which all consumers are convolutions, which pad in its place; in place.

    Args:
        proto: the model.
        value: returns the value of a constant by name; None reads initializers and Constant nodes.

    Returns:
        Number of nodes that are no longer there.
    """
    view = OnnxGraph(proto.graph)
    results = {tensor.name for tensor in proto.graph.output}
    kept: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        consumers = view.consumers.get(node.output[0], []) if node.op_type == "Pad" else []
        amounts = _amounts(node, value or view.array) if consumers else None
        fits = amounts is not None and node.output[0] not in results
        if amounts is None or not fits or not all(_pads_itself(c, node.output[0], len(amounts)) for c in consumers):
            kept.append(node)
            continue
        for conv in consumers:
            own = attribute(conv, "pads", [0] * len(amounts))
            others = [a for a in conv.attribute if a.name not in {"pads", "auto_pad"}]
            del conv.attribute[:]
            conv.attribute.extend(
                [*others, helper.make_attribute("pads", [int(a + b) for a, b in zip(own, amounts, strict=True)])]
            )
            conv.input[0] = node.input[0]
    removed = len(proto.graph.node) - len(kept)
    if removed:
        view.replace_nodes(kept)
    return removed


def _amounts(node: onnx.NodeProto, value: Values) -> list[int] | None:
    """Return what a Pad adds to the spatial axes, in the order of Conv's `pads`; None if it pads anything else."""
    names = [name for name in node.input[1:] if name]
    constants = [value(name) for name in names]
    if attribute(node, "mode", b"constant") != b"constant" or any(c is None for c in constants) or len(names) > 2:
        return None
    given = constants[0] if constants else attribute(node, "pads", None)
    filling = constants[1] if len(constants) > 1 else attribute(node, "value", 0.0)
    if given is None or (filling is not None and getattr(filling, "size", 1) != 1) or float(filling or 0) != 0:
        return None
    amounts = [int(amount) for amount in given]
    rank = len(amounts) // 2
    outside = [amounts[i] for i in (0, 1, rank, rank + 1)] if rank > 2 else [1]
    if any(outside) or min(amounts) < 0:
        return None
    return [*amounts[2:rank], *amounts[rank + 2 :]]


def _pads_itself(node: onnx.NodeProto, source: str, sides: int) -> bool:
    """Return True if a node is a convolution of a tensor with padding that is given in numbers."""
    if node.op_type != "Conv" or node.input[0] != source or list(node.input).count(source) != 1:
        return False
    automatic = attribute(node, "auto_pad", b"NOTSET")
    own = attribute(node, "pads", None)
    return automatic in {b"NOTSET", b"VALID"} and (own is None or len(own) == sides)
