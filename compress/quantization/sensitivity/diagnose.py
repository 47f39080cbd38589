"""Where quantization loses accuracy: the first tensor that diverges, the noise that each layer adds, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from compress.graph.batches import Batches
from compress.graph.inputs import Inputs
from compress.graph.ops import node_kind
from compress.quantization.ptq.guard import kept
from compress.quantization.ptq.prepare import float_graph
from compress.quantization.ptq.quantize import quantize
from compress.quantization.report import placement_of
from compress.quantization.sensitivity.causes import Cause, look_at_tensors
from compress.quantization.sensitivity.probe import Effect, Probe, outputs_alone
from compress.quantization.sensitivity.sensitivity import variants_by_layer
from compress.quantization.sensitivity.subset import subset_of
from compress.quantization.spec import QuantSpec
from compress.support.meters import task_metric
from compress.support.progress import NoProgress, Progress

LEAST_DB = 20.0
"""Signal to noise below which a tensor of the quantized network diverges from the float network's."""

TASK = "diagnose"
_IMAGES = 16
"""Images that the noise of single layers is measured on."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first tensor of a quantized network that diverges.

    Attributes:
        tensor: node of the graph.
        sqnr_db: its signal to noise against the float network's.
        before_db: the least of the tensors that it is computed from; far above `sqnr_db` if this operation is at fault.
    """

    tensor: str
    sqnr_db: float
    before_db: float


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """The error that the quantizers of one layer add.

    Attributes:
        layer: its module path, or the node's name if it has no module.
        alone: effect if this layer is quantized and nothing else is, on the first images and without the metric.
        share: its share of the sum of all layers' noise.
        causes: why, as far as known.
    """

    layer: str
    alone: Effect
    share: float
    causes: tuple[Cause, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Where a quantized network loses accuracy.

    Attributes:
        images: number of images that effects were measured on.
        float_score: the metric of the float network; None without targets.
        quantized: effect of all quantizers.
        first: the first tensor that diverges; None if none does.
        rows: the layers, the noisiest first.
        metric: name of the metric.
        unit: of the metric.
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
        metric: a `TaskMetric`, or what `compress.support.meters.task_metric` takes; None = top-1 of a classifier.
        progress: is informed of each layer.

    Raises:
        QuantizationError: no images, or nothing can be quantized.
        CalibrationError: as `quantize`.

    Examples:
        >>> diagnosis = compress.diagnose(model, images[:1], batches, batches)
        >>> sorted(row.layer for row in diagnosis.rows)
        ['0', '3', '5']
    """
    spec = spec or QuantSpec()
    images = list(images)
    chosen = task_metric(metric) if metric is not None else outputs_alone(model, images[0]) if images else None
    qmodel = quantize(model, example_inputs, batches, spec=spec, progress=progress)
    probe = Probe(model, qmodel, images, chosen)
    return diagnosed(model, example_inputs, qmodel, probe, kept(qmodel, spec), progress=progress)


def diagnosed(
    model: nn.Module,
    example_inputs: Inputs,
    qmodel: fx.GraphModule,
    probe: Probe,
    spec: QuantSpec,
    *,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find where a network that is quantized already loses accuracy; arguments are those of `diagnose`."""
    noise = noise_by_layer(model, example_inputs, probe, spec, progress=progress)
    seen = look_at_tensors(qmodel, probe.batches, noise)
    total = sum(effect.noise for effect in noise.values()) or 1.0
    rows = [
        LayerError(layer=name, alone=effect, share=effect.noise / total, causes=seen.causes.get(name, ()))
        for name, effect in noise.items()
    ]
    return Diagnosis(
        images=probe.count,
        float_score=probe.float_score,
        quantized=whole_effect(probe),
        first=_first(qmodel, seen.sqnr_db),
        rows=tuple(sorted(rows, key=lambda row: -row.share)),
        metric=probe.judge.name,
        unit=probe.judge.unit,
    )


def noise_by_layer(
    model: nn.Module,
    example_inputs: Inputs,
    probe: Probe,
    spec: QuantSpec,
    *,
    chosen: Collection[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Effect]:
    """Return the effect of each layer quantized alone, in graph order.

    There are as many passes as layers, so that they see few images: a ratio of powers needs no more.

    Args:
        model: as for `diagnose`.
        example_inputs: as for `diagnose`.
        probe: of the network that is quantized by `spec`.
        spec: as for `diagnose`.
        chosen: layers; None = all.
        progress: is informed of each layer.
    """
    bars = progress or NoProgress()
    graph, _ = float_graph(model, example_inputs, replace(spec, adaround=None, bias_correction=None))
    alone = {name: found for name, (found, _) in variants_by_layer(graph, spec, chosen).items()}
    bars.start(TASK, len(alone))
    found = {}
    for name, subset in alone.items():
        found[name] = probe.effect(subset, images=_IMAGES)
        bars.advance(TASK, 1)
    bars.finish(TASK)
    return found


def whole_effect(probe: Probe) -> Effect:
    """Return the effect of all quantizers of a probe's network."""
    return probe.effect(subset_of(placement_of(probe.qmodel)))


def _first(qmodel: fx.GraphModule, sqnr_db: dict[str, float]) -> Divergence | None:
    for node in qmodel.graph.nodes:
        value = sqnr_db.get(node.name)
        if value is None or value >= LEAST_DB:
            continue
        before = [sqnr_db[name] for name in _sources(node) if name in sqnr_db]
        return Divergence(tensor=node.name, sqnr_db=value, before_db=min(before, default=float("inf")))
    return None


def _sources(node: fx.Node) -> list[str]:
    """Return the tensors that a node is computed from, quantizers left out."""
    sources = (n.all_input_nodes[0] if node_kind(n) == "quantizer" else n for n in node.all_input_nodes)
    return [source.name for source in sources]
