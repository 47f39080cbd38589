"""Runs of a quantized graph with some of its quantizers on and the others off, without building it for each.

Placement decides which quantizers a network would have if a layer were left float, and it is cheap, because it needs
the graph alone. So the graph with all quantizers is built and calibrated once, and each case is a subset of it: the
layers whose weight is quantized, and the (tensor, consumer) edges on which a consumer gets the quantized tensor. If two
layers consume one tensor and only one of them is quantized, each gets its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

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

    weights: frozenset[str] = frozenset()
    edges: frozenset[tuple[str, str]] = frozenset()


def subset_of(placement: Placement) -> Subset:
    """Return the quantizers of a placement."""
    return Subset(
        weights=frozenset(site.path for site in placement.weights),
        edges=frozenset(edge for site in placement.activations for edge in site.edges),
    )


def run_subset(qmodel: fx.GraphModule, subset: Subset, *inputs: Tensor) -> Any:
    """Run a quantized graph with only `subset` of its quantizers on, without gradients."""
    with torch.no_grad():
        return Sides(qmodel, [subset]).run(*inputs)[0]


class Sides(fx.Interpreter):
    """Runs a quantized graph with several subsets of its quantizers side by side, node by node.

    A node's value is a tuple, one for each subset; that of a quantizer is (plain, quantized), for consumers of either.
    """

    def __init__(self, module: fx.GraphModule, subsets: Sequence[Subset]) -> None:
        super().__init__(module)
        self.subsets, self.side = subsets, 0
        self.weights = {site.path for site in placement_of(module).weights}
        self.sources = {n: n.all_input_nodes[0] for n in module.graph.nodes if node_kind(n) == "quantizer"}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node once for each subset."""
        if n.op == "placeholder":
            return (super().run_node(n),) * len(self.subsets)
        return tuple(self._on_side(n, side) for side in range(len(self.subsets)))

    def _on_side(self, n: fx.Node, side: int) -> Any:
        self.side = side
        subset = self.subsets[side]
        if source := self.sources.get(n):
            plain = self.env[source][side]
            wanted = any((source.name, user.name) in subset.edges for user in n.users)
            return plain, self.fetch_attr(str(n.target))(plain) if wanted else plain
        if n.target not in self.weights:
            return super().run_node(n)
        quantizer = cast(Quantizer, self.fetch_attr(str(n.target)).weight_quantizer)
        enabled, quantizer.enabled = quantizer.enabled, n.target in subset.weights
        try:
            return super().run_node(n)
        finally:
            quantizer.enabled = enabled

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Return the arguments of a node on this side."""

        def value(argument: fx.Node) -> Any:
            found = self.env[argument][self.side]
            if source := self.sources.get(argument):
                return found[(source.name, n.name) in self.subsets[self.side].edges]
            return found

        return fx.node.map_arg(args, value)
