"""Operations that exporters write as several nodes: found by their form, so that placement sees what they are.

    linear      MatMul by a constant, Add of a bias
    silu, hardswish, mish, gelu (with Erf, or approximated with Tanh)    arithmetic around the function, in any order
    layer_norm  (x - mean) / Sqrt(variance + epsilon), and the affine part

A form counts only if no other node reads what is inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from compress.onnx_ptq.index import Index


@dataclass(frozen=True, kw_only=True)
class Compound:
    """One operation that is several nodes.

    Attributes:
        kind: row of `graph.traits`.
        nodes: its nodes, in graph order; the last one writes its result.
        input: the activation that it reads.
    """

    kind: str
    nodes: tuple[onnx.NodeProto, ...]
    input: str


_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})
_INSIDE = _ARITHMETIC | {"Tanh", "Clip"}
_MOST_NODES = 12
_AT = np.linspace(-6, 6, 49, dtype=np.float32)
_KNOWN = {
    "gelu": _AT * (1 + np.array([math.erf(x / math.sqrt(2)) for x in _AT])) / 2,
    "silu": _AT / (1 + np.exp(-_AT)),
    "hardswish": _AT * np.clip(_AT + 3, 0, 6) / 6,
    "mish": _AT * np.tanh(np.log1p(np.exp(_AT))),
}
_SAME = 2e-3
"""Largest difference to a known activation: GELU differs from its approximation by tanh by 0.0005."""

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
    """Return True if nothing outside reads what is inside, and the inside reads nothing but its input and constants."""
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
    if after is None or after.op_type != "Add" or weight not in index.constants or node.input[0] in index.fixed:
        return None
    other = [name for name in after.input if name != node.output[0]]
    bias = index.value(other[0]) if len(other) == 1 and other[0] in index.constants else None
    value = index.value(weight)
    if bias is None or value is None or value.ndim != 2 or bias.shape not in {(), (1,), value.shape[1:]}:
        return None
    return Compound(kind="linear", nodes=(node, after), input=node.input[0])


def _activation(node: onnx.NodeProto, index: Index) -> Compound | None:
    """From the function inside an activation back to what it reads, and forward to a product that is a known one.

    What is known is told by its values, as exporters write the same activation in many orders.
    """
    nodes, reads = [node], [name for name in node.input[:1] if name]
    while len(nodes) < _MOST_NODES:
        if len(reads) == 1:
            found = _forward(nodes, reads[0], index)
            if found is not None:
                return found
        makers = [(name, index.producers.get(name)) for name in reads]
        name, maker = next(((n, m) for n, m in makers if m is not None and m.op_type in _ARITHMETIC), ("", None))
        if maker is None or (len(reads) == 1 and index.alone(name) is None):
            return None
        nodes.insert(0, maker)
        reads = list(dict.fromkeys(key for key in (*reads, *maker.input) if key != name and key not in index.fixed))
    return None


def _forward(nodes: list[onnx.NodeProto], x: str, index: Index) -> Compound | None:
    """Return the known activation of x that begins with some nodes; None if there is none."""
    found, after = list(nodes), index.alone(nodes[-1].output[0])
    while after is not None and after.op_type in _INSIDE and len(found) < _MOST_NODES:
        made = {name for part in found for name in part.output} | {x} | index.fixed
        for maker in (index.producers.get(name) for name in after.input if name not in made):
            if maker is None or maker.op_type not in _ARITHMETIC or not made.issuperset(maker.input):
                return None
            found.insert(0, maker)
        found.append(after)
        kind = _known(found, x, index) if after.op_type in _ARITHMETIC else None
        if kind is not None:
            return Compound(kind=kind, nodes=tuple(found), input=x)
        after = index.alone(after.output[0])
    return None


def _known(nodes: list[onnx.NodeProto], x: str, index: Index) -> str | None:
    """Return the kind of the activation that nodes compute from x, by its values; None if it is none of the known."""
    made = {name for part in nodes for name in part.output}
    numbers = {name: index.number(name) for part in nodes for name in part.input if name and name not in {x, *made}}
    if None in numbers.values():
        return None
    values, result = helper.make_tensor_value_info(x, TensorProto.FLOAT, [len(_AT)]), nodes[-1].output[0]
    graph = helper.make_graph(
        nodes,
        "activation",
        [values],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(number, np.float32), name) for name, number in numbers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", index.opset.get("", 1))])
    (got,) = ReferenceEvaluator(model).run(None, {x: _AT})
    return next((kind for kind, known in _KNOWN.items() if np.abs(got - known).max() < _SAME), None)


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
        if after is None or after.op_type != wanted or index.fixed.isdisjoint(after.input):
            break
        nodes.append(after)
    return Compound(kind="layer_norm", nodes=tuple(nodes), input=x)


_FINDERS: dict[str, Finder] = {
    "MatMul": _linear,
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softplus", "Erf", "Tanh", "Clip"), _activation),
    "ReduceMean": _layer_norm,
}
