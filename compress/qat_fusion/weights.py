"""The weights of many layers quantized in one launch, and their gradients masked in one.

A weight is small and a launch is not: quantizing the 54 weights of ResNet-50 one by one is 54 launches forward and 54
back, each of a few microseconds on the GPU and of fifty on the processor that starts them. So the fused graph
quantizes weights in groups: one node reads the weights of a group through a table of pointers, writes them into
one buffer in the type that autocast would turn them into, and keeps one bit a weight; its backward pass reads the
gradients through a table again and writes them, masked, into one buffer, of which every parameter's gradient is a view.

The masks are needed: ranges stay fixed while weights are trained, so a weight can leave its range.

A group ends at 25 MiB of weights, the size of the buckets in which DistributedDataParallel sums gradients: a group's
gradients are there when those of its first layer are, so with one group for the whole network no sum would overlap
with the backward pass. Groups follow the order of the graph, and each is computed right before its first layer.
Gradient checkpointing around the model computes them again with everything else; without gradients nothing is kept.

Where Triton kernels do not run (processors, torch.compile, learned or disabled quantizers, weights that are not dense),
each weight passes its own quantizer.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compress.kernels.epilogue import Kernels, by_hand
from compress.quantization.quantizer import Quantizer

_GROUP_BYTES = 25 << 20  # as DistributedDataParallel's bucket_cap_mb


class QuantizedWeights(nn.Module):
    """Quantized weights of `layers`, in their order.

    Args:
        layers: each with `weight` and `weight_quantizer`. They are not registered: other modules of the graph own them.
        kernels: as of `fuse_for_training`.

    Attributes:
        coded: of which layers the weights are wanted as integers too.
    """

    def __init__(self, layers: Sequence[nn.Module], kernels: Kernels | None) -> None:
        super().__init__()
        self.layers: tuple[Any, ...] = tuple(layers)
        self.kernels: Kernels | None = kernels
        self.coded = [False] * len(self.layers)

    def forward(self) -> tuple[Tensor | None, ...]:
        """The weights, shaped and laid out as they are; in autocast's type where Triton kernels compute them.

        As many again follow: the integers, int8, None where they are not wanted or Triton kernels do not compute them.
        """
        weights = [layer.weight for layer in self.layers]
        found = [layer.weight_quantizer for layer in self.layers]
        if by_hand(weights[0], self.kernels) and all(map(is_plain, found)) and all(map(is_live, found)):
            result = _triton().quantize_weights(self, weights, found, weight_dtype(weights[0]), self.coded)
            if result is not None:
                return cast("tuple[Tensor | None, ...]", result)
        values = [quantizer(weight) for quantizer, weight in zip(found, weights, strict=True)]
        return (*values, *(None for _ in values))


def weight_dtype(weight: Tensor) -> torch.dtype:
    """The type in which a layer's product reads its weight: autocast's, or its own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def is_plain(quantizer: nn.Module) -> bool:
    """Whether a quantizer rounds to integers by fixed ranges, as `fake_quantize` does."""
    if type(quantizer) is not Quantizer:
        return False
    return quantizer.format.kind == "int" and not quantizer.amax.requires_grad


def is_live(quantizer: Quantizer) -> bool:
    """Whether a quantizer rounds at present: neither off, nor watching, nor without ranges."""
    return quantizer.enabled and quantizer.calibrator is None and quantizer.ready


def group_weights(graph_module: fx.GraphModule, readers: dict[fx.Node, nn.Module], kernels: Kernels | None) -> None:
    """Give nodes the quantized weights of their layers, as the keyword argument `weight`.

    Args:
        graph_module: changed in place.
        readers: nodes in the graph's order, each with its quantized layer; several may share one.
        kernels: as of `fuse_for_training`.
    """
    groups: list[dict[nn.Module, list[fx.Node]]] = []
    seen: dict[nn.Module, dict[nn.Module, list[fx.Node]]] = {}
    room = 0
    for node, layer in readers.items():
        if layer not in seen:
            size = cast(Tensor, layer.weight).nbytes
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


def codes_of_weight(graph_module: fx.GraphModule, reader: fx.Node) -> fx.Node | None:
    """The node of the integers of the weight that a node reads; None where it reads none of `group_weights`.

    Args:
        graph_module: changed in place: the integers are computed from now on.
        reader: has the keyword argument `weight`.
    """
    weight = reader.kwargs.get("weight")
    if not isinstance(weight, fx.Node):
        return None
    group, index = cast("tuple[fx.Node, int]", weight.args)
    owner = cast(QuantizedWeights, graph_module.get_submodule(str(group.target)))
    owner.coded[index] = True
    with graph_module.graph.inserting_after(weight):
        return graph_module.graph.call_function(operator.getitem, (group, len(owner.layers) + index))


def _triton() -> Any:
    from compress.kernels.triton import weights as fused_weights_triton

    return fused_weights_triton
