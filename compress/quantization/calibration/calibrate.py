"""Calibration: run images through a model with quantizers and set the range of every quantizer.

Ranges of weights follow from the weights. Activation quantizers collect statistics while the model runs in float, each
with the calibrator that its placement names; afterwards only `amax` remains. A quantizer that no tensor passed, whose
tensor held NaN, or whose tensor was zero although the weights allow other values (`placement.dead`), is an error
that names it, because a scale chosen for it would be arbitrary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor, fx, nn

from compress.errors import CalibrationError, CompressError
from compress.graph.batches import Batches, device_of, model_inputs
from compress.graph.report import attach_report
from compress.progress import NoProgress, Progress
from compress.quantization.calibration.calibrators import Calibrator, make_calibrator
from compress.quantization.calibration.together import choose_together, on_host
from compress.quantization.placement.dead import always_zero
from compress.quantization.placement.read_fx import read_fx
from compress.quantization.quantizer import Quantizer, quantizers
from compress.quantization.report import CalibrationReport, placement_of, quantization_report_of
from compress.quantization.spec import ActivationSpec, WeightSpec


def calibrate(
    qmodel: nn.Module, batches: Batches, *, all_reduce: bool = False, progress: Progress | None = None
) -> CalibrationReport:
    """Measure the ranges of a model's tensors and set them in its quantizers.

    Args:
        qmodel: from `insert_quantizers`; on any device, batches are moved to it.
        batches: calibration data as for `quantize`; all of it is used.
        all_reduce: merge statistics over the processes of torch.distributed's default group.
        progress: is informed of each batch.

    Returns:
        Ranges and histograms; also at `qmodel.report.calibration`.

    Raises:
        QuantizationError: the model was not made by compress.
        CalibrationError: no batches, batches that the model fails on, NaN, a tensor of zeros that the weights do not
            explain, or a quantizer that never ran.
        DataError: a batch does not hold the model's inputs.
    """
    report = quantization_report_of(qmodel)
    placement = report.placement
    check_batches(batches)
    calibrate_weights(qmodel)
    activations = {site.name: cast(Quantizer, qmodel.get_submodule(site.name)) for site in placement.activations}
    watching = {site.name: _calibrator(activations[site.name], site.spec) for site in placement.activations}
    images = _watch(qmodel, activations, watching, batches, progress or NoProgress())
    if all_reduce:
        total = torch.tensor([images], device=device_of(qmodel))
        torch.distributed.all_reduce(total)
        images = int(total.item())
    if images == 0:
        raise CalibrationError("calibration got no images: `batches` was empty; give at least one batch")
    if all_reduce:
        for calibrator in watching.values():
            calibrator.all_reduce()
    choose_together(watching.values())
    dead = _dead(qmodel, watching)
    for name, calibrator in watching.items():
        if name in dead:
            activations[name].set_amax(torch.ones_like(activations[name].amax))  # zeros are exact on any grid
        else:
            _set(activations[name], calibrator)
    found = dict(quantizers(qmodel))
    amax = dict(zip(found, on_host([quantizer.amax for quantizer in found.values()]), strict=True))
    histograms = {name: h for name, c in watching.items() if (h := c.histogram) is not None}
    seen = CalibrationReport(images=images, amax=amax, histograms=histograms, dead=dead)
    attach_report(cast(fx.GraphModule, qmodel), replace(report, calibration=seen))
    return seen


def _dead(qmodel: nn.Module, watching: dict[str, Calibrator]) -> tuple[str, ...]:
    """Return the quantizers whose tensor was zero and stays zero for any image, because of the weights."""
    zeros = {name for name, calibrator in watching.items() if calibrator.only_zeros}
    if not zeros:
        return ()
    dead = always_zero(read_fx(cast(fx.GraphModule, qmodel)))
    return tuple(node.path for node in dead if node.path in zeros)


def calibrate_weights(qmodel: nn.Module) -> None:
    """Set the ranges of all weight quantizers from the weights as they are now.

    Raises:
        CalibrationError: a weight holds NaN.
    """
    watching: dict[Quantizer, Calibrator] = {}
    for site in placement_of(qmodel).weights:
        layer = qmodel.get_submodule(site.path)
        quantizer = cast(Quantizer, layer.weight_quantizer)
        watching[quantizer] = _calibrator(quantizer, site.spec)
        watching[quantizer].collect(cast(Tensor, layer.weight).detach())
        if site.spec.calibrator != "max":  # histograms of all channels of all layers would be too much at a time
            _set_weights(watching)
            watching = {}
    _set_weights(watching)


def _set_weights(watching: dict[Quantizer, Calibrator]) -> None:
    choose_together(watching.values())
    for quantizer, calibrator in watching.items():
        if calibrator.only_zeros:
            quantizer.set_amax(torch.ones_like(quantizer.amax))  # zeros are exact on any grid
        else:
            _set(quantizer, calibrator)


def _calibrator(quantizer: Quantizer, spec: WeightSpec | ActivationSpec) -> Calibrator:
    f = quantizer.format
    return make_calibrator(
        spec.calibrator, num_bits=f.num_bits, axis=f.axis, signed=f.signed, percentile=spec.percentile
    )


def _set(quantizer: Quantizer, calibrator: Calibrator) -> None:
    try:
        quantizer.set_amax(calibrator.compute_amax().to(quantizer.amax.dtype))
    except CalibrationError as error:
        text = str(error)
        raise CalibrationError(text if quantizer.name in text else f"{quantizer.name}: {text}") from None


def _watch(
    qmodel: nn.Module,
    activations: dict[str, Quantizer],
    watching: dict[str, Calibrator],
    batches: Batches,
    progress: Progress,
) -> int:
    """Run all batches with calibrators attached and weights unquantized; return the number of images."""
    images, task = 0, "calibrate"
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        return 0
    total = len(batches) if isinstance(batches, Sized) else 0
    progress.start(task, total)
    with torch.no_grad(), _calibrating(qmodel, activations, watching):
        for batch in chain([first], iterator):
            inputs = model_inputs(qmodel, batch)
            _run(qmodel, inputs)
            images += len(inputs[0])
            progress.advance(task, 1, images=images)
    progress.finish(task)
    return images


def check_batches(batches: Batches) -> None:
    """Refuse calibration data that are no iterable of batches.

    Raises:
        CalibrationError: says what was got.
    """
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}: give an iterable of batches, such as a DataLoader or [batch]"
        )


def _run(qmodel: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    try:
        qmodel(*inputs)
    except CompressError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)
        reason = str(error).strip().partition("\n")[0]
        raise CalibrationError(
            f"the model fails on a calibration batch of {shapes} ({reason}); give batches of the type and the channels "
            "of example_inputs"
        ) from error


@contextmanager
def _calibrating(
    qmodel: nn.Module, activations: dict[str, Quantizer], watching: dict[str, Calibrator]
) -> Iterator[None]:
    """Attach calibrators, in evaluation mode and without quantizing; restore everything afterwards."""
    training = qmodel.training
    states = {name: quantizer.enabled for name, quantizer in quantizers(qmodel)}
    qmodel.eval()
    try:
        for name, quantizer in quantizers(qmodel):
            quantizer.enabled = False
            quantizer.calibrator = watching.get(name)
        yield
    finally:
        for name, quantizer in quantizers(qmodel):
            quantizer.enabled = states[name]
            quantizer.calibrator = None
        qmodel.train(training)
