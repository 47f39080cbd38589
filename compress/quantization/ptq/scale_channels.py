"""`smooth: auto` of torch models: channels with outliers are scaled, poor products of activations stay float.

A scale goes into the layer or normalization that makes the tensor, through activations without bounds; where none can
take it there is no scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.graph.canonical import canonical_graph
from compress.graph.compare import Reference
from compress.graph.inputs import Inputs
from compress.graph.ops import node_kind, node_module
from compress.graph.traits import PASSING
from compress.quantization.placement.insert import read_fx
from compress.quantization.placement.view import Node
from compress.quantization.ptq.channel_scales import (
    ChannelScale,
    Consumer,
    Group,
    choose_scales,
    convolve,
    groups_of,
    poor_products,
    products_of,
    scaling_note,
)
from compress.quantization.ptq.equalize import scale_inputs, scale_outputs, shared_parameters
from compress.quantization.ptq.walk import on_images, tensors_of
from compress.quantization.ptq.zero_points import place_on_images
from compress.quantization.spec import QuantSpec, Rule

_THROUGH = PASSING | {"relu", "leaky_relu"}
"""Operations that a positive factor for each channel passes."""
_POOLS = frozenset({"max_pool", "adaptive_max_pool", "avg_pool", "adaptive_avg_pool"})
"""Those that it passes where channels are the second axis."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Result of `scale_channels`: the model (the caller's own if nothing was scaled), rules for products, and notes."""

    model: nn.Module
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()


@torch.no_grad()
def scale_channels(
    model: nn.Module, example_inputs: Inputs, batches: Sequence[Any], spec: QuantSpec, *, all_reduce: bool = False
) -> Scaled:
    """Scale channels of a copy of a float model, and choose products that stay float, as rank 0 does."""
    if not batches:
        return Scaled(model=model)
    graph_module = canonical_graph(model, example_inputs, fold=False)
    view = read_fx(graph_module)
    placement = place_on_images(graph_module, spec, batches, all_reduce=all_reduce)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    layers = _Layers(graph_module)
    groups = [
        group for group in groups_of(view, placement, layers.plain) if layers.producer(nodes[group.tensor], group)
    ]
    products = products_of(view, placement)
    if not groups and not products:
        return Scaled(model=model)
    choose = partial(_chosen, graph_module, groups, products, spec)
    scales, rules = on_images(choose, graph_module, batches, all_reduce=all_reduce) or ({}, ())
    if not scales:
        return Scaled(model=model, rules=rules)
    reference = Reference.of(model, example_inputs)
    for tensor, scale in scales.items():
        group = next(group for group in groups if group.tensor == tensor)
        device = layers.module(group.layers[0].path).weight.device
        producer, factor = layers.producer(nodes[tensor], group), scale.scale.to(device)
        if producer is not None:
            producer(1 / factor)
            for layer in group.layers:
                scale_inputs(layers.module(layer.path), factor)
    reference.check(graph_module, "scaling channels")
    return Scaled(model=graph_module, rules=rules, notes=scaling_note(list(scales.values())))


def _chosen(
    graph_module: fx.GraphModule,
    groups: Sequence[Group],
    products: Sequence[Node],
    spec: QuantSpec,
    images: Sequence[tuple[Tensor, ...]],
) -> tuple[dict[str, ChannelScale], tuple[Rule, ...]]:

    def watch(names: Sequence[str]) -> Callable[[tuple[Tensor, ...]], Mapping[str, Tensor]]:
        return partial(tensors_of, graph_module, frozenset(names))

    scales = choose_scales(groups, images, spec, watch=watch, consumer=partial(_consumer, graph_module))
    return {group.tensor: scale for group, scale in scales}, poor_products(products, images, spec, watch=watch)


def _consumer(graph_module: fx.GraphModule, layer: Node) -> Consumer:
    module: Any = graph_module.get_submodule(layer.path)
    weight, groups = module.weight.detach().float().cpu(), getattr(module, "groups", 1)
    if layer.kind == "linear":
        return Consumer(weight=weight, groups=1, compute=lambda x, w: x @ w.T)
    return Consumer(weight=weight, groups=groups, compute=convolve(module.stride, module.dilation, groups))


class _Layers:
    """Which layers and normalizations of a graph can be rescaled."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.calls = Counter(str(n.target) for n in graph_module.graph.nodes if n.op == "call_module")
        self.shared = shared_parameters(graph_module)

    def module(self, path: str) -> Any:
        return self.graph_module.get_submodule(path)

    def plain(self, node: Node) -> bool:
        return self._alone(node.path)

    def _alone(self, path: str) -> bool:
        own = self.calls[path] == 1 and path not in self.shared
        return own and not parametrize.is_parametrized(self.module(path))

    def producer(self, node: fx.Node, group: Group) -> Callable[[Tensor], None] | None:
        """What multiplies the channels of a tensor by factors (C,), where it is made; None if nothing can."""
        if len(node.users) != len(group.layers):
            return None
        through = _THROUGH | _POOLS if group.convolution else _THROUGH
        while node_kind(node) in through:
            (node, *more) = node.all_input_nodes
            if more or len(node.users) != 1:
                return None
        kind = node_kind(node)
        if node.op != "call_module" or not self._alone(str(node.target)):
            return None
        module: Any = node_module(node)
        if kind in (("conv", "conv_transpose") if group.convolution else ("linear",)):
            return partial(scale_outputs, module)
        rank = len(group.layers[0].inputs[0].shape or ())
        norms = {"batch_norm": group.convolution or rank == 2, "layer_norm": not group.convolution}
        one_axis = len(getattr(module, "normalized_shape", (1,))) == 1
        if norms.get(kind, False) and one_axis and isinstance(getattr(module, "weight", None), Tensor):
            return partial(_scale_norm, module)
        return None


def _scale_norm(module: Any, factor: Tensor) -> None:
    module.weight.mul_(factor)
    if getattr(module, "bias", None) is not None:
        module.bias.mul_(factor)
