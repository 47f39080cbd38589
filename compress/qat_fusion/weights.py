"""Quantize the weights of many layers in one launch, and mask their gradients in one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.graph.ops import tensor_of
from compress.kernels.epilogue import IntegerGrid
from compress.kernels.triton.launch import Kernels, use_triton_eager
from compress.kernels.triton.weights import quantize_weights
from compress.quantization.quantizer import Quantizer

_GROUP_BYTES = 25 << 20  # of DistributedDataParallel's buckets: sums of gradients overlap with backward


class QuantizedWeights(nn.Module):
    """Quantized weights of `layers`, in their order, those `coded` as integers too; layers are not registered."""

    def __init__(self, layers: Sequence[nn.Module], kernels: Kernels | None) -> None:
        super().__init__()
        self.layers: tuple[Any, ...] = tuple(layers)
        self.kernels: Kernels | None = kernels
        self.coded = [False] * len(self.layers)

    def forward(self) -> tuple[Tensor | None, ...]:
        """As many int8 tensors follow: None where integers are not wanted, or where Triton does not run."""
        weights = [layer.weight for layer in self.layers]
        found = [layer.weight_quantizer for layer in self.layers]
        if use_triton_eager(weights[0], self.kernels) and all(map(is_plain, found)) and all(map(is_live, found)):
            grids = [grid_of(quantizer) for quantizer in found]
            result = quantize_weights(self, weights, grids, weight_dtype(weights[0]), self.coded)
            if result is not None:
                return result
        values = [quantizer(weight) for quantizer, weight in zip(found, weights, strict=True)]
        return (*values, *(None for _ in values))


def grid_of(quantizer: Quantizer) -> IntegerGrid:
    quant_format = quantizer.format
    return IntegerGrid(quantizer.amax, quant_format.low, quant_format.high, quant_format.axis)


def weight_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def is_plain(quantizer: nn.Module) -> bool:
    """True if a quantizer rounds to integers of a byte in a fixed range that is symmetric or begins at 0."""
    if type(quantizer) is not Quantizer or quantizer.format.wide:
        return False
    return quantizer.format.kind == "int" and not quantizer.format.lowest and not quantizer.amax.requires_grad


def is_live(quantizer: Quantizer) -> bool:
    """True if a quantizer is enabled, has ranges, and no calibrator watches it."""
    return quantizer.enabled and quantizer.calibrator is None and quantizer.ready


def group_weights(graph_module: fx.GraphModule, consumers: dict[fx.Node, nn.Module], kernels: Kernels | None) -> None:
    """Give nodes, in the graph's order, the quantized weights of their layers as the keyword argument `weight`."""
    groups: list[dict[nn.Module, list[fx.Node]]] = []
    seen: dict[nn.Module, dict[nn.Module, list[fx.Node]]] = {}
    room = 0
    for node, layer in consumers.items():
        if layer not in seen:
            size = tensor_of(layer).nbytes
            if room < size:
                groups.append({})
                room = _GROUP_BYTES
            room -= size
            seen[layer] = groups[-1]
        seen[layer].setdefault(layer, []).append(node)
    for i, group in enumerate(groups):
        name = f"quantized_weights.{i}"
        graph_module.add_submodule(name, QuantizedWeights(tuple(group), kernels))
        with graph_module.graph.inserting_before(next(iter(group.values()))[0]):
            weights = graph_module.graph.call_module(name)
        for j, nodes in enumerate(group.values()):
            with graph_module.graph.inserting_before(nodes[0]):
                weight = graph_module.graph.call_function(operator.getitem, (weights, j))
            for node in nodes:
                node.update_kwarg("weight", weight)


def codes_of_weight(graph_module: fx.GraphModule, consumer: fx.Node) -> fx.Node | None:
    """The node of the integers of a consumer's weight, computed from now on; None if it is not of `group_weights`."""
    weight = consumer.kwargs.get("weight")
    if not isinstance(weight, fx.Node):
        return None
    arguments: Any = weight.args
    group, index = arguments
    owner: Any = graph_module.get_submodule(str(group.target))  # of QuantizedWeights
    owner.coded[index] = True
    with graph_module.graph.inserting_after(weight):
        return graph_module.graph.call_function(operator.getitem, (group, len(owner.layers) + index))
