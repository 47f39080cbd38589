"""Calibration: run images through a model with quantizers and set the range of every quantizer.

Ranges of weights follow from the weights. Activation quantizers collect statistics while the model runs in float. A
quantizer that no tensor passed, whose tensor held NaN, or whose tensor was zero although the weights allow other values
(`always_zero`), is an error that names it, because a scale chosen for it would be arbitrary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import length_hint
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.errors import CalibrationError, CompressWarning, DeadTensorError, first_few
from compress.graph.compare import alone
from compress.graph.inputs import Batches, device_of, model_inputs, run_batch, size_remark
from compress.graph.ops import AVERAGES, Watching, tensor_of
from compress.graph.report import attach_report
from compress.quantization.calibration.calibrators import (
    Calibrator,
    HistogramCalibrator,
    all_reduce_together,
    calibrator_for,
)
from compress.quantization.calibration.histogram import Histogram
from compress.quantization.numerics import amax_from_scale, scale_from_amax
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.insert import read_fx
from compress.quantization.placement.view import GraphView, Node, always_zero
from compress.quantization.quantizer import Collector, Quantizer, quantizers, switched_off, weight_quantizer_of
from compress.quantization.report import CalibrationReport, placement_of, quantization_report_of, quantized_graph
from compress.support.progress import NoProgress, Progress


@alone
def calibrate(
    qmodel: nn.Module,
    batches: Batches,
    *,
    also: Sequence[nn.Module] = (),
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Measure the ranges of a model's tensors and set them in its quantizers.

    Args:
        qmodel: from `insert_quantizers`; on any device, batches are moved to it.
        batches: calibration data as for `quantize`; all of it is used.
        also: the same float model with quantizers for other targets, calibrated in the same pass; a tensor of several
            is counted once.
        all_reduce: merge statistics over torch.distributed's default group.
        progress: is informed of each batch.

    Returns:
        Ranges and histograms of `qmodel`; also at `qmodel.report.calibration`, those of the others at theirs.

    Raises:
        QuantizationError: the model was not made by compress.
        CalibrationError: no batches, batches that the model fails on, NaN, unexplained zeros, or a quantizer that never
            ran.
        DataError: a batch does not hold the model's inputs.

    Examples:
        >>> qmodel = compress.insert_quantizers(model, images[:1], compress.QuantSpec(target="openvino"))
        >>> compress.calibrate(qmodel, batches).images
        16
    """
    check_batches(batches)
    first, *others = (_Network(model) for model in (qmodel, *also))
    images = _watch(first, others, batches, progress or NoProgress(), all_reduce=all_reduce)
    if images == 0:
        raise CalibrationError("calibration got no images: `batches` was empty; give at least one batch")
    for network in others:
        network.set_ranges(images)
    return first.set_ranges(images)


class _Network:
    def __init__(self, qmodel: nn.Module) -> None:
        self.model = quantized_graph(qmodel)
        self.report = quantization_report_of(qmodel)
        self.weights = _weight_calibrators(qmodel)
        choose_together(self.weights.values())
        sites = self.report.placement.activations
        found = dict(quantizers(qmodel))
        self.activations = {site.name: found[site.name] for site in sites}
        self.watching = {site.name: calibrator_for(self.activations[site.name].format, site.spec) for site in sites}
        self.tensors = {site.name: frozenset(tensor for tensor, _ in site.edges) for site in sites}

    def prepare(self) -> None:
        """Do what needs no statistics of images: a GPU still computes meanwhile."""
        _set_weights(self.weights)
        self.view = read_fx(self.model)

    def set_ranges(self, images: int) -> CalibrationReport:
        choose_together(self.watching.values())
        dead = _dead(self.view, self.watching)
        check_closed(self.watching, dead)
        for name, calibrator in self.watching.items():
            quantizer = self.activations[name]
            if name in dead:
                quantizer.set_amax(torch.ones_like(quantizer.amax))  # zeros are exact on any grid
            else:
                _set(quantizer, calibrator)
        ranges = {name: quantizer.amax for name, quantizer in self.activations.items()}
        for name, raised in raised_ranges(self.view, self.report.placement, ranges).items():
            self.activations[name].set_amax(raised)
        found = dict(quantizers(self.model))
        amax = dict(zip(found, on_host([quantizer.amax for quantizer in found.values()]), strict=True))
        seen = CalibrationReport(images=images, amax=amax, histograms=_histograms(self.watching), dead=dead)
        attach_report(self.model, replace(self.report, calibration=seen))
        return seen


def _histograms(watching: Mapping[str, Calibrator]) -> dict[str, tuple[Tensor, Tensor]]:
    found = {name: c for name, c in watching.items() if isinstance(c, HistogramCalibrator) and c.seen}
    tables = [cast(Histogram, c._counted) for c in found.values()]
    counts, widths = on_host([table.counts for table in tables]), on_host([table.width for table in tables])
    return {
        name: calibrator.histogram_of(replace(table, counts=own, width=width))
        for (name, calibrator), table, own, width in zip(found.items(), tables, counts, widths, strict=True)
    }


def _dead(view: GraphView, watching: dict[str, Calibrator]) -> tuple[str, ...]:
    """The quantizers whose tensor was zero and stays zero for any image, because of the weights."""
    zeros = {name for name, calibrator in watching.items() if calibrator.only_zeros}
    if not zeros:
        return ()
    return tuple(node.path for node in always_zero(view) if node.path in zeros)


def check_closed(watching: Mapping[str, Calibrator], dead: Collection[str]) -> None:
    """Refuse tensors with infinity, and of zeros that the weights do not explain if all were seen (DeadTensorError)."""
    closed = [name for name, calibrator in watching.items() if calibrator.only_zeros and name not in dead]
    if closed and all(watching[name].seen for name in closed):
        raise DeadTensorError(closed)
    masked = [name for name, calibrator in watching.items() if calibrator.infinite]
    if masked:
        raise DeadTensorError(masked, infinite=True)


def take_ranges(qmodel: nn.Module, seen: CalibrationReport) -> None:
    """Set ranges measured on another network of the same float model and placement; in place."""
    for name, quantizer in quantizers(qmodel):
        quantizer.set_amax(seen.amax[name].to(quantizer.amax.device))
    attach_report(quantized_graph(qmodel), replace(quantization_report_of(qmodel), calibration=seen))


def _weight_calibrators(qmodel: nn.Module) -> dict[Quantizer, Calibrator]:
    """Calibrators that have seen the weights, of quantizers whose range is not set yet: those that clip nothing."""
    # The others set their ranges now: histograms of all channels of all layers would be too much at a time.
    found: dict[Quantizer, Calibrator] = {}
    for site in placement_of(qmodel).weights:
        layer = qmodel.get_submodule(site.path)
        quantizer = weight_quantizer_of(layer)
        calibrator = calibrator_for(quantizer.format, site.spec)
        calibrator.collect(tensor_of(layer).detach())
        if site.spec.calibrator == "max":
            found[quantizer] = calibrator
        else:
            choose_together([calibrator])
            _set_weights({quantizer: calibrator})
    return found


def _set_weights(watching: Mapping[Quantizer, Calibrator]) -> None:
    zeros = [quantizer for quantizer, calibrator in watching.items() if calibrator.only_zeros]
    for quantizer, calibrator in watching.items():
        if quantizer in zeros:
            quantizer.set_amax(torch.ones_like(quantizer.amax))  # zeros are exact on any grid
        else:
            _set(quantizer, calibrator)
    if zeros:
        warnings.warn(
            f"{first_few(quantizer.name for quantizer in zeros)}: all weights are zero, so their range is 1, which is "
            "coarse for small weights: if they are trained (LoRA begins so), train some steps in float first",
            CompressWarning,
            stacklevel=2,
        )


def _set(quantizer: Quantizer, calibrator: Calibrator) -> None:
    try:
        quantizer.set_amax(calibrator.compute_amax().to(quantizer.amax.dtype))
    except CalibrationError as error:
        text = str(error)
        raise CalibrationError(text if quantizer.name in text else f"{quantizer.name}: {text}") from None


def _watch(
    first: _Network, others: Sequence[_Network], batches: Batches, progress: Progress, *, all_reduce: bool
) -> int:
    """Run all batches through the first network, unquantized, with the calibrators of all; return the images."""
    images, task = 0, "calibrate"
    iterator = iter(batches)
    first_batch = next(iterator, None)
    further, shared = _shared(first, others)
    if first_batch is not None:
        progress.start(task, length_hint(batches))

        def show(name: str, value: Tensor) -> None:
            for calibrator in further[name]:
                calibrator.collect(value)

        network = Watching(first.model, further, show).run if further else first.model
        with torch.no_grad(), calibrating(first.model, first.watching):
            for batch in chain([first_batch], iterator):
                inputs = model_inputs(first.model, batch)
                run_batch(network, tuple(inputs), remark=size_remark(first.model))
                images += len(inputs[0])
                progress.advance(task, 1, images=images)
        progress.finish(task)
    for measured in (first, *others):
        measured.prepare()
    if all_reduce:
        images = _all_reduced(first, others, shared, images)
    for own, same in shared:
        own.take(same)
    return images


def _all_reduced(
    first: _Network, others: Sequence[_Network], shared: Sequence[tuple[Calibrator, Calibrator]], images: int
) -> int:
    total = torch.tensor([images], device=device_of(first.model))
    torch.distributed.all_reduce(total)
    if total.item():
        takers = {id(own) for own, _ in shared}
        every = chain(*(network.watching.values() for network in (first, *others)))
        all_reduce_together([calibrator for calibrator in every if id(calibrator) not in takers])
    return int(total.item())


def _shared(
    first: _Network, others: Sequence[_Network]
) -> tuple[dict[str, list[Calibrator]], list[tuple[Calibrator, Calibrator]]]:
    """Those that must see tensors of their own, by node; and pairs of a calibrator with one that counts the same."""
    further: dict[str, list[Calibrator]] = {}
    shared: list[tuple[Calibrator, Calibrator]] = []
    known: dict[tuple[frozenset[str], str], Calibrator] = {}
    for network in (first, *others):
        for name, calibrator in network.watching.items():
            same = known.setdefault((network.tensors[name], calibrator.statistics), calibrator)
            if same is calibrator and network is not first:
                for tensor in network.tensors[name]:
                    further.setdefault(tensor, []).append(calibrator)
            elif same is not calibrator and network is not first:
                shared.append((calibrator, same))
    return further, shared


def check_batches(batches: Batches) -> None:
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}: give an iterable of batches, such as a DataLoader or [batch]"
        )


@contextmanager
def calibrating(qmodel: nn.Module, watching: Mapping[str, Collector]) -> Iterator[None]:
    """Attach calibrators, in evaluation mode and without quantizing; restore everything afterwards."""
    training, found = qmodel.training, dict(quantizers(qmodel))
    qmodel.eval()
    try:
        with switched_off(found.values()):
            for name, quantizer in found.items():
                quantizer.calibrator = watching.get(name)
            yield
    finally:
        for quantizer in found.values():
            quantizer.calibrator = None
        qmodel.train(training)


def raised_ranges(view: GraphView, placement: Placement, amax: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ranges of averages over an image that have to be larger, by quantizer.

    A mean of n integers is a multiple of 1/n, so that a step below 1/n of the input's adds nothing. Such ranges come
    from tensors that are zero but for rounding; ONNX Runtime refuses files whose steps lie further apart, at their
    first run. `view` is of the graph that the placement is for, `amax` the range of each activation quantizer.
    """
    nodes = {node.name: node for node in view.nodes}
    of_tensor = {tensor: site for site in placement.activations for tensor, _ in site.edges}
    before = {consumer: (tensor, site) for site in placement.activations for tensor, consumer in site.edges}
    found: dict[str, Tensor] = {}
    for node in view.nodes:  # in graph order: the input of an average may be an average
        consumer = node
        while consumer.name not in before and consumer.inputs and consumer.inputs[0].kind == "identity":
            consumer = consumer.inputs[0]  # files leave it out
        if node.kind not in AVERAGES or node.name not in of_tensor or consumer.name not in before:
            continue
        tensor, given = before[consumer.name]
        most, own = _values(node, nodes[tensor]), of_tensor[node.name]
        step = scale_from_amax(found.get(given.name, amax[given.name]), given.format).max() / most
        least = float(amax_from_scale(step, own.format))
        if float(amax[own.name].max()) < least:
            found[own.name] = amax[own.name].clamp_min(least)
    return found


def _values(node: Node, before: Node) -> int:
    """How many values one element of an average is the mean of, at most."""
    whole, kept = math.prod(before.shape or ()), math.prod(node.shape or ())
    return max(1, whole // max(kept, 1)) if node.kind == "mean" else math.prod((before.shape or ())[2:])


def choose_together(calibrators: Iterable[Calibrator]) -> None:
    """Prepare `compute_amax` of many calibrators with statistics on GPUs; on a CPU each chooses by itself.

    All statistics are read at once, and calibrators of one kind choose their ranges at once.
    """
    found = [(c, largest) for c in calibrators if (largest := c._largest()) is not None]
    found = [(calibrator, largest) for calibrator, largest in found if largest.device.type != "cpu"]
    alike: dict[Any, list[HistogramCalibrator]] = {}
    copies = on_host([largest for _, largest in found])
    for (calibrator, largest), copy in zip(found, copies, strict=True):
        calibrator._read = copy
        if isinstance(calibrator, HistogramCalibrator) and calibrator.axis is None:
            choice = calibrator.choice
            alike.setdefault((choice.func, *choice.keywords.items(), largest.device), []).append(calibrator)
    for group in alike.values():
        together([cast(Histogram, calibrator._counted) for calibrator in group], group)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of small tensors of one type on the CPU, waiting for each device once."""
    found: dict[int, Tensor] = {}
    for device in {tensor.device for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in places]).cpu()
        parts = flat.split([tensors[i].numel() for i in places])
        found.update({i: part.reshape(tensors[i].shape).clone() for i, part in zip(places, parts, strict=True)})
    return [found[i] for i in range(len(tensors))]


def together(histograms: Sequence[Histogram], group: Sequence[HistogramCalibrator]) -> None:
    counts = torch.cat([h.counts for h in histograms])
    chosen = group[0].choice(counts, torch.cat([h.width for h in histograms]).nan_to_num()).cpu()
    for calibrator, own in zip(group, chosen.split(1), strict=True):
        calibrator._chosen = own
