"""Which layers quantization hurts: each layer alone quantized, and each alone left out of the quantized network.

The two answer different questions. A layer that is quantized alone shows the noise that it adds by itself; such noises
are nearly independent, so their powers add up, which is what mixed precision builds on. A layer that is left out shows
what is won back by keeping it float, with all others as they are.

Nothing is rebuilt for a layer: placement says which quantizers a network would have under the rules "all float but
this one" and "all but this one", and the one calibrated graph runs with that subset of them (`subset`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.batches import Batches, model_inputs
from compress.graph.canonical import canonical_graph
from compress.graph.inputs import Inputs, flat_tensors
from compress.graph.layers import layers
from compress.graph.ops import layer_name
from compress.progress import NoProgress, Progress
from compress.quantization.calibrate import quantize
from compress.quantization.compare import sqnr
from compress.quantization.decisions import Placement
from compress.quantization.placement import place
from compress.quantization.prepare import prepare_float
from compress.quantization.rules import LayerSettings, resolve_rules
from compress.quantization.spec import QuantSpec, Rule
from compress.quantization.subset import Subset, run_subset, subset_of

TASK = "sensitivity"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What quantizers do to a network's logits.

    Attributes:
        sqnr_db: signal to noise of the logits against the float network's, dB; inf where nothing changed.
        agreement: share of images whose highest logit is the float network's, 0 to 1.
        top1: share of images that are classified rightly, 0 to 1; None for images without targets.
    """

    sqnr_db: float
    agreement: float
    top1: float | None

    @property
    def noise(self) -> float:
        """Power of the noise over that of the signal: 10^(-sqnr_db / 10)."""
        return float(10 ** (-self.sqnr_db / 10))


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """One layer.

    Attributes:
        layer: its module path, or the node's name where it has no module.
        kind: of the operation.
        weight_elements: of its weight.
        macs: for one image; None = unknown.
        alone: it is quantized, with its inputs, and nothing else is.
        left_out: it is float, and everything else is quantized.
    """

    layer: str
    kind: str
    weight_elements: int
    macs: int | None
    alone: Effect
    left_out: Effect


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """All layers of a network under one specification.

    Attributes:
        images: how many the effects were measured on.
        float_top1: of the float network, 0 to 1; None for images without targets.
        quantized: everything is quantized.
        rows: the layers in graph order. An operation that is only quantized along with another (a residual add) is
            not a row: it follows its layer.
    """

    images: int
    float_top1: float | None
    quantized: Effect
    rows: tuple[LayerSensitivity, ...]


def sensitivity(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    images: Iterable[Any],
    *,
    spec: QuantSpec | None = None,
    known: Mapping[str, LayerSensitivity] | None = None,
    keep: Callable[[LayerSensitivity], None] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the effect of every layer's quantizers.

    Args:
        model: float network, with one tensor of logits (N, classes) as its result; not changed.
        example_inputs: what it is called with, to trace it.
        batches: calibration data, as for `quantize`.
        images: batches that effects are measured on, as for `quantize`; with a target for top-1 too. They are read once
            and kept; two forward passes over them are made for each layer.
        spec: target and rules; layers that its rules leave float are no rows. Weights are rounded to nearest also where
            it asks for AdaRound or bias correction, which change weights for good and so have no float side.
        known: rows of an earlier call that was stopped; they are not measured again.
        keep: called with each row as soon as it is measured.
        progress: hears of each layer.

    Raises:
        QuantizationError: no images, or nothing can be quantized.
        CalibrationError: as `quantize`.
    """
    spec, known = spec or QuantSpec(), known or {}
    listener = progress or NoProgress()
    spec = replace(spec, adaround=None, bias_correction=None)
    graph = float_graph(model, example_inputs, spec)
    qmodel = quantize(model, example_inputs, batches, spec=spec, progress=progress)
    probe = _Probe(model, qmodel, images)
    variants = variants_by_layer(graph, spec)
    facts = {layer.path or layer.name: layer for layer in layers(graph)}
    images_traced = len(flat_tensors(example_inputs)[0])
    rows = []
    listener.start(TASK, len(variants), done=sum(name in known for name in variants))
    for name, (alone, left_out) in variants.items():
        if name not in known:
            fact = facts[name]
            row = LayerSensitivity(
                layer=name,
                kind=fact.kind,
                weight_elements=fact.weight_elements,
                macs=None if fact.macs is None else fact.macs // images_traced,
                alone=probe.effect(alone),
                left_out=probe.effect(left_out),
            )
            listener.advance(TASK, 1)
            if keep is not None:
                keep(row)
            rows.append(row)
        else:
            rows.append(known[name])
    listener.finish(TASK)
    return Sensitivity(
        images=probe.count,
        float_top1=probe.top1(probe.reference),
        quantized=probe.effect(subset_of(place(graph, spec))),
        rows=tuple(rows),
    )


def float_graph(model: nn.Module, example_inputs: Inputs, spec: QuantSpec) -> fx.GraphModule:
    """The float graph that `insert_quantizers` places quantizers in.

    Raises:
        ModelError: the model cannot be traced.
    """
    graph = canonical_graph(model, example_inputs, fold=False)
    prepare_float(graph, spec)
    return graph


def variants_by_layer(graph: fx.GraphModule, spec: QuantSpec) -> dict[str, tuple[Subset, Subset]]:
    """For every layer that can be quantized by itself: the quantizers of it alone, and of all but it.

    Args:
        graph: of `float_graph`.
        spec: target and rules.

    Returns:
        (alone, left out) by layer name, in graph order.
    """
    settings = layer_settings(graph, spec)
    whole = place(graph, spec)
    names = dict.fromkeys(
        name for row in whole.decisions if row.decision == "quantize" for name in row.layer.split() if name in settings
    )
    order = {layer_name(node): i for i, node in enumerate(graph.graph.nodes)}
    found = {}
    for name in sorted(names, key=order.__getitem__):
        alone = _placed(graph, spec, only(name, settings[name]))
        if alone is None:
            continue
        left_out = _placed(graph, spec, (*spec.rules, Rule(match=name, enable=False)))
        found[name] = (subset_of(alone), subset_of(left_out) if left_out else _NOTHING)
    return found


def layer_settings(graph: fx.GraphModule, spec: QuantSpec) -> dict[str, LayerSettings]:
    """What holds for each operation of a graph after the rules, by its name."""
    return {layer_name(node): own for node, own in resolve_rules(list(graph.graph.nodes), spec).items()}


_NOTHING = Subset(weights=frozenset(), edges=frozenset())


def only(name: str, settings: LayerSettings) -> tuple[Rule, ...]:
    """Rules that leave everything float but one layer."""
    own = Rule(match=name, enable=True, weights=settings.weights, activations=settings.activations)
    return (Rule(match="*", enable=False), own)


def _placed(graph: fx.GraphModule, spec: QuantSpec, rules: tuple[Rule, ...]) -> Placement | None:
    """The placement under other rules; None where they leave nothing to quantize."""
    try:
        return place(graph, replace(spec, rules=rules))
    except QuantizationError:
        return None


class _Probe:
    """Holds the images and the float network's answers, and says what a subset of quantizers does to them."""

    def __init__(self, model: nn.Module, qmodel: fx.GraphModule, images: Iterable[Any]) -> None:
        self.qmodel = qmodel
        self.batches, targets = _split(qmodel, images)
        self.targets = torch.cat(targets) if targets else None
        self.count = sum(len(inputs[0]) for inputs in self.batches)
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                self.reference = torch.cat([_logits(model(*inputs)) for inputs in self.batches])
        finally:
            model.train(training)

    def effect(self, subset: Subset) -> Effect:
        logits = torch.cat([_logits(run_subset(self.qmodel, subset, *inputs)) for inputs in self.batches])
        same = logits.argmax(1) == self.reference.argmax(1)
        return Effect(
            sqnr_db=sqnr(self.reference, logits), agreement=same.double().mean().item(), top1=self.top1(logits)
        )

    def top1(self, logits: Tensor) -> float | None:
        if self.targets is None:
            return None
        return (logits.argmax(1) == self.targets.to(logits.device)).double().mean().item()


def _split(qmodel: fx.GraphModule, images: Iterable[Any]) -> tuple[list[tuple[Tensor, ...]], list[Tensor]]:
    """The inputs of each batch, and their targets where every batch has them."""
    inputs: list[tuple[Tensor, ...]] = []
    targets: list[Tensor] = []
    for batch in images:
        inputs.append(model_inputs(qmodel, batch))
        if isinstance(batch, (tuple, list)):
            behind = 1 if isinstance(batch[0], (tuple, list)) else len(inputs[-1])
            targets += batch[behind : behind + 1]
    if not inputs:
        raise QuantizationError("sensitivity got no images to measure on; give at least one batch")
    return inputs, targets if len(targets) == len(inputs) else []


def _logits(output: Any) -> Tensor:
    tensors: Sequence[Tensor] = flat_tensors(output)
    if not tensors or tensors[0].dim() != 2:
        shape = tuple(tensors[0].shape) if tensors else "no tensor"
        raise QuantizationError(f"sensitivity compares logits (N, classes); the network returned {shape}")
    return tensors[0]
