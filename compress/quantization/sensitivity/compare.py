"""Comparison of a quantized network with the float one: of its weights, its layers, and its outputs.

Outputs are compared with some of the quantizers on and the others off: the graph with all of them is built and
calibrated once, and each case is a subset.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.compare import Noise, module_results, run_model
from compress.graph.inputs import TARGET_KEYS, Batches, Inputs, flat_tensors, model_inputs
from compress.graph.ops import node_kind, tensor_of
from compress.graph.traits import WEIGHTED
from compress.quantization import QuantSpec
from compress.quantization.placement.decisions import Placement
from compress.quantization.ptq.improve import kept
from compress.quantization.ptq.quantize import quantize
from compress.quantization.quantizer import weight_quantizer_of
from compress.quantization.report import placement_of, quantization_report_of
from compress.support.meters import MeanOf, TaskMetric, task_metric
from compress.support.progress import Progress


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
