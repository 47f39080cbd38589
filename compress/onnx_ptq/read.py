"""Reads an ONNX graph into the view that placement works on: the same rules decide as for torch models.

A node of the view is one operation of the file, or several that spell one (`compounds`). It is named after the tensor
that it writes, and its path is the name of the node in the file, which rules match. What is computed from the sizes of
tensors is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from compress.graph.ops import ONNX_KINDS
from compress.graph.traits import MANY, TRAITS, WEIGHTED
from compress.onnx_graph.graph import attribute, inputs_of, subgraphs
from compress.onnx_ptq.compounds import Compound, find_compounds, find_parts
from compress.onnx_ptq.index import FLOATS, Index, Shapes, Types, elements
from compress.quantization.placement.view import GraphView, Node, Parameters, mask_in

OUTPUT = "the outputs of the graph"
_MORE_KINDS = {"Upsample": "resize", "Sum": "add"}
_STANDARD = frozenset({"", "ai.onnx"})


@dataclass(frozen=True, kw_only=True)
class Weight:
    """The place of a layer's weight in the file.

    Attributes:
        node: reads it.
        place: index of that input.
        transposed: True if the file holds (in, out) of a linear layer, where the view has (out, in).
    """

    node: onnx.NodeProto
    place: int
    transposed: bool = False


@dataclass(kw_only=True)
class Reading:
    """A graph as placement sees it, and the way back.

    Attributes:
        view: what placement works on.
        nodes: the file's nodes that an operation of the view consists of, by the view's name.
        weights: by the path of the layer.
    """

    view: GraphView
    nodes: dict[str, tuple[onnx.NodeProto, ...]] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)


def read_onnx_graph(index: Index, shapes: Shapes, types: Types, unknown: Mapping[str, str]) -> Reading:
    """Return the view of a graph.

    `shapes` are those of the inputs that it is calibrated with. `unknown` has the reasons why tensors cannot be
    measured, by name: they come from or after operators that no engine here knows.
    """
    reader = _Reader(index, shapes, types, unknown)
    for value in index.graph.input:
        if value.name not in index.constants:
            reader.add(Node(name=value.name, kind="input"))
    for node in index.graph.node:
        reader.read(node)
    results = tuple(dict.fromkeys(reader.tensor(value.name) for value in index.graph.output))
    reader.add(Node(name=OUTPUT, kind="output", inputs=results))
    for made in reader.view:
        for source in made.inputs:
            if made not in source.consumers:
                source.consumers.append(made)
    return Reading(view=GraphView(nodes=tuple(reader.view)), nodes=reader.nodes, weights=reader.weights)


class _Reader:
    def __init__(self, index: Index, shapes: Shapes, types: Types, unknown: Mapping[str, str]) -> None:
        self.index, self.shapes, self.types, self.unknown = index, shapes, types, unknown
        self.view: list[Node] = []
        self.made: dict[str, Node] = {}
        self.nodes: dict[str, tuple[onnx.NodeProto, ...]] = {}
        self.weights: dict[str, Weight] = {}
        self.parts = find_parts(index, shapes)
        self.channels_last: set[str] = set()
        compounds = find_compounds(index)
        self.last = {compound.nodes[-1].output[0]: compound for compound in compounds}
        self.inside = {part.output[0] for compound in compounds for part in compound.nodes[:-1]}

    def add(self, node: Node, *members: onnx.NodeProto) -> None:
        node.shape = self.shapes.get(node.name, node.shape)
        node.floating = self.types.get(node.name) in FLOATS
        self.view.append(node)
        self.made[node.name] = node
        self.nodes[node.name] = members

    def tensor(self, name: str) -> Node:
        """Return the node that computes a tensor; a constant gets one when it is first asked for."""
        if name not in self.made:
            self.add(Node(name=name, kind="constant"))
        return self.made[name]

    def read(self, node: onnx.NodeProto) -> None:
        results = [name for name in node.output if name]
        if not results or self.index.fixed.issuperset(results) or results[0] in self.inside:
            return
        if any(name in self.unknown for name in results):
            self._opaque(node, results, self.unknown[results[0]])
        elif results[0] in self.last:
            self._compound(self.last[results[0]])
        elif results[0] in self.parts or node.op_type == "Split":
            self._part(node, results)
        else:
            self._plain(node)
        for name in results:
            if name not in self.made:
                self.add(Node(name=name, kind="unknown", inputs=(self.tensor(results[0]),)), node)

    def _opaque(self, node: onnx.NodeProto, results: list[str], note: str) -> None:
        read = [name for name in dict.fromkeys(inputs_of(node)) if name and name not in self.index.fixed]
        inputs = tuple(dict.fromkeys(self.tensor(name) for name in read))
        self.add(Node(name=results[0], kind="unknown", path=node.name, inputs=inputs, note=note), node)

    def _compound(self, found: Compound) -> None:
        name = found.nodes[-1].output[0]
        made = Node(name=name, kind=found.kind, inputs=(self.tensor(found.input),))
        if found.kind == "linear":
            bias = [key for key in found.nodes[1].input if key not in found.nodes[0].output]
            self._weighted(made, found.nodes[0], bias=bias[0], transposed=True)
        self._layout(made, found.input)
        self.add(made, *found.nodes)

    def _part(self, node: onnx.NodeProto, results: list[str]) -> None:
        """A part of a tensor, as torch.fx has it: one operation without a shape that takes it apart, and its parts."""
        whole = f"parts of {node.input[0]}"
        if whole not in self.made:
            self.add(Node(name=whole, kind="split", inputs=(self.tensor(node.input[0]),)))
        if node not in self.nodes[whole]:
            self.nodes[whole] = (*self.nodes[whole], node)
        for name in results:
            made = Node(name=name, kind="getitem", inputs=(self.made[whole],))
            self._layout(made, node.input[0])
            self.add(made, node)

    def _plain(self, node: onnx.NodeProto) -> None:
        if list(subgraphs([node])):
            note = f"a {node.op_type} with a graph of its own, of which nothing is quantized"
            return self._opaque(node, list(filter(None, node.output)), note)
        kind = self._kind(node)
        made = Node(name=node.output[0], kind=kind, path=node.name)
        operands = self._operands(node, kind)
        made.inputs = tuple(dict.fromkeys(self.tensor(name) for name in operands))
        if kind == "unknown":
            made.note = f"{node.op_type}{f' of the domain {node.domain}' if node.domain not in _STANDARD else ''}"
        if kind in WEIGHTED:
            flip = node.op_type == "MatMul" or (node.op_type == "Gemm" and not attribute(node, "transB", 0))
            self._weighted(made, node, bias=node.input[2] if len(node.input) > 2 else "", transposed=flip)
        self._arguments(made, node)
        self._layout(made, *operands)
        self.add(made, node)

    def _kind(self, node: onnx.NodeProto) -> str:
        kind = ONNX_KINDS.get(node.op_type) or _MORE_KINDS.get(node.op_type, "unknown")
        if node.domain not in _STANDARD:
            return kind if kind in {"gelu", "layer_norm"} else "unknown"
        if kind in {"linear", "matmul"}:
            return self._product(node, kind)
        if node.op_type == "Gather" and node.input[0] in self.index.fixed:
            return "embedding"
        if node.op_type == "Clip" and self._bounds(node) == (0.0, 6.0):
            return "relu6"
        if node.op_type == "Transpose" and _is_layout(node):
            return "identity"  # between NCHW and NHWC: sums and layers on both sides are still one block
        return kind

    def _product(self, node: onnx.NodeProto, kind: str) -> str:
        if self.types.get(node.output[0]) not in FLOATS:
            return "unknown"
        weight = node.input[1] in self.index.fixed
        if weight and len(self.shapes.get(node.input[1], ())) == 2 and node.input[0] not in self.index.fixed:
            return "linear"
        return "addmm" if kind == "linear" and len(node.input) > 2 and node.input[2] else "matmul"

    def _operands(self, node: onnx.NodeProto, kind: str) -> list[str]:
        """The tensors that an operation computes with; numbers are arguments."""
        count = TRAITS[kind].data_inputs
        names = [name for name in node.input if name]
        if kind == "addmm":
            names = [names[2], *names[:2]]
        elif kind == "embedding":
            names = names[1:]
        elif kind == "unknown":
            names = [name for name in names if name not in self.index.fixed]
        elif count != MANY and node.op_type != "Sum":
            names = names[:count]
        if TRAITS[kind].category == "arithmetic":
            names = [name for name in names if name not in self.index.fixed or elements(self.shapes.get(name)) > 1]
        return names

    def _weighted(self, made: Node, node: onnx.NodeProto, *, bias: str, transposed: bool) -> None:
        """Fill in the parameters of a layer, or the reason why its weight cannot be quantized."""
        made.path, name = node.name, node.input[1]
        value = self.index.value(name) if name in self.index.unchanging else None
        if value is None:
            given = any(value.name == name for value in self.index.graph.input)
            made.refusal = (
                f"has a weight that {'is an input of the file' if given else 'the file computes when it runs'}"
            )
        elif self.types.get(made.name, TensorProto.FLOAT) not in FLOATS or value.dtype.name not in _FLOAT_NAMES:
            made.refusal = f"computes in {value.dtype.name}, for which Q/DQ does not exist"
        elif value.size == 0:
            made.refusal = "has a weight without elements"
        made.refusal = made.refusal or mask_in(_tensor(self.index, bias))
        if made.refusal:
            return
        self.weights[node.name] = Weight(node=node, place=1, transposed=transposed and made.kind == "linear")
        made.parameters = Parameters(
            weight=partial(weight_of, self.index, name, self.weights[node.name].transposed),
            bias=partial(_tensor, self.index, bias),
            axis=1 if made.kind == "conv_transpose" else 0,
            groups=attribute(node, "group", 1),
        )

    def _arguments(self, made: Node, node: onnx.NodeProto) -> None:
        if made.traits.category == "arithmetic":
            numbers = [self.index.number(name) for name in node.input]
            made.numbers = tuple(number for number in numbers if number is not None)
            made.factor = self._factor(node) if made.kind == "mul" else 0.0
        elif made.kind == "clamp":
            made.low = self._bounds(node)[0]
        elif made.kind == "resize":
            mode = attribute(node, "mode", b"nearest").decode()
            made.mode = "bicubic" if mode == "cubic" else mode
        elif made.kind == "pad":
            made.filling = self._filling(node)
        elif made.kind == "mean":
            made.axes = self._mean_axes(node)
        elif made.kind == "batch_norm":
            made.parameters = Parameters(
                weight=partial(_tensor, self.index, node.input[1]),
                bias=partial(_tensor, self.index, node.input[2]),
                mean=partial(_tensor, self.index, node.input[3]),
            )
        elif node.op_type == "Cast" and attribute(node, "to", 0) == TensorProto.FLOAT:
            made.cast = "float32" if self.types.get(node.input[0]) in FLOATS else ""

    def _factor(self, node: onnx.NodeProto) -> float:
        """Return the largest of the constants that a Mul multiplies by, if all are positive; else 0.0."""
        values = [self.index.value(name) for name in node.input if name in self.index.fixed]
        found = [value for value in values if value is not None and value.size and bool((value > 0).all())]
        return float(found[0].max()) if len(found) == len(values) == 1 else 0.0

    def _bounds(self, node: onnx.NodeProto) -> tuple[float, float]:
        """Lowest and highest value of a Clip, which are attributes before opset 11 and inputs after."""
        found = []
        for i, (key, open_) in enumerate((("min", -np.inf), ("max", np.inf)), start=1):
            name = node.input[i] if len(node.input) > i else ""
            number = self.index.number(name) if name else None
            found.append(float(attribute(node, key, open_)) if number is None else number)
        return found[0], found[1]

    def _filling(self, node: onnx.NodeProto) -> float:
        """Value that a Pad fills with, an attribute before opset 11 and an input after; NaN if it is computed."""
        if attribute(node, "mode", b"constant") != b"constant":
            return 0.0
        if len(node.input) < 3 or not node.input[2]:
            return float(attribute(node, "value", 0.0))
        number = self.index.number(node.input[2])
        return float("nan") if number is None else number

    def _mean_axes(self, node: onnx.NodeProto) -> frozenset[int] | None:
        shape = self.shapes.get(node.input[0])
        given = self.index.value(node.input[1]) if len(node.input) > 1 else attribute(node, "axes", None)
        if shape is None or given is None:
            return None
        axes = frozenset(int(axis) % len(shape) for axis in np.asarray(given).reshape(-1))
        if node.input[0] in self.channels_last and len(shape) == 4:
            return frozenset({0: 0, 1: 2, 2: 3, 3: 1}[axis] for axis in axes)
        return axes

    def _layout(self, made: Node, *operands: str) -> None:
        """Follow which images have their channels last."""
        node = self.index.producers.get(made.name)
        if node is not None and node.op_type == "Transpose":
            if list(attribute(node, "perm", [])) == [0, 2, 3, 1]:
                self.channels_last.add(made.name)
        elif (made.traits.elementwise or made.kind == "pad") and not self.channels_last.isdisjoint(operands):
            self.channels_last.add(made.name)


_FLOAT_NAMES = frozenset({"float32", "float16", "bfloat16"})


def weight_of(index: Index, name: str, transposed: bool) -> torch.Tensor:
    """Return a weight in float32, (out, in) if the file holds (in, out)."""
    value: NDArray[Any] = np.asarray(index.value(name), np.float32)
    return torch.from_numpy(np.array(value.T if transposed else value))


def _tensor(index: Index, name: str) -> torch.Tensor | None:
    value = index.value(name) if name in index.unchanging else None
    return None if value is None else torch.from_numpy(np.array(value, np.float32))


def _is_layout(node: onnx.NodeProto) -> bool:
    return list(attribute(node, "perm", [])) in ([0, 2, 3, 1], [0, 3, 1, 2])
