"""Operations that exporters write as several nodes: found by their form, so that placement sees what they are.

    linear      MatMul by a constant, Add of a bias
    silu        x * Sigmoid(x)
    hardswish   x * HardSigmoid(x), x * Clip(x + 3, 0, 6) / 6
    mish        x * Tanh(Softplus(x))
    gelu        x * (1 + Erf(x / sqrt 2)) / 2 in any order, and the same with Tanh
    layer_norm  (x - mean) / Sqrt(variance + epsilon), and the affine part

A form counts only if no other node reads what is inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx

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


def _gate(kind: str, ends: frozenset[str]) -> Finder:
    """Return a finder of x * f(x): from the first node of f to the product."""

    def find(node: onnx.NodeProto, index: Index) -> Compound | None:
        nodes, x = [node], node.input[0]
        after = index.alone(node.output[0])
        while after is not None and after.op_type in ends and x not in after.input:
            nodes.append(after)
            after = index.alone(after.output[0])
        if after is None or after.op_type != "Mul" or set(after.input) != {x, nodes[-1].output[0]}:
            return None
        return Compound(kind=kind, nodes=(*nodes, after), input=x)

    return find


def _gelu(node: onnx.NodeProto, index: Index) -> Compound | None:
    """From Erf or Tanh back to x, and forward to the last product with x and with a number."""
    nodes, name = [node], node.input[0]
    while (before := index.producers.get(name)) is not None and _by_number(before, index) and index.alone(name):
        nodes.insert(0, before)
        name = next(key for key in before.input if key not in index.fixed)
    x, seen, after = name, False, index.alone(node.output[0])
    while after is not None and (_by_number(after, index) or (not seen and _times(after, x, index))):
        if not _by_number(after, index):
            seen = True
            half = _half(after, x, index)
            if half is not None:
                nodes.insert(0, half)
        nodes.append(after)
        if seen and (len(nodes) > 4 or not _halves(index.alone(after.output[0]), index)):
            break
        after = index.alone(after.output[0])
    return Compound(kind="gelu", nodes=tuple(nodes), input=x) if seen else None


def _by_number(node: onnx.NodeProto, index: Index) -> bool:
    return node.op_type in {"Mul", "Div", "Add"} and sum(index.number(key) is not None for key in node.input) == 1


def _halves(node: onnx.NodeProto | None, index: Index) -> bool:
    return node is not None and node.op_type == "Mul" and any(index.number(key) == 0.5 for key in node.input)


def _half(node: onnx.NodeProto, x: str, index: Index) -> onnx.NodeProto | None:
    """Return the node that halves x before a product reads it."""
    makers = (index.producers.get(key) for key in node.input)
    return next((m for m in makers if m is not None and _halves(m, index) and x in m.input), None)


def _times(node: onnx.NodeProto, x: str, index: Index) -> bool:
    return node.op_type == "Mul" and (x in node.input or _half(node, x, index) is not None)


def _hard_swish(node: onnx.NodeProto, index: Index) -> Compound | None:
    """From Add(x, 3) over Clip to the product with x, with a division by 6 before or after it."""
    numbers = [index.number(key) for key in node.input]
    if 3.0 not in numbers or len(node.input) != 2:
        return None
    x, nodes, seen = node.input[1 - numbers.index(3.0)], [node], False
    after = index.alone(node.output[0])
    while after is not None and (
        after.op_type == "Clip" or _by_number(after, index) or (x in after.input and not seen)
    ):
        seen = seen or x in after.input
        nodes.append(after)
        if len(nodes) == 4:
            break
        after = index.alone(after.output[0])
    whole = seen and len(nodes) == 4 and nodes[1].op_type == "Clip" and "Add" not in {n.op_type for n in nodes[1:]}
    return Compound(kind="hardswish", nodes=tuple(nodes), input=x) if whole else None


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
    "Sigmoid": _gate("silu", frozenset()),
    "HardSigmoid": _gate("hardswish", frozenset()),
    "Softplus": _gate("mish", frozenset({"Tanh"})),
    "Erf": _gelu,
    "Tanh": _gelu,
    "Add": _hard_swish,
    "ReduceMean": _layer_norm,
}
