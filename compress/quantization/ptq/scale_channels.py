"""`smooth: auto` of torch models: channels with outliers are scaled, poor products of activations stay float.

A scale goes into the layer or normalization that makes the tensor, through activations without bounds; where none can
take it there is no scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.graph.canonical import canonical_graph
from compress.graph.compare import Reference
from compress.graph.inputs import Batches, Inputs, model_inputs
from compress.graph.ops import Watching, node_kind, node_module
from compress.graph.traits import PASSING
from compress.quantization.placement.place import place
from compress.quantization.placement.read_fx import read_fx
from compress.quantization.placement.view import Node
from compress.quantization.ptq.channel_scales import (
    IMAGES,
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
from compress.quantization.ptq.ranges import scale_inputs, scale_outputs, shared_parameters
from compress.quantization.spec import QuantSpec, Rule

_THROUGH = PASSING | {"relu", "leaky_relu"}
"""Operations that a positive factor for each channel passes."""
_POOLS = frozenset({"max_pool", "adaptive_max_pool", "avg_pool", "adaptive_avg_pool"})
"""Those that it passes where channels are the second axis."""
_BATCHES = 8
"""Batches that are looked at where they cannot be split into images."""
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""What torch raises for inputs that a network does not take."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Result of `scale_channels`: the model (the caller's own if nothing was scaled), rules for products, and notes."""

    model: nn.Module
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()


def some_of(batches: Batches) -> tuple[list[Any], Batches]:
    """Batches from all over the data, or the first ones of what can be read once; and all batches."""
    if isinstance(batches, Sequence):
        return list(batches[:: -(-len(batches) // IMAGES) or 1]), batches
    source, seen, images = iter(batches), list[Any](), 0
    for batch in source:
        seen.append(batch)
        images += _length(batch)
        if images >= IMAGES:
            break
    return seen, (chain(seen, source) if source is batches else _Begun(batches, seen, source))


class _Begun:
    """Batches whose first pass has begun: it goes on after what was read."""

    def __init__(self, batches: Batches, seen: Sequence[Any], rest: Iterator[Any]) -> None:
        self.batches, self.seen = batches, seen
        self.rest: Iterator[Any] | None = rest

    def __iter__(self) -> Iterator[Any]:
        if self.rest is None:
            return iter(self.batches)
        rest, self.rest = self.rest, None
        return chain(self.seen, rest)

    def __length_hint__(self) -> int:
        return length_hint(self.batches)


@torch.no_grad()
def scale_channels(
    model: nn.Module, example_inputs: Inputs, batches: Sequence[Any], spec: QuantSpec, *, all_reduce: bool = False
) -> Scaled:
    """Scale channels of a copy of a float model, and choose products that stay float, as rank 0 does.

    Raises:
        ModelError: the model cannot be traced, or computes something else when its channels are scaled.
    """
    if not batches:
        return Scaled(model=model)
    graph_module = canonical_graph(model, example_inputs, fold=False)
    view = read_fx(graph_module)
    placement, nodes = place(view, spec), {node.name: node for node in graph_module.graph.nodes}
    layers = _Layers(graph_module)
    groups = [
        group for group in groups_of(view, placement, layers.plain) if layers.producer(nodes[group.tensor], group)
    ]
    products = products_of(view, placement)
    if not groups and not products:
        return Scaled(model=model)
    choose = partial(_chosen, graph_module, groups, products, spec)
    try:
        scales, rules = choose(list(_images(graph_module, batches)))
    except _FAILURES:  # the first dimension of its inputs is no batch
        try:
            scales, rules = choose([model_inputs(graph_module, batch) for batch in batches[:_BATCHES]])
        except _FAILURES:  # calibration meets the same batch, and describes it
            return Scaled(model=model)
    if all_reduce:
        scales, rules = _of_rank_0((scales, rules))
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
        return partial(_tensors, graph_module, frozenset(names))

    scales = choose_scales(groups, images, spec, watch=watch, consumer=partial(_consumer, graph_module))
    return {group.tensor: scale for group, scale in scales}, poor_products(products, images, spec, watch=watch)


def _tensors(graph_module: fx.GraphModule, names: frozenset[str], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        found[name] = x.detach().float().cpu()

    Watching(graph_module, names, keep).run(*inputs)
    return found


def _images(graph_module: fx.GraphModule, batches: Sequence[Any]) -> Iterator[tuple[Tensor, ...]]:
    """Yield single images, evenly spread over the batches."""
    places = [(batch, place) for batch in batches for place in range(_length(batch))]
    chosen = [places[i * len(places) // IMAGES] for i in range(IMAGES)] if len(places) > IMAGES else places
    for batch, start in chosen:
        yield tuple(x[start : start + 1] for x in model_inputs(graph_module, batch))


def _length(batch: Any) -> int:
    while isinstance(batch, (tuple, list, Mapping)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, Tensor) and batch.ndim else 1


def _consumer(graph_module: fx.GraphModule, layer: Node) -> Consumer:
    module: Any = graph_module.get_submodule(layer.path)
    weight, groups = module.weight.detach().float().cpu(), getattr(module, "groups", 1)
    if layer.kind == "linear":
        return Consumer(weight=weight, groups=1, compute=lambda x, w: x @ w.T)
    return Consumer(weight=weight, groups=groups, compute=convolve(module.stride, module.dilation, groups))


def _of_rank_0(found: Any) -> Any:
    box = [found]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]


class _Layers:
    """Which layers and normalizations of a graph can be rescaled."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.calls = Counter(str(n.target) for n in graph_module.graph.nodes if n.op == "call_module")
        self.shared = shared_parameters(graph_module)

    def module(self, path: str) -> Any:
        return self.graph_module.get_submodule(path)

    def plain(self, node: Node) -> bool:
        """True if a layer's parameters are its own and it is called once."""
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
