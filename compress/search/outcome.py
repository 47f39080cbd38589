"""The outcome of a search: the bound that was asked for, and the networks that were fine-tuned and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compress.search.front import Front, Point
from compress.support.meters import TaskMetric, amount_of
from compress.support.text import scored, signed
from compress.variants import Variant


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A network that was fine-tuned, quantized, exported and measured.

    Attributes:
        label: of the point that it began as.
        folder: its own run folder, with a report.
        variant: which of its networks is the best on the engine.
        file: of that network.
        ms: median time of a run.
        ratio: its time over that of the float network, timed in turn.
        score: the task's metric on the engine, whole evaluation split.
        drop: points lost against the float network on the engine.
    """

    label: str
    folder: str
    variant: str
    file: str
    ms: float
    ratio: float
    score: float
    drop: float


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The bound of a search: one of the two is given.

    Attributes:
        latency: largest share of the float network's time.
        max_drop: most points of the metric that may be lost.
        unit: of the metric in reports.
    """

    latency: float | None = None
    max_drop: float | None = None
    unit: str = "%"

    def keeps(self, made: Attempt) -> bool:
        """Whether a network keeps the bound on the engine."""
        if self.latency is not None:
            return made.ratio <= self.latency
        return made.drop <= float(self.max_drop or 0.0) + 1e-9

    @property
    def words(self) -> str:
        """The bound in words."""
        if self.latency is not None:
            return f"at most {self.latency:g} of the float network's latency"
        return " ".join(f"at most {self.max_drop:g} {amount_of(self.unit)} lost".split())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a search with its fine-tuned networks.

    Attributes:
        bound: that was asked for.
        front: of the search.
        metric: of the task.
        scores: the metric on the engine before fine-tuning, by label of the point; `float` among them.
        attempts: points that were fine-tuned, in their order.
        chosen: the best of those that keep the bound; None if none does.
        images: of the evaluation split that `scores` were measured on.
        folder: the run folder.
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
        """The point that the chosen network began as; without one, the fastest of the front."""
        return self.labels[self.chosen.label] if self.chosen is not None else self.front.front[0]

    @property
    def advice(self) -> str:
        """The result in one sentence."""
        made, metric = self.chosen, self.metric
        if made is None:
            return f"No network keeps the bound, {self.bound.words}; the table says how near each came."
        if made.ratio >= 1:
            return (
                f"Keep the float network: of those that keep the bound, {self.bound.words}, the fastest is "
                f"{made.folder} ({_kind(made)}), which takes {made.ratio:.2f} of its latency."
            )
        below = (made.drop >= 0) == (metric.direction == "higher")
        lost = f"{scored(abs(made.drop), metric.unit)} {metric.amount}".rstrip()
        same = signed(made.drop, metric.unit).startswith("±")
        side = "as accurate as it" if same else f"{lost} {'below' if below else 'above'} it"
        return (
            f"Take {made.folder} ({_kind(made)}): {metric.text(made.score)} {metric.title} at {made.ratio:.2f} of the "
            f"float network's latency, {side}{self._beside(made)}."
        )

    def _beside(self, made: Attempt) -> str:
        """Beside the chosen network: others that were fine-tuned and keep the bound, else the best uniform choice."""
        others = [other for other in self.attempts if other is not made and self.bound.keeps(other)]
        if others:
            rows = [f"{x.label} has {self.metric.text(x.score)} at {x.ratio:.2f}" for x in others]
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
    """The point that a network began as, and what was made of it: `width 0.5, int8; qat`, `width 0.5, float`."""
    return made.label if made.variant == str(Variant.FLOAT) else f"{made.label}; {made.variant}"
