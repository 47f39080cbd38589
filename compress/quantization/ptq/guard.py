"""Measures what the methods beyond calibration do to a network, and takes back those that make it worse.

Their harm shows as noise at the outputs on the calibration images, against the float network; plain PTQ is the
yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import ModelError, QuantizationError
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
from compress.graph.report import attach_report
from compress.quantization.calibration.calibrate import calibrating
from compress.quantization.report import DEFAULT_CALIBRATOR, Comparison, QuantizedModule, quantization_report_of
from compress.quantization.spec import QuantSpec

IMAGES = 64
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
    images: int = IMAGES,
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
