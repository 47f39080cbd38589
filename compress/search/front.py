"""Measured candidates and their Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from compress.errors import SearchError
from compress.search.accuracy_model import AccuracyModel
from compress.search.lab import Figures, Lab, build, quantization_of, with_formats
from compress.search.latency_model import Check, check, rank_correlation
from compress.search.space import Configuration, Otherwise, key_of, otherwise
from compress.search.timing import Timed

FLOAT_POINT, START = "float", "start"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A configuration and what was measured of it.

    Attributes:
        label: `float`, `width 0.5`, `trial 17`, ...
        configuration: empty = float.
        figures: before fine-tuning.
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
        """Whether it needs no search: float, or uniform."""
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

    def quantization(self, point: Point, network: nn.Module) -> object:
        """The `QuantSpec` of a point's formats; None if all are float."""
        return quantization_of(self.lab, network, point.configuration)

    def otherwise(self, point: Point) -> tuple[Otherwise, ...]:
        """Predicted effects of the neighbouring choices of each element."""
        lab = self.lab
        return otherwise(
            lab.space, self.accuracy.distance, lambda c: self.timed.model.predict(lab.costs.of(c)), point.configuration
        )

    def accuracy_check(self) -> dict[str, float]:
        """Rank correlation of each model with measured distance."""
        rows = [point for point in self.points if point.configuration]
        measured = [point.figures.distance for point in rows]
        return {
            name: rank_correlation([self.accuracy.predict(point.configuration, name) for point in rows], measured)
            for name in ("distance", "taylor", "fisher")
        }

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

    Raises:
        SearchError: none keeps the bound; names the best.
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
    """Percent of held-out images given another class than by float.

    Raises:
        SearchError: the outputs are no logits.
    """
    if point.figures.agreement is None:
        raise SearchError("max_drop compares classes, and the network's outputs are no logits; ask for a latency")
    return 100 * (1 - point.figures.agreement)
