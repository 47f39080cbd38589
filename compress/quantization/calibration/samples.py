"""Samples of tensors on a CPU, where counting every value would take as long as the network itself.

Of each stretch of neighbours one value is drawn, by the same random numbers for every tensor, so that the samples of
parts make the sample of the whole. The largest magnitude is always that of all values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOOK = 1 << 18
"""Elements that are searched for the largest, and then sampled while the cache holds them."""

_SAMPLED, _THINNEST = 1 << 17, 13
"""Values of a whole tensor that are counted at least, and one value in so many that is counted at least, on a CPU."""
_STRATA = 2503
"""Stretches after which the random numbers of the sample repeat: a prime, which no image width divides."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An evenly spread sample of a tensor on the CPU.

    Attributes:
        amax: largest magnitude of all values of the tensor or stretch; NaN where there is one.
        values: (n,), each of which counts for `every` values of the tensor.
        rest: (m,), which count once.
        every: 1 where all values are in the sample.
    """

    amax: float
    values: Tensor
    rest: Tensor
    every: int

    def copied(self) -> Sample:
        """A copy, made by one thread: torch's own threads would wait for those that compute."""
        values, rest = (torch.from_numpy(part.numpy().copy()) for part in (self.values, self.rest))
        return replace(self, values=values, rest=rest)


def drawn_from(values: Tensor, *, start: int = 0, total: int | None = None) -> Sample:
    """Sample (n,) values from place `start` of a tensor of `total` (None = n), and find the largest magnitude.

    No column or channel is preferred. The samples of all stretches of a tensor together are the tensor's.
    """
    numbers = values.float().numpy()  # whose operations begin sooner than those of torch, and use one thread
    total = numbers.size if total is None else total
    every = _every(total)
    if every < 2:
        largest_of_all = float(largest_magnitude(numbers))
        return Sample(
            amax=largest_of_all, values=torch.from_numpy(numbers), rest=torch.from_numpy(numbers[:0]), every=1
        )
    place, period = _places(every), _STRATA * every
    end = min(max(total // period * period - start, 0), numbers.size)  # what comes after it counts as it is
    head = min(-start % period, end)
    tail = head + (end - head) // period * period
    before, after = _inside(place, start % period, head), _inside(place, 0, end - tail)
    drawn = np.empty(before.size + (tail - head) // every + after.size, np.float32)
    numbers[:head].take(before, out=drawn[: before.size], mode="clip")
    numbers[tail:end].take(after, out=drawn[drawn.size - after.size :], mode="clip")
    largest = [largest_magnitude(part) for part in (numbers[:head], numbers[tail:]) if part.size]
    rows, result = numbers[head:tail].reshape(-1, period), drawn[before.size : drawn.size - after.size]
    for i in range(0, len(rows), step := max(1, LOOK // period)):
        part = rows[i : i + step]
        largest.append(largest_magnitude(part))
        part.take(place, axis=1, out=result[i * _STRATA : (i + step) * _STRATA].reshape(-1, _STRATA), mode="clip")
    drawn_values, rest = (torch.from_numpy(part) for part in (drawn, numbers[end:]))
    return Sample(amax=float(np.max(largest)), values=drawn_values, rest=rest, every=every)


def largest_magnitude(numbers: NDArray[np.float32], *, signed: bool = True) -> np.float32:
    """The largest magnitude, NaN where there is one; `signed` is False if none is negative."""
    found: np.float32 = np.maximum(numbers.max(), -numbers.min()) if signed else numbers.max()
    return found


def is_sampled(total: int) -> bool:
    """True if not all values of a tensor of `total` values are in its sample."""
    return _every(total) > 1


def drawn_places(start: int, size: int, total: int) -> tuple[NDArray[np.intp], int, int]:
    """The places in a stretch that `drawn_from` takes, for a tensor that is held in another order.

    Returns:
        Those of `Sample.values` and then those of `Sample.rest`; the number of the former; `Sample.every`.
    """
    every = _every(total)
    if every < 2:
        return np.arange(size), size, 1
    period = _STRATA * every
    end = min(max(total // period * period - start, 0), size)
    periods = np.arange(start // period, -(-(start + end) // period))
    places = (periods[:, None] * period + _places(every)).reshape(-1) - start
    drawn = places[slice(*places.searchsorted((0, end)))]
    return np.concatenate([drawn, np.arange(end, size)]), drawn.size, every


def _every(total: int) -> int:
    return min(_THINNEST, total // _SAMPLED)


def _inside(place: NDArray[np.intp], start: int, number: int) -> NDArray[np.intp]:
    """The drawn places of a stretch of one period that begins at `start`, counted from there."""
    first, last = place.searchsorted((start, start + number))
    return place[first:last] - start


@functools.cache
def _places(every: int) -> NDArray[np.intp]:
    """The places that are drawn from each `every` * _STRATA values."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(0, _STRATA * every, every) + torch.randint(every, (_STRATA,), generator=generator)
    return place.numpy().astype(np.intp)
