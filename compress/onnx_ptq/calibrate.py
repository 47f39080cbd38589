"""Calibration of an ONNX graph: one pass over the user's batches, with the calibrators that torch models use.

The tensors that are to be quantized are results of the float graph on ONNX Runtime. Those of one batch are in memory at
a time, of two if they are small; what remains of them are histograms. Ranges of weights follow from the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.engines.base import Arrays
from compress.errors import CalibrationError
from compress.onnx_ptq.index import elements
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.run import FloatSession, in_order, known_results
from compress.process import core_count
from compress.progress import NoProgress, Progress
from compress.quantization.calibration.averages import raised_ranges
from compress.quantization.calibration.calibrators import Calibrator, make_calibrator
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.dead import always_zero
from compress.quantization.placement.decisions import ActivationSite, Placement
from compress.quantization.report import CalibrationReport
from compress.quantization.spec import ActivationSpec, WeightSpec

_TASK = "calibrate"
_THREADS = 8
"""Tensors of one batch that are counted at a time, so that no processor waits where torch has one thread."""
_MEMORY = 1 << 30
"""Bytes of watched tensors up to which two batches are computed at a time."""


def calibrate_graph(
    source: SourceFile,
    reading: Reading,
    placement: Placement,
    batches: Iterable[Arrays],
    *,
    total: int = 0,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Measure the range of every quantizer of a placement.

    Args:
        source: the float graph.
        reading: the graph that the placement is for.
        placement: the quantizers.
        batches: inputs by name; all of them are used.
        total: number of batches, for `progress`; 0 = unknown.
        progress: is informed of each batch.

    Raises:
        CalibrationError: no batches, a batch that the network fails on, NaN, or a tensor of zeros that the weights do
            not explain; the message names the tensor.
    """
    progress = progress or NoProgress()
    watching = {site.name: _calibrator(site.format, site.spec) for site in placement.activations}
    images = 0
    progress.start(_TASK, total)
    results = known_results(source.proto.graph)  # so that a broken file fails here, before it is written
    at_once = _batches_at_once(reading, placement)
    threads = core_count() // at_once if at_once > 1 else 0
    session = FloatSession(source, dict.fromkeys([*_watched_tensors(placement), *results]), threads=threads)
    with ThreadPoolExecutor(min(_THREADS, core_count())) as pool:
        for feed, values in in_order(session, batches, at_once):
            deque(pool.map(partial(_collect, watching, values), placement.activations), maxlen=0)
            del values  # so that the next batch gets this memory
            images += len(next(iter(feed.values())))
            progress.advance(_TASK, 1, images=images)
        del session  # it holds the weights of the network
        progress.finish(_TASK)
        if images == 0:
            raise CalibrationError("calibration got no images: `batches` was empty; give at least one batch")
        dead = _dead(watching, reading, placement)
        live = [name for name in watching if name not in dead]
        amax = dict.fromkeys(dead, torch.ones(()))
        amax.update(zip(live, pool.map(lambda name: _chosen(name, watching[name]), live), strict=True))
    amax.update(raised_ranges(reading.view, placement, amax))
    parameters = {node.path: node.parameters for node in reading.view.nodes if node.path in reading.weights}
    for weight in placement.weights:
        value = parameters[weight.path].weight()  # type: ignore[union-attr]
        amax[f"{weight.path}.weight_quantizer"] = weight_amax(weight.path, value, weight.format, weight.spec)  # type: ignore[arg-type]
    histograms = {name: h for name, c in watching.items() if (h := c.histogram) is not None}
    return CalibrationReport(images=images, amax=amax, histograms=histograms, dead=dead)


def _batches_at_once(reading: Reading, placement: Placement) -> int:
    """Return two where the watched tensors of two batches fit the memory, so that a core has always one to compute."""
    sizes = {node.name: elements(node.shape) for node in reading.view.nodes}
    size = sum(sizes.get(name, 0) for name in _watched_tensors(placement)) * 4
    return 2 if core_count() > 1 and 2 * size <= _MEMORY else 1


def _dead(watching: Mapping[str, Calibrator], reading: Reading, placement: Placement) -> tuple[str, ...]:
    """Return the quantizers whose tensors were zero and stay zero for any image, because of the weights."""
    zero = {node.name for node in always_zero(reading.view)}
    return tuple(
        site.name
        for site in placement.activations
        if watching[site.name].only_zeros and zero.issuperset(tensor for tensor, _ in site.edges)
    )


def _watched_tensors(placement: Placement) -> list[str]:
    """Return the tensors that calibration collects."""
    return list(dict.fromkeys(tensor for site in placement.activations for tensor, _ in site.edges))


def weight_amax(name: str, weight: Tensor, quant_format: QuantFormat, spec: WeightSpec) -> Tensor:
    """Return the range of a weight, () or (C,).

    Raises:
        CalibrationError: it holds NaN or Inf.
    """
    calibrator = _calibrator(quant_format, spec)
    calibrator.collect(weight)
    if calibrator.only_zeros:
        channels = () if quant_format.axis is None else (weight.shape[quant_format.axis],)
        return torch.ones(channels)  # zeros are exact on any grid
    return _chosen(f"{name}.weight", calibrator)


def _calibrator(quant_format: QuantFormat, spec: WeightSpec | ActivationSpec) -> Calibrator:
    return make_calibrator(
        spec.calibrator,
        num_bits=quant_format.num_bits,
        axis=quant_format.axis,
        signed=quant_format.signed,
        percentile=spec.percentile,
    )


def _collect(watching: Mapping[str, Calibrator], values: Arrays, site: ActivationSite) -> None:
    """Show a site's calibrator its tensors of one batch."""
    for tensor in dict.fromkeys(tensor for tensor, _ in site.edges):
        watching[site.name].collect(_as_tensor(values[tensor]))


def _chosen(name: str, calibrator: Calibrator) -> Tensor:
    try:
        return calibrator.compute_amax()
    except CalibrationError as error:
        raise CalibrationError(f"{name}: {error}") from None


def _as_tensor(value: Any) -> Tensor:
    array = np.asarray(value)
    return torch.from_numpy(array if array.dtype.name in {"float32", "float16"} else array.astype(np.float32))
