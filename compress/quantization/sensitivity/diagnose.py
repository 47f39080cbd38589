"""Where quantization loses accuracy: the first tensor that diverges, the noise that each layer adds, and why.

One pass runs the float and the quantized network side by side. At a quantizer the float tensor is compared with its
grid: the noise of this quantizer alone; at other nodes the two networks are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compress.graph.compare import Noise
from compress.graph.inputs import Batches, Inputs
from compress.graph.ops import PASSING, layer_name, node_kind, node_module, walk
from compress.quantization import QuantSpec
from compress.quantization.placement.insert import float_graph
from compress.quantization.quantizer import Quantizer
from compress.quantization.report import placement_of
from compress.quantization.sensitivity.sensitivity import (
    Effect,
    Probe,
    Sides,
    Subset,
    probed,
    subset_of,
    subsets_by_layer,
)
from compress.support.progress import NoProgress, Progress, tracked

LEAST_DB = 20.0
"""Signal to noise below which a tensor of the quantized network diverges from the float network's."""

TASK = "diagnose"
_IMAGES, _WATCHED = 16, 32
"""Images that the noise of single layers is measured on, and of the pass over all tensors."""
_WEIGHT_RATIO, _CHANNEL_RATIO, _TENSOR_RATIO = 8.0, 16.0, 8.0
"""Largest range over the median (of weights' and of activations' channels), or over the least of several tensors."""
_CLIPPED_NOISE, _ZEROED = 0.5, 0.5
"""Share of a quantizer's noise that values beyond its range make; share of nonzero values that become zero."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason why a quantizer loses much.

    Attributes:
        kind: `channel ranges` of a weight, `outlier channels` of an activation, `saturation`, `two ranges` under one
            scale, `softmax tails` or `dead values`.
        tensor: what is quantized: a layer's weight, or a tensor of the graph.
        value: the ratio or share that shows it; `text` is the finding as a sentence.
    """

    kind: str
    tensor: str
    value: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first tensor of a quantized network that diverges from float.

    `before_db` is the least of its inputs' ratios; far above `sqnr_db` if this operation is at fault.
    """

    tensor: str
    sqnr_db: float
    before_db: float


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """The error that the quantizers of one layer add.

    Attributes:
        layer: its module path, or the node's name if it has no module.
        alone: effect if nothing but this layer is quantized, on the first images and without the metric.
        share: its share of the sum of all layers' noise.
    """

    layer: str
    alone: Effect
    share: float
    causes: tuple[Cause, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Where a quantized network loses accuracy.

    Attributes:
        quantized: effect of all quantizers, on so many images.
        first: the first tensor that diverges; None if none does.
        rows: the layers, the noisiest first.
    """

    images: int
    float_score: float | None
    quantized: Effect
    first: Divergence | None
    rows: tuple[LayerError, ...]
    metric: str
    unit: str


def diagnose(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    images: Iterable[Any],
    *,
    spec: QuantSpec | None = None,
    metric: Any = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Quantize a network and find where it loses accuracy.

    Args:
        model: float network; not changed. Without a metric its result is one tensor of logits (N, classes).
        example_inputs: inputs that the model is traced with.
        batches: calibration data, as for `quantize`, which can be read repeatedly.
        images: batches that effects are measured on; without targets by signal to noise and agreement alone.
        spec: target, rules and methods.
        metric: a class with `update` and `compute`, or a function of (outputs, targets); None = top-1 of a classifier.
        progress: is informed of each layer.

    Raises:
        QuantizationError: no images, or nothing can be quantized.
        CalibrationError: as `quantize`.

    Examples:
        >>> diagnosis = compress.diagnose(model, images[:1], batches, batches)
        >>> sorted(row.layer for row in diagnosis.rows)
        ['0', '3', '5']
    """
    probe, spec = probed(model, example_inputs, batches, images, spec or QuantSpec(), metric, progress)
    return diagnosed(probe, example_inputs, spec, progress or NoProgress())


def diagnosed(probe: Probe, example_inputs: Inputs, spec: QuantSpec, progress: Progress) -> Diagnosis:
    noise = noise_by_layer(probe, example_inputs, spec, progress)
    watch = _watched(probe)
    causes = _causes(probe.qmodel, watch, noise)
    total = sum(effect.noise for effect in noise.values()) or 1.0
    rows = [
        LayerError(layer=name, alone=effect, share=effect.noise / total, causes=tuple(causes[name]))
        for name, effect in noise.items()
    ]
    return Diagnosis(
        images=probe.count,
        float_score=probe.float_score,
        quantized=probe.effect(),
        first=_first(probe.qmodel, {name: seen.decibel for name, seen in watch.noises.items()}),
        rows=tuple(sorted(rows, key=lambda row: -row.share)),
        metric=probe.judge.name,
        unit=probe.judge.unit,
    )


def noise_by_layer(
    probe: Probe, example_inputs: Inputs, spec: QuantSpec, progress: Progress, *, chosen: Collection[str] | None = None
) -> dict[str, Effect]:
    """The effect of each layer (of `chosen`; None = all) quantized alone, on few images, in graph order."""
    graph, _ = float_graph(probe.model, example_inputs, replace(spec, adaround=None, bias_correction=None))
    subsets = subsets_by_layer(graph, spec, chosen)
    return {name: probe.effect(subsets[name][0], images=_IMAGES) for name in tracked(progress, TASK, subsets)}


def _first(qmodel: fx.GraphModule, sqnr_db: dict[str, float]) -> Divergence | None:
    for node in qmodel.graph.nodes:
        value = sqnr_db.get(node.name)
        if value is not None and value < LEAST_DB:
            sources = (n.all_input_nodes[0] if node_kind(n) == "quantizer" else n for n in node.all_input_nodes)
            before = min((sqnr_db.get(source.name, math.inf) for source in sources), default=math.inf)
            return Divergence(tensor=node.name, sqnr_db=value, before_db=before)
    return None


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
        """Add a batch of the tensor in float: the noise is that of this quantizer alone."""
        q = quantizer(x)
        difference = (x - q).square()
        beyond = x.abs() > quantizer.amax
        self.count += float((x != 0).sum())
        self.zeroed += float(((x != 0) & (q == 0)).sum())
        self.beyond += float(beyond.sum())
        self.noise += float(difference.sum())
        self.clipped_noise += float(difference[beyond].sum())
        # on axis 1 of images, on the last axis of tokens
        by_channel = torch.atleast_1d(x.abs()).movedim(1 if x.dim() > 3 else -1, 0)
        self.channels = torch.maximum(self.channels, by_channel.reshape(len(by_channel), -1).amax(1))


class _Watch(Sides):
    """Runs the float network (the first side) and the quantized one, and looks at every tensor."""

    def __init__(self, qmodel: fx.GraphModule) -> None:
        super().__init__(qmodel, (Subset(), subset_of(placement_of(qmodel))))
        self.noises: defaultdict[str, Noise] = defaultdict(Noise)
        self.largest: defaultdict[str, float] = defaultdict(float)
        self.facts: defaultdict[tuple[str, str], _Facts] = defaultdict(_Facts)

    def run_node(self, n: fx.Node) -> tuple[Any, ...]:
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
def _watched(probe: Probe) -> _Watch:
    watch, left = _Watch(probe.qmodel), _WATCHED
    for inputs in probe.batches:
        if left > 0:
            watch.run(*(x[:left] for x in inputs))
            left -= len(inputs[0])
    return watch


def _causes(qmodel: fx.GraphModule, watch: _Watch, layers: Collection[str]) -> Mapping[str, list[Cause]]:
    """The causes by layer; those of an operation between layers (a concat) belong to the layer after it."""
    nodes = {node.name: node for node in qmodel.graph.nodes}
    found: defaultdict[str, list[Cause]] = defaultdict(list)
    placement = placement_of(qmodel)
    for weight in placement.weights:
        if weight.format.axis is None:
            found[weight.path] += _of_weight(weight.path, qmodel.get_submodule(weight.path))
    for site in placement.activations:
        ranges = {tensor: watch.largest.get(tensor, 0.0) for tensor, _ in site.edges}
        for tensor, consumer in site.edges:
            if (site.name, tensor) in watch.facts and consumer in nodes:
                layer = _layer_after(nodes[consumer], layers)
                found[layer] += _of_tensor(nodes[tensor], watch.facts[site.name, tensor])
                found[layer] += _of_ranges(nodes[tensor], ranges, watch.largest)
    return found


def _layer_after(node: fx.Node, layers: Collection[str]) -> str:
    """The nearest of the layers at or after a node; the node's own name if there is none."""
    after = map(layer_name, walk([node], lambda one: one.users))
    return next((name for name in after if name in layers), layer_name(node))


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
    """Causes of tensors that share one scale: those of one quantizer, and the inputs of a quantized concat."""
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
    """The largest range over the median of those that are not zero."""
    nonzero = ranges[ranges > 0]
    return float(nonzero.max() / nonzero.median()) if nonzero.numel() > 1 else 1.0
