"""The graph of a float file, with values of constants, types and shapes; what inference leaves open is measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper
from onnx.reference import ReferenceEvaluator

from compress.engines.base import Arrays, library_errors
from compress.errors import QuantizationError
from compress.onnx_graph import (
    SMALL_CONSTANT,
    OnnxGraph,
    attribute,
    constant_tensor,
    inputs_of,
    subgraphs,
    without_weights,
)
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.run import FloatSession, unknown_to_runtime

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
"""Types that QuantizeLinear takes."""

Shapes = dict[str, tuple[int, ...]]
Types = dict[str, int]

_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_GROWING = frozenset({"ConstantOfShape", "Expand", "Tile", "Range", "Resize", "Pad", "OneHot", "EyeLike"})
"""Operators whose result may be of any size that the file states; they are run to learn small constants only."""

_COMPUTED = 1 << 22
"""Elements of the largest result of such an operator that is computed: its size is known before."""


class Index(OnnxGraph):
    """An index over the graph of a file; made anew after a change, but for constants that are added through it.

    Attributes:
        consumers: the nodes that read each tensor, each once, in order, with those whose graphs read it.
        unchanging: tensors that follow from constants alone.
        fixed: the same and those that follow from the shapes of tensors.
    """

    def __init__(self, source: SourceFile, shapes: Shapes | None = None) -> None:
        super().__init__(source.proto.graph)
        self.source = source
        self.opset = {entry.domain: entry.version for entry in source.proto.opset_import}
        self.outputs = {value.name for value in self.graph.output}
        self.consumers = {}
        self.unchanging = {tensor.name for tensor in self.graph.initializer} | {""}
        self.fixed = set(self.unchanging)
        for node in self.graph.node:
            read = [name for name in dict.fromkeys(inputs_of(node)) if name]
            for name in read:
                self.consumers.setdefault(name, []).append(node)
            if node.op_type in _RANDOM:
                continue
            if self.unchanging.issuperset(read):
                self.unchanging.update(node.output)
            if node.op_type == "Shape" or self.fixed.issuperset(read):
                self.fixed.update(node.output)
        self._shapes = shapes or {}
        self._values: dict[str, NDArray[Any] | None] = {}

    def value(self, name: str) -> NDArray[Any] | None:
        """Return the value of a fixed tensor, for the shapes that the index was made with; None if it is not known."""
        if not name:
            return None
        if name in self._values:
            return self._values[name]
        value, tensor = self._compute(name), self.constants.get(name)
        if tensor is None or not external_data_helper.uses_external_data(tensor):
            self._values[name] = value  # weights in other files may be more than memory holds
        return value

    def add_constant(self, name: str, value: NDArray[Any]) -> str:
        name = super().add_constant(name, value)
        self.unchanging.add(name)
        self.fixed.add(name)
        return name

    def number(self, name: str) -> float | None:
        if name not in self.fixed or not name:
            return None
        value = self.value(name)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def deciding(self) -> dict[str, NDArray[Any]]:
        """Return the computed values, all integers, that decide about the shapes of results."""
        found = {}
        for node in self.graph.node:
            for name in node.input[1:]:
                if name in self.fixed and name in self.producers and self.producers[name].op_type != "Constant":
                    value = self.value(name)
                    if value is not None and value.dtype.kind == "i" and value.size < SMALL_CONSTANT:
                        found[name] = value
        return found

    def alone(self, name: str) -> onnx.NodeProto | None:
        """Return the only node that reads a tensor; None if there are several, or the graph returns it."""
        found = self.consumers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None

    def _compute(self, name: str) -> NDArray[Any] | None:
        if name in self.constants:
            return self.source.array(self.constants[name])
        node = self.producers.get(name)
        if node is None or name not in self.fixed or list(subgraphs([node])):
            return None
        if node.op_type == "Shape":
            shape = self._shapes.get(node.input[0])
            part = slice(attribute(node, "start", 0), attribute(node, "end", None))
            return None if shape is None else np.asarray(shape[part], np.int64)
        feeds = {key: value for key in node.input if key and (value := self.value(key)) is not None}
        if not feeds.keys() >= {key for key in node.input if key}:
            return None
        shape = self._shapes.get(name)
        small = shape is not None and math.prod(shape) <= _COMPUTED
        if node.op_type in _GROWING and not small and not _stays_small(node, feeds):
            return None
        return _evaluated(node, feeds, name, self.opset)


def _stays_small(node: onnx.NodeProto, feeds: dict[str, NDArray[Any]]) -> bool:
    """Return True if a ConstantOfShape is of a small size; the size of others is not looked at."""
    if node.op_type != "ConstantOfShape":
        return False
    sizes = [int(size) for size in feeds[node.input[0]].reshape(-1)]
    return min(sizes, default=1) >= 0 and math.prod(sizes) <= SMALL_CONSTANT


def _evaluated(
    node: onnx.NodeProto, feeds: dict[str, NDArray[Any]], name: str, opset: dict[str, int]
) -> NDArray[Any] | None:
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()
    ]
    graph = helper.make_graph([node], "constant", inputs, [onnx.ValueInfoProto(name=name)])
    imports = [helper.make_opsetid(domain, version) for domain, version in opset.items()]
    try:
        results: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=imports)).run([name], feeds)
        return np.asarray(results[0])
    except Exception:  # the reference evaluator raises whatever the numpy code of an operator does
        return None


def infer(
    source: SourceFile, sizes: dict[str, tuple[int, ...]], known: dict[str, NDArray[Any]] | None = None
) -> tuple[Shapes, Types]:
    """Infer shapes and types of the tensors of a graph whose inputs have given shapes; unknown ones are left out.

    `known` values decide about shapes, such as computed pads, which inference does not compute.
    """
    model = without_weights(source.proto)
    for value in model.graph.input:
        if value.name in sizes:
            del value.type.tensor_type.shape.dim[:]
            for size in sizes[value.name]:
                value.type.tensor_type.shape.dim.add().dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    if known:
        kept = [node for node in model.graph.node if not set(node.output) <= known.keys()]
        del model.graph.node[:]
        model.graph.node.extend(kept)
        model.graph.initializer.extend(constant_tensor(name, value) for name, value in known.items())
    with library_errors(QuantizationError, f"{source.path}: its shapes cannot be inferred (", ")"):
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = [*graph.value_info, *graph.output, *graph.input]
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in values:
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    return shapes, types


def elements(shape: tuple[int, ...] | None) -> int:
    return 0 if shape is None else math.prod(shape)


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
    unknown = unknown_to_runtime(source)
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
