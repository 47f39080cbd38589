"""Post-training quantization from a float model to a calibrated one, for library users and for the steps of a run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.graph.canonical import canonical_graph, check_float_model
from compress.graph.compare import alone
from compress.graph.inputs import Batches, Inputs, as_inputs, device_of, model_inputs
from compress.graph.ops import Watching
from compress.graph.report import attach_report
from compress.quantization import QuantSpec, Rule, Target, check_quant_spec
from compress.quantization.calibration.calibrate import calibrate, check_batches, take_ranges
from compress.quantization.placement.decisions import (
    Placement,
    around_closed,
    closed_branches,
    concats_apart,
    shared_tensors,
)
from compress.quantization.placement.insert import float_graph, insert_placed, read_fx
from compress.quantization.placement.place import place
from compress.quantization.ptq.improve import (
    FirstBatches,
    before_calibration,
    check_shapes,
    compare_ranges,
    default_ranges,
    guarded,
    improve,
    kept,
    methods,
    needs_data_twice,
    smoothed,
)
from compress.quantization.ptq.on_images import Scaled, looks_at_layers, place_on_images, scale_channels
from compress.quantization.ptq.walk import some_of
from compress.quantization.report import (
    CalibrationReport,
    Prepared,
    QuantizedModule,
    calibration_of,
    quantization_report_of,
)
from compress.support.progress import Progress


@alone
def quantize(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    *,
    spec: QuantSpec | None = None,
    folder: Path | None = None,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> QuantizedModule:
    """Fold BatchNorm, insert quantizers, calibrate them and apply the further methods of `spec`.

    Training the result is quantization-aware training. Methods that make the outputs on the calibration images worse
    than plain PTQ are taken back, with a note, unless `spec.insist`; a note also says where ranges by entropy or
    percentile are worse than the default ones.

    Args:
        model: any float32 module; it is not changed.
        example_inputs: inputs that the model is traced with.
        batches: calibration data, all of it is used: tensors, or (tensor, target); for a model of several inputs
            tuples that begin with all of them.
        spec: None = `QuantSpec()`, target TensorRT. Several targets are for `quantize_targets`.
        folder: where AdaRound saves finished layers, to go on from after a stop.
        all_reduce: merge statistics over the processes of torch.distributed's default group, each with its own share of
            the data.
        progress: is informed of each batch and of each layer.

    Returns:
        A GraphModule in evaluation mode; `.placement` is the table of decisions, `.report` holds the results of all
        methods.

    Raises:
        ModelError: the model cannot be traced, depends on earlier calls, or behaves differently for a calibration
            batch's shapes.
        QuantizationError: nothing can be quantized, a rule matches nothing, the model is quantized already or is not
            in float32.
        CalibrationError: no batches, batches that the model fails on, NaN, or a tensor that is constant zero.
        DataError: a batch does not hold the model's inputs.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches, spec=compress.QuantSpec(target="openvino"))
        >>> qmodel(images).shape
        torch.Size([16, 4])
    """
    spec = spec or QuantSpec()
    check_quant_spec(spec)
    found = quantize_targets(
        model,
        example_inputs,
        batches,
        spec=spec.for_target(spec.only_target),
        folder=folder,
        all_reduce=all_reduce,
        progress=progress,
    )
    return found[spec.only_target]


@alone
def quantize_targets(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    *,
    spec: QuantSpec,
    folder: Path | None = None,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> dict[Target, QuantizedModule]:
    """Quantize a float model for each target of `spec`, in its order; all are calibrated in one pass over the data.

    Arguments and errors are those of `quantize`; each further target has a folder of its own in `folder`.

    Examples:
        >>> spec = compress.QuantSpec(target=("tensorrt", "openvino"))
        >>> list(compress.quantize_targets(model, images[:1], batches, spec=spec))
        ['tensorrt', 'openvino']
    """
    check_quant_spec(spec)
    check_float_model(model)
    check_batches(batches)
    spec = replace(spec, rules=tuple(rule for rule in spec.rules if not rule.channel_scales))  # chosen anew
    asked = methods(spec)
    if (asked or needs_data_twice(spec)) and iter(batches) is batches:
        batches = list(batches)  # a generator can be read once
    looks = looks_at_layers(spec) or spec.bias_correction == "auto"
    seen, batches = some_of(batches) if looks else ([], batches)
    work = _Work(model, example_inputs, batches, seen, spec, folder, all_reduce, progress)
    if not asked:
        return work.make(spec, spec.targets)
    first, *others = spec.targets  # methods beyond calibration are judged on the first
    judged = guarded(model, lambda chosen: work.make(chosen, [first])[first], batches, spec, all_reduce=all_reduce)
    return {first: judged, **(work.make(kept(judged, spec), others) if others else {})}


@dataclass
class _Work:
    model: nn.Module
    example_inputs: Inputs
    batches: Batches
    seen: list[Any]
    spec: QuantSpec
    folder: Path | None
    all_reduce: bool
    progress: Progress | None
    ranges: dict[Any, dict[Target, CalibrationReport]] = field(default_factory=dict)
    scaled: dict[tuple[tuple[Rule, ...], Target], Scaled] = field(default_factory=dict)
    traced: tuple[tuple[Any, ...], tuple[fx.GraphModule, Prepared]] | None = None

    def make(self, chosen: QuantSpec, targets: Sequence[Target]) -> dict[Target, QuantizedModule]:
        return around_closed(lambda spec: self._attempt(spec, targets), chosen, self.batches)

    def _attempt(self, spec: QuantSpec, targets: Sequence[Target]) -> dict[Target, QuantizedModule]:
        model, example, batches, together = self.model, self.example_inputs, self.batches, self.all_reduce
        ready, smoothing = smoothed(model, example, batches, spec, all_reduce=together, progress=self.progress)
        done = self._scaled(spec, targets[0]) if looks_at_layers(spec) else Scaled(model=ready)
        ready, spec = done.model, replace(spec, rules=(*done.rules, *spec.rules))
        found = {t: self._inserted(ready, spec.for_target(t)) for t in targets}
        ranges = self.ranges.setdefault(before_calibration(spec), {})
        inputs = {node.name for made in found.values() for node in made.graph.nodes if node.op == "placeholder"}
        with closed_branches(inputs, *(quantization_report_of(made).placement for made in found.values())):
            self._calibrate(found, ranges, ready, spec)
        for target, made in found.items():
            place = self.folder and (self.folder if target == self.spec.targets[0] else self.folder / target)
            options: dict[str, Any] = {"smoothing": smoothing, "folder": place, "all_reduce": together}
            improve(made, batches, spec, seen=self.seen, progress=self.progress, **options)
            attach_report(made, replace(quantization_report_of(made), scaling=done.notes))
        return found

    def _scaled(self, spec: QuantSpec, target: Target) -> Scaled:
        key = spec.rules, target
        if key not in self.scaled:
            own = spec.for_target(target)
            self.scaled[key] = scale_channels(
                self.model, self.example_inputs, self.seen, own, all_reduce=self.all_reduce
            )
        return self.scaled[key]

    def _inserted(self, model: nn.Module, spec: QuantSpec) -> QuantizedModule:
        """Insert quantizers, for inputs of a concat whose ranges are far apart with scales of their own."""

        def placed(graph_module: fx.GraphModule) -> Placement:
            view = read_fx(graph_module)
            placement = place(view, spec)
            rules = _apart(graph_module, placement, self.example_inputs, self.batches, all_reduce=self.all_reduce)
            chosen = replace(spec, rules=(*rules, *spec.rules))
            return place_on_images(graph_module, chosen, self.seen, all_reduce=self.all_reduce)

        return insert_placed(self._float_graph(model, spec), self.example_inputs, spec, placed)

    def _float_graph(self, model: nn.Module, spec: QuantSpec) -> tuple[fx.GraphModule, Prepared]:
        """A copy of the float graph: it is traced once for all targets and for the ranges beside the chosen ones."""
        key = model, spec.relu6, spec.batchnorm, spec.equalize, spec.bias_correction == "analytic"
        if self.traced is None or self.traced[0] != key:
            self.traced = key, float_graph(model, self.example_inputs, spec)
        return copy.deepcopy(self.traced[1])

    def _calibrate(
        self,
        found: dict[Target, QuantizedModule],
        seen: dict[Target, CalibrationReport],
        model: nn.Module,
        spec: QuantSpec,
    ) -> None:
        """Calibrate networks of one float model, or take the ranges in `seen`, to which new ones are added."""
        if set(seen) >= set(found):
            for target, qmodel in found.items():
                take_ranges(qmodel, seen[target])
            return
        first, judged = next(iter(found.items()))
        usual = None if seen else default_ranges(spec.for_target(first))
        yardstick = [] if usual is None else [self._inserted(model, usual)]
        sample = FirstBatches(model, self.batches, judged)
        one, *rest = (*found.values(), *yardstick)
        calibrate(one, sample, also=rest, all_reduce=self.all_reduce, progress=self.progress)
        changed = spec.relu6 == "relu"  # a network of its own, which is not the model's on purpose
        own = canonical_graph(model, self.example_inputs) if changed else one
        check_shapes(model, own, sample, self.example_inputs)
        for other in yardstick:
            beside = compare_ranges(model, judged, other, sample.first, spec, all_reduce=self.all_reduce)
            take_ranges(judged, replace(calibration_of(judged), compared=beside))
        seen |= {target: calibration_of(qmodel) for target, qmodel in found.items()}


@torch.no_grad()
def _apart(
    graph_module: fx.GraphModule,
    placement: Placement,
    example_inputs: Inputs,
    batches: Batches,
    *,
    all_reduce: bool,
) -> tuple[Rule, ...]:
    """Rules for concats whose inputs' ranges are far apart on the first batch, or on the example."""
    shared = shared_tensors(placement)
    if not shared:
        return ()
    inputs = as_inputs(example_inputs) if iter(batches) is batches else model_inputs(graph_module, next(iter(batches)))
    found: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        found[name] = float(x.abs().max()) if x.numel() else 0.0

    Watching(graph_module, frozenset(shared), note).run(*inputs)
    ranges = torch.tensor([found.get(name, 0.0) for name in shared], device=device_of(graph_module))
    if all_reduce:  # every process decides alike
        torch.distributed.all_reduce(ranges, op=torch.distributed.ReduceOp.MAX)
    return concats_apart(read_fx(graph_module), placement, dict(zip(shared, ranges.tolist(), strict=True)))
