"""torch.einsum of two tensors that is a product of matrices becomes torch.matmul, which engines run in INT8."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def open_einsums(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Replace einsums that are products of two matrices, in place; return the nodes. Shapes are stale afterwards.

    An einsum that stays has the reason in `node.meta["whole"]`.
    """
    opened = []
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.einsum:
            continue
        operands = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
        swap = matrix_product(str(node.args[0])) if len(operands) == 2 else None
        if swap is None:
            node.meta["whole"] = str(node.args[0])
            continue
        with graph_module.graph.inserting_before(node):
            sides: list[Any] = [
                graph_module.graph.call_method("transpose", (side, -2, -1)) if turned else side
                for side, turned in zip(operands, swap, strict=True)
            ]
            product = graph_module.graph.call_function(torch.matmul, tuple(sides))
        product.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        node.replace_all_uses_with(product)
        graph_module.graph.erase_node(node)
        opened.append(node.name)
    graph_module.recompile()
    return tuple(opened)


def matrix_product(equation: str) -> tuple[bool, bool] | None:
    """Find which of two operands to transpose so that matmul computes `equation`; None if it is no such product.

    >>> matrix_product("bhik,bhjk->bhij")
    (False, True)
    >>> matrix_product("b i j, b j d -> b i d")
    (False, False)
    >>> matrix_product("bij,jk->bki")
    >>> matrix_product("ij,jj->ij")
    """
    sides, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = sides.partition(",")
    sizes = {len(left), len(right), len(result)}
    if not arrow or not comma or "." in equation or len(sizes) != 1 or len(left) < 2:
        return None
    batch = result[:-2]
    if left[:-2] != batch or right[:-2] != batch or len({*result}) != len(result):
        return None
    row, column = result[-2], result[-1]
    if len({*left}) != len(left) or len({*right}) != len(right):
        return None  # a diagonal
    summed = {*left[-2:]} - {row}
    if len(summed) != 1 or row not in left[-2:] or column not in right[-2:] or {*right[-2:]} != {*summed, column}:
        return None
    return left[-2] != row, right[-1] != column
