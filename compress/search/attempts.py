"""The points of a front that are fine-tuned, their order, and the choice among them.

Pictures without labels cannot say what fine-tuning gives back. So by latency the best uniform choice is fine-tuned
beside the best point, and the accuracy on the engine decides: nobody ends with less than a uniform width would give.
"""

from __future__ import annotations

from collections.abc import Sequence

from compress.errors import SearchError
from compress.search.front import Front, Point
from compress.search.outcome import Attempt, Bound

_DIGITS = 2
"""Errors of uniform choices that agree to so many digits are taken for the same, and the faster one is better."""

_LIKELY = 0.5
"""By drop the first point that is tried is the fastest with at most this error."""


def order(front: Front, bound: Bound) -> list[Point]:
    """Return the points to fine-tune, the most promising first.

    By latency these are the points within the bound: the most accurate one, the best uniform choice, and the others. By
    drop it is the middle of the front, and `after` halves what is left of it.

    Raises:
        SearchError: no candidate was measured.
    """
    others = sorted((p for p in front.points if p.configuration), key=lambda p: p.figures.ratio)
    if not others:
        raise SearchError(f"no candidate could be measured: {'; '.join(list(front.failed.values())[:3])}")
    rows = [point for point in front.front if point.configuration] or others[:1]  # the float network is the fastest
    if bound.latency is not None:
        within = [point for point in rows if point.figures.ratio <= bound.latency] or rows[:1]
        first, *rest = sorted(within, key=lambda point: point.figures.distance)
        uniform = _uniform(others, bound.latency)
        second = [uniform] if uniform is not None and uniform is not first else []
        return [first, *second, *(point for point in rest if point is not uniform)]
    faster = [point for point in rows if point.figures.ratio < 1] or rows[:1]
    likely = [point for point in faster if point.figures.distance <= _LIKELY] or faster[-1:]
    return [likely[0], *(point for point in faster if point is not likely[0])]


def _uniform(points: Sequence[Point], latency: float) -> Point | None:
    """The uniform choice of the least error within a latency."""
    within = [point for point in points if point.is_baseline and point.figures.ratio <= latency]
    key = lambda point: (round(point.figures.distance, _DIGITS), point.figures.ratio)  # noqa: E731
    return min(within, key=key, default=None)


def after(waiting: Sequence[Point], point: Point, made: Attempt, bound: Bound) -> list[Point]:
    """Return the points that are still worth fine-tuning after one of them was measured, the next first."""
    if bound.latency is not None:
        if bound.keeps(made):
            return [] if point.is_baseline else [p for p in waiting if p.is_baseline][:1]
        faster = [p for p in waiting if p.figures.ratio < point.figures.ratio]
        fast = [p for p in faster if p.figures.ratio < point.figures.ratio * min(1.0, bound.latency / made.ratio)]
        return sorted(fast or faster, key=lambda p: p.figures.distance)
    ahead = (
        [p for p in waiting if p.figures.ratio < point.figures.ratio]
        if bound.keeps(made)
        else [p for p in waiting if p.figures.distance < point.figures.distance]
    )
    ahead.sort(key=lambda p: p.figures.ratio)
    middle = len(ahead) // 2
    return ahead[middle : middle + 1] + ahead[:middle] + ahead[middle + 1 :]


def best(attempts: Sequence[Attempt], bound: Bound) -> Attempt | None:
    """Return the most accurate of those that keep a latency, or the fastest of those that keep a drop; None = none."""
    kept = [made for made in attempts if bound.keeps(made)]
    if bound.latency is not None:
        return min(kept, key=lambda made: (made.drop, made.ratio), default=None)
    return min(kept, key=lambda made: (made.ratio, made.drop), default=None)
