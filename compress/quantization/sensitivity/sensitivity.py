"""Sensitivity to quantization of each layer, and mixed precision by it.

A layer quantized alone shows the noise that it adds; such noises are nearly independent, so that their powers add up,
and so do times. A layer left float shows the noise that is avoided. No graph is built for a layer: the calibrated graph
runs with a subset of its quantizers.

A format for each layer, with the least noise for a cost, or the least cost for a noise, is an integer program:

    minimize  sum noise[l, f] x[l, f]   subject to   sum cost[l, f] x[l, f] <= budget,   sum_f x[l, f] = 1 for every l

(a multiple-choice knapsack; HAWQ-V3, arXiv 2011.10680, section 3.4, with a second-order bound in place of the noise).

Outputs are compared with some of the quantizers on and the others off: the graph with all of them is built and
calibrated once, and each case is a subset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.compare import Noise, module_results, run_model
from compress.graph.inputs import TARGET_KEYS, Batches, Inputs, flat_tensors, model_inputs
from compress.graph.layers import Layer, layers
from compress.graph.ops import WEIGHTED, node_kind, tensor_of
from compress.quantization import QuantSpec, Rule
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.insert import float_graph, read_fx
from compress.quantization.placement.place import LayerSettings, place, resolve_rules
from compress.quantization.placement.view import GraphView
from compress.quantization.ptq.improve import kept
from compress.quantization.ptq.quantize import quantize
from compress.quantization.quantizer import weight_quantizer_of
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


FLOAT = "float"
"""The format of a layer that is not quantized."""

Table = Mapping[str, Mapping[str, float]]
"""A number for each layer and format: table[layer][format]."""

_LOWERED = 10
"""Times that a limit on the noise is lowered."""

_Rows = Sequence[NDArray[np.float64]]
"""A number for each option of each layer."""


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


TASK = "sensitivity"


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
    for name in tracked(progress or NoProgress(), TASK, left, done=len(rows)):
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
