"""Where quantization loses accuracy: the first tensor that diverges, the noise that each layer adds, and why."""

from __future__ import annotations

import math
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
from compress.quantization.sensitivity.causes import Cause, look_at_tensors
from compress.quantization.sensitivity.probe import Effect, Probe, metric_for
from compress.quantization.sensitivity.sensitivity import subsets_by_layer
from compress.quantization.spec import QuantSpec
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
    spec, images = spec or QuantSpec(), list(images)
    qmodel = quantize(model, example_inputs, batches, spec=spec, progress=progress)
    probe = Probe(model, qmodel, images, metric_for(model, images, metric))
    return diagnosed(probe, example_inputs, kept(qmodel, spec), progress or NoProgress())


def diagnosed(probe: Probe, example_inputs: Inputs, spec: QuantSpec, progress: Progress) -> Diagnosis:
    """Find where the network of a probe, which was quantized by `spec`, loses accuracy."""
    noise = noise_by_layer(probe, example_inputs, spec, progress)
    seen = look_at_tensors(probe.qmodel, probe.batches, noise)
    total = sum(effect.noise for effect in noise.values()) or 1.0
    rows = [
        LayerError(layer=name, alone=effect, share=effect.noise / total, causes=seen.causes.get(name, ()))
        for name, effect in noise.items()
    ]
    return Diagnosis(
        images=probe.count,
        float_score=probe.float_score,
        quantized=probe.effect(),
        first=_first(probe.qmodel, seen.sqnr_db),
        rows=tuple(sorted(rows, key=lambda row: -row.share)),
        metric=probe.judge.name,
        unit=probe.judge.unit,
    )


def noise_by_layer(
    probe: Probe, example_inputs: Inputs, spec: QuantSpec, progress: Progress, *, chosen: Collection[str] | None = None
) -> dict[str, Effect]:
    """Return the effect of each layer (of `chosen`; None = of all) quantized alone, in graph order.

    There are as many passes as layers, so that they see few images: a ratio of powers needs no more.
    """
    graph, _ = float_graph(probe.model, example_inputs, replace(spec, adaround=None, bias_correction=None))
    subsets = subsets_by_layer(graph, spec, chosen)
    progress.start(TASK, len(subsets))
    found = {}
    for name, (alone, _) in subsets.items():
        found[name] = probe.effect(alone, images=_IMAGES)
        progress.advance(TASK, 1)
    progress.finish(TASK)
    return found


def _first(qmodel: fx.GraphModule, sqnr_db: dict[str, float]) -> Divergence | None:
    for node in qmodel.graph.nodes:
        value = sqnr_db.get(node.name)
        if value is not None and value < LEAST_DB:
            sources = (n.all_input_nodes[0] if node_kind(n) == "quantizer" else n for n in node.all_input_nodes)
            before = min((sqnr_db.get(source.name, math.inf) for source in sources), default=math.inf)
            return Divergence(tensor=node.name, sqnr_db=value, before_db=before)
    return None
