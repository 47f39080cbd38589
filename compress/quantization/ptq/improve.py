"""The methods of `QuantSpec` beyond calibration, each switched on by itself, and their comparison with plain PTQ.

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

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import ModelError, QuantizationError
from compress.graph.canonical import canonical_graph
from compress.graph.compare import Reference, first_difference
from compress.graph.inputs import (
    Inputs,
    as_inputs,
    device_of,
    first_inputs,
    flat_tensors,
    model_inputs,
    run_with,
    shapes_text,
)
from compress.graph.ops import tensor_of
from compress.graph.report import attach_report
from compress.quantization import QuantSpec
from compress.quantization.calibration.calibrate import calibrating
from compress.quantization.ptq.bias_correction import (
    IMAGES,
    correct_bias_analytic,
    correct_bias_means,
    correct_to_targets,
)
from compress.quantization.ptq.rescaling import smooth
from compress.quantization.ptq.rounding import Rounder, reconstruct
from compress.quantization.ptq.walk import Visit, walk
from compress.quantization.report import (
    DEFAULT_CALIBRATOR,
    Comparison,
    Correction,
    QuantizationReport,
    QuantizedModule,
    Smoothing,
    quantization_report_of,
)
from compress.support.progress import Progress

COMPARED_IMAGES = 64
"""Largest number of images that are compared."""
SHAPES = 4
"""Largest number of shapes of calibration batches on which the graph is compared with the model."""
RANGE_IMAGES, RANGE_MARGIN_DB = 16, 3.0
"""The same for ranges, and the least loss that a note is for: other measures than the error cost decibels that a
classifier need not miss."""

_OFF: dict[str, Any] = {
    "relu6": "keep",
    "equalize": False,
    "smooth": None,
    "adaround": None,
    "reconstruct": None,
    "bias_correction": None,
}


_DEFAULTS = {"smooth": "auto", "bias_correction": "auto"}
"""Values that are chosen layer by layer, and so not compared."""


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


def compare_ranges(
    model: nn.Module,
    qmodel: nn.Module,
    usual: nn.Module,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    all_reduce: bool,
) -> Comparison:
    found = compare_with_plain(
        model, qmodel, usual, batches, (spec.activations.calibrator,), all_reduce=all_reduce, images=RANGE_IMAGES
    )
    return replace(found, margin_db=RANGE_MARGIN_DB)


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
