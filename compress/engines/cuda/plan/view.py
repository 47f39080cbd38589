"""A graph as the lowering looks at it: producers and consumers of a tensor, and its codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compress.engines.cuda.plan.graph import Graph, Node
from compress.engines.cuda.plan.quantizers import QuantizedConstant, QuantizedGraph, real_weight
from compress.engines.cuda.plan.steps import Output, Source


@dataclass
class View:
    """A quantized graph, and which of its nodes are part of a step already.

    Attributes:
        index: place of a node in the order.
        absorbed: names of nodes that a step computes.
    """

    graph: Graph
    weights: Mapping[str, QuantizedConstant]
    producers: Mapping[str, Node]
    consumers: Mapping[str, list[Node]]
    index: Mapping[str, int]
    absorbed: set[str] = field(default_factory=set)

    @staticmethod
    def of(quantized: QuantizedGraph) -> View:
        """The view of a graph of which nothing is lowered yet."""
        graph = quantized.graph
        return View(
            graph,
            quantized.weights,
            graph.producers(),
            graph.consumers(),
            {node.name: i for i, node in enumerate(graph.nodes)},
        )

    def source(self, name: str) -> Source:
        """The codes of a tensor, or the tensor itself."""
        node = self.producers.get(name)
        if node is not None and node.op == "Dequantize":
            return Source(node.inputs[0], node.attributes["grid"])
        return Source(name)

    def codes(self, name: str) -> Source | None:
        """The codes of a tensor, on one grid; None if there are none."""
        found = self.source(name)
        return found if found.grid is not None and len(found.grid.scale) == 1 else None

    def only_consumer(self, name: str) -> Node | None:
        """The node that alone reads a tensor; None where several do, or the network returns it."""
        found = self.consumers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.graph.outputs else None

    def constant(self, name: str) -> Tensor | None:
        """A constant's value; an integer weight's real one."""
        if name in self.graph.constants:
            return self.graph.constants[name]
        return real_weight(self.weights[name]) if name in self.weights else None

    def is_constant(self, name: str) -> bool:
        """True if a value is known beforehand."""
        return name in self.graph.constants or name in self.weights

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor."""
        return self.graph.shapes[name]

    def channel_vector(self, name: str, shape: tuple[int, ...], axis: int) -> Tensor | None:
        """A constant as one number for each index along `axis` of a result of `shape`, float64; None for others."""
        constant = self.graph.constants.get(name)
        if constant is None or not constant.is_floating_point() or constant.dim() > len(shape):
            return None
        sizes = [1] * (len(shape) - constant.dim()) + list(constant.shape)
        if any(n != 1 and (i != axis or n != shape[axis]) for i, n in enumerate(sizes)):
            return None
        return constant.double().reshape(-1).expand(shape[axis]).clone()

    def output(self, name: str, *, channels: bool = False) -> Output:
        """The outputs of a step whose consumers want codes, values, or both; absorbs a Quantize."""
        readers = self.consumers.get(name, [])
        fitting = [r for r in readers if r.op == "Quantize" and (channels or len(r.attributes["grid"].scale) == 1)]
        value = name if name in self.graph.outputs or not readers or len(fitting) < len(readers) else ""
        if not fitting:
            return Output(value=name)
        first = fitting[0]
        self.absorbed.add(first.name)
        rest = any(r is not first for r in fitting)  # another grid: quantized from the values, by a step of its own
        return Output(codes=first.outputs[0], grid=first.attributes["grid"], value=name if rest else value)


def number_of(tensor: Tensor | None) -> float | None:
    """The one number that a constant holds; None if it is no such constant."""
    return float(tensor.reshape(-1)[0]) if tensor is not None and tensor.numel() == 1 else None
