"""Runs of a quantized graph with some of its quantizers on and the others off, without building it for each.

Placement decides which quantizers a network would have if a layer were left float, and it is cheap, because it needs
the graph alone. So the graph with all quantizers is built and calibrated once, and each case is a subset of it: the
layers whose weight is quantized, and the (tensor, consumer) edges on which a consumer gets the quantized tensor. If two
layers consume one tensor and only one of them is quantized, each gets its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from compress.graph.ops import node_kind
from compress.quantization.placement.decisions import Placement
from compress.quantization.quantizer import Quantizer
from compress.quantization.report import placement_of


@dataclass(frozen=True, kw_only=True)
class Subset:
    """The quantizers that are on.

    Attributes:
        weights: paths of the layers whose weight is quantized.
        edges: (tensor, consumer) pairs of node names on which the consumer gets the quantized tensor.
    """

    weights: frozenset[str]
    edges: frozenset[tuple[str, str]]


def subset_of(placement: Placement) -> Subset:
    """Return the quantizers of a placement."""
    return Subset(
        weights=frozenset(site.path for site in placement.weights),
        edges=frozenset(edge for site in placement.activations for edge in site.edges),
    )


def run_subset(qmodel: fx.GraphModule, subset: Subset, *inputs: Tensor) -> Any:
    """Run a quantized graph with only `subset` of its quantizers on, without gradients."""
    with torch.no_grad(), _weights_on(qmodel, subset.weights):
        return _Runner(qmodel, subset).run(*inputs)


class _Both(NamedTuple):
    """A tensor in float and quantized, for consumers of either."""

    plain: Any
    quantized: Any


class _Runner(fx.Interpreter):
    """Gives each consumer the tensor of its edge."""

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
    """Switch the weight quantizers of `paths` on and all others off; restore them afterwards."""
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
