"""An ONNX graph with its producers, consumers, values of constants, types and shapes.

Consumers include the graphs inside nodes (branches of If, bodies of Loop), which may read any tensor around them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from compress.errors import QuantizationError
from compress.onnx_graph.graph import SMALL_CONSTANT, attribute, inputs_of, subgraphs, without_weights
from compress.onnx_ptq.load import SourceFile

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


class Index:
    """An index over the graph of a file; made anew after a change.

    Attributes:
        source: the file.
        graph: its graph.
        opset: of the standard operators.
        initializers: by name.
        producers: the node that writes each tensor.
        consumers: the nodes that read each tensor, each once, in order, nodes with graphs inside included.
        outputs: names of the graph's outputs.
        constants: tensors that follow from constants alone.
        fixed: the same and those that follow from the shapes of tensors.
    """

    def __init__(self, source: SourceFile, shapes: Shapes | None = None) -> None:
        self.source, self.graph = source, source.proto.graph
        self.opset = {entry.domain: entry.version for entry in source.proto.opset_import}
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self.outputs = {value.name for value in self.graph.output}
        self.producers: dict[str, onnx.NodeProto] = {}
        self.consumers: dict[str, list[onnx.NodeProto]] = {}
        self.constants = set(self.initializers) | {""}
        self.fixed = set(self.constants)
        for node in self.graph.node:
            read = [name for name in dict.fromkeys(inputs_of(node)) if name]
            for name in read:
                self.consumers.setdefault(name, []).append(node)
            for name in node.output:
                self.producers[name] = node
            if node.op_type in _RANDOM:
                continue
            if self.constants.issuperset(read):
                self.constants.update(node.output)
            if node.op_type == "Shape" or self.fixed.issuperset(read):
                self.fixed.update(node.output)
        self._shapes = shapes or {}
        self._values: dict[str, NDArray[Any] | None] = {}

    def value(self, name: str) -> NDArray[Any] | None:
        """Return the value of a fixed tensor, for the shapes that the index was made with; None if it is not known.

        Raises:
            QuantizationError: the data of a constant cannot be read.
        """
        if not name:
            return None
        if name in self._values:
            return self._values[name]
        value, tensor = self._compute(name), self.initializers.get(name)
        if tensor is None or not external_data_helper.uses_external_data(tensor):
            self._values[name] = value  # weights in other files may be more than memory holds
        return value

    def number(self, name: str) -> float | None:
        """Return the one number that a constant holds; None if it is no such constant."""
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
        if name in self.initializers:
            return self.source.array(self.initializers[name])
        node = self.producers.get(name)
        if node is None or name not in self.fixed or list(subgraphs([node])):
            return None
        if node.op_type == "Shape":
            shape = self._shapes.get(node.input[0])
            part = slice(attribute(node, "start", 0), attribute(node, "end", None))
            return None if shape is None else np.asarray(shape[part], np.int64)
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            return self.source.array(node.attribute[0].t)
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
    """Run one node on constants with ONNX's reference evaluator; None if it cannot."""
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()
    ]
    graph = helper.make_graph([node], "constant", inputs, [onnx.ValueInfoProto(name=name)])
    imports = [helper.make_opsetid(domain, version) for domain, version in opset.items()]
    try:
        results: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=imports)).run([name], feeds)
        return np.asarray(results[0])
    except Exception:
        return None


def infer(
    source: SourceFile, sizes: dict[str, tuple[int, ...]], known: dict[str, NDArray[Any]] | None = None
) -> tuple[Shapes, Types]:
    """Infer shapes and types of the tensors of a graph whose inputs have given shapes; what is not known is left out.

    Args:
        source: the file.
        sizes: shapes of its inputs.
        known: values of tensors that decide about shapes, such as computed pads, which inference does not compute.

    Raises:
        QuantizationError: shape inference fails: the graph cannot be run on such inputs.
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
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception as error:
        raise QuantizationError(f"{source.path}: its shapes cannot be inferred ({error})") from error
    values = [*graph.value_info, *graph.output, *graph.input]
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in values:
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    return shapes, types


def renamed(names: Iterable[str], taken: set[str]) -> dict[str, str]:
    """Return a free name for each name, which is added to those that are taken."""
    found = {}
    for name in names:
        free = name
        for i in itertools.count(1):
            if free not in taken:
                break
            free = f"{name}_{i}"
        taken.add(free)
        found[name] = free
    return found


def elements(shape: tuple[int, ...] | None) -> int:
    """Return the number of elements of a shape; 0 if it is not known."""
    return 0 if shape is None else math.prod(shape)


def constant_tensor(name: str, value: NDArray[Any]) -> onnx.TensorProto:
    """Return an initializer."""
    return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
