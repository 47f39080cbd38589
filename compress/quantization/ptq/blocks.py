"""Blocks of a quantized graph: parts with one tensor at the beginning and one at the end, such as residual blocks."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

from compress.errors import QuantizationError
from compress.graph.layers import alive_after
from compress.graph.ops import node_module
from compress.quantization.modules import _QuantWeight
from compress.quantization.quantizer import Quantizer


@dataclass(frozen=True)
class Block:
    """A part of a graph; only `source` and parameters enter it, and the value of its last node is the result."""

    source: fx.Node
    nodes: tuple[fx.Node, ...]
    layers: tuple[str, ...]


def blocks(graph_module: fx.GraphModule, *, most: int) -> tuple[Block, ...]:
    """Cut a quantized graph wherever a single tensor is alive, and join the parts to blocks with quantized layers.

    Operations after a layer belong to its block, and a quantizer to that of its consumer. What follows the last
    quantized layer is in no block. Up to `most` parts of a single layer are joined; a residual block stays whole.

    Raises:
        QuantizationError: the network has several inputs.
    """
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise QuantizationError(
            f"the network has {len(inputs)} inputs, and reconstruction of blocks knows networks of one: take "
            "quantization.reconstruct out, or use quantization.adaround"
        )
    found: list[Block] = []
    waiting: tuple[fx.Node, ...] = ()
    source, joined = inputs[0], 0
    for part in _parts(graph_module, inputs[0]):
        layers = _layers(part)
        if not layers:
            if waiting or not found or isinstance(_module(part[-1]), Quantizer):
                waiting += part
            else:
                last = found[-1]
                found[-1] = Block(last.source, last.nodes + part, last.layers)
                source = part[-1]
            continue
        nodes, waiting = waiting + part, ()
        joins = len(layers) == 1 and 0 < joined < most
        if joins:
            last = found[-1]
            found[-1] = Block(last.source, last.nodes + nodes, tuple(dict.fromkeys(last.layers + layers)))
        else:
            found.append(Block(source, nodes, layers))
        joined = (joined + 1 if joins else 1) if len(layers) == 1 else 0
        source = nodes[-1]
    return tuple(found)


def block_module(graph_module: fx.GraphModule, block: Block) -> fx.GraphModule:
    """A block as a network of its own, with the very modules of the whole."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, values = next(iter(graph_module.graph.nodes)), {block.source: x}

    def brought(node: fx.Node) -> fx.Node:
        """A constant of the graph, or the number of images, which the block's input has too."""
        if node not in values:
            values[node] = graph.node_copy(node, lambda n: x if n is first else brought(n))
        return values[node]

    for node in block.nodes:
        values[node] = graph.node_copy(node, brought)
    graph.output(values[block.nodes[-1]])
    return fx.GraphModule(graph_module, graph)


def _batch_sizes(first: fx.Node) -> set[fx.Node]:
    """The nodes that read the number of images from the network's input, which would keep it alive throughout."""
    found: set[fx.Node] = set()
    for node in first.users:
        whole = (node.target, node.args[1:]) in (("size", ()), (getattr, ("shape",)))
        if node.op == "call_method" and node.target == "size" and node.args[1:] == (0,):
            found.add(node)
        elif whole and all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
            found |= {node, *node.users}
    return found


def _parts(graph_module: fx.GraphModule, first: fx.Node) -> Iterator[tuple[fx.Node, ...]]:
    """Yield the nodes between cuts, without constants; the last part ends before the graph's output."""
    left_out = {first, *_batch_sizes(first)}
    nodes = [node for node in graph_module.graph.nodes if node.op != "get_attr" and node not in left_out]
    part: list[fx.Node] = []
    for node, alive in alive_after([first, *nodes]):
        if node.op == "output":
            break
        if node is not first:
            part.append(node)
        if part and alive == {node}:
            yield tuple(part)
            part = []


def _layers(part: tuple[fx.Node, ...]) -> tuple[str, ...]:
    found = (str(node.target) for node in part if isinstance(_module(node), _QuantWeight))
    return tuple(dict.fromkeys(found))


def _module(node: fx.Node) -> nn.Module | None:
    return node_module(node) if node.op == "call_module" else None
