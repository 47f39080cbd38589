"""Confidence intervals of a metric, and of its difference between two networks, by a paired bootstrap over images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from compress.errors import DataError
from compress.tasks.base import Evidence, Hits, everything

RESAMPLES = 1000
LEVEL = 0.95
_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A metric and its difference from a reference, as shares with the ends of their intervals."""

    value: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float
    images: int

    @property
    def measurable(self) -> bool:
        """True if the interval of the difference leaves out zero."""
        return self.difference_low > 0 or self.difference_high < 0


def compare_evidence(
    reference: Evidence, seen: Evidence, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Comparison:
    """Compare a network with a reference on the same images.

    Percentile bootstrap (Efron and Tibshirani, 1993, chapters 6 and 13), with replacement; `level` is the share of the
    resamples inside an interval. Shares of right answers use exact bounds where few images differ (Clopper and Pearson,
    1934; the sign test).

    Raises:
        DataError: the two have seen different numbers of images, or none.
    """
    images = len(seen)
    if not images or len(reference) != images:
        raise DataError(f"{len(reference)} and {images} images cannot be compared in pairs")
    generator = np.random.default_rng(seed)
    draws = []
    for first in range(0, resamples, _AT_ONCE):
        count = min(_AT_ONCE, resamples - first)
        weights = generator.multinomial(images, np.full(images, 1 / images), size=count)
        draws.append((seen.values(weights), reference.values(weights)))
    values, references = (np.concatenate(part) for part in zip(*draws, strict=True))
    percents = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.percentile(values, percents)
    difference_low, difference_high = np.percentile(values - references, percents)
    value, before = (float(one.values(everything(one))[0]) for one in (seen, reference))
    ends, difference_ends = (float(low), float(high)), (float(difference_low), float(difference_high))
    if isinstance(seen, Hits) and isinstance(reference, Hits):
        ends = share_interval(int(seen.right().sum()), images, level=level)
        difference_ends = _difference_of_hits(reference, seen, difference_ends, level)
    else:  # where no resample differs, an image which does is not among them
        unseen = share_interval(0, images, level=level)[1]
        if difference_ends[0] == difference_ends[1]:
            difference_ends = (difference_ends[0] - unseen, difference_ends[1] + unseen)
        if ends[0] == ends[1] and 0 <= value <= 1:
            ends = max(value - unseen, 0.0), min(value + unseen, 1.0)
    return Comparison(
        value=value,
        low=ends[0],
        high=ends[1],
        difference=value - before,
        difference_low=difference_ends[0],
        difference_high=difference_ends[1],
        images=images,
    )


def share_interval(found: int, images: int, *, level: float = LEVEL) -> tuple[float, float]:
    """The exact ends of the interval of a share of which `found` of `images` were seen (Clopper and Pearson).

    >>> low, high = share_interval(0, 45)
    >>> f"{low:.4f} to {high:.4f}"
    '0.0000 to 0.0787'
    """
    tail = (1 - level) / 2
    low = float(betaincinv(found, images - found + 1, tail)) if found else 0.0
    high = float(betaincinv(found + 1, images - found, 1 - tail)) if found < images else 1.0
    return low, high


def _difference_of_hits(reference: Hits, seen: Hits, drawn: tuple[float, float], level: float) -> tuple[float, float]:
    """The interval of a difference of two shares of right answers; `drawn` is the bootstrap's."""
    right, before = seen.right(), reference.right()
    gained, lost, images = int((right & ~before).sum()), int((before & ~right).sum()), len(right)
    differ = gained + lost
    if 2 * 0.5**differ > 1 - level:  # the sign test could not tell them apart, were all of these on one side
        return -share_interval(lost, images, level=level)[1], share_interval(gained, images, level=level)[1]
    signs = [(2 * end - 1) * differ / images for end in share_interval(gained, differ, level=level)]
    return min(drawn[0], signs[0]), max(drawn[1], signs[1])
