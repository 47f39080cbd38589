"""Sensitivity to quantization: each layer quantized alone, and each layer alone left float.

A layer that is quantized alone shows the noise that it adds by itself; such noises are nearly independent, so that
their powers add up, on which mixed precision is based. A layer that is left float shows the noise that is avoided if
all others stay quantized. No graph is built for a layer: the calibrated graph runs with a subset of its quantizers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from compress.errors import QuantizationError
from compress.graph.inputs import Batches, Inputs, flat_tensors
from compress.graph.layers import Layer, layers
from compress.quantization.placement.insert import float_graph
from compress.quantization.placement.place import place
from compress.quantization.placement.read_fx import read_fx
from compress.quantization.placement.rules import LayerSettings, resolve_rules
from compress.quantization.placement.view import GraphView
from compress.quantization.ptq.guard import kept
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity.compare import Effect, Probe, Subset, subset_of
from compress.quantization.spec import QuantSpec, Rule
from compress.support.meters import task_metric
from compress.support.progress import NoProgress, Progress, tracked

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
        spec: layers that its rules leave float are no rows. AdaRound and bias correction are not applied, because they
            change the weights that a layer would have in float.
        metric: a `TaskMetric`, or what `compress.support.meters.task_metric` takes; None = top-1 of a classifier.
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
    spec = replace(spec or QuantSpec(), adaround=None, bias_correction=None)
    qmodel = quantize(model, example_inputs, batches, spec=spec, progress=progress)
    spec = kept(qmodel, spec)
    graph, _ = float_graph(model, example_inputs, spec)
    probe = Probe(model, qmodel, list(images), None if metric is None else task_metric(metric))
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
    """The settings of each operation of a graph after the rules, by its name."""
    return {node.layer: own for node, own in resolve_rules(read_fx(graph), spec).items()}


def _placed(view: GraphView, spec: QuantSpec, rules: tuple[Rule, ...]) -> Subset | None:
    """The quantizers under other rules; None if they leave nothing to quantize."""
    try:
        return subset_of(place(view, replace(spec, rules=rules)))
    except QuantizationError:
        return None
