"""Measured candidates, their Pareto front, the bound, the points that were fine-tuned in turn, and the choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from compress.errors import SearchError
from compress.measure.latency import NOT_MEASURED
from compress.search.accuracy_model import AccuracyModel
from compress.search.lab import Figures, Lab, build, with_formats
from compress.search.latency_model import Check, check, rank_correlation
from compress.search.space import Configuration, Otherwise, key_of, otherwise
from compress.search.timing import Timed
from compress.support.meters import TaskMetric, amount_of
from compress.support.text import scored, signed
from compress.variants import Variant

FLOAT_POINT, START = "float", "start"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A configuration and what was measured of it.

    Attributes:
        label: `float`, `width 0.5`, `trial 17`, ...
        predicted_ratio: over float's time, by a model not fitted to it.
        predicted_distance: by the accuracy model.
    """

    label: str
    configuration: Configuration
    figures: Figures
    predicted_ratio: float
    predicted_distance: float

    @property
    def is_baseline(self) -> bool:
        return not self.label.startswith((START, "trial"))


@dataclass(frozen=True, kw_only=True)
class Front:
    """The result of a search.

    Attributes:
        lab: with which its networks are built.
        points: all that were measured, the float network first.
        chosen: keeps the bound, before fine-tuning; None without a bound.
        timed: the latency model and its check.
        failed: configurations that could not be built or run, with the reason.
        notes: sentences for the user.

    Examples:
        >>> front = compress.search(model, images, batches, latency=0.5)  # doctest: +SKIP
        >>> network = front.network(front.chosen)  # doctest: +SKIP
    """

    lab: Lab
    points: tuple[Point, ...]
    chosen: Point | None
    timed: Timed
    accuracy: AccuracyModel
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def front(self) -> tuple[Point, ...]:
        """Points that no other beats, fastest first."""
        return pareto(self.points)

    def network(self, point: Point) -> nn.Module:
        """A point's float network as measured: pruned and reconstructed."""
        return build(self.lab, point.configuration)

    def quantized(self, point: Point, network: nn.Module | None = None) -> nn.Module:
        """The network of a point, or `network`, with its formats."""
        return with_formats(self.lab, network or self.network(point), point.configuration)

    def otherwise(self, point: Point) -> tuple[Otherwise, ...]:
        """Predicted effects of the neighbouring choices of each element."""
        lab = self.lab
        return otherwise(
            lab.space, self.accuracy.distance, lambda c: self.timed.model.predict(lab.costs.of(c)), point.configuration
        )

    def accuracy_check(self) -> float:
        """Rank correlation of the accuracy model with measured distance."""
        rows = [point for point in self.points if point.configuration]
        measured = [point.figures.distance for point in rows]
        return rank_correlation([self.accuracy.predict(point.configuration) for point in rows], measured)

    @property
    def latency_check(self) -> Check:
        """Of the latency model before the trials, on unseen networks."""
        return self.timed.check

    @property
    def candidate_check(self) -> Check:
        """Predictions for candidates, each by a model not fitted to it."""
        rows = [p for p in self.points if p.configuration]
        return check([p.predicted_ratio for p in rows], [p.figures.ratio for p in rows])

    @property
    def repeat_check(self) -> Check:
        """Two measurements of the same networks; no prediction can be closer."""
        samples = self.timed.samples
        rows = [
            (samples[key].time, p.figures.ratio) for p in self.points if (key := key_of(p.configuration)) in samples
        ]
        return check([first for first, _ in rows], [second for _, second in rows])


def pareto(points: Iterable[Point]) -> tuple[Point, ...]:
    """Points that no other beats in time and distance, fastest first.

    >>> pareto([])
    ()
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.figures.ratio, p.figures.distance)):
        if not found or point.figures.distance < found[-1].figures.distance:
            found.append(point)
    return tuple(found)


def choose(points: Iterable[Point], *, latency: float | None = None, max_drop: float | None = None) -> Point:
    """The least distance within a time, or the fastest of those that lose little agreement.

    `latency` is in float's times, `max_drop` in percent points of held-out images.
    """
    front = pareto(points)
    if latency is not None:
        within = [point for point in front if point.figures.ratio <= latency]
        if not within:
            fastest = front[0]
            raise SearchError(
                f"latency {latency:g} cannot be met: the fastest network found, {fastest.label}, takes "
                f"{fastest.figures.ratio:.3f} of the float network's time; ask for that or more, or allow more in "
                "the recipe's `search` section (smaller widths, blocks, formats)"
            )
        return min(within, key=lambda point: point.figures.distance)
    near = [point for point in front if lost(point) <= float(max_drop or 0.0) + 1e-9]
    if not near:
        best = min(front, key=lambda point: (lost(point), point.figures.ratio))
        raise SearchError(
            f"max_drop {max_drop:g} cannot be met: the best network found, {best.label}, loses {lost(best):.2f} points "
            f"at {best.figures.ratio:.3f} of the float network's time; ask for more"
        )
    return min(near, key=lambda point: point.figures.ratio)


def lost(point: Point) -> float:
    if point.figures.agreement is None:
        raise SearchError("max_drop compares classes, and the network's outputs are no logits; ask for a latency")
    return 100 * (1 - point.figures.agreement)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A fine-tuned and measured network.

    Attributes:
        variant: its best on the engine.
        score: metric on the engine, whole split.
        drop: points lost there.
        unquiet: why the ratio is not to be reported, or ""; bounds are judged by it all the same.
    """

    label: str
    folder: str
    variant: str
    file: str
    ms: float
    ratio: float
    score: float
    drop: float
    unquiet: str = ""

    def ratio_text(self, digits: int = 3) -> str:
        """Return the ratio in words, none of a busy machine."""
        return NOT_MEASURED if self.unquiet else f"{self.ratio:.{digits}f}"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Largest share of float's time, or most points lost."""

    latency: float | None = None
    max_drop: float | None = None
    unit: str = "%"

    def keeps(self, made: Attempt) -> bool:
        if self.latency is not None:
            return made.ratio <= self.latency
        return made.drop <= float(self.max_drop or 0.0) + 1e-9

    @property
    def words(self) -> str:
        if self.latency is not None:
            return f"at most {self.latency:g} of the float network's latency"
        return " ".join(f"at most {self.max_drop:g} {amount_of(self.unit)} lost".split())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a search with its fine-tuned networks.

    Attributes:
        scores: the metric on the engine before fine-tuning, by label of the point; `float` among them.
        chosen: the best that keeps the bound, or None.
        images: of the evaluation split that `scores` were measured on.
    """

    bound: Bound
    front: Front
    metric: TaskMetric
    scores: Mapping[str, float]
    attempts: tuple[Attempt, ...]
    chosen: Attempt | None
    images: int
    folder: Path
    labels: Mapping[str, Point] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", {point.label: point for point in self.front.points})

    @property
    def point(self) -> Point:
        return self.labels[self.chosen.label] if self.chosen is not None else self.front.front[0]

    @property
    def advice(self) -> str:
        made, metric = self.chosen, self.metric
        if made is None:
            return f"No network keeps the bound, {self.bound.words}; the table says how near each came."
        if made.ratio >= 1 and not made.unquiet:
            return (
                f"Keep the float network: of those that keep the bound, {self.bound.words}, the fastest is "
                f"{made.folder} ({_kind(made)}), which takes {made.ratio:.2f} of its latency."
            )
        speed = f"at {made.ratio:.2f} of the float network's latency"
        speed = f"(latency {NOT_MEASURED})" if made.unquiet else speed
        below = (made.drop >= 0) == (metric.direction == "higher")
        lost = f"{scored(abs(made.drop), metric.unit)} {metric.amount}".rstrip()
        same = signed(made.drop, metric.unit).startswith("±")
        side = "as accurate as it" if same else f"{lost} {'below' if below else 'above'} it"
        return (
            f"Take {made.folder} ({_kind(made)}): {metric.text(made.score)} {metric.title} {speed}, "
            f"{side}{self._beside(made)}."
        )

    def _beside(self, made: Attempt) -> str:
        others = [other for other in self.attempts if other is not made and self.bound.keeps(other)]
        if others:
            rows = [f"{x.label} has {self.metric.text(x.score)} at {x.ratio_text(2)}" for x in others]
            return f"; fine-tuned as well, {', '.join(rows)}"
        uniform = [p for p in self.front.points if p.is_baseline and p.configuration and p.figures.ratio <= made.ratio]
        rival = min(uniform, key=lambda p: p.figures.distance, default=None)
        if rival is None or self.point.figures.distance >= rival.figures.distance:
            return ""
        return (
            f"; before fine-tuning its error is {self.point.figures.distance:.3f}, that of the best uniform choice "
            f"that is as fast ({rival.label}) {rival.figures.distance:.3f}"
        )


def _kind(made: Attempt) -> str:
    return made.label if made.variant == str(Variant.FLOAT) else f"{made.label}; {made.variant}"


# Errors of uniform choices that agree to so many digits are taken for the same, and the faster one is better.
_DIGITS = 2

_LIKELY = 0.5  # by drop the first point that is tried is the fastest with at most this error


def order(front: Front, bound: Bound) -> list[Point]:
    """Return the points to fine-tune, the most promising first.

    By latency: those within the bound, the most accurate and the best uniform one first. By drop: the middle of the
    front, of which `after` halves what is left.
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
    within = [point for point in points if point.is_baseline and point.figures.ratio <= latency]
    key = lambda point: (round(point.figures.distance, _DIGITS), point.figures.ratio)  # noqa: E731
    return min(within, key=key, default=None)


def after(waiting: Sequence[Point], point: Point, made: Attempt, bound: Bound) -> list[Point]:
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
    kept = [made for made in attempts if bound.keeps(made)]
    if bound.latency is not None:
        return min(kept, key=lambda made: (made.drop, made.ratio), default=None)
    return min(kept, key=lambda made: (made.ratio, made.drop), default=None)
