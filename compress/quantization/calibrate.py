"""Calibration: run images through a model with quantizers and give every quantizer its range.

Weights are read directly. Activation quantizers watch, each with the calibrator its placement names, while the model
runs in float; nothing stays behind but `amax`. A quantizer that nothing flowed through, or whose tensor was NaN, or
zero for no reason that the weights tell (`dead`), is an error that names it: a silent scale would be worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compress.errors import CalibrationError, CompressError
from compress.graph.batches import Batches, device_of, model_inputs
from compress.graph.inputs import Inputs
from compress.progress import NoProgress, Progress
from compress.quantization.calibrators import Calibrator, choose_together, make_calibrator, on_host
from compress.quantization.dead import always_zero
from compress.quantization.float_model import check_float_model
from compress.quantization.improve import improve, needs_data_twice, smoothed
from compress.quantization.insert import insert_quantizers, placement_of, quantizers
from compress.quantization.quantizer import Quantizer
from compress.quantization.spec import ActivationSpec, QuantSpec, WeightSpec, check_quant_spec


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """What calibration saw.

    Attributes:
        images: how many, over all processes.
        amax: range by quantizer path: a float, or one a channel.
        histograms: (counts, edges) of activation magnitudes, by quantizer path, where the calibrator keeps one.
        dead: quantizers whose tensor is zero whatever the image (`dead`); they have a range of 1. Once training
            has changed that, calibrate again.
    """

    images: int
    amax: dict[str, Tensor]
    histograms: dict[str, tuple[Tensor, Tensor]]
    dead: tuple[str, ...] = ()

    @property
    def clipped(self) -> dict[str, float]:
        """Share of the values, zeros apart, beyond the range, by quantizer path; of those that have a histogram."""
        return {name: _share_beyond(*self.histograms[name], self.amax[name]) for name in self.histograms}


def _share_beyond(counts: Tensor, edges: Tensor, amax: Tensor) -> float:
    """Share of a histogram's counts, its first bin apart, in bins that begin at `amax` or above."""
    seen = counts[1:].double().cpu()
    beyond = seen[edges[1:-1].double().cpu() >= amax.max().double().cpu()].sum()
    return float(beyond / seen.sum().clamp_min(1))


def quantize(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Batches,
    *,
    spec: QuantSpec | None = None,
    progress: Progress | None = None,
) -> Any:
    """Post-training quantization: fold BatchNorm, place, insert, calibrate. Train the result and it is QAT.

    Args:
        model: any float32 module; it is not changed.
        example_inputs: what it is called with, to trace it.
        batches: calibration data, all of it is used: tensors, or (tensor, target); for a model of several inputs
            tuples that begin with all of them.
        spec: target and rules; None = `QuantSpec()`, target TensorRT.
        progress: hears of each batch.

    Returns:
        A GraphModule in evaluation mode; `.placement` is the table of decisions, `.improvements` what was done beside
        rounding to nearest (equalization, smoothing, AdaRound, bias correction), if anything was asked for.

    Raises:
        ModelError: the model cannot be traced.
        QuantizationError: nothing can be quantized, a rule matches nothing, the model is quantized already or is not
            in float32.
        CalibrationError: no batches, batches that the model fails on, NaN, or a tensor that is constant zero.
        DataError: a batch does not hold the model's inputs.
    """
    spec = spec or QuantSpec()
    check_quant_spec(spec)
    check_float_model(model)
    _check_batches(batches)
    if needs_data_twice(spec) and iter(batches) is batches:
        batches = list(batches)  # a generator runs once
    ready = smoothed(model, example_inputs, batches, spec, progress=progress)
    qmodel = insert_quantizers(ready, example_inputs, spec)
    calibrate(qmodel, batches, progress=progress)
    improve(qmodel, batches, spec, smoothing=getattr(ready, "smoothing", None), progress=progress)
    return qmodel


def calibrate(
    qmodel: nn.Module, batches: Batches, *, all_reduce: bool = False, progress: Progress | None = None
) -> CalibrationReport:
    """Measure ranges and set them.

    Args:
        qmodel: from `insert_quantizers`; on any device, batches are moved to it.
        batches: as for `quantize`; all of it is used.
        all_reduce: merge statistics over the processes of torch.distributed's default group.
        progress: hears of each batch.

    Returns:
        Ranges and histograms.

    Raises:
        QuantizationError: the model was not made by compress.
        CalibrationError: no batches, batches that the model fails on, NaN, a tensor of zeros that the weights do not
            explain, or a quantizer that never ran.
        DataError: a batch does not hold the model's inputs.
    """
    placement = placement_of(qmodel)
    _check_batches(batches)
    listener = progress or NoProgress()
    calibrate_weights(qmodel)
    activations = {site.name: cast(Quantizer, qmodel.get_submodule(site.name)) for site in placement.activations}
    watching = {site.name: _calibrator(activations[site.name], site.spec) for site in placement.activations}
    images = _watch(qmodel, activations, watching, batches, listener)
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
    return CalibrationReport(images=images, amax=amax, histograms=histograms, dead=dead)


def _dead(qmodel: nn.Module, watching: dict[str, Calibrator]) -> tuple[str, ...]:
    """Quantizers that saw zeros alone and will never see anything else, as long as the weights are what they are."""
    zeros = {name for name, calibrator in watching.items() if calibrator.only_zeros}
    if not zeros:
        return ()
    dead = always_zero(cast(fx.GraphModule, qmodel).graph)
    return tuple(str(node.target) for node in dead if node.op == "call_module" and node.target in zeros)


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
    """Run all batches with calibrators attached and weights unquantized; returns the number of images."""
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


def _check_batches(batches: Batches) -> None:
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
    """Evaluation mode, calibrators attached, weight quantizers off; all as before afterwards, also on an error."""
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
