"""The form of a graph that placement works on.

Attention and paddings are opened, activations are one node, functions are layers, BatchNorm is folded.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

from compress.graph.attention import open_attention
from compress.graph.compare import Reference
from compress.graph.fold import fold_batchnorm, fold_constants
from compress.graph.functional import (
    constant_value,
    functions_to_modules,
    is_constant,
    open_paddings,
    products_to_linear,
)
from compress.graph.inplace import follow_changes
from compress.graph.inputs import Inputs
from compress.graph.ops import node_kind
from compress.graph.spelled import activations_in_one, open_einsums
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
    opened += activations_in_one(graph_module) + select_by_index(graph_module)
    products_to_linear(graph_module)
    made = functions_to_modules(graph_module)
    if fold:
        fold_batchnorm(graph_module)
    folded = fold_constants(graph_module, trained=fold)
    if opened or made or folded:
        propagate_shapes(graph_module, example_inputs)
    reference.check(graph_module, "bringing the graph to the form that is quantized")
    return graph_module


def select_by_index(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Write `x[:, [2, 1, 0]]`, by a list or a tensor of the model, as torch.index_select, in place; return the names.

    Exporters write the other form as GatherND, after which engines compute in float.
    """
    made = []
    for node in list(graph_module.graph.nodes):
        if node.target is not operator.getitem or node.args[0].meta.get("shape") is None:
            continue
        source, parts = node.args
        parts = parts if isinstance(parts, tuple) else (parts,)
        chosen = [axis for axis, part in enumerate(parts) if not isinstance(part, slice) or part != slice(None)]
        if len(chosen) != 1 or not is_constant(parts[chosen[0]]):
            continue
        index = parts[chosen[0]]
        value = constant_value(graph_module, index) if isinstance(index, fx.Node) else index
        rows = torch.as_tensor(value) if isinstance(value, (list, Tensor)) else torch.zeros(0)
        if rows.dim() != 1 or rows.dtype not in {torch.int64, torch.int32} or not rows.numel():
            continue
        axis, name = chosen[0], f"{node.name}_index"
        graph_module.register_buffer(name, rows.to(torch.int64) % source.meta["shape"][axis], persistent=False)
        with graph_module.graph.inserting_before(node):
            rows_node = graph_module.graph.get_attr(name)
            selected = graph_module.graph.call_function(torch.index_select, (source, axis, rows_node))
        selected.meta.update(node.meta)
        node.replace_all_uses_with(selected)
        graph_module.graph.erase_node(node)
        made.append(selected.name)
    graph_module.recompile()
    return tuple(made)


def drop_assertions(graph_module: fx.GraphModule) -> None:
    """Erase assertions about shapes, which as consumers would keep layers from fusing; in place."""
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node_kind(node) in SHAPES | {"getattr"}:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
