"""An einsum of two tensors that is a product of matrices becomes one, which engines run in INT8."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compress.graph.functional import is_constant

Axes = tuple[int | None, ...]
"""Axes of an operand in the order of a product's; None is one that it does not have, of size 1."""


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
    """Replace einsums that are products of two matrices; in place. Shapes are stale afterwards.

    An einsum that stays has the reason in `node.meta["whole"]`.

    Returns:
        Names of the nodes that were replaced.
    """
    opened = []
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.einsum:
            continue
        sides = list(node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:])
        ranks = [len(side.meta.get("shape") or ()) if isinstance(side, fx.Node) else 0 for side in sides]
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


def _arranged(graph: fx.Graph, value: Any, axes: Axes) -> Any:
    """Return a tensor with its axes in another order, and with axes of size 1."""
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
    """Find the product that an einsum is; a constant is its second operand, as the weight of a layer.

    Args:
        equation: of the einsum.
        ranks: of its operands, for an equation with an ellipsis; 0 where one is not known.
        fixed: which operands are constants.

    Returns:
        The product, and True if its operands are those of the einsum in reverse; None if it is no such product.
    """
    if len(ranks) != 2:
        return None
    written = _without_ellipsis(equation.replace(" ", ""), ranks)
    if written is None:
        return None
    swapped = fixed[0] and not fixed[1]
    if swapped:
        sides, _, result = written.partition("->")
        left, _, right = sides.partition(",")
        written = f"{right},{left}->{result}"
    product = matrix_product(written)
    return None if product is None else (product, swapped)


def _without_ellipsis(equation: str, ranks: list[int]) -> str | None:
    """Write an ellipsis as letters, and the result where it is left out; None if a rank would have to be known."""
    sides, arrow, result = equation.partition("->")
    operands = sides.split(",")
    if len(operands) != 2:
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
