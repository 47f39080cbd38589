"""Sensitivity to quantization: what each layer costs in accuracy, why, and what brings a network back.

A layer quantized alone shows the noise that it adds; such noises are nearly independent, so that their powers add up,
and so do times. A layer left float shows the noise that is avoided. No graph is built for a layer: the graph with all
quantizers is calibrated once, and runs with a subset of them.

A format for each layer, with the least noise for a cost, or the least cost for a noise, is an integer program:

    minimize  sum noise[l, f] x[l, f]   subject to   sum cost[l, f] x[l, f] <= budget,   sum_f x[l, f] = 1 for every l

(a multiple-choice knapsack; HAWQ-V3, arXiv 2011.10680, section 3.4, with a second-order bound in place of the noise).

`diagnose` runs the float and the quantized network side by side. At a quantizer the float tensor is compared with its
grid: the noise of this quantizer alone; at other nodes the two networks are compared.

`mend` looks for the smallest set of changes that brings a network back to a metric, or to a signal to noise:

1. Changes of the whole network whose cause was found are tried: a head left float, equalization, another calibrator,
   SmoothQuant. The best is kept if it helps, and so on.
2. Formats are chosen for the noisiest layers by the integer program: the cheapest under a limit on the noise, which is
   lowered until the network, quantized anew, meets the goal.
3. Changes that are not needed for the goal are taken out again, the dearest first.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.compare import Noise, module_results, run_model
from compress.graph.inputs import TARGET_KEYS, Batches, Inputs, flat_tensors, model_inputs
from compress.graph.layers import Layer, layers
from compress.graph.ops import PASSING, WEIGHTED, layer_name, node_kind, node_module, producer_past, tensor_of, walk
from compress.quantization import QuantSpec, Rule
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.insert import float_graph, read_fx
from compress.quantization.placement.place import LayerSettings, place, resolve_rules
from compress.quantization.placement.view import GraphView
from compress.quantization.ptq.quantize import kept, quantize
from compress.quantization.quantizer import Quantizer, weight_quantizer_of
from compress.quantization.report import placement_of, quantization_report_of
from compress.support.meters import MeanOf, TaskMetric, task_metric
from compress.support.progress import NoProgress, Progress, tracked


def sqnr(signal: Tensor, value: Tensor) -> float:
    """The signal to quantization noise of `value` in dB: 10 log10(sum signal^2 / sum (signal - value)^2).

    Infinite when they are equal, -inf when the signal is zero and the value is not.
    """
    noise = Noise()
    noise.add(signal, value)
    return noise.decibel


@torch.no_grad()
def weight_sqnr(qmodel: nn.Module) -> dict[str, float]:
    found: dict[str, Any] = {site.path: qmodel.get_submodule(site.path) for site in placement_of(qmodel).weights}
    return {path: sqnr(layer.weight, layer.quantized_weight) for path, layer in found.items()}


def output_sqnr(float_model: fx.GraphModule, qmodel: fx.GraphModule, images: Iterable[Tensor]) -> dict[str, float]:
    """The SQNR in dB, by layer path, of every weighted layer's output in the quantized network against the float one's.

    Both come from the same trace, so that their nodes have the same names. The noise includes that of all layers
    before.
    """
    paths = [str(n.target) for n in qmodel.graph.nodes if node_kind(n) in WEIGHTED and n.op == "call_module"]
    found = {path: Noise() for path in paths}
    for batch in images:
        reference, value = (module_results(model, (batch,), paths) for model in (float_model, qmodel))
        for path in reference.keys() & value.keys():
            found[path].add(reference[path], value[path])
    return {path: noise.decibel for path, noise in found.items()}


@dataclass(frozen=True, kw_only=True)
class Subset:
    """The quantizers that are on: of weights by layer, of (tensor, consumer) edges by names of nodes."""

    weights: frozenset[str] = frozenset()
    edges: frozenset[tuple[str, str]] = frozenset()


def subset_of(placement: Placement) -> Subset:
    return Subset(
        weights=frozenset(site.path for site in placement.weights),
        edges=frozenset(edge for site in placement.activations for edge in site.edges),
    )


def run_subset(qmodel: fx.GraphModule, subset: Subset, *inputs: Tensor) -> object:
    with torch.no_grad():
        return Sides(qmodel, [subset]).run(*inputs)[0]


class Sides(fx.Interpreter):
    """Runs a quantized graph with several subsets of its quantizers side by side.

    A node's value is a tuple, one for each subset; that of a quantizer is (plain, quantized). A layer whose weight is
    float has the bias that it had before correction.
    """

    def __init__(self, module: fx.GraphModule, subsets: Sequence[Subset]) -> None:
        super().__init__(module)
        self.subsets, self.side = subsets, 0
        self.weights = {site.path for site in placement_of(module).weights}
        rows = quantization_report_of(module).corrections
        self.added = {row.layer: row.added for row in rows if row.added is not None}
        self.sources = {n: n.all_input_nodes[0] for n in module.graph.nodes if node_kind(n) == "quantizer"}

    def run_node(self, n: fx.Node) -> tuple[Any, ...]:
        if n.op == "placeholder":
            return (super().run_node(n),) * len(self.subsets)
        return tuple(self._on_side(n, side) for side in range(len(self.subsets)))

    def _on_side(self, n: fx.Node, side: int) -> object:
        self.side = side
        subset = self.subsets[side]
        if source := self.sources.get(n):
            plain = self.env[source][side]
            wanted = any((source.name, user.name) in subset.edges for user in n.users)
            return plain, self.fetch_attr(str(n.target))(plain) if wanted else plain
        if n.target not in self.weights:
            return super().run_node(n)
        layer: Any = self.fetch_attr(str(n.target))
        quantizer, added = weight_quantizer_of(layer), self.added.get(str(n.target))
        enabled, quantizer.enabled = quantizer.enabled, n.target in subset.weights
        bias = tensor_of(layer, "bias") if added is not None and not quantizer.enabled else None
        before = None if bias is None else bias.clone()
        try:
            if bias is not None and added is not None:
                bias.sub_(added.to(bias.device))
            return super().run_node(n)
        finally:
            quantizer.enabled = enabled
            if bias is not None and before is not None:
                bias.copy_(before)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> fx.node.Argument:
        """The arguments of a node on this side."""

        def value(argument: fx.Node) -> Any:
            found = self.env[argument][self.side]
            if source := self.sources.get(argument):
                return found[(source.name, n.name) in self.subsets[self.side].edges]
            return found

        return fx.node.map_arg(args, value)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Effect of quantizers on a network's logits.

    Attributes:
        sqnr_db: signal to noise of the logits against the float network's, dB; inf where nothing changed.
        agreement: share of images (of pixels, for segmentation) whose highest logit is the float network's, 0 to 1;
            None for outputs that decide for no class.
        score: the metric, by default top-1; shares are 0 to 1. None for images without targets.
    """

    sqnr_db: float
    agreement: float | None
    score: float | None

    @property
    def noise(self) -> float:
        """Power of the noise over that of the signal: 10^(-sqnr_db / 10)."""
        return float(10 ** (-self.sqnr_db / 10))


def _logits(output: Any) -> Tensor:
    tensors = flat_tensors(output)
    if not tensors or tensors[0].dim() != 2:
        shape = tuple(tensors[0].shape) if tensors else "no tensor"
        raise QuantizationError(
            f"sensitivity compares logits (N, classes); the network returned {shape}; give the metric of its task"
        )
    return tensors[0]


def _correct(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(1) == targets.to(logits.device)).double().mean()


_TOP1 = TaskMetric(name="top1", make=partial(MeanOf, _correct), select=_logits, classes=lambda logits: logits.argmax(1))
_OUTPUTS = TaskMetric(name="outputs", make=_TOP1.make, select=flat_tensors)


class Judged:
    """The float network's outputs on batches, by which others are judged.

    `judge` is the metric; `float_score` the float network's, None without targets.
    """

    def __init__(self, outputs: Iterable[Any], targets: Sequence[Any], judge: TaskMetric) -> None:
        self.judge, self.targets = judge, targets
        self.reference = [judge.select(output) for output in outputs]
        self.float_score: float | None = None
        if len(targets) == len(self.reference) and judge is not _OUTPUTS:
            meter = judge.make()
            for selected, own in zip(self.reference, targets, strict=True):
                meter.update(selected, own)
            self.float_score = judge.figures(meter)[judge.name]

    def effect_of(self, results: Iterable[Any], *, scored: bool = True) -> Effect:
        """The effect on outputs of the batches, or of the first of them."""
        noise = Noise()
        meter = self.judge.make() if scored and self.float_score is not None else None
        same = places = 0
        for i, result in enumerate(results):
            outputs, reference = self.judge.select(result), self.reference[i]
            noise.add(reference, outputs)
            if self.judge.classes is not None:
                equal = self.judge.classes(outputs) == self.judge.classes(reference)
                same, places = same + int(equal.sum()), places + equal.numel()
            if meter is not None:
                meter.update(outputs, self.targets[i])
        return Effect(
            sqnr_db=noise.decibel,
            agreement=same / places if places else None,
            score=self.judge.figures(meter)[self.judge.name] if meter is not None else None,
        )


class Probe(Judged):
    """Holds batches and the float network's outputs, and measures the effect of a subset of quantizers."""

    def __init__(
        self, model: nn.Module, qmodel: fx.GraphModule, images: Sequence[Any], metric: TaskMetric | None = None
    ) -> None:
        if not images:
            raise QuantizationError("sensitivity got no images to measure on; give at least one batch")
        self.model, self.qmodel = model, qmodel
        self.batches = [model_inputs(qmodel, batch) for batch in images]
        targets = [x for batch, own in zip(images, self.batches, strict=True) for x in targets_of(batch, len(own))]
        outputs = (run_model(model, model_inputs(model, batch, qmodel)) for batch in images)
        super().__init__(outputs, targets, metric or _TOP1)

    @property
    def count(self) -> int:
        return sum(len(inputs[0]) for inputs in self.batches)

    def effect(self, subset: Subset | None = None, *, images: int | None = None) -> Effect:
        """The effect of a subset of the quantizers (None = all) on the outputs and on the metric.

        With `images`, whole batches are read until there are so many, and the metric is left out.
        """
        subset = subset or subset_of(placement_of(self.qmodel))
        before = itertools.accumulate((len(inputs[0]) for inputs in self.batches), initial=0)
        chosen = [own for own, seen in zip(self.batches, before, strict=False) if images is None or seen < images]
        return self.effect_of((run_subset(self.qmodel, subset, *own) for own in chosen), scored=images is None)


def probed(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    images: Iterable[Any],
    spec: QuantSpec,
    metric: Any,
    progress: Progress | None = None,
) -> tuple[Probe, QuantSpec]:
    """A quantized network to be measured, and the specification without the methods that were taken back."""
    qmodel, images = quantize(model, example_inputs, batches, spec=spec, progress=progress), list(images)
    judge = metric_for(run_model(model, model_inputs(model, images[0])), metric) if images else None
    return Probe(model, qmodel, images, judge), kept(qmodel, spec)


def metric_for(output: Any, metric: Any) -> TaskMetric:
    """The user's metric, or top-1, or signal to noise alone for outputs that are no logits."""
    found = flat_tensors(output)
    return task_metric(metric) if metric is not None else _TOP1 if len(found) == 1 and found[0].dim() == 2 else _OUTPUTS


def targets_of(batch: Any, inputs: int) -> list[Any]:
    """The targets of a batch whose model takes so many inputs; [] = it has none."""
    if isinstance(batch, Mapping):
        return [batch[key] for key in TARGET_KEYS if key in batch][:1]
    if isinstance(batch, (tuple, list)):
        position = 1 if isinstance(batch[0], (tuple, list)) else inputs
        return list(batch[position : position + 1])
    return []


# The format of a layer that is not quantized.
FLOAT = "float"

# A number for each layer and format: table[layer][format].
Table = Mapping[str, Mapping[str, float]]

# Times that a limit on the noise is lowered.
_LOWERED = 10

# A number for each option of each layer.
_Rows = Sequence[NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A format for every layer.

    `noise` is the sum over layers of the power of the noise over that of the signal, `cost` in the unit of its table.
    """

    formats: Mapping[str, str]
    noise: float
    cost: float


def choose_formats(
    noise: Table, cost: Table, *, budget: float | None = None, noise_limit: float | None = None
) -> Choice:
    """The formats with the least noise within a budget, or with the least cost within a noise limit (one is given).

    `noise` is the power of the noise over that of the signal, of each layer alone in each format, `cost` is in any
    unit; formats that one of the tables lacks are not chosen.
    """
    if (budget is None) == (noise_limit is None):
        raise QuantizationError("choose_formats takes one of budget and noise_limit")
    options = {layer: [name for name in row if name in cost.get(layer, {})] for layer, row in noise.items()}
    missing = [layer for layer, names in options.items() if not names]
    if missing or not options:
        raise QuantizationError(f"no format has both a noise and a cost for {', '.join(missing) or 'any layer'}")
    noises, costs = (
        [np.array([table[layer][name] for name in names], dtype=float) for layer, names in options.items()]
        for table in (noise, cost)
    )
    if budget is not None:
        chosen = _least(noises, costs, budget, "cost")
    else:
        chosen = _least(costs, noises, float(noise_limit or 0.0), "noise")
    formats = {layer: names[place] for (layer, names), place in zip(options.items(), chosen, strict=True)}
    return Choice(
        formats=formats,
        noise=sum(noise[layer][name] for layer, name in formats.items()),
        cost=sum(cost[layer][name] for layer, name in formats.items()),
    )


def lowered(noise: Table, cost: Table, limit: float) -> Iterator[Choice]:
    """The cheapest choices under a limit that is halved each time."""
    for halvings in range(_LOWERED):
        yield choose_formats(noise, cost, noise_limit=limit / 2**halvings)


def front(noise: Table, cost: Table, *, points: int = 12) -> tuple[Choice, ...]:
    """Choices from the cheapest to the one with the least noise, none of them beaten in both by another.

    Budgets lie closer together near the least cost, where each layer left float gains most.
    """
    lowest = sum(min(row[f] for f in row if f in cost[layer]) for layer, row in noise.items())
    quiet = choose_formats(noise, cost, noise_limit=lowest)
    cheap = min(sum(min(cost[layer][f] for f in noise[layer] if f in cost[layer]) for layer in noise), quiet.cost)
    found: list[Choice] = []
    for budget in cheap + (quiet.cost - cheap) * np.linspace(0, 1, max(points, 2)) ** 2:
        choice = choose_formats(noise, cost, budget=float(budget) + 1e-9 * abs(quiet.cost))
        if not found or choice.noise < found[-1].noise:
            found.append(choice)
    return tuple(found)


def _least(goals: _Rows, limited: _Rows, limit: float, what: str) -> list[int]:
    """The option of each row with the least sum of goals whose sum of limited numbers is within the limit.

    Choices are extended row by row (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11), and dropped
    if the limit is out of reach, another one has no more of both sums, or the bound is above a known choice.
    """
    room = limit + 1e-9 * (abs(limit) or max(np.abs(row).max() for row in limited))
    least = [row.min() for row in limited]
    if sum(least) > room:
        raise QuantizationError(
            f"the limit on the {what} is {limit:.6g}, and the least that formats allow is {sum(least):.6g}"
        )
    price, known = _price(goals, limited, room)
    known += 1e-9 * (abs(known) + price * abs(room))  # what rounding may add to a bound
    priced = [(goal + price * size).min() for goal, size in zip(goals, limited, strict=True)]
    sums, sizes, chosen = np.zeros(1), np.zeros(1), []
    for row, (goal, size) in enumerate(zip(goals, limited, strict=True)):
        sums, sizes = np.add.outer(sums, goal).ravel(), np.add.outer(sizes, size).ravel()
        bound = sums + price * (sizes - room) + sum(priced[row + 1 :])
        order = np.lexsort((sums, sizes))
        order = order[(sizes[order] + sum(least[row + 1 :]) <= room) & (bound[order] <= known)]
        best = np.minimum.accumulate(sums[order])
        order = order[np.diff(best, prepend=np.inf) < 0]
        sums, sizes = sums[order], sizes[order]
        chosen.append(order)
    found, place = [], int(sums.argmin())
    for goal, order in zip(reversed(goals), reversed(chosen), strict=True):
        place, option = divmod(int(order[place]), len(goal))
        found.append(option)
    return found[::-1]


def _price(goals: _Rows, limited: _Rows, room: float) -> tuple[float, float]:
    """By bisection, the least price of the limited numbers at which a choice fits, and the sum of its goals."""
    unit = max(np.abs(row).max() for row in goals) / (max(np.abs(row).max() for row in limited) or 1.0) or 1.0
    price, low, high, known = 0.0, 1e-12 * unit, 1e12 * unit, np.inf
    for _ in range(60):
        chosen = [int(np.argmin(goal + price * size)) for goal, size in zip(goals, limited, strict=True)]
        if sum(size[i] for size, i in zip(limited, chosen, strict=True)) <= room:
            high, known = price, float(sum(goal[i] for goal, i in zip(goals, chosen, strict=True)))
        else:
            low = max(low, price)
        price = min(high, float(np.sqrt(low * high)))
    return high, known


def mixed_spec(
    spec: QuantSpec, choice: Mapping[str, str], settings: Mapping[str, Mapping[str, LayerSettings]], *, base: str
) -> QuantSpec:
    """`spec`, of format `base`, with a rule for every layer whose format is not `base`.

    `settings`: those of each format but `float`, by layer (`layer_settings`).
    """
    rules = (format_rule(layer, name, settings) for layer, name in choice.items() if name != base)
    return replace(spec, rules=(*spec.rules, *rules))


def format_rule(layer: str, name: str, settings: Mapping[str, Mapping[str, LayerSettings]]) -> Rule:
    if name == FLOAT:
        return Rule(match=layer, enable=False)
    own = settings[name][layer]
    return Rule(match=layer, weights=own.weights, activations=own.activations)


Owner = TypeVar("Owner", QuantSpec, Rule)


def everywhere(spec: QuantSpec, part: Literal["weights", "activations"], **changes: Any) -> QuantSpec:
    def changed(owner: Owner) -> Owner:
        own = getattr(owner, part)
        return replace(owner, **{part: replace(own, **changes)}) if own else owner

    return replace(changed(spec), rules=tuple(map(changed, spec.rules)))


_MEASURING = "sensitivity"


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """Sensitivity of one layer.

    Attributes:
        layer: its module path, or the node's name if it has no module.
        macs: multiply-accumulates for one image; None = unknown.
        alone: effect if this layer is quantized, with its inputs, and nothing else is.
        left_out: effect if this layer is float, and everything else is quantized.
    """

    layer: str
    kind: str
    weight_elements: int
    macs: int | None
    alone: Effect
    left_out: Effect


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Sensitivity of all layers of a network under one specification.

    Attributes:
        images: number of images that the effects were measured on.
        float_score: the metric of the float network; None for images without targets.
        quantized: effect if everything is quantized.
        rows: the layers in graph order. An operation that is only quantized along with another (a residual add) is
            not a row, because it follows its layer.
        metric: name of the metric.
        unit: of the metric; `%` for a share.

    Examples:
        >>> found = compress.sensitivity(model, images[:1], batches, batches)
        >>> [row.layer for row in found.rows]
        ['0', '3', '5']
    """

    images: int
    float_score: float | None
    quantized: Effect
    rows: tuple[LayerSensitivity, ...]
    metric: str = "top1"
    unit: str = "%"


def sensitivity(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    images: Iterable[Any],
    *,
    spec: QuantSpec | None = None,
    metric: Any = None,
    known: Mapping[str, LayerSensitivity] | None = None,
    keep: Callable[[LayerSensitivity], None] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the effect of every layer's quantizers.

    Args:
        model: float network; not changed. Without a metric its result is one tensor of logits (N, classes).
        example_inputs: for the trace.
        batches: calibration data, as for `quantize`.
        images: batches that effects are measured on; with targets for the metric too. They and the float network's
            outputs stay in memory; two forward passes are made for each layer.
        spec: layers that its rules leave float are no rows. AdaRound and a bias correction that walks are not applied,
            because they change what other layers would have in float.
        metric: a class with `update` and `compute`, or a function of (outputs, targets); None = top-1 of a classifier.
        known: rows of an earlier call that was stopped; they are not measured a second time.
        keep: called with each row as soon as it is measured.
        progress: is informed of each layer.

    Raises:
        QuantizationError: no images, or nothing can be quantized.
        CalibrationError: as `quantize`.

    Examples:
        >>> [row.layer for row in compress.sensitivity(model, images[:1], batches, batches).rows]
        ['0', '3', '5']
    """
    spec = replace(spec or QuantSpec(), adaround=None)
    spec = replace(spec, bias_correction="auto" if spec.bias_correction == "auto" else None)
    probe, spec = probed(model, example_inputs, batches, images, spec, metric, progress)
    graph, _ = float_graph(model, example_inputs, spec)
    subsets = subsets_by_layer(graph, spec)
    facts = {layer.path or layer.name: layer for layer in layers(graph)}
    rows = {name: row for name, row in (known or {}).items() if name in subsets}
    left = [name for name in subsets if name not in rows]
    for name in tracked(progress or NoProgress(), _MEASURING, left, done=len(rows)):
        effects = map(probe.effect, subsets[name])
        rows[name] = _row(name, facts[name], len(flat_tensors(example_inputs)[0]), *effects)
        if keep is not None:
            keep(rows[name])
    return Sensitivity(
        images=probe.count,
        float_score=probe.float_score,
        quantized=probe.effect(subset_of(place(read_fx(graph), spec))),
        rows=tuple(rows[name] for name in subsets),
        metric=probe.judge.name,
        unit=probe.judge.unit,
    )


def _row(name: str, layer: Layer, images: int, alone: Effect, left_out: Effect) -> LayerSensitivity:
    return LayerSensitivity(
        layer=name,
        kind=layer.kind,
        weight_elements=layer.weight_elements,
        macs=None if layer.macs is None else layer.macs // images,
        alone=alone,
        left_out=left_out,
    )


def subsets_by_layer(
    graph: fx.GraphModule, spec: QuantSpec, chosen: Collection[str] | None = None
) -> dict[str, tuple[Subset, Subset]]:
    """Two subsets for every layer (of `chosen`) that can be quantized by itself: its quantizers, and all but those."""
    settings = layer_settings(graph, spec)
    view = read_fx(graph)
    decisions = place(view, spec).decisions
    quantized = {name for row in decisions if row.decision == "quantize" for name in row.layer.split()}
    found = {}
    for name in dict.fromkeys(node.layer for node in view.nodes):
        if name in quantized and (chosen is None or name in chosen):
            own = Rule(match=name, weights=settings[name].weights, activations=settings[name].activations)
            alone = _placed(view, spec, (Rule(match="*", enable=False), own))
            left_out = _placed(view, spec, (*spec.rules, Rule(match=name, enable=False)))
            if alone is not None:
                found[name] = (alone, left_out or Subset())
    return found


def layer_settings(graph: fx.GraphModule, spec: QuantSpec) -> dict[str, LayerSettings]:
    return {node.layer: own for node, own in resolve_rules(read_fx(graph), spec).items()}


def _placed(view: GraphView, spec: QuantSpec, rules: tuple[Rule, ...]) -> Subset | None:
    """The quantizers under other rules; None if they leave nothing to quantize."""
    try:
        return subset_of(place(view, replace(spec, rules=rules)))
    except QuantizationError:
        return None


# Signal to noise below which a tensor of the quantized network diverges from the float network's.
LEAST_DB = 20.0

_DIAGNOSING = "diagnose"
# Images that the noise of single layers is measured on, and of the pass over all tensors.
_IMAGES, _WATCHED = 16, 32
# Largest range over the median (of weights' and of activations' channels), or over the least of several tensors.
_WEIGHT_RATIO, _CHANNEL_RATIO, _TENSOR_RATIO = 8.0, 16.0, 8.0
# Share of a quantizer's noise that values beyond its range make; share of nonzero values that become zero.
_CLIPPED_NOISE, _ZEROED = 0.5, 0.5


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
    return {name: probe.effect(subsets[name][0], images=_IMAGES) for name in tracked(progress, _DIAGNOSING, subsets)}


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
        tails = node_kind(producer_past(source, PASSING)) == "softmax"
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


_MENDING = "mend"
# Layers for which other formats than float are tried.
_NOISIEST = 16
# Least gain for which a change of the whole network is kept.
_GAIN_DB = 1.0
# Noise over signal that counts at most.
_MOST_NOISE = 1e6
# The format that a layer has already.
_BASE = "base"
# Kind of activations whose ranges no histogram of integers chooses.
_FP8 = "e4m3"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a specification.

    Attributes:
        layer: of one layer; "" = of the whole network.
        cause: why it was tried.
        without: effect of the mended network if this change is taken out; None if not measured.
    """

    text: str
    layer: str = ""
    cause: str = ""
    without: Effect | None = None


@dataclass(frozen=True, kw_only=True)
class Mended:
    """Result of `mend`.

    Attributes:
        diagnosis: of the network as it was specified; `effect`: of the mended one.
        changes: none of them can be taken out without missing the goal.
        specs: the specification without each change, in their order.
    """

    diagnosis: Diagnosis
    spec: QuantSpec
    changes: tuple[Change, ...]
    specs: tuple[QuantSpec, ...]
    effect: Effect
    met: bool
    goal: str


@dataclass(frozen=True, kw_only=True)
class Goal:
    """When a network is mended; exactly one is given.

    Attributes:
        drop: largest loss in points of the metric, or of the agreement where there are no targets.
        sqnr_db: least signal to noise of the outputs.
    """

    drop: float | None = None
    sqnr_db: float | None = None

    def met(self, effect: Effect, probe: Judged) -> bool:
        if self.sqnr_db is not None:
            return effect.sqnr_db >= self.sqnr_db
        if probe.float_score is not None and effect.score is not None:
            lost = probe.judge.drop(probe.float_score, effect.score)
        elif effect.agreement is not None:
            lost = 100 * (1 - effect.agreement)
        else:
            raise QuantizationError("without targets and classes there is no loss in points; give a least SQNR instead")
        return lost <= float(self.drop or 0.0) + 1e-9

    def text(self, probe: Judged) -> str:
        if self.sqnr_db is not None:
            return f"at least {self.sqnr_db:g} dB at the outputs"
        if probe.float_score is None:
            return f"agreement with float within {self.drop:.3g} points of float"
        return f"{probe.judge.title} within {self.drop:.3g} {probe.judge.amount} of float"


@dataclass(frozen=True, kw_only=True)
class _Step:
    change: Change
    cost: float = 1.0
    values: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()


def mend(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    images: Iterable[Any],
    *,
    spec: QuantSpec | None = None,
    drop: float | None = None,
    sqnr_db: float | None = None,
    metric: Any = None,
    fixed: Collection[str] = (),
    progress: Progress | None = None,
) -> Mended:
    """Find the smallest set of changes with which a quantized network meets a goal.

    Args:
        model: float network; not changed.
        example_inputs: for the trace.
        batches: as for `quantize`; they can be read repeatedly.
        images: batches that the goal is measured on; without targets, `drop` is of the agreement with float.
        spec: target, rules and methods to begin with.
        drop: largest loss of the metric against float, in its unit (percent points).
        sqnr_db: least signal to noise of the outputs; exactly one of the two is given.
        metric: as for `sensitivity`.
        fixed: keys of the specification that stay as they are: `head`, `equalize`, `activations`, `smooth`.
        progress: is informed of each network that is tried.

    Raises:
        QuantizationError: no goal or two, no images, or nothing can be quantized.
        CalibrationError: as `quantize`.

    Examples:
        >>> mended = compress.mend(model, images[:1], batches, batches, sqnr_db=5.0)
        >>> mended.met, mended.changes  # good enough as it is
        (True, ())
    """
    goal = Goal(drop=drop, sqnr_db=sqnr_db)
    if (drop is None) == (sqnr_db is None):
        raise QuantizationError("mend takes one goal: drop (points of the metric), or sqnr_db")
    bars, batches = progress or NoProgress(), list(batches)
    bars.start(_MENDING, 0)
    probe, spec = probed(model, example_inputs, batches, images, spec or QuantSpec(), metric)
    bars.advance(_MENDING, 1)
    found = diagnosed(probe, example_inputs, spec, bars)
    mended = _Work(spec, example_inputs, batches, probe, found, goal, bars).mended(fixed)
    bars.finish(_MENDING)
    return mended


@dataclass
class _Work:
    """Tries specifications; each is measured once."""

    spec: QuantSpec
    example: Inputs
    batches: list[Any]
    probe: Probe
    found: Diagnosis
    goal: Goal
    bars: Progress

    def __post_init__(self) -> None:
        self.tried = {repr(self.spec): self.found.quantized}

    def quantized(self, spec: QuantSpec) -> Probe:
        probe = copy(self.probe)
        probe.qmodel = quantize(self.probe.model, self.example, self.batches, spec=spec)
        self.bars.advance(_MENDING, 1)
        return probe

    def effect(self, spec: QuantSpec) -> Effect:
        if repr(spec) not in self.tried:
            self.tried[repr(spec)] = self.quantized(spec).effect()
        return self.tried[repr(spec)]

    def met(self, steps: list[_Step]) -> bool:
        return self.goal.met(self.effect(_applied(self.spec, steps)), self.probe)

    def mended(self, fixed: Collection[str]) -> Mended:
        steps: list[_Step] = []
        if not self.met(steps):
            steps = self._whole(
                [step for step in _whole_changes(self.spec, self.found) if not step.values.keys() & set(fixed)]
            )
            if not self.met(steps):
                steps += self._layers(steps)
            steps = self._needed(steps)
        spec = _applied(self.spec, steps)
        specs = tuple(_applied(self.spec, [other for other in steps if other is not step]) for step in steps)
        changes = [replace(step.change, without=self.effect(own)) for step, own in zip(steps, specs, strict=True)]
        return Mended(
            diagnosis=self.found,
            spec=spec,
            changes=tuple(changes),
            specs=specs,
            effect=self.effect(spec),
            met=self.met(steps),
            goal=self.goal.text(self.probe),
        )

    def _whole(self, left: list[_Step]) -> list[_Step]:
        """The best change of the whole network, then the best one on top of it, and so on."""
        chosen: list[_Step] = []
        while left and not self.met(chosen):
            before = self.effect(_applied(self.spec, chosen))
            rated = []
            for step in left:
                try:
                    effect = self.effect(_applied(self.spec, [*chosen, step]))
                except QuantizationError:  # no layers that it could change
                    continue
                rated.append((self.goal.met(effect, self.probe), effect.sqnr_db - before.sqnr_db, step))
            met, gain, best = max(rated, key=lambda row: row[:2], default=(False, 0.0, left[0]))
            if not met and gain < _GAIN_DB:
                break
            chosen.append(best)
            left.remove(best)
        return chosen

    def _layers(self, chosen: list[_Step]) -> list[_Step]:
        """The cheapest formats under a limit on the noise, lowered until the goal is met."""
        spec = _applied(self.spec, chosen)
        graph, _ = float_graph(self.probe.model, self.example, replace(spec, adaround=None, bias_correction=None))
        formats = _formats(spec)
        settings = {name: layer_settings(graph, own) for name, own in formats.items()}
        noise = {layer: {FLOAT: 0.0, _BASE: value} for layer, value in self._noise(spec).items()}
        noisiest = sorted(noise, key=lambda layer: -noise[layer][_BASE])[:_NOISIEST]
        for name, own in formats.items():
            for layer, value in self._noise(own, noisiest).items():
                noise[layer][name] = value
        work = {layer.path or layer.name: float(layer.macs or 0) for layer in layers(graph)}
        total = sum(work.values()) or 1.0
        costs = {
            layer: dict.fromkeys(row, 1.0) | {_BASE: 0.0, FLOAT: 3.0 + 20 * work.get(layer, 0.0) / total}
            for layer, row in noise.items()
        }
        limit = sum(row[_BASE] for row in noise.values())
        if self.goal.sqnr_db is not None:
            limit = min(limit, 2 * 10 ** (-self.goal.sqnr_db / 10))
        causes = {row.layer: row.causes[0].text for row in self.found.rows if row.causes}
        steps: list[_Step] = []
        for choice in lowered(noise, costs, limit / 2):
            steps = [
                _Step(
                    change=Change(text=f"{layer}: {name}", layer=layer, cause=causes.get(layer, "")),
                    cost=costs[layer][name],
                    rules=(format_rule(layer, name, settings),),
                )
                for layer, name in choice.formats.items()
                if name != _BASE
            ]
            if self.met([*chosen, *steps]):
                break
        return steps

    def _noise(self, spec: QuantSpec, chosen: Collection[str] | None = None) -> dict[str, float]:
        if spec == self.spec:
            effects = {row.layer: row.alone for row in self.found.rows}
        else:
            effects = noise_by_layer(self.quantized(spec), self.example, spec, self.bars, chosen=chosen)
        return {layer: min(effect.noise, _MOST_NOISE) for layer, effect in effects.items()}

    def _needed(self, steps: list[_Step]) -> list[_Step]:
        if self.met(steps):
            for step in sorted(steps, key=lambda step: -step.cost):
                rest = [other for other in steps if other is not step]
                steps = rest if self.met(rest) else steps
        return steps


def _applied(spec: QuantSpec, steps: Iterable[_Step]) -> QuantSpec:
    for step in steps:
        spec = replace(spec, **step.values, rules=(*spec.rules, *step.rules))
    return spec


def _whole_changes(spec: QuantSpec, found: Diagnosis) -> list[_Step]:
    kinds: dict[str, str] = {}
    for row in found.rows:
        for cause in row.causes:
            kinds.setdefault(cause.kind, f"{row.layer}: {cause.text}")
    steps = []

    def add(cause: str, text: str, key: str, value: Any) -> None:
        steps.append(_Step(change=Change(text=text, cause=cause), values={key: value}))

    own = spec.activations
    if spec.head == "quantize":
        add("the head is quantized (head: quantize)", "head: auto, which leaves a detection head float", "head", "auto")
    if "channel ranges" in kinds and not spec.equalize and spec.batchnorm == "fold":
        add(kinds["channel ranges"], "equalize: true, channels of neighbouring layers trade scale", "equalize", True)
    if "saturation" in kinds and own.calibrator in {"entropy", "percentile"} and own.kind != _FP8:
        text = "calibrator: mse, which weighs what is clipped against finer steps"
        add(kinds["saturation"], text, "activations", replace(own, calibrator="mse"))
    if "outlier channels" in kinds and spec.smooth is None:
        add(kinds["outlier channels"], "smooth: auto, outliers of channels move into the weights", "smooth", "auto")
    return steps


def _formats(spec: QuantSpec) -> dict[str, QuantSpec]:
    own = spec.activations.resolved(whole=False)
    names = {"max", "mse", "percentile"} - {own.calibrator, "mse" if own.kind == _FP8 else own.calibrator}
    found = {f"calibrator {name}": everywhere(spec, "activations", calibrator=name) for name in sorted(names)}
    if spec.weights.axis is None:
        found["a scale for each channel"] = everywhere(spec, "weights", axis=0)
    return found
