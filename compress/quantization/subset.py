"""A quantized graph run with some of its quantizers on and the others off, without building it anew.

Which quantizers a network would have if a layer were left float is a question to placement, and placement is cheap: it
reads a graph and moves no tensor. So the graph that holds every quantizer is built and calibrated once, and each
variant is a subset of it: the layers whose weight is quantized, and the (tensor, reader) edges on which a reader
sees the quantized tensor. Where two layers read one tensor and only one of them is quantized, each sees its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from compress.graph.ops import node_kind
from compress.quantization.decisions import Placement
from compress.quantization.insert import placement_of
from compress.quantization.quantizer import Quantizer


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Which quantizers are on.

    Attributes:
        weights: paths of the layers whose weight is quantized.
        edges: (tensor, reader) pairs of node names on which the reader sees the quantized tensor.
    """

    weights: frozenset[str]
    edges: frozenset[tuple[str, str]]


def subset_of(placement: Placement) -> Subset:
    """The quantizers that a placement asks for."""
    return Subset(
        weights=frozenset(site.path for site in placement.weights),
        edges=frozenset(edge for site in placement.activations for edge in site.edges),
    )


def run_subset(qmodel: fx.GraphModule, subset: Subset, *inputs: Tensor) -> Any:
    """What a quantized graph returns for its inputs with only `subset` of its quantizers on; no gradients."""
    with torch.no_grad(), _weights_on(qmodel, subset.weights):
        return _Runner(qmodel, subset).run(*inputs)


class _Both(NamedTuple):
    """A tensor as it is, and quantized: its readers choose."""

    plain: Any
    quantized: Any


class _Runner(fx.Interpreter):
    """Gives each reader the tensor that its edge asks for."""

    def __init__(self, module: fx.GraphModule, subset: Subset) -> None:
        super().__init__(module)
        self.edges = subset.edges
        self.wanted = {tensor for tensor, _ in subset.edges}

    def run_node(self, n: fx.Node) -> Any:
        if node_kind(n) != "quantizer":
            return super().run_node(n)
        source = cast(fx.Node, n.args[0])
        plain = self.env[source]
        quantize = self.fetch_attr(str(n.target))
        return _Both(plain, quantize(plain) if source.name in self.wanted else plain)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        def value(argument: fx.Node) -> Any:
            found = self.env[argument]
            if not isinstance(found, _Both):
                return found
            source = cast(fx.Node, argument.args[0])
            return found.quantized if (source.name, n.name) in self.edges else found.plain

        return fx.node.map_arg(args, value)


@contextmanager
def _weights_on(qmodel: fx.GraphModule, paths: frozenset[str]) -> Iterator[None]:
    """Weight quantizers of `paths` on and all others off; as before afterwards."""
    found = {site.path: qmodel.get_submodule(site.path) for site in placement_of(qmodel).weights}
    quantizers = {path: cast(Quantizer, layer.weight_quantizer) for path, layer in found.items()}
    before = {path: quantizer.enabled for path, quantizer in quantizers.items()}
    try:
        for path, quantizer in quantizers.items():
            quantizer.enabled = path in paths
        yield
    finally:
        for path, quantizer in quantizers.items():
            quantizer.enabled = before[path]
