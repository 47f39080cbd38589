"""Measured candidates, and the Pareto front of them in time and accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from compress.errors import SearchError
from compress.search.accuracy_model import AccuracyModel
from compress.search.lab import Figures, Lab, build, quantization_of, with_formats
from compress.search.latency_model import Check, check, rank_correlation
from compress.search.space import Configuration, key_of
from compress.search.start import Otherwise, otherwise
from compress.search.timing import Timed

FLOAT_POINT, START = "float", "start"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A configuration and what was measured of it.

    Attributes:
        label: such as `float`, `width 0.5`, `start 3`, `trial 17`.
        configuration: of the space; empty for the float network.
        figures: measured on the engine, before fine-tuning.
        predicted_ratio: time in times of the float network, by a latency model that was not fitted to this network.
        predicted_distance: by the accuracy model.
    """

    label: str
    configuration: Configuration
    figures: Figures
    predicted_ratio: float
    predicted_distance: float

    @property
    def is_baseline(self) -> bool:
        """True for the float network and for uniform configurations, which need no search."""
        return not self.label.startswith((START, "trial"))


@dataclass(frozen=True, kw_only=True)
class Front:
    """The result of a search.

    Attributes:
        lab: with which its networks are built.
        points: all that were measured, the float network first.
        chosen: the point that keeps the bound, before fine-tuning; None without a bound.
        timed: the latency model and its check.
        accuracy: the accuracy model.
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
        """The points that no other beats, from the fastest to the most accurate; none is slower than a better one."""
        return pareto(self.points)

    def network(self, point: Point) -> nn.Module:
        """The float network of a point, as it was measured: pruned and reconstructed, to be trained on."""
        return build(self.lab, point.configuration)

    def quantized(self, point: Point, network: nn.Module | None = None) -> nn.Module:
        """The network of a point with its formats; of `network`, such as the fine-tuned one, if it is given."""
        return with_formats(self.lab, network or self.network(point), point.configuration)

    def quantization(self, point: Point, network: nn.Module) -> object:
        """The `QuantSpec` that gives the layers of a point their formats; None if all of them are float."""
        return quantization_of(self.lab, network, point.configuration)

    def otherwise(self, point: Point) -> tuple[Otherwise, ...]:
        """Predicted effects of the neighbouring choices of each element."""
        lab = self.lab
        return otherwise(
            lab.space, self.accuracy.distance, lambda c: self.timed.model.predict(lab.costs.of(c)), point.configuration
        )

    def accuracy_check(self) -> dict[str, float]:
        """Rank correlation of each accuracy model with the measured distance, over all points."""
        rows = [point for point in self.points if point.configuration]
        measured = [point.figures.distance for point in rows]
        return {
            name: rank_correlation([self.accuracy.predict(point.configuration, name) for point in rows], measured)
            for name in ("distance", "taylor", "fisher")
        }

    @property
    def latency_check(self) -> Check:
        """Of the latency model before the trials, on networks that it had not seen."""
        return self.timed.check

    @property
    def candidate_check(self) -> Check:
        """Predictions for all candidates, each by a model that was not fitted to it, against their measurements."""
        rows = [p for p in self.points if p.configuration]
        return check([p.predicted_ratio for p in rows], [p.figures.ratio for p in rows])

    @property
    def repeat_check(self) -> Check:
        """Two measurements of the same networks, for the model and as candidates; no prediction can be closer."""
        samples = self.timed.samples
        rows = [
            (samples[key].time, p.figures.ratio) for p in self.points if (key := key_of(p.configuration)) in samples
        ]
        return check([first for first, _ in rows], [second for _, second in rows])


def pareto(points: Iterable[Point]) -> tuple[Point, ...]:
    """Points that no other beats in both time and distance, from the fastest on.

    >>> pareto([])
    ()
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.figures.ratio, p.figures.distance)):
        if not found or point.figures.distance < found[-1].figures.distance:
            found.append(point)
    return tuple(found)


def choose(points: Iterable[Point], *, latency: float | None = None, max_drop: float | None = None) -> Point:
    """The point of the least distance within a time, or the fastest of those that lose little agreement.

    Args:
        points: measured.
        latency: most time, in times of the float network.
        max_drop: most percent points of the pictures held back that another class is given to.

    Raises:
        SearchError: no point keeps the bound; names the best one.
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
    """Percent points of the pictures held back that are given another class than by the float network.

    Raises:
        SearchError: the outputs are no logits.
    """
    if point.figures.agreement is None:
        raise SearchError("max_drop compares classes, and the network's outputs are no logits; ask for a latency")
    return 100 * (1 - point.figures.agreement)
