"""The form of a graph that placement works on.

Attention and paddings are opened, activations are one node, functions are layers, BatchNorm is folded.
"""

from __future__ import annotations

from torch import fx, nn

from compress.graph.attention import open_attention
from compress.graph.compare import Reference
from compress.graph.fold import fold_batchnorm, fold_constants
from compress.graph.functional import functions_to_modules, open_paddings, products_to_linear
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
    opened += activations_in_one(graph_module)
    products_to_linear(graph_module)
    made = functions_to_modules(graph_module)
    if fold:
        fold_batchnorm(graph_module)
    folded = fold_constants(graph_module, trained=fold)
    if opened or made or folded:
        propagate_shapes(graph_module, example_inputs)
    reference.check(graph_module, "bringing the graph to the form that is quantized")
    return graph_module


def drop_assertions(graph_module: fx.GraphModule) -> None:
    """Erase assertions about shapes, which as consumers would keep layers from fusing; in place."""
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node_kind(node) in SHAPES | {"getattr"}:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
