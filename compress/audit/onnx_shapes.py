"""Infers the shape of every result in an ONNX file for one image, by comparing batches of two and of three."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from compress.export.onnx_graph import OnnxGraph

_TWO, _THREE = 2, 3
_SMALL = 1024


@dataclass(frozen=True, kw_only=True)
class NodeOutput:
    """A result of a node.

    Attributes:
        dims: shape for one image; a dimension of batch times tokens is given as tokens.
        users: nodes that read it.
        result: True if it is an output of the network.
    """

    dims: tuple[int, ...]
    users: frozenset[str]
    result: bool


OnnxShapes = Mapping[str, tuple[NodeOutput, ...]]
"""Results by the name of their node, without those that do not grow with the batch or whose size is unknown."""


def onnx_shapes(path: Path | str) -> OnnxShapes:
    """Infer the shapes of a file; return {} if it cannot be read or shape inference fails."""
    try:
        model = onnx.load(str(path), load_external_data=False)
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) > _SMALL:
                tensor.ClearField("raw_data")
        two, three = (_inferred(model, batch) for batch in (_TWO, _THREE))
    except Exception:
        return {}
    consumers = OnnxGraph(model.graph).consumers
    results = {value.name for value in model.graph.output}
    found: dict[str, tuple[NodeOutput, ...]] = {}
    for node in model.graph.node:
        found[node.name] = tuple(
            NodeOutput(dims=dims, users=frozenset(n.name for n in consumers.get(name, ())), result=name in results)
            for name in node.output
            if (dims := _per_image(two.get(name), three.get(name))) is not None
        )
    return found


def _inferred(model: onnx.ModelProto, batch: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes that are known in all dimensions if the open batch of the inputs is `batch`."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    weights = {tensor.name for tensor in fixed.graph.initializer}
    for value in fixed.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in weights and dims and not dims[0].HasField("dim_value"):
            dims[0].dim_value = batch
    del fixed.graph.value_info[:]
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    return {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.output)
        if all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }


def _per_image(two: tuple[int, ...] | None, three: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the dimensions for one image.

    >>> _per_image((2, 17, 64), (3, 17, 64)), _per_image((34, 64), (51, 64)), _per_image((64, 64), (64, 64))
    ((17, 64), (17, 64), None)
    """
    if two is None or three is None or len(two) != len(three):
        return None
    grown = [i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if len(grown) != 1 or two[grown[0]] * _THREE != three[grown[0]] * _TWO:
        return None
    rows = two[grown[0]] // _TWO
    return tuple(rows if i == grown[0] else size for i, size in enumerate(two) if i != grown[0] or rows != 1)
