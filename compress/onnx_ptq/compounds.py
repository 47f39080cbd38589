"""Operations that exporters write as several nodes: found by their form, so that placement sees what they are.

    linear      MatMul by a constant, Add of a bias
    silu, hardswish, mish, gelu (with Erf, or approximated with Tanh), quick_gelu    arithmetic around the function
    softplus    with its threshold, as torch's exporter writes it
    layer_norm  (x - mean) / Sqrt(variance + epsilon), and the affine part

A form counts only if no other node reads what is inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from compress.graph.spelled import AT, spelled_activation
from compress.onnx_ptq.index import Index, Shapes


@dataclass(frozen=True, kw_only=True)
class Compound:
    """One operation that is several nodes.

    Attributes:
        kind: row of `graph.traits`.
        nodes: in graph order; the last one writes the result.
        input: the activation that it reads.
    """

    kind: str
    nodes: tuple[onnx.NodeProto, ...]
    input: str


_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Greater", "Where"})
_TELLING = frozenset({"Sigmoid", "HardSigmoid", "Softplus", "Erf", "Tanh", "Clip"})

Finder = Callable[[onnx.NodeProto, Index], Compound | None]
"""Returns the compound that begins, or has its most telling node, at a node."""


def find_compounds(index: Index) -> list[Compound]:
    """Return the compounds of a graph; no node is in two."""
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


class _OnnxForm:
    def __init__(self, index: Index) -> None:
        self._index = index

    def node(self, value: str) -> onnx.NodeProto:
        return self._index.producers[value]

    def inputs(self, value: str) -> Sequence[str]:
        return [name for name in dict.fromkeys(self.node(value).input) if name not in self._index.fixed]

    def is_arithmetic(self, value: str) -> bool:
        maker = self._index.producers.get(value)
        return maker is not None and maker.op_type in _ARITHMETIC

    def reader(self, value: str) -> str | None:
        after = self._index.alone(value)
        return after.output[0] if after is not None and after.op_type in _ARITHMETIC | _TELLING else None

    def computed(self, values: Sequence[str], x: str) -> Tensor | None:
        nodes = [self.node(value) for value in values]
        read = {name for node in nodes for name in node.input if name} - {x, *values}
        numbers = {name: self._index.number(name) for name in read}
        if None in numbers.values():
            return None
        graph = helper.make_graph(
            nodes,
            "activation",
            [helper.make_tensor_value_info(x, TensorProto.FLOAT, [len(AT)])],
            [helper.make_tensor_value_info(values[-1], TensorProto.FLOAT, None)],
            [numpy_helper.from_array(np.asarray(number, np.float32), name) for name, number in numbers.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._index.opset.get("", 1))])
        with np.errstate(all="ignore"):
            (result,) = ReferenceEvaluator(model).run(None, {x: AT.numpy()})
        return torch.from_numpy(np.asarray(result))


def _activation(node: onnx.NodeProto, index: Index) -> Compound | None:
    form = _OnnxForm(index)
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


_FINDERS: dict[str, Finder] = {
    "MatMul": _linear,
    **dict.fromkeys(_TELLING, _activation),
    "ReduceMean": _layer_norm,
}


Span = tuple[int, int, int]
"""Axis, first index, and index after the last."""


def find_parts(index: Index, shapes: Shapes) -> dict[str, Span]:
    """Return where each part of a tensor lies, by name: slices and gathers along one axis, without gap or overlap.

    Exporters write `chunk`, `unbind` and `split` so when they do not know the sizes. torch.fx sees one operation, and
    each part is quantized with a range of its own; a single slice is a view of the whole tensor.
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
