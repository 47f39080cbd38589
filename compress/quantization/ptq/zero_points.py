"""Zero points of activations: where images show that few values are negative, few integers are.

A tensor whose lowest value is not known from the operations (`placement.values`) is measured. An operation that is flat
below a value, as a hard-swish is below -3, needs no integers there either. Each reader measures; this file decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from compress.graph.functional import constant_value, is_constant
from compress.graph.ops import Watching
from compress.graph.traits import PASSING
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.insert import read_fx
from compress.quantization.placement.place import place
from compress.quantization.placement.targets import TABLES
from compress.quantization.placement.view import GraphView, Node
from compress.quantization.ptq.channel_scales import looks_at_layers
from compress.quantization.ptq.walk import on_images
from compress.quantization.spec import QuantSpec

T = TypeVar("T")

Constant = Callable[[Node, Node], Tensor | None]
"""The other operand of a sum or product (first) with a tensor (second), if it is a constant."""

LOOKED_AT = 16
"""Images whose values decide about zero points and biases."""
MARGIN = 1 / 16
"""Share of the range that is left for images that were not looked at."""
GAIN = 0.75
"""Largest share of the negative range in the positive one for which a zero point is worth it."""


def place_on_images(
    graph_module: fx.GraphModule, spec: QuantSpec, batches: Sequence[Any], *, all_reduce: bool = False
) -> Placement:
    """Decide where quantizers are placed in a float graph (`place`), with zero points from images."""
    view = read_fx(graph_module)
    placement = place(view, spec)
    tensors = frozenset(signed_tensors(placement, spec))
    if not tensors or not batches:
        return placement
    nodes = {node.name: node for node in graph_module.graph.nodes}

    def ranges(images: Sequence[tuple[Tensor, ...]]) -> dict[str, tuple[float, float]]:
        found: dict[str, tuple[float, float]] = {}

        def look(name: str, x: Tensor) -> None:
            if x.numel():
                low, high = found.get(name, (math.inf, -math.inf))
                found[name] = min(low, float(x.min())), max(high, float(x.max()))

        for image in spread(images):
            Watching(graph_module, tensors, look).run(*image)
        return found

    def constant(user: Node, node: Node) -> Tensor | None:
        operands = nodes[user.name].args
        others = [each for each in operands if each is not nodes[node.name]]
        if len(operands) != 2 or len(others) != 1 or not is_constant(others[0]):
            return None
        value = constant_value(graph_module, others[0]) if isinstance(others[0], fx.Node) else others[0]
        return torch.as_tensor(value).detach().float().cpu()

    seen = on_images(ranges, graph_module, batches, all_reduce=all_reduce) or {}
    return place(view, spec, lowest_expected(view, seen, constant))


def spread(images: Sequence[T]) -> Sequence[T]:
    """Return at most `LOOKED_AT` images, evenly spread."""
    return images[:: -(-len(images) // LOOKED_AT)]


def signed_tensors(placement: Placement, spec: QuantSpec) -> list[str]:
    """The tensors with a sign that may have a zero point: none where specification or target has none."""
    if not looks_at_layers(spec) or not TABLES[placement.target].zero_points:
        return []
    signed = [site for site in placement.activations if site.format.signed and not site.format.lowest]
    return list(dict.fromkeys(tensor for site in signed for tensor, _ in site.edges))


def lowest_expected(view: GraphView, seen: Mapping[str, tuple[float, float]], constant: Constant) -> dict[str, float]:
    """The value that each tensor is not expected below, if few integers are enough there, from (lowest, highest)."""
    flat = _flat_below(view, constant)
    lowest = {  # other images are not expected below it
        name: max(min(low - MARGIN * (high - low), -MARGIN * high), flat.get(name, -math.inf))
        for name, (low, high) in seen.items()
    }
    return {name: least for name, least in lowest.items() if 0 < -least < GAIN * seen[name][1]}


def _flat_below(view: GraphView, constant: Constant) -> dict[str, float]:
    """The tensors whose values below one, which is below 0, make no difference to any operation that consumes them."""
    flat = dict[Node, float]()
    for node in reversed(view.nodes):
        flat[node] = min((_flat_for(node, user, flat[user], constant) for user in node.consumers), default=-math.inf)
    return {node.name: least for node, least in flat.items() if -math.inf < least < 0}


def _flat_for(node: Node, user: Node, result: float, constant: Constant) -> float:
    """The value below which one consumer is flat; `result` is that of the consumer's own result."""
    if user.kind in PASSING or (user.traits.free and user.traits.category == "movement"):
        return result
    if user.kind not in ("add", "mul"):
        return user.traits.flat_below
    value = constant(user, node)
    if value is None or not value.numel() or not bool(value.isfinite().all()):
        return -math.inf
    if user.kind == "add":
        return float((result - value).min())
    return float((result / value).min()) if bool((value > 0).all()) else -math.inf
