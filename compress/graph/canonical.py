"""The form of a graph that placement works on.

Attention and paddings are opened, activations are one node, functions are layers, BatchNorm is folded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from compress.graph.attention import open_attention
from compress.graph.compare import Reference
from compress.graph.fold import fold_batchnorm
from compress.graph.functional import functions_to_modules, open_paddings, products_to_linear
from compress.graph.inplace import follow_changes
from compress.graph.inputs import Inputs
from compress.graph.ops import node_kind
from compress.graph.spelled import activations_in_one
from compress.graph.trace import check_module, propagate_shapes, trace
from compress.graph.traits import SHAPES


def canonical_graph(model: nn.Module, example_inputs: Inputs, *, fold: bool = True) -> fx.GraphModule:
    """The graph that quantization works on, in evaluation mode, with shapes on its nodes.

    The model is not changed; a GraphModule is taken as its own trace.

    Raises:
        ModelError: the model cannot be traced, changes tensors through views that are read again, gives other results
            in its second call, or the graph computes something else.
    """
    check_module(model)
    reference = Reference.of(model, example_inputs)
    graph_module = trace(model, example_inputs)
    drop_assertions(graph_module)
    follow_changes(graph_module, example_inputs)
    opened = open_attention(graph_module) + open_einsums(graph_module) + open_paddings(graph_module)
    opened += activations_in_one(graph_module)
    products_to_linear(graph_module)
    made = functions_to_modules(graph_module)
    if fold:
        fold_batchnorm(graph_module)
    if opened or made:
        propagate_shapes(graph_module, example_inputs)
    reference.check(graph_module, "bringing the graph to the form that is quantized")
    return graph_module


def drop_assertions(graph_module: fx.GraphModule) -> None:
    """Erase assertions about shapes, which as consumers would keep layers from fusing; in place."""
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node_kind(node) in SHAPES | {"getattr"}:
            graph_module.graph.erase_node(node)
    graph_module.recompile()


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
