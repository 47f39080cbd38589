"""A network as a graph in which all projections of attention are linear layers like others, so that masks hold them."""

from __future__ import annotations

from torch import Tensor, fx, nn

from compress.graph.canonical import canonical_graph
from compress.graph.named import Named


def opened(model: nn.Module, example: Tensor) -> fx.GraphModule:
    """Return a graph of copies of the network's layers, with BatchNorm kept.

    Args:
        model: float network.
        example: its input, which the graph is traced with.
    """
    graph = canonical_graph(model, example, fold=False)
    for path, layer in list(graph.named_modules()):
        if isinstance(layer, Named) and isinstance(layer, nn.Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight, plain.bias = layer.weight, layer.bias
            for name, child in layer.named_children():  # the other projections lie below its path
                plain.add_module(name, child)
            graph.set_submodule(path, plain.train(layer.training))
    return graph
