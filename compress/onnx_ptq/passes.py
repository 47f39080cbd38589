"""Passes over batches in pieces: a few images of a batch at a time, several pieces beside each other.

The pages of one piece serve the next: new pages cost as much as a tenth of the network's run. A piece is computed by
one thread where memory allows one for each core, because threads of one run wait at each layer for the slowest. A batch
is taken apart only if that changes no result: the second image is computed twice, alone, and between two others.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from compress.engines.base import Arrays
from compress.onnx_ptq.blocked import Blocked
from compress.support.process import core_count

_PIECE, _LEAST = 1 << 26, 3
"""Bytes of results that a piece has at most, and the images that it has in any case."""
_MEMORY = 1 << 30
"""Bytes of results up to which several pieces are computed at a time."""
_AT_ONCE = 8
"""Pieces that are computed at a time at most: their statistics are drawn by one interpreter."""
_SAME = 1e-4
"""Change that other images beside it may make in an image's tensors, relative to their largest value: rounding."""

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
    at_once = min(core_count(), _AT_ONCE, max(1, _MEMORY // max(piece, 1)))
    return Plan(
        images=images if images < whole else 0,
        at_once=at_once,
        threads=core_count() // at_once if at_once > 1 else 0,
    )


def images_of(feed: Arrays) -> int:
    return next((len(value) for value in feed.values() if value.ndim), 1)


def open_batch(value: onnx.ValueInfoProto) -> bool:
    """Return True if an input takes any number of images."""
    dims = value.type.tensor_type.shape.dim
    return bool(dims) and not dims[0].HasField("dim_value")


def one_image(proto: onnx.ModelProto, feed: Arrays) -> Arrays | None:
    """Return one image of a batch; None if the file has a fixed batch, or inputs whose first dimensions differ.

    It is the second, if there are two.
    """
    given = [value for value in proto.graph.input if value.name in feed]
    names = {value.type.tensor_type.shape.dim[0].dim_param for value in given if value.type.tensor_type.shape.dim}
    if not all(open_batch(value) for value in given) or len({value.shape[:1] for value in feed.values()}) > 1:
        return None
    if len(names) > 1:
        return None
    return {name: value[:2][-1:] for name, value in feed.items()}


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
