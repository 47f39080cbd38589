"""Calibration of an ONNX graph: one pass over the user's batches, with the calibrators that torch models use.

The tensors that are to be quantized are results of the float graph on ONNX Runtime; those of a few images are in memory
at a time (`passes`), and what remains of them are histograms. Ranges of weights follow from the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.engines.base import Arrays
from compress.errors import CalibrationError
from compress.onnx_ptq.passes import (
    BLOCKS,
    Blocked,
    BlockedSamples,
    BlockedSession,
    Piece,
    Plan,
    blocked_session,
    in_order,
    independent,
    one_image,
    pieces,
    plan_for,
    with_block,
)
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.source import FloatSession, SourceFile, elements, known_results
from compress.quantization import WeightSpec
from compress.quantization.calibration.calibrate import check_closed, raised_ranges
from compress.quantization.calibration.calibrators import Calibrator, HistogramCalibrator, calibrator_for
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.view import always_zero
from compress.quantization.report import CalibrationReport
from compress.support.process import core_count
from compress.support.progress import NoProgress, Progress

_TASK = "calibrate"
_THREADS = 8
"""Ranges that are chosen at a time, so that no processor waits where torch has one thread."""

_MOST_WEIGHTS = 1 << 30
"""Bytes of weights that are written beside an optimized graph."""

_PLAIN = (np.float32, np.float16)
"""Types that torch reads as they are."""

AnySession = FloatSession | BlockedSession
Parts = dict[tuple[str, str], Any]
"""Statistics of the tensors of a piece, by quantizer and tensor."""


def calibrate_graph(
    source: SourceFile,
    reading: Reading,
    placement: Placement,
    batches: Iterable[Arrays],
    *,
    total: int = 0,
    check: Callable[[Arrays], None] | None = None,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Measure the range of every quantizer of a placement; all `batches` (inputs by name) are used.

    `check` is shown the results for one image of the first batch (for all where their number is fixed) before the
    others are computed; it may refuse them. `total` batches are for `progress`; 0 = unknown.
    """
    progress = progress or NoProgress()
    watching = {site.name: calibrator_for(site.format, site.spec) for site in placement.activations}
    for site in placement.activations:
        watching[site.name].lowest = site.format.lowest
    progress.start(_TASK, total)
    images = 0
    with ThreadPoolExecutor(min(_THREADS, core_count())) as pool:
        weights = pool.submit(_weight_ranges, reading, placement)  # while the session is made
        for whole, found in _batch_statistics(source, reading, placement, watching, batches, check):
            for name, tensor in found[0]:
                parts = [part[name, tensor] for part in found if part[name, tensor] is not None]
                if parts:
                    watching[name].collect_parts(parts)
            images += whole
            progress.advance(_TASK, 1, images=images)
        progress.finish(_TASK)
        if images == 0:
            raise CalibrationError("calibration got no images: `batches` was empty; give at least one batch")
        dead = _dead(watching, reading, placement)
        check_closed(watching, dead)
        live = [name for name in watching if name not in dead]
        amax = dict.fromkeys(dead, torch.ones(()))
        amax.update(zip(live, pool.map(lambda name: _chosen(name, watching[name]), live), strict=True))
        amax.update(raised_ranges(reading.view, placement, amax))
        amax.update(weights.result())
    histograms = {name: h for name, c in watching.items() if (h := c.histogram) is not None}
    return CalibrationReport(images=images, amax=amax, histograms=histograms, dead=dead)


def _batch_statistics(
    source: SourceFile,
    reading: Reading,
    placement: Placement,
    watching: Mapping[str, Calibrator],
    batches: Iterable[Arrays],
    check: Callable[[Arrays], None] | None,
) -> Iterator[tuple[int, list[Parts]]]:
    results = known_results(source)  # so that a broken file fails here, before it is written
    given = iter(batches)
    first = next(given, None)
    if first is None:
        return
    watched = list(dict.fromkeys(tensor for site in placement.activations for tensor, _ in site.edges))
    alone = one_image(source.proto, first)
    sizes = {node.name: elements(node.shape) for node in reading.view.nodes}
    tensors, size = dict.fromkeys([*watched, *results]), 4 * sum(sizes.get(name, 0) for name in watched)
    plan = plan_for(first, size, apart=alone is not None)
    session, blocked = _sessions(source, tensors, plan, _sampled_only(placement, watching))
    few = next(pieces([first], plan.images))
    tried: list[tuple[AnySession, Arrays]] = []
    if check is not None or plan.images:
        tried.append((session, first if alone is None else alone))
    if plan.images:
        tried.append((blocked or session, few.feed))
    values = list(in_order(lambda job: job[0].run(job[1]), tried, plan.at_once))
    if check is not None:
        check(values[0])
    chosen: AnySession = session
    known: list[Mapping[str, Any] | None] = []
    if plan.images:
        found_alone = _same_alone(values[0], values[1], few.images, watched, blocked)
        if found_alone is not None:
            chosen = blocked or session
            known.append(found_alone)
        else:
            plan = plan_for(first, size, apart=False)
            chosen = FloatSession(source, tensors, threads=plan.threads)
        del found_alone
    del values, tried, session, blocked
    work = partial(_parts, chosen, placement, watching, BlockedSamples())
    jobs = zip(pieces(itertools.chain([first], given), plan.images), _and_none(known), strict=False)
    found: list[Parts] = []
    for piece, parts in in_order(work, jobs, plan.at_once):
        found.append(parts)
        if piece.ends:
            yield piece.whole, found
            found = []


def _sessions(
    source: SourceFile, tensors: Iterable[str], plan: Plan, sampled: Set[str]
) -> tuple[FloatSession, BlockedSession | None]:
    """Return a session, and a faster one where nothing but samples is drawn of some of its results."""
    weights = sum(len(tensor.raw_data) for tensor in source.proto.graph.initializer)
    if plan.images and sampled and not source.external and weights < _MOST_WEIGHTS:
        try:
            return blocked_session(source, tensors, sampled, threads=plan.threads)
        except Exception:  # ONNX Runtime has no such layout here, or its folder is full: nothing but time is lost
            pass
    return FloatSession(source, tensors, threads=plan.threads), None


def _sampled_only(placement: Placement, watching: Mapping[str, Calibrator]) -> Set[str]:
    sites = [(isinstance(watching[site.name], HistogramCalibrator), site.edges) for site in placement.activations]
    sampled = {tensor for counted, edges in sites if counted for tensor, _ in edges}
    return sampled - {tensor for counted, edges in sites if not counted for tensor, _ in edges}


def _same_alone(
    alone: Arrays, beside: Mapping[str, Any], images: int, watched: Iterable[str], blocked: BlockedSession | None
) -> Mapping[str, Any] | None:
    """Return the results for a few images if the second has them alone too, with the right block; else None."""
    for block in BLOCKS if blocked is not None else BLOCKS[:1]:
        read = with_block(beside, block)
        if independent(alone, read, images, watched):
            if blocked is not None:
                blocked.block = block
            return read
    return None


def _and_none(known: list[Mapping[str, Any] | None]) -> Iterator[Mapping[str, Any] | None]:
    """Yield what is in a list, which is emptied so that it can be freed, and then None without end."""
    while True:
        yield known.pop(0) if known else None


def _parts(
    session: AnySession,
    placement: Placement,
    watching: Mapping[str, Calibrator],
    samples: BlockedSamples,
    job: tuple[Piece, Mapping[str, Any] | None],
) -> tuple[Piece, Parts]:
    """The statistics of the tensors of a piece, the last ones first: they are still in the cache."""
    piece, known = job
    values = session.run(piece.feed) if known is None else known
    found: Parts = {}
    for site in reversed(placement.activations):
        watch = watching[site.name]
        for tensor in dict.fromkeys(tensor for tensor, _ in site.edges):
            value = values[tensor]
            start, total = 0, math.prod(value.shape)
            if piece.images < piece.whole:
                each = total // piece.images
                start, total = each * piece.start, each * piece.whole
            if total == 0:
                found[site.name, tensor] = None
            elif isinstance(value, Blocked) and isinstance(watch, HistogramCalibrator):
                signed = site.format.signed and not site.format.lowest
                sample = samples.draw(value, start=start, total=total, signed=signed)
                found[site.name, tensor] = watch.part_of(sample)
            else:
                array = np.asarray(value)
                x = torch.from_numpy(array if array.dtype in _PLAIN else array.astype(np.float32)).reshape(-1)
                found[site.name, tensor] = watch.part(x, start=start, total=total)
    return piece, found


def _weight_ranges(reading: Reading, placement: Placement) -> dict[str, Tensor]:
    parameters = {node.path: node.parameters for node in reading.view.nodes if node.path in reading.weights}
    found = {}
    for weight in placement.weights:
        value = parameters[weight.path].weight()  # type: ignore[union-attr]
        found[f"{weight.path}.weight_quantizer"] = weight_amax(weight.path, value, weight.format, weight.spec)  # type: ignore[arg-type]
    return found


def _dead(watching: Mapping[str, Calibrator], reading: Reading, placement: Placement) -> tuple[str, ...]:
    """Return the quantizers whose tensors were zero and stay zero for any image, because of the weights."""
    sites = [site for site in placement.activations if watching[site.name].only_zeros]
    zero = {node.name for node in always_zero(reading.view)} if sites else set()
    return tuple(site.name for site in sites if zero.issuperset(tensor for tensor, _ in site.edges))


def weight_amax(name: str, weight: Tensor, quant_format: QuantFormat, spec: WeightSpec) -> Tensor:
    """Return the range of a weight, () or (C,)."""
    calibrator = calibrator_for(quant_format, spec)
    calibrator.collect(weight)
    if calibrator.only_zeros:
        channels = () if quant_format.axis is None else (weight.shape[quant_format.axis],)
        return torch.ones(channels)  # zeros are exact on any grid
    return _chosen(f"{name}.weight", calibrator)


def _chosen(name: str, calibrator: Calibrator) -> Tensor:
    try:
        return calibrator.compute_amax()
    except CalibrationError as error:
        raise CalibrationError(f"{name}: {error}") from None
