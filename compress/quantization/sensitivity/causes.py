"""Why a quantizer loses what it does: facts of its tensor on a few images, and the causes that follow from them.

One pass runs the float and the quantized network side by side, node by node. At every quantizer the float tensor is
compared with its grid, so that the noise is that of this quantizer alone; at every other node the two networks are
compared, so that the noise is that of everything before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from compress.graph.batches import model_inputs
from compress.graph.ops import layer_name, node_kind, node_module
from compress.graph.traits import PASSING
from compress.quantization.quantizer import Quantizer
from compress.quantization.report import placement_of
from compress.quantization.sensitivity.compare import Noise
from compress.quantization.sensitivity.subset import Sides, Subset, subset_of

_WEIGHT_RATIO, _CHANNEL_RATIO, _TENSOR_RATIO = 8.0, 16.0, 8.0
"""Largest range over the median (of weights' and of activations' channels), or over the least of several tensors."""
_CLIPPED_NOISE, _ZEROED = 0.5, 0.5
"""Share of a quantizer's noise that values beyond its range make; share of nonzero values that become zero."""

IMAGES = 32
"""Largest number of images of the pass."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason why a quantizer loses much.

    Attributes:
        kind: `channel ranges` of a weight, `outlier channels` of an activation, `saturation`, `two ranges` under one
            scale, `softmax tails` or `dead values`.
        tensor: what is quantized: a layer's weight, or a tensor of the graph.
        value: the number that shows it: a ratio or a share.
        text: the finding as a sentence.
    """

    kind: str
    tensor: str
    value: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Results of the pass.

    Attributes:
        sqnr_db: signal to noise of every node's result in the quantized network, in graph order.
        causes: by layer: of its weight, and of the tensors that it consumes quantized.
    """

    sqnr_db: dict[str, float]
    causes: dict[str, tuple[Cause, ...]]


@dataclass
class _Facts:
    """Sums over batches of one quantizer's tensor."""

    count: float = 0.0
    zeroed: float = 0.0
    beyond: float = 0.0
    noise: float = 0.0
    clipped_noise: float = 0.0
    channels: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, x: Tensor, quantizer: Quantizer) -> None:
        """Add a batch of the tensor in float, so that the noise is that of this quantizer alone."""
        q = quantizer(x)
        difference = (x - q).square()
        beyond = x.abs() > quantizer.amax
        self.count += float((x != 0).sum())
        self.zeroed += float(((x != 0) & (q == 0)).sum())
        self.beyond += float(beyond.sum())
        self.noise += float(difference.sum())
        self.clipped_noise += float(difference[beyond].sum())
        self.channels = torch.maximum(self.channels, _by_channel(x))


class _Watch(Sides):
    """Runs the float network (the first side) and the quantized one, and looks at every tensor."""

    def __init__(self, qmodel: fx.GraphModule) -> None:
        super().__init__(qmodel, (Subset(), subset_of(placement_of(qmodel))))
        self.noises: defaultdict[str, Noise] = defaultdict(Noise)
        self.largest: defaultdict[str, float] = defaultdict(float)
        self.facts: defaultdict[tuple[str, str], _Facts] = defaultdict(_Facts)

    def run_node(self, n: fx.Node) -> Any:
        values = super().run_node(n)
        if source := self.sources.get(n):
            self.facts[str(n.target), source.name].add(values[0][0], cast(Quantizer, node_module(n)))
        elif n.op not in {"placeholder", "output"}:
            exact, rounded = values
            if isinstance(exact, Tensor) and exact.is_floating_point() and exact.numel():
                self.noises[n.name].add(exact, rounded)
                self.largest[n.name] = max(self.largest[n.name], exact.abs().max().item())
        return values


@torch.no_grad()
def look_at_tensors(
    qmodel: fx.GraphModule, batches: Iterable[Any], layers: Collection[str], *, images: int = IMAGES
) -> Tensors:
    """Run the float and the quantized network side by side, and find the causes of noise.

    Args:
        qmodel: calibrated, in evaluation mode.
        batches: as for `quantize`.
        layers: names that causes are for; those of an operation between layers (a concat) are for the layer after it.
        images: largest number of images.
    """
    runner, left = _Watch(qmodel), images
    for batch in batches:
        inputs = tuple(x[:left] for x in model_inputs(qmodel, batch))
        runner.run(*inputs)
        left -= len(inputs[0])
        if left <= 0:
            break
    return Tensors(
        sqnr_db={name: noise.decibel for name, noise in runner.noises.items()},
        causes=_causes(qmodel, runner, layers),
    )


def _causes(qmodel: fx.GraphModule, runner: _Watch, layers: Collection[str]) -> dict[str, tuple[Cause, ...]]:
    nodes = {node.name: node for node in qmodel.graph.nodes}
    found: defaultdict[str, list[Cause]] = defaultdict(list)
    placement = placement_of(qmodel)
    for weight in placement.weights:
        if weight.format.axis is None:
            found[weight.path] += _of_weight(weight.path, qmodel.get_submodule(weight.path))
    for site in placement.activations:
        ranges = {tensor: runner.largest.get(tensor, 0.0) for tensor, _ in site.edges}
        for tensor, consumer in site.edges:
            if (site.name, tensor) in runner.facts and consumer in nodes:
                layer = _layer_after(nodes[consumer], layers)
                found[layer] += _of_tensor(nodes[tensor], runner.facts[site.name, tensor])
                found[layer] += _of_ranges(nodes[tensor], ranges, runner.largest)
    return {layer: tuple(causes) for layer, causes in found.items() if causes}


def _layer_after(node: fx.Node, layers: Collection[str]) -> str:
    """Return the nearest of the layers at or after a node; the node's own name if there is none."""
    waiting, seen = [node], {node}
    for one in waiting:
        if layer_name(one) in layers:
            return layer_name(one)
        more = [user for user in one.users if user not in seen]
        waiting += more
        seen.update(more)
    return layer_name(node)


def _of_weight(path: str, layer: Any) -> Iterator[Cause]:
    weight = layer.weight.detach()
    axis = 1 if "Transpose" in type(layer).__name__ else 0
    ranges = weight.abs().movedim(axis, 0).flatten(1).amax(1)
    ratio = _ratio(ranges)
    if ratio > _WEIGHT_RATIO:
        steps = float(ranges.median() / layer.weight_quantizer.scale.max())
        text = (
            f"one scale for channels whose ranges differ by {ratio:.0f}: half of them keep {steps:.1f} steps or fewer"
        )
        yield Cause(kind="channel ranges", tensor=f"{path}.weight", value=ratio, text=text)


def _of_tensor(source: fx.Node, facts: _Facts) -> Iterator[Cause]:
    clipped = facts.clipped_noise / facts.noise if facts.noise else 0.0
    if clipped > _CLIPPED_NOISE:
        share = facts.beyond / max(facts.count, 1.0)
        text = f"{share:.2%} of the values lie beyond the range, and they make {clipped:.0%} of the noise"
        yield Cause(kind="saturation", tensor=source.name, value=clipped, text=text)
    zeroed = facts.zeroed / max(facts.count, 1.0)
    if zeroed > _ZEROED:
        origin = source
        while node_kind(origin) in PASSING and origin.all_input_nodes:
            origin = origin.all_input_nodes[0]
        tails = node_kind(origin) == "softmax"
        what = "probabilities are below half a step and become zero" if tails else "nonzero values become zero"
        yield Cause(
            kind="softmax tails" if tails else "dead values",
            tensor=source.name,
            value=zeroed,
            text=f"{zeroed:.0%} of the {what}",
        )
    ratio = _ratio(facts.channels)
    if ratio > _CHANNEL_RATIO:
        text = f"one channel's range is {ratio:.0f} times the median channel's, and they share one scale"
        yield Cause(kind="outlier channels", tensor=source.name, value=ratio, text=text)


def _of_ranges(source: fx.Node, together: dict[str, float], largest: dict[str, float]) -> Iterator[Cause]:
    """Tensors that share one scale: those of one quantizer, and the inputs of a concat that is quantized as a whole."""
    ranges = dict(together)
    if len(ranges) < 2 and node_kind(source) in {"concat", "stack"}:
        ranges = {node.name: largest[node.name] for node in source.all_input_nodes if node.name in largest}
    nonzero = {name: value for name, value in ranges.items() if value > 0}
    if len(nonzero) < 2:
        return
    low, high = min(nonzero, key=nonzero.__getitem__), max(nonzero, key=nonzero.__getitem__)
    ratio = nonzero[high] / nonzero[low]
    if ratio > _TENSOR_RATIO:
        text = f"{high} reaches {nonzero[high]:.3g} and {low} {nonzero[low]:.3g}, and they share one scale"
        yield Cause(kind="two ranges", tensor=source.name, value=ratio, text=text)


def _ratio(ranges: Tensor) -> float:
    """Return the largest range over the median of those that are not zero."""
    nonzero = ranges[ranges > 0]
    return float(nonzero.max() / nonzero.median()) if nonzero.numel() > 1 else 1.0


def _by_channel(x: Tensor) -> Tensor:
    """Return the range of each channel: on axis 1 of images, on the last axis of tokens, (C,)."""
    if x.dim() < 2:
        return x.abs().reshape(-1)
    moved = x.abs().movedim(1 if x.dim() > 3 else -1, 0)
    return moved.flatten(1).amax(1)
