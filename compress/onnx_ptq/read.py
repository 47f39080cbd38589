"""Reads an ONNX graph into the view that placement works on: the same rules decide as for torch models.

A node of the view is one operation of the file, or several that spell one. It is named after the tensor that it writes,
and its path is the name of the node in the file, which rules match. What is computed from the sizes of tensors is left
out. Compounds are found by their form, which counts only if no other node reads what is inside it:

    linear      MatMul by a constant, Add of a bias
    silu, hardswish, mish, gelu (with Erf, or approximated with Tanh), quick_gelu    arithmetic around the function
    softplus    with its threshold, as torch's exporter writes it
    layer_norm  (x - mean) / Sqrt(variance + epsilon), and the affine part
    roll        two slices of a tensor, joined in the other order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto

from compress.graph.ops import MANY, ONNX_KINDS, TRAITS, WEIGHTED
from compress.graph.spelled import spelled_activation
from compress.onnx_graph import TELLING, OnnxForm, attribute, inputs_of, subgraphs
from compress.onnx_ptq.source import FLOATS, Index, Shapes, Types, elements
from compress.quantization.placement.view import GraphView, Node, Parameters, mask_in


@dataclass(frozen=True, kw_only=True)
class Compound:
    """One operation that is several nodes.

    Attributes:
        kind: row of `graph.ops`.
        nodes: in graph order; the last one writes the result.
        input: the activation that it reads.
    """

    kind: str
    nodes: tuple[onnx.NodeProto, ...]
    input: str


# Returns the compound that begins, or has its most telling node, at a node.
Finder = Callable[[onnx.NodeProto, Index], Compound | None]


def find_compounds(index: Index) -> list[Compound]:
    found: list[Compound] = []
    taken: set[str] = set()
    for node in index.graph.node:
        finder = _FINDERS.get(node.op_type)
        compound = finder(node, index) if finder is not None else None
        if compound is None or len(compound.nodes) < 2:
            continue
        names = {part.output[0] for part in compound.nodes}
        if taken.isdisjoint(names) and _closed(compound, index):
            taken |= names
            found.append(compound)
    return found


def _closed(compound: Compound, index: Index) -> bool:
    """Return True if nothing outside reads what is inside, and the inside reads its input and constants alone."""
    names = [part.output[0] for part in compound.nodes]
    for part in compound.nodes:
        allowed = index.fixed | {compound.input} | set(names)
        if not allowed.issuperset(part.input) or len([name for name in part.output if name]) != 1:
            return False
    inside = set(names)
    readers = [reader for name in names[:-1] for reader in index.consumers.get(name, [])]
    return index.outputs.isdisjoint(names[:-1]) and all(inside.intersection(reader.output) for reader in readers)


def _linear(node: onnx.NodeProto, index: Index) -> Compound | None:
    after = index.alone(node.output[0])
    weight = node.input[1]
    if after is None or after.op_type != "Add" or weight not in index.unchanging or node.input[0] in index.fixed:
        return None
    other = [name for name in after.input if name != node.output[0]]
    bias = index.value(other[0]) if len(other) == 1 and other[0] in index.unchanging else None
    value = index.value(weight)
    if bias is None or value is None or value.ndim != 2 or bias.shape not in {(), (1,), value.shape[1:]}:
        return None
    return Compound(kind="linear", nodes=(node, after), input=node.input[0])


def _activation(node: onnx.NodeProto, index: Index) -> Compound | None:
    form = OnnxForm(index, index.opset.get("", 1))
    found = spelled_activation(node.output[0], form)
    if found is None:
        return None
    return Compound(kind=found.name.split()[0], nodes=tuple(map(form.node, found.values)), input=found.x)


def _layer_norm(node: onnx.NodeProto, index: Index) -> Compound | None:
    """From the mean of x over (x - mean) to its quotient by the root of its mean square, and the affine part."""
    x = node.input[0]
    centred = index.consumers.get(node.output[0], [])
    if not centred or any(part.op_type != "Sub" or list(part.input) != [x, node.output[0]] for part in centred):
        return None
    nodes, differences = [node, *centred], {part.output[0] for part in centred}
    chain = [reader for name in differences for reader in index.consumers.get(name, [])]
    squares = [part for part in chain if part.op_type in {"Pow", "Mul"} and differences.issuperset(part.input[:1])]
    quotients = [part for part in chain if part.op_type == "Div" and part.input[0] in differences]
    if len(squares) != 1 or len(quotients) != 1:
        return None
    nodes.append(squares[0])
    for wanted in ("ReduceMean", "Add", "Sqrt", "Div"):
        after = index.alone(nodes[-1].output[0])
        if after is None or after.op_type != wanted:
            return None
        nodes.append(after)
    for wanted in ("Mul", "Add"):
        after = index.alone(nodes[-1].output[0])
        if after is None or after.op_type != wanted or not any(_of_last_axis(index, name) for name in after.input):
            break
        nodes.append(after)
    return Compound(kind="layer_norm", nodes=tuple(nodes), input=x)


def _of_last_axis(index: Index, name: str) -> bool:
    """True if a tensor is a constant that holds one number, or one for each place of the last axis."""
    value = index.value(name) if name in index.unchanging else None
    return value is not None and value.size in (1, *value.shape[-1:])


def _roll(node: onnx.NodeProto, index: Index) -> Compound | None:
    makers = [index.producers.get(name) for name in node.input]
    parts = [maker for maker in makers if maker is not None and maker.op_type == "Slice"]
    if len(parts) != 2 or len(makers) != 2:
        return None
    name = parts[0].input[0]
    shape = index.shapes.get(name, ())
    spans = [span for part in parts if (span := _span(part, name, shape, index) if shape else None)]
    if len(spans) != 2:
        return None
    (axis, start, end), second = spans
    joined = attribute(node, "axis", 0) % len(shape)
    whole = axis == joined and end == shape[axis] and second == (axis, 0, start)
    return Compound(kind="roll", nodes=(*parts, node), input=name) if whole else None


_FINDERS: dict[str, Finder] = {
    "MatMul": _linear,
    **dict.fromkeys(TELLING, _activation),
    "ReduceMean": _layer_norm,
    "Concat": _roll,
}


# Axis, first index, and index after the last.
Span = tuple[int, int, int]


def find_parts(index: Index, shapes: Shapes) -> dict[str, Span]:
    """Return where each part of a tensor lies, by name: slices and gathers along one axis, without gap or overlap.

    Exporters write `chunk`, `unbind` and `split` so. torch.fx sees one operation, whose parts have ranges of their own.
    """
    found: dict[str, Span] = {}
    for name, readers in index.consumers.items():
        shape = shapes.get(name)
        if shape is None or len(readers) < 2:
            continue
        spans = {reader.output[0]: span for reader in readers if (span := _span(reader, name, shape, index))}
        for axis in {span[0] for span in spans.values()}:
            along = sorted((span[1:], part) for part, span in spans.items() if span[0] == axis)
            edges = sorted({edge for (start, end), _ in along for edge in (start, end)})
            pieces = {piece for piece, _ in along}
            whole = [0, *edges[1:]] == edges and edges[-1] == shape[axis]
            if len(pieces) > 1 and whole and pieces == set(pairwise(edges)):
                found.update((part, (axis, *piece)) for piece, part in along)
    return found


def _span(node: onnx.NodeProto, name: str, shape: tuple[int, ...], index: Index) -> Span | None:
    """Return the indices that a node takes of one axis of a tensor; None if it takes anything else."""
    if node.input[0] != name or not index.fixed.issuperset(node.input[1:]):
        return None
    if node.op_type == "Gather":
        value = index.value(node.input[1])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % len(shape)
        if value is None or value.size != 1:
            return None
        start = int(value.reshape(-1)[0]) % shape[axis]
        return axis, start, start + 1
    if node.op_type != "Slice" or len(node.input) < 4:
        return None
    values = [index.value(key) for key in node.input[1:]]
    if any(value is None or value.size != 1 for value in values):
        return None
    start, end, axis, *step = (int(value.reshape(-1)[0]) for value in values if value is not None)
    axis %= len(shape)
    first, last, stride = slice(start, end, *step).indices(shape[axis])
    return (axis, first, last) if stride == 1 and first < last else None


OUTPUT = "the outputs of the graph"
_MORE_KINDS = {"Upsample": "resize", "Sum": "add", "Attention": "attention"}
_STANDARD = frozenset({"", "ai.onnx"})


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Where the file has a layer's weight; `transposed`: as (in, out), where the view has (out, in)."""

    node: onnx.NodeProto
    place: int
    transposed: bool = False


@dataclass(kw_only=True)
class Reading:
    """A graph as placement sees it, and the way back.

    Attributes:
        nodes: the file's nodes that an operation of the view consists of, by the view's name.
        weights: by the path of the layer.
    """

    view: GraphView
    nodes: dict[str, tuple[onnx.NodeProto, ...]] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)


def read_onnx_graph(
    index: Index, shapes: Shapes, types: Types, unknown: Mapping[str, str], opened: Set[str] = frozenset()
) -> Reading:
    """Return the view of a graph.

    `shapes` are those of the inputs that it is calibrated with. `unknown` has the reasons why tensors cannot be
    measured, by name. Compounds `opened` are not joined.
    """
    reader = _Reader(index, shapes, types, unknown, opened)
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
    def __init__(
        self, index: Index, shapes: Shapes, types: Types, unknown: Mapping[str, str], opened: Set[str]
    ) -> None:
        self.index, self.shapes, self.types, self.unknown = index, shapes, types, unknown
        self.view: list[Node] = []
        self.made: dict[str, Node] = {}
        self.nodes: dict[str, tuple[onnx.NodeProto, ...]] = {}
        self.weights: dict[str, Weight] = {}
        self.parts = find_parts(index, shapes)
        self.channels_last: set[str] = set()
        compounds = [found for found in find_compounds(index) if found.kind not in opened]
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
        made = Node(name=found.nodes[-1].output[0], kind=found.kind, inputs=(self.tensor(found.input),))
        if found.kind == "linear":
            bias = [key for key in found.nodes[1].input if key not in found.nodes[0].output]
            self._weighted(made, found.nodes[0], bias=bias[0], transposed=True)
        self._layout(made, found.input)
        self.add(made, *found.nodes)

    def _part(self, node: onnx.NodeProto, results: list[str]) -> None:
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
        if kind == "attention":
            made.note = "an export of opset 22 or lower writes them one by one"
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
        if node.op_type == "Transpose" and list(attribute(node, "perm", [])) in ([0, 2, 3, 1], [0, 3, 1, 2]):
            return "identity"  # between NCHW and NHWC: sums and layers on both sides are still one block
        return kind

    def _product(self, node: onnx.NodeProto, kind: str) -> str:
        weight = node.input[1] in self.index.fixed
        if self.types.get(node.output[0]) not in ({*FLOATS, TensorProto.DOUBLE} if weight else FLOATS):
            return "unknown"
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
        parts = {"weight": name, "bias": bias}
        unknown = next((part for part, key in parts.items() if key not in self.index.unchanging), None)
        if value is None or unknown:
            part = unknown or "weight"
            given = any(value.name == parts[part] for value in self.index.graph.input)
            made.refusal = (
                f"has a {part} that {'is an input of the file' if given else 'the file computes when it runs'}"
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
        elif made.kind.endswith(("pool", "conv", "conv_transpose")):
            made.window = max(attribute(node, "kernel_shape", []), default=0)
        elif made.kind == "mean":
            made.axes = self._mean_axes(node)
        elif made.kind == "batch_norm":
            made.parameters = Parameters(
                weight=partial(_tensor, self.index, node.input[1]),
                bias=partial(_tensor, self.index, node.input[2]),
                mean=partial(_tensor, self.index, node.input[3]),
            )
        elif node.op_type == "Cast":
            before, after = self.types.get(node.input[0]), attribute(node, "to", 0)
            made.converts = before != after
            made.cast = "float32" if before in FLOATS and after == TensorProto.FLOAT else ""

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
