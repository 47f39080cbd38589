"""Calibration of an ONNX graph: one pass over the user's batches, with the calibrators that torch models use.

The tensors that are to be quantized are results of the float graph on ONNX Runtime. A few images of a batch are
computed at a time, several such pieces beside each other, and what remains of them are histograms. The pages of one
piece serve the next: new pages cost as much as a tenth of the network's run. A piece is computed by one thread where
memory allows one for each core, because threads of one run wait at each layer for the slowest. A batch is taken apart
only if that changes no result: the second image is computed twice, alone, and between two others.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import Arrays
from compress.errors import CalibrationError
from compress.onnx_graph import attribute, replace_nodes
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.source import (
    FloatSession,
    SourceFile,
    elements,
    images_of,
    known_results,
    one_image,
    results_of,
    session_options,
)
from compress.quantization import WeightSpec
from compress.quantization.calibration.calibrate import check_closed, raised_ranges
from compress.quantization.calibration.calibrators import Calibrator, HistogramCalibrator, calibrator_for
from compress.quantization.calibration.histogram import LOOK, Sample, drawn_places, is_sampled, largest_magnitude
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.view import always_zero
from compress.quantization.report import CalibrationReport
from compress.support.libraries import import_library
from compress.support.process import core_count
from compress.support.progress import NoProgress, Progress

# Channels of a block, with AVX-512 and without.
BLOCKS = (16, 8)

_COPY = "ReorderOutput"
# Bytes of places that are kept for the next piece of the same size.
_REMEMBERED = 1 << 28


# On x86 ONNX Runtime holds images in blocks of 8 or 16 channels, (N, C / block, H, W, block), and copies each result
# into the file's order, which takes up to a fourth of a pass. Its optimized graph has these copies as nodes; without
# them the results are the blocked tensors, of which the sample is read at other places. The layout is ONNX Runtime's
# own affair: an image is compared in both orders.
@dataclass(frozen=True, kw_only=True)
class Blocked:
    """Images in blocks of channels.

    Attributes:
        values: (N, channels filled up to whole blocks, H, W) as ONNX Runtime says; in memory (N, groups, H, W, block).
        channels: number of channels; what the last group holds beyond them means nothing.
        block: channels of a group.
    """

    values: NDArray[np.float32]
    channels: int
    block: int

    @property
    def groups(self) -> NDArray[np.float32]:
        """(N, groups, H * W, block)."""
        images, filled, height, width = self.values.shape
        return self.values.reshape(images, filled // self.block, height * width, self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file, (N, C, H, W)."""
        return (len(self.values), self.channels, *self.values.shape[2:])

    def plain(self, first: int, last: int) -> NDArray[np.float32]:
        """Return images in the order of the file, (last - first, C, H, W)."""
        images = self.groups[first:last].transpose(0, 1, 3, 2).reshape(-1, *self.values.shape[1:])
        return images[:, : self.channels]


def blocked_session(
    source: SourceFile, tensors: Iterable[str], blocked: Set[str], *, threads: int
) -> tuple[FloatSession, BlockedSession]:
    """Two sessions of a graph: results of one are in the file's order, `blocked` ones of the other need not be."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        path = Path(name) / "optimized.onnx"
        plain = FloatSession(source, tensors, threads=threads, optimized=path)
        return plain, BlockedSession(plain, path, blocked, threads=threads)


class BlockedSession:
    """A session whose optimized graph returns tensors as they are computed; the caller finds out `block`."""

    def __init__(self, plain: FloatSession, path: Path, blocked: Set[str], *, threads: int) -> None:
        ort = import_library("onnxruntime", "pip install onnxruntime")
        proto = onnx.load(path, load_external_data=False)
        makers = {name: node for node in proto.graph.node for name in node.output}
        self._given, self.block = plain.given, BLOCKS[0]
        self._channels: dict[str, tuple[str, int]] = {}
        for name in filter(blocked.__contains__, plain.computed):
            maker = makers.get(name)
            if maker is not None and maker.op_type == _COPY and not attribute(maker, "channels_last", 0):
                self._channels[name] = maker.input[0], attribute(maker, "channels", 0)
        self._names = {name: self._channels[name][0] if name in self._channels else name for name in plain.computed}
        self._results = list(dict.fromkeys(self._names.values()))
        used = {name for node in proto.graph.node for name in node.input} | set(self._results)
        nodes = [node for node in proto.graph.node if node.op_type != _COPY or node.output[0] in used]
        replace_nodes(proto.graph, nodes)
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._results)
        self._reads = {value.name for value in proto.graph.input}
        options = session_options(path.parent, threads, plain.ops)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimized already
        self._session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(self, feeds: Arrays) -> dict[str, Any]:
        by_name = results_of(self._session, self._results, {k: v for k, v in feeds.items() if k in self._reads})
        results: dict[str, Any] = {name: feeds[name] for name in self._given}
        for name, result in self._names.items():
            results[name] = by_name[result]
            if name in self._channels:
                results[name] = Blocked(values=results[name], channels=self._channels[name][1], block=self.block)
        return results


def with_block(values: Mapping[str, Any], block: int) -> dict[str, Any]:
    return {k: replace(v, block=block) if isinstance(v, Blocked) else v for k, v in values.items()}


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where the values of a sample are in a blocked tensor.

    Attributes:
        at: places of the drawn values, then of the rest.
        drawn: number of the drawn ones.
        every: values that each of them stands for.
        bounds: of each group, the first of its places and the last.
    """

    at: NDArray[np.intp]
    drawn: int
    every: int
    bounds: NDArray[np.intp]


class BlockedSamples:
    """Draws samples of blocked tensors; the places of tensors of one shape are computed once."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], _Places] = {}
        self._bytes = 0
        self._own = threading.local()

    def draw(self, tensor: Blocked, *, start: int, total: int, signed: bool = True) -> Sample:
        """Return the sample that `drawn_from` draws of the tensor in the file's order, of which `start` is its place.

        Its memory is the tensor's, or is used again by the next call of the same thread. `signed` is False if it is
        known that no value is negative.
        """
        flat = tensor.values.reshape(-1)
        if not is_sampled(total) and tensor.channels == tensor.values.shape[1]:  # all of them, in any order
            every_value = torch.from_numpy(flat)
            amax = float(largest_magnitude(flat, signed=signed))
            return Sample(amax=amax, values=every_value, rest=every_value[:0], every=1)
        places = self._places_of(tensor, start, total)
        values, found = self._memory(places.at.size), []
        for part, first, last in _stretches(tensor):
            found.append(largest_magnitude(part, signed=signed))
            a, b = places.bounds[first], places.bounds[last]
            flat.take(places.at[a:b], out=values[a:b], mode="clip")
        drawn, rest = torch.from_numpy(values).split([places.drawn, values.size - places.drawn])
        return Sample(amax=float(functools.reduce(np.maximum, found)), values=drawn, rest=rest, every=places.every)

    def _memory(self, size: int) -> NDArray[np.float32]:
        """Return memory of the thread: new pages for each sample would cost as much as to draw it."""
        memory: NDArray[np.float32] = getattr(self._own, "memory", np.empty(0, np.float32))
        if memory.size < size:
            self._own.memory = memory = np.empty(size, np.float32)
        return memory[:size]

    def _places_of(self, tensor: Blocked, start: int, total: int) -> _Places:
        key = (tensor.values.shape, tensor.channels, tensor.block, start, total)
        if key not in self._places:
            made = _places(tensor, start, total)
            if self._bytes + made.at.nbytes > _REMEMBERED:
                return made
            self._bytes += made.at.nbytes
            self._places[key] = made
        return self._places[key]


def _places(tensor: Blocked, start: int, total: int) -> _Places:
    images, groups, pixels, block = tensor.groups.shape
    channels = tensor.channels
    plain, drawn, every = drawn_places(start, images * channels * pixels, total)
    image, channel = np.divmod(np.arange(images * channels), channels)
    first = (image * groups + channel // block) * pixels * block + channel % block  # of each plane
    ends = plain.searchsorted(np.arange(images * channels + 1) * pixels)
    at = plain * block
    at += np.repeat(first - np.arange(images * channels) * pixels * block, np.diff(ends))
    planes = np.minimum(np.arange(groups) * block, channels) + np.arange(images)[:, None] * channels
    return _Places(at=at, drawn=drawn, every=every, bounds=ends[np.append(planes.reshape(-1), images * channels)])


def _stretches(tensor: Blocked) -> Iterator[tuple[NDArray[np.float32], int, int]]:
    """Yield stretches that the cache holds: (values, first group, last group), groups counted over all images."""
    # Of a group that is not full the values are the largest and the smallest of each channel.
    images, groups, pixels, block = tensor.groups.shape
    full = tensor.channels // block
    rows, step = tensor.groups.reshape(images * groups, pixels * block), max(1, LOOK // (pixels * block))
    runs = [(0, len(rows))] if full == groups else [(i * groups, i * groups + full) for i in range(images)]
    for begin, end in runs:
        for first in range(begin, end, step):
            yield rows[first : min(first + step, end)], first, min(first + step, end)
        if full < groups:
            group = rows[end].reshape(tensor.values.shape[2], -1, block)
            yield _extremes(group, tensor.channels - full * block), end, end + 1


def _extremes(group: NDArray[np.float32], channels: int) -> NDArray[np.float32]:
    """Return the largest and the smallest value of each of the first channels of a group, (H, W, block)."""
    rows = group.reshape(len(group), -1)  # long rows first, for which numpy is fast
    found = [f(f(rows, axis=0).reshape(group.shape[1:]), axis=0) for f in (np.max, np.min)]
    return np.stack(found)[:, :channels]


# Bytes of results that a piece has at most, and the images that it has in any case.
_PIECE, _LEAST = 1 << 26, 3
# Bytes of results up to which several pieces are computed at a time.
_MEMORY = 1 << 30
# Pieces that are computed at a time at most: their statistics are drawn by one interpreter.
AT_ONCE = 8
# Change that other images beside it may make in an image's tensors, relative to their largest value: rounding.
_SAME = 1e-4

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some images of a batch of `whole` images, from number `start` on."""

    feed: Arrays
    start: int
    images: int
    whole: int

    @property
    def ends(self) -> bool:
        return self.start + self.images == self.whole


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How batches are computed: images of a piece at least (0 = whole batches), pieces at a time, threads of each."""

    images: int
    at_once: int
    threads: int


def plan_for(feed: Arrays, size: int, *, apart: bool) -> Plan:
    """Return how batches like one are computed, of which `size` bytes are wanted, and which may be taken `apart`."""
    whole = images_of(feed)
    images = max(_LEAST, _PIECE * whole // size) if apart and size else whole
    piece = size * min(images, whole) // max(whole, 1)
    at_once = min(core_count(), AT_ONCE, max(1, _MEMORY // max(piece, 1)))
    return Plan(
        images=images if images < whole else 0,
        at_once=at_once,
        threads=core_count() // at_once if at_once > 1 else 0,
    )


def pieces(feeds: Iterable[Arrays], images: int) -> Iterator[Piece]:
    """Yield pieces of batches, of `images` each or a few more (0 = whole batches); the first is the largest."""
    for feed in feeds:
        whole = images_of(feed)
        number = max(1, whole // images) if images else 1
        for start, end in itertools.pairwise(whole - whole * i // number for i in range(number, -1, -1)):
            part = feed if number == 1 else {name: value[start:end] for name, value in feed.items()}
            yield Piece(feed=part, start=start, images=end - start, whole=whole)


def independent(alone: Arrays, beside: Mapping[str, Any], images: int, tensors: Iterable[str]) -> bool:
    """True if tensors of an image are the same alone and as the second of several, which may be `Blocked`."""
    return all(_is_second(alone[name], beside[name], images) for name in tensors)


def _is_second(alone: NDArray[Any], beside: NDArray[Any] | Blocked, images: int) -> bool:
    if alone.ndim == 0 or beside.shape != (len(alone) * images, *alone.shape[1:]):
        return False
    if isinstance(beside, Blocked) and beside.values.shape[1] % beside.block:
        return False
    first, last = len(alone), 2 * len(alone)
    found = beside.plain(first, last) if isinstance(beside, Blocked) else beside[first:last]
    if alone.dtype.kind != "f" or alone.size == 0:
        return np.array_equal(alone, found)
    change, largest = np.abs(alone - found).max(), np.abs(alone).max()
    return bool(change <= _SAME * largest)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> Iterator[Result]:
    """Yield the results of a function for items, in order, of `at_once` threads; as many results may wait."""
    source = iter(items)
    with ThreadPoolExecutor(at_once) as pool:
        started = deque(pool.submit(work, item) for item in itertools.islice(source, 2 * at_once))
        while started:
            yield started.popleft().result()
            started.extend(pool.submit(work, item) for item in itertools.islice(source, 1))


_TASK = "calibrate"
# Ranges that are chosen at a time, so that no processor waits where torch has one thread.
_THREADS = 8

# Bytes of weights that are written beside an optimized graph.
_MOST_WEIGHTS = 1 << 30

# Types that torch reads as they are.
_PLAIN = (np.float32, np.float16)

AnySession = FloatSession | BlockedSession
# Statistics of the tensors of a piece, by quantizer and tensor.
Parts = dict[tuple[str, str], Any]


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
    first = next(given)
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
            signed = site.format.signed and not site.format.lowest
            if total == 0:
                found[site.name, tensor] = None
            elif isinstance(value, Blocked) and isinstance(watch, HistogramCalibrator):
                sample = samples.draw(value, start=start, total=total, signed=signed)
                found[site.name, tensor] = watch.part_of(sample)
            else:
                array = np.asarray(value)
                x = torch.from_numpy(array if array.dtype in _PLAIN else array.astype(np.float32)).reshape(-1)
                found[site.name, tensor] = watch.part(x, start=start, total=total, signed=signed)
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
