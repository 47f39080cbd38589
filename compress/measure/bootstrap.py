"""Confidence intervals of a metric, and of its difference between two networks, by a paired bootstrap over images.

Both networks are taken on the same resamples (Efron and Tibshirani, 1993, chapters 6 and 13; percentile intervals).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compress.errors import DataError
from compress.tasks.evidence import Evidence, everything

RESAMPLES = 1000
LEVEL = 0.95
_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A metric and its difference from a reference, as shares, each with the ends of its interval."""

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

    Args:
        reference: such as the float network on an engine.
        seen: the other network.
        resamples: of the images, with replacement.
        level: share of the resamples inside an interval.
        seed: of the resamples.

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
    ends = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.percentile(values, ends)
    difference_low, difference_high = np.percentile(values - references, ends)
    value, before = (float(one.values(everything(one))[0]) for one in (seen, reference))
    return Comparison(
        value=value,
        low=float(low),
        high=float(high),
        difference=value - before,
        difference_low=float(difference_low),
        difference_high=float(difference_high),
        images=images,
    )
