"""Post-training quantization from a float model to a calibrated one, and the methods of `QuantSpec` beyond calibration.

1. `smooth` rescales the float network's norms, from images, before quantizers are placed;
2. `relu6` and `equalize` rescale its layers, without images (`float_graph`);
3. ranges are calibrated;
4. `adaround` and the empirical `bias_correction` process the layers in one walk: a layer is rounded, then its bias is
   corrected, and the inputs of the next layer include both;
5. or `reconstruct` learns roundings and ranges block by block, before the bias correction;
6. the analytic `bias_correction` follows from the quantized weights, `auto` from means of inputs too, without a walk.

Methods that make the network worse than plain PTQ on calibration images are taken back (`guarded`).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import ModelError, QuantizationError
from compress.graph.canonical import canonical_graph, check_float_model
from compress.graph.compare import Reference, alone, first_difference
from compress.graph.inputs import (
    Batches,
    Inputs,
    as_inputs,
    device_of,
    first_inputs,
    flat_tensors,
    model_inputs,
    run_with,
    shapes_text,
)
from compress.graph.ops import Watching, tensor_of
from compress.graph.report import attach_report
from compress.quantization import QuantSpec, Rule, Target, check_quant_spec
from compress.quantization.calibration.calibrate import calibrate, calibrating, check_batches, take_ranges
from compress.quantization.placement.decisions import (
    Placement,
    around_closed,
    closed_branches,
    concats_apart,
    shared_tensors,
)
from compress.quantization.placement.insert import float_graph, insert_placed, read_fx
from compress.quantization.placement.place import place
from compress.quantization.ptq.bias_correction import (
    IMAGES,
    correct_bias_analytic,
    correct_bias_means,
    correct_to_targets,
)
from compress.quantization.ptq.on_images import Scaled, looks_at_layers, place_on_images, scale_channels
from compress.quantization.ptq.rescaling import smooth
from compress.quantization.ptq.rounding import Rounder, reconstruct
from compress.quantization.ptq.walk import FAILURES, Visit, some_of, walk
from compress.quantization.report import (
    DEFAULT_CALIBRATOR,
    CalibrationReport,
    Comparison,
    Correction,
    Prepared,
    QuantizationReport,
    QuantizedModule,
    Smoothing,
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
            placement = place(read_fx(graph_module), spec)
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
            options: dict[str, Any] = {"all_reduce": self.all_reduce, "images": RANGE_IMAGES}
            names = (spec.activations.calibrator,)
            beside = compare_with_plain(model, judged, other, sample.first, names, **options)
            beside = replace(beside, margin_db=RANGE_MARGIN_DB)
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
    first = None if iter(batches) is batches else next(iter(batches), None)
    inputs = as_inputs(example_inputs) if first is None else model_inputs(graph_module, first)
    found: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        found[name] = float(x.abs().max()) if x.numel() else 0.0

    with contextlib.suppress(*FAILURES):  # calibration meets the same batch, and describes it
        Watching(graph_module, frozenset(shared), note).run(*inputs)
    ranges = torch.tensor([found.get(name, 0.0) for name in shared], device=device_of(graph_module))
    if all_reduce:  # every process decides alike
        torch.distributed.all_reduce(ranges, op=torch.distributed.ReduceOp.MAX)
    return concats_apart(read_fx(graph_module), placement, dict(zip(shared, ranges.tolist(), strict=True)))


# Largest number of images that are compared.
COMPARED_IMAGES = 64
# Largest number of shapes of calibration batches on which the graph is compared with the model.
SHAPES = 4
# The same for ranges, and the least loss that a note is for: other measures than the error cost decibels that a
# classifier need not miss.
RANGE_IMAGES, RANGE_MARGIN_DB = 16, 3.0

_OFF: dict[str, Any] = {
    "relu6": "keep",
    "equalize": False,
    "smooth": None,
    "adaround": None,
    "reconstruct": None,
    "bias_correction": None,
}


# Values that are chosen layer by layer, and so not compared.
_DEFAULTS = {"smooth": "auto", "bias_correction": "auto"}


def methods(spec: QuantSpec) -> tuple[str, ...]:
    asked = {name: getattr(spec, name) for name in _OFF}
    return tuple(name for name, off in _OFF.items() if asked[name] not in (off, _DEFAULTS.get(name, off)))


def plain(spec: QuantSpec) -> QuantSpec:
    return without(spec, methods(spec))


def without(spec: QuantSpec, taken_back: Iterable[str]) -> QuantSpec:
    return replace(spec, **{name: _OFF[name] for name in taken_back})


def before_calibration(spec: QuantSpec) -> tuple[Any, ...]:
    """The methods that change the float network: specifications that agree in them have equal ranges."""
    return spec.relu6, spec.equalize, spec.smooth


def default_ranges(spec: QuantSpec) -> QuantSpec | None:
    """A specification with the default calibrator of activations; None if there is nothing to compare with it.

    Entropy and percentiles clip by other measures than the error; `max` clips nothing, and `lsq` is where training
    begins.
    """
    asked = spec.activations
    if asked.calibrator not in ("entropy", "percentile") or asked.kind != "int":
        return None
    return replace(spec, activations=replace(asked, calibrator=DEFAULT_CALIBRATOR))


class FirstBatches:
    """Batches that are read once; it keeps the first `RANGE_IMAGES` images, and the first batch of each shape."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], graph: nn.Module) -> None:
        self.model, self.batches, self.graph = model, batches, graph
        self.first: list[Any] = []
        self.of_shapes: dict[tuple[torch.Size, ...], tuple[Tensor, ...]] = {}

    def __iter__(self) -> Iterator[Any]:
        left = RANGE_IMAGES
        for batch in self.batches:
            inputs = model_inputs(self.model, batch, self.graph)
            if left > 0:
                self.first.append(batch)
                left -= len(inputs[0])
            if len(self.of_shapes) < SHAPES:
                self.of_shapes.setdefault(tuple(x.shape for x in inputs), inputs)
            yield batch

    def __length_hint__(self) -> int:
        return length_hint(self.batches)


def check_shapes(model: nn.Module, graph_module: nn.Module, sample: FirstBatches, example_inputs: Inputs) -> None:
    """Refuse a graph that is not the model on calibration batches, which may have other shapes than the example."""
    example = as_inputs(example_inputs)
    for inputs in sample.of_shapes.values():
        reference = Reference.of(model, inputs)
        with calibrating(graph_module, {}):
            error = reference.difference(graph_module)
            place = first_difference(model, graph_module, inputs) if error else ""
        if error:
            raise ModelError(
                f"on a calibration batch of {shapes_text(inputs)} the graph of {reference.name} differs from the model "
                f"by {error:.2g} of its largest output{f', first at {place}' if place else ''}: its forward decides by "
                f"the sizes or values of its inputs, and the graph does as for inputs of {shapes_text(example)}; "
                "give example_inputs of the shapes that are used, or a forward that does the same for all"
            )


def kept(qmodel: nn.Module, spec: QuantSpec) -> QuantSpec:
    """The specification that a network was made by in the end, without the methods that were taken back."""
    seen = quantization_report_of(qmodel).comparison
    return spec if seen is None else without(spec, seen.taken_back)


def guarded(
    model: nn.Module,
    make: Callable[[QuantSpec], QuantizedModule],
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    all_reduce: bool = False,
) -> QuantizedModule:
    """Quantize with the methods of a specification, and without those that make the network worse than plain PTQ.

    If the methods together are worse, each is tried in the order of their application on top of those that were kept;
    with `insist` all stay. `batches` can be read repeatedly. The report holds the comparison.
    """
    qmodel, simple = make(spec), make(plain(spec))
    seen = compare_with_plain(model, qmodel, simple, batches, methods(spec), all_reduce=all_reduce)
    if seen.worse and not spec.insist:
        qmodel, back = simple, methods(spec)
        for name in methods(spec) if len(back) > 1 else ():
            others = tuple(other for other in back if other != name)
            try:
                candidate = make(without(spec, others))
            except QuantizationError:  # it needs one that was taken back: equalization, ReLU in the place of ReLU6
                continue
            found = compare_with_plain(model, candidate, qmodel, batches, methods(spec), all_reduce=all_reduce)
            if not found.worse:
                qmodel, back = candidate, others
        seen = replace(seen, taken_back=back)
    attach_report(qmodel, replace(quantization_report_of(qmodel), comparison=seen))
    return qmodel


@torch.no_grad()
def compare_with_plain(
    model: nn.Module,
    qmodel: nn.Module,
    simple: nn.Module,
    batches: Iterable[Any],
    names: tuple[str, ...],
    *,
    all_reduce: bool,
    images: int = COMPARED_IMAGES,
) -> Comparison:
    """The signal to noise of two quantized forms of a network, `simple` by plain PTQ, on calibration images."""
    training, totals = model.training, torch.zeros(3, dtype=torch.float64)
    model.eval()
    try:
        for inputs in first_inputs(model, batches, images, qmodel):
            expected, ours, theirs = (_outputs(network, inputs) for network in (model, qmodel, simple))
            parts = (expected.square().sum(), (ours - expected).square().sum(), (theirs - expected).square().sum())
            totals += torch.stack(parts).cpu()
    finally:
        model.train(training)
    if all_reduce:
        found = totals.to(device_of(model))
        torch.distributed.all_reduce(found)
        totals = found.cpu()
    signal, noise, noise_plain = totals.tolist()
    return Comparison(methods=names, sqnr_db=_decibel(signal, noise), plain_sqnr_db=_decibel(signal, noise_plain))


def _outputs(network: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    tensors = [x for x in flat_tensors(run_with(network, inputs)) if x.is_floating_point()]
    return torch.cat([x.double().reshape(-1) for x in tensors])


def _decibel(signal: float, noise: float) -> float:
    return 10 * math.log10(max(signal, 1e-300) / max(noise, 1e-300))


def needs_data_twice(spec: QuantSpec) -> bool:
    learned = spec.adaround is not None or spec.reconstruct is not None
    return isinstance(spec.smooth, float) or learned or spec.bias_correction == "empirical"


def smoothed(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> tuple[nn.Module, Smoothing | None]:
    """Smooth a copy of a float model if `spec` asks for it; otherwise the model itself and None are returned."""
    if not isinstance(spec.smooth, (int, float)):
        return model, None
    reference = Reference.of(model, example_inputs)
    graph_module = canonical_graph(model, example_inputs, fold=False)
    done = smooth(graph_module, batches, alpha=spec.smooth, all_reduce=all_reduce, progress=progress)
    reference.check(graph_module, "smoothing")
    return graph_module, done


@torch.no_grad()
def improve(
    qmodel: fx.GraphModule,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    seen: Sequence[Any] = (),
    smoothing: Smoothing | None = None,
    folder: Path | None = None,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Apply the rounding and bias correction of `spec` to a calibrated network, in place; return the report.

    With `all_reduce` every process learns on its own images, and all take the result of rank 0. AdaRound saves finished
    layers in `folder`, to go on from after a stop. `bias_correction: auto` looks at `seen`, some of the batches, and
    leaves what `reconstruct` learned.
    """
    report = quantization_report_of(qmodel)
    if report.prepared is None:
        raise QuantizationError(
            "the model was not made by insert_quantizers: improve needs the spec that it was made with"
        )
    paths, rounds = [site.path for site in report.placement.weights], spec.adaround is not None
    before = paths if spec.bias_correction == "analytic" or rounds else []
    weights = {path: tensor_of(qmodel.get_submodule(path)).detach().clone() for path in before}
    blocks = reconstruct(qmodel, batches, spec.reconstruct, progress=progress) if spec.reconstruct else ()
    rounder = None
    if spec.adaround is not None:
        rounder = Rounder(spec.adaround, folder=folder, progress=progress, total=len(paths))
    corrections: dict[str, Correction] = {}

    def visit(this: Visit) -> None:
        if rounder is not None:
            rounder.visit(this)
        if spec.bias_correction == "empirical":
            corrections[this.path] = correct_to_targets(this, corrections.get(this.path))

    if rounder is not None or spec.bias_correction == "empirical":
        walk(qmodel, batches, visit, images=spec.adaround.images if spec.adaround else IMAGES)
    rounding = rounder.finish() if rounder is not None else ()
    rows = tuple(corrections.values())
    if spec.bias_correction == "analytic":
        rows = correct_bias_analytic(qmodel, report.prepared.moments, weights=weights)
    elif spec.bias_correction == "auto" and spec.batchnorm == "fold" and spec.reconstruct is None:
        rows = correct_bias_means(qmodel, seen, weights)
    if all_reduce and (rounding or rows or blocks):
        for tensor in (*qmodel.parameters(), *qmodel.buffers()):
            torch.distributed.broadcast(tensor.data, 0)
    report = replace(report, smoothing=smoothing, rounding=rounding, reconstruction=blocks, corrections=rows)
    attach_report(qmodel, report)
    return report
