"""Forms that a model or a file spells out.

Activations, such as x * sigmoid(x), are found by the values that they compute. An einsum of two tensors that is a
product of matrices becomes one, which engines run in INT8.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from compress.graph.functional import is_constant
from compress.graph.ops import node_kind, run_node

V = TypeVar("V", bound=Hashable)


def quick_gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(1.702 x), the approximation of GELU that CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


KNOWN: dict[str, Callable[..., Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": partial(F.gelu, approximate="tanh"),
    "hardswish": F.hardswish,
    "mish": F.mish,
    "quick_gelu": quick_gelu,
    "softplus": F.softplus,
}
# Where activations are compared.
AT = torch.linspace(-6, 6, 49)
# Largest difference to a known activation: constants such as 1.4142 are written with few digits.
_SAME = 1e-4
_MOST = 12
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "square"})
_TELLING = frozenset({"sigmoid", "hardsigmoid", "softplus", "tanh", "relu6", "clamp", "erf"})


class Form(Protocol[V]):
    """A graph in which activations are looked for; a value is the one result of an operation."""

    def inputs(self, value: V) -> Sequence[V]:
        """The operands of the operation that computes a value, without constants."""

    def is_arithmetic(self, value: V) -> bool:
        """True for sums, products, quotients and powers."""

    def reader(self, value: V) -> V | None:
        """The result of the only operation that reads a value; None if there are several, or it is returned."""

    def computed(self, values: Sequence[V], x: V) -> Tensor | None:
        """What operations compute where x is `AT`; None if it is not known."""


@dataclass(frozen=True)
class Spelled(Generic[V]):
    """An activation, a key of `KNOWN`, of `x`, written as several operations, the last of which is its result."""

    name: str
    values: tuple[V, ...]
    x: V


def spelled_activation(value: V, form: Form[V]) -> Spelled[V] | None:
    """The known activation that contains a function, such as the Sigmoid of x * sigmoid(x); None if there is none."""
    made, reads = [value], list(form.inputs(value))
    while len(made) < _MOST:
        found = _forward(made, reads[0], form) if len(reads) == 1 else None
        if found is not None:
            return found
        operands = [name for name in reads if form.is_arithmetic(name)]
        inner = [name for name in operands if form.reader(name) is not None]  # others may be what it is applied to
        before = next(iter(inner or operands), None)
        if before is None or (len(reads) == 1 and not inner):
            return None
        made.insert(0, before)
        reads = [name for name in dict.fromkeys((*reads, *form.inputs(before))) if name != before]
    return None


def _forward(made: Sequence[V], x: V, form: Form[V]) -> Spelled[V] | None:
    """Return the largest known activation of x that begins with `made`: Softplus alone is one, and part of Mish."""
    found, after, largest = list(made), form.reader(made[-1]), None
    while after is not None and len(found) < _MOST:
        known = {*found, x}
        for other in form.inputs(after):
            if other not in known:
                if not form.is_arithmetic(other) or not known.issuperset(form.inputs(other)):
                    return largest
                found.insert(0, other)
        found.append(after)
        got = form.computed(found, x) if form.is_arithmetic(after) else None
        if got is not None:
            name = next((key for key, known in KNOWN.items() if bool(((known(AT) - got).abs() < _SAME).all())), None)
            if name is not None:
                largest = Spelled(name, tuple(found), x)
        after = form.reader(after)
    return largest


class _TorchForm:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._root = graph_module

    def inputs(self, value: fx.Node) -> Sequence[fx.Node]:
        return value.all_input_nodes

    def is_arithmetic(self, value: fx.Node) -> bool:
        return node_kind(value) in _ARITHMETIC and not _name(value).endswith("_") and value.op != "call_module"

    def reader(self, value: fx.Node) -> fx.Node | None:
        after = next(iter(value.users)) if len(value.users) == 1 else None
        return after if after is not None and (self.is_arithmetic(after) or _is_telling(after)) else None

    def computed(self, values: Sequence[fx.Node], x: fx.Node) -> Tensor | None:
        inside = set(values)
        if any(not inside.issuperset(value.users) for value in values[:-1]):
            return None
        env: dict[fx.Node, Any] = {x: AT.clone()}
        for value in values:
            args, kwargs = fx.node.map_arg((value.args, value.kwargs), env.__getitem__)
            env[value] = run_node(self._root, value, args, kwargs)
        result = env[values[-1]]
        return result if isinstance(result, Tensor) and result.shape == AT.shape else None


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_telling(node: fx.Node) -> bool:
    kind = node_kind(node)
    if node.op != "call_module" and _name(node).endswith("_"):
        return False  # an operation in place: its operand no longer has its value afterwards
    return kind in _TELLING or (kind == "function" and _name(node) == "erf")


def activations_in_one(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Replace spelled out activations by torch's own, in place; return the nodes. Shapes are stale afterwards."""
    form, replaced = _TorchForm(graph_module), list[str]()
    for node in list(graph_module.graph.nodes):
        found = spelled_activation(node, form) if node.users and _is_telling(node) else None
        if found is None:
            continue
        last, function = found.values[-1], KNOWN[found.name]
        with graph_module.graph.inserting_after(last):
            target, options = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
            one = graph_module.graph.call_function(target, (found.x,), dict(options))
        one.meta["nn_module_stack"] = last.meta.get("nn_module_stack")
        last.replace_all_uses_with(one)
        for value in reversed(found.values):
            graph_module.graph.erase_node(value)
        replaced.append(last.name)
    graph_module.recompile()
    return tuple(replaced)


# Axes of an operand in the order of a product's; None is one that it does not have, of size 1.
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class MatrixProduct:
    """How `matmul` computes an einsum.

    Attributes:
        left: of the first operand: batch, rows, what is summed.
        right: of the second operand: batch, what is summed, columns.
        result: axes of the product in the order of the einsum's result.
    """

    left: Axes
    right: Axes
    result: tuple[int, ...]


def open_einsums(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Replace einsums that are products of two matrices, or orders of axes; in place; return the names of the nodes.

    An einsum that stays has the reason in `node.meta["whole"]`. Shapes are stale afterwards.
    """
    opened = []
    for node in list(graph_module.graph.nodes):
        if node.target is getattr and node.args[1] == "mT":  # torch.onnx writes it as an Einsum
            node.op, node.target, node.args = "call_method", "transpose", (node.args[0], -2, -1)
            opened.append(node.name)
        if node.op != "call_function" or node.target is not torch.einsum:
            continue
        sides = list(node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:])
        ranks = [len(side.meta.get("shape") or ()) if isinstance(side, fx.Node) else 0 for side in sides]
        order = axis_order(str(node.args[0]), ranks)
        if order is not None:
            node.op, node.target, node.args = "call_method", "permute", (*sides, *order)
            opened.append(node.name)
            continue
        fixed = [is_constant(side) for side in sides]
        found = oriented_product(str(node.args[0]), ranks, fixed)
        if found is None:
            node.meta["whole"] = str(node.args[0])
            continue
        product, swapped = found
        graph, stack = graph_module.graph, node.meta.get("nn_module_stack")
        with graph.inserting_before(node):
            operands = sides[::-1] if swapped else sides
            left, right = _arranged(graph, operands[0], product.left), _arranged(graph, operands[1], product.right)
            result = graph.call_function(torch.matmul, (left, right))
            result.meta["nn_module_stack"] = stack
            result = _arranged(graph, result, product.result)
        result.meta["nn_module_stack"] = stack
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        opened.append(node.name)
    graph_module.recompile()
    return tuple(opened)


def _arranged(graph: fx.Graph, value: fx.Node, axes: Axes) -> fx.Node:
    order = [axis for axis in axes if axis is not None]
    if order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]:
        value = graph.call_method("transpose", (value, -2, -1))
    elif order != sorted(order):
        value = graph.call_method("permute", (value, *order))
    for place, axis in enumerate(axes):
        if axis is None:
            value = graph.call_method("unsqueeze", (value, place))
    return value


def oriented_product(equation: str, ranks: list[int], fixed: list[bool]) -> tuple[MatrixProduct, bool] | None:
    """Find the product that an einsum is; a constant (`fixed`) is its second operand, as the weight of a layer.

    `ranks` of the operands are for an equation with an ellipsis; 0 where one is not known. Returns the product, and
    True if its operands are those of the einsum in reverse; None if it is no such product.
    """
    if len(ranks) != 2:
        return None
    written = written_out(equation, ranks)
    if written is None:
        return None
    swapped = fixed[0] and not fixed[1]
    if swapped:
        sides, _, result = written.partition("->")
        left, _, right = sides.partition(",")
        written = f"{right},{left}->{result}"
    product = matrix_product(written)
    return None if product is None else (product, swapped)


def axis_order(equation: str, ranks: list[int]) -> tuple[int, ...] | None:
    written = written_out(equation, ranks) if len(ranks) == 1 else None
    axes, _, result = (written or "").partition("->")
    return tuple(map(axes.index, result)) if axes and sorted(axes) == sorted({*result}) == sorted(result) else None


def written_out(equation: str, ranks: list[int]) -> str | None:
    """Write an ellipsis as letters, and the result where it is left out; None if a rank would have to be known."""
    sides, arrow, result = equation.replace(" ", "").partition("->")
    operands = sides.split(",")
    if len(operands) != len(ranks):
        return None
    if not arrow:
        once = sorted(letter for letter in {*sides} - {*",."} if sides.count(letter) == 1)
        result = "".join(["..." if "..." in sides else "", *once])
    hidden = {rank - len(side.replace("...", "")) for side, rank in zip(operands, ranks, strict=True) if "..." in side}
    if len(hidden) > 1 or min(hidden, default=0) < 0 or ("..." in result and not hidden):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    letters = "".join(free[: next(iter(hidden), 0)])
    return f"{','.join(operands)}->{result}".replace("...", letters)


def matrix_product(equation: str) -> MatrixProduct | None:
    """Find how matmul computes `equation`, of letters alone; None if it is no product of two matrices.

    One letter is summed, and one side at most has more than one letter that the other side has not.

    >>> matrix_product("bhik,bhjk->bhij")
    MatrixProduct(left=(0, 1, 2, 3), right=(0, 1, 3, 2), result=(0, 1, 2, 3))
    >>> matrix_product("bchw,oc->bohw")
    MatrixProduct(left=(0, 2, 3, 1), right=(1, 0), result=(0, 3, 1, 2))
    >>> matrix_product("ij,jj->ij")
    """
    sides, _, result = equation.partition("->")
    left, _, right = sides.partition(",")
    if any(len({*letters}) != len(letters) for letters in (left, right, result)) or not {*result} <= {*left, *right}:
        return None  # a diagonal
    summed = [letter for letter in left if letter in right and letter not in result]
    rows = [letter for letter in result if letter in left and letter not in right]
    columns = [letter for letter in result if letter in right and letter not in left]
    if len(summed) != 1 or not rows or not columns or min(len(rows), len(columns)) > 1:
        return None
    if {*left, *right} != {*result, *summed}:
        return None  # a sum of one operand alone
    batch = [letter for letter in result if letter not in (rows[-1], columns[-1])]
    found = [_axes(left, [*batch, rows[-1], *summed]), _axes(right, [*batch, *summed, columns[-1]])]
    product = [*batch, rows[-1], columns[-1]]
    return MatrixProduct(found[0], found[1], tuple(product.index(letter) for letter in result))


def _axes(letters: str, order: list[str]) -> Axes:
    """Return where letters are, without those at the front that are not there, which matmul adds itself."""
    first = next(place for place, letter in enumerate(order) if letter in letters)
    return tuple(letters.index(letter) if letter in letters else None for letter in order[first:])
