"""Shapes and types of all tensors of a graph, for one batch; what inference leaves open is measured."""

from __future__ import annotations

import numpy as np
import onnx

from compress.engines.base import Arrays
from compress.errors import QuantizationError
from compress.onnx_ptq.index import Index, Shapes, Types, elements, infer
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.run import FloatSession, unknown_to_runtime

_ROUNDS = 4
"""Rounds of inference, each with the values that follow from the shapes of the round before."""

_LARGE, _GROWTH = 1 << 28, 1 << 10
"""Elements that every tensor may have, and elements for each element of the inputs."""


def inferred(source: SourceFile, feed: Arrays) -> tuple[Index, Shapes, Types]:
    """Return the index, shapes and types of a graph; what inference leaves open is measured on one batch."""
    sizes = {name: value.shape for name, value in feed.items()}
    shapes, types = infer(source, sizes)
    _check_sizes(source, shapes, feed)
    index = Index(source, shapes)
    unknown = unknown_to_runtime(index.graph)
    for _ in range(_ROUNDS):
        known = {} if len(shapes) == len(types) else index.deciding()
        before = len(shapes)
        if known:
            shapes, types = infer(source, sizes, known)
            index = Index(source, shapes)
        if len(shapes) == before:
            break
    open_ = [
        name
        for node in index.graph.node
        for name in node.output
        if name and name not in index.fixed and name not in unknown and not (name in shapes and name in types)
    ]
    if open_:
        for name, value in FloatSession(source, open_).run(feed).items():
            if isinstance(value, np.ndarray):
                shapes[name] = value.shape
                types.setdefault(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
        index = Index(source, shapes)
    return index, shapes, types


def _check_sizes(source: SourceFile, shapes: Shapes, feed: Arrays) -> None:
    """Refuse a tensor that is out of all proportion to the inputs, before anything is allocated."""
    allowed = max(_LARGE, _GROWTH * sum(value.size for value in feed.values()))
    given = {tensor.name for tensor in source.proto.graph.initializer}
    name = max(shapes.keys() - given, key=lambda key: elements(shapes[key]), default="")
    if name and elements(shapes[name]) > allowed:
        raise QuantizationError(
            f"{source.path}: tensor {name!r} has the shape {shapes[name]}, {elements(shapes[name])} elements; at most "
            f"{allowed} are computed for inputs of this size. Give smaller batches, or export the file again"
        )
