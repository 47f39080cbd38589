"""A file's network in floating point: what runs where integers do not pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compress.engines.cuda.onnx_ops import apply, is_read_by_the_host
from compress.engines.cuda.plan.activation import Activation, recognize_activations
from compress.engines.cuda.plan.graph import Graph, Node, without_dead
from compress.engines.cuda.plan.quantizers import Grid, real_weight, resolve_quantizers

FloatNetwork = Callable[..., tuple[Tensor, ...]]
"""From the network's inputs, in its order, to its outputs."""


def float_graph(graph: Graph) -> Graph:
    """A graph as it was read, without quantizers."""
    quantized = resolve_quantizers(recognize_activations(graph))
    inner = quantized.graph
    constants = {**inner.constants, **{name: real_weight(weight) for name, weight in quantized.weights.items()}}
    same: dict[str, str] = {}
    nodes: list[Node] = []
    for node in inner.nodes:
        node = replace(node, inputs=tuple(same.get(name, name) for name in node.inputs))
        if node.op == "Dequantize" and node.outputs[0] not in inner.outputs:
            same[node.outputs[0]] = node.inputs[0]
        elif node.op == "Dequantize":
            nodes.append(replace(node, op="Identity", inputs=node.inputs[:1], attributes={}))
        elif node.op == "Quantize":
            limits = _limits(node.attributes["grid"])
            nodes.append(replace(node, op="Activation", inputs=node.inputs[:1], attributes={"activation": limits}))
        else:
            nodes.append(node)
    return without_dead(replace(inner, constants=constants), nodes)


def _limits(grid: Grid) -> Activation:
    return Activation("clip", (grid.low - grid.zero) * grid.scale[0], (grid.high - grid.zero) * grid.scale[0])


def float_network(graph: Graph, dtype: torch.dtype, device: torch.device) -> FloatNetwork:
    """The function of a graph without quantizers, computed in `dtype`; outputs have the types of the file."""

    def fitting(node: Node, index: int, value: Tensor) -> Tensor:
        if is_read_by_the_host(node.op, index, value):
            return value.cpu()
        value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
        image = node.op == "Conv" and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if image else value

    constants = {
        (node.name, i): fitting(node, i, graph.constants[name])
        for node in graph.nodes
        for i, name in enumerate(node.inputs)
        if name in graph.constants
    }

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = {
            name: x.to(dtype) if x.is_floating_point() else x for name, x in zip(graph.inputs, inputs, strict=True)
        }
        for node in graph.nodes:
            given = [constants.get((node.name, i), values.get(name)) for i, name in enumerate(node.inputs)]
            values.update(zip(node.outputs, _results(node, given), strict=False))
        return tuple(values[name].to(graph.dtypes[name]) for name in graph.outputs)

    return run


def _results(node: Node, given: list[Tensor | None]) -> tuple[Tensor, ...]:
    if node.op == "Activation" and given[0] is not None:
        return (node.attributes["activation"](given[0]),)
    return apply(node.op, node.attributes, given)


def compiled(network: FloatNetwork, examples: Mapping[str, Tensor], backend: str = "inductor") -> FloatNetwork:
    """The network as torch compiles it for inputs of one set of shapes and strides."""
    from torch.fx.experimental.proxy_tensor import make_fx  # lazy: half a second, for few files

    with torch.no_grad():
        traced = make_fx(network)(*examples.values())
        found: FloatNetwork = torch.compile(traced, dynamic=False, backend=backend)
    return found
