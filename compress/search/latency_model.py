"""Latency as a sum over layers, fitted to timed networks; the work of a layer follows from its shapes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from scipy.stats import spearmanr

from compress.errors import SearchError
from compress.graph.layers import Layer
from compress.search.space import (
    SPARSE_24,
    Configuration,
    Structure,
    formats_of,
    left_out,
    shares_of_axes,
    sparse_layers,
    widths_of,
)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Work of a layer for one image.

    Attributes:
        kind: `conv`, `pointwise`, `depthwise`, `grouped`, `linear`, ...
        format: of the weight, such as `int8 2:4`.
        read, written, weights: elements.
        inputs, outputs: channels; 0 = none may go.
    """

    path: str
    kind: str
    format: str
    macs: float
    read: float
    written: float
    weights: float
    inputs: float = 0.0
    outputs: float = 0.0

    def padded(self, block: int) -> LayerCost:
        """The work of an engine that fills up blocks of so many channels."""
        if block == 1:
            return self
        read, written = _padding(self.inputs, block), _padding(self.outputs, block)
        both = read if self.kind == "depthwise" else read * written
        return replace(
            self,
            macs=both * self.macs,
            read=read * self.read,
            written=written * self.written,
            weights=both * self.weights,
        )


@dataclass(frozen=True, kw_only=True)
class _Channels:
    """Share of an axis that is left, and its channels; 0 of an axis that stays whole."""

    share: float
    count: float


class Costs:
    """Costs of a float network's layers under any configuration."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self._sizes = {name: len(group.classes) for name, group in structure.groups.items()}
        self._axes = shares_of_axes(structure)
        self._batch = max(1, len(structure.inputs[0]))

    def of(self, configuration: Configuration) -> tuple[LayerCost, ...]:
        widths, gone = {**self._sizes, **widths_of(configuration)}, left_out(configuration)
        formats = formats_of(self.structure, configuration)
        sparse = set(sparse_layers(self.structure, configuration))
        skipped = {layer for name in gone for layer in self.structure.blocks[name].layers}
        return tuple(
            self._cost(row, widths, f"{formats[row.path]} {SPARSE_24}" if row.path in sparse else formats[row.path])
            for row in self.structure.layers
            if row.path not in skipped
        )

    def _cost(self, row: Layer, widths: dict[str, int], name: str) -> LayerCost:
        weight = f"{row.path}.weight"
        kind = kind_of(row)
        if kind == "depthwise":
            read = written = self._channels((weight, "vector"), widths)
        else:
            read, written = self._channels((weight, "in"), widths), self._channels((weight, "out"), widths)
        both = read.share if kind == "depthwise" else read.share * written.share
        return LayerCost(
            path=row.path,
            kind=kind,
            format=name,
            macs=both * row.weight_macs / self._batch,
            read=read.share * math.prod(row.input_shapes[0]) / self._batch,
            written=written.share * math.prod(row.output_shape or ()) / self._batch,
            weights=both * row.weight_elements,
            inputs=read.count,
            outputs=written.count,
        )

    def _channels(self, axis: tuple[str, str], widths: dict[str, int]) -> _Channels:
        counts: Counter[str] = self._axes.get(axis, Counter())
        if not any(counts):
            return _Channels(share=1.0, count=0.0)
        left = sum(n * (widths[name] / self._sizes[name] if name else 1.0) for name, n in counts.items())
        return _Channels(share=left / sum(counts.values()), count=left)


def kind_of(row: Layer) -> str:
    if row.kind != "conv":
        return row.kind
    if row.groups > 1:
        return "depthwise" if row.input_shapes[0][1] == row.groups else "grouped"
    return "pointwise" if all(size == 1 for size in row.kernel) else "conv"


def _padding(count: float, block: int) -> float:
    """Channels that are computed for each one that is there."""
    return math.ceil(count / block) * block / count if count else 1.0


_NETWORK, _CONVERT, _SINGLE = "network", "convert", "*"
_RIDGE, _DEVIATION, _LAYER = 1e-3, 0.05, 0.5
_NOISE = 0.16  # (0.04 / 0.1)^2: measurements deviate by 4 %, sums over layers by 10 % (standard deviations)

Values = Sequence[float] | NDArray[np.float64]
Feature = tuple[str, str, str]  # (kind or path, format, quantity)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A network that was timed.

    Attributes:
        costs: by layer.
        time: in the model's unit.
        layers: by path, as the engine reports, or empty.
    """

    costs: tuple[LayerCost, ...]
    time: float
    layers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factor of measured times over the sum, near networks that were timed.

    Attributes:
        places: (networks, layers) predicted times.
        weights: (networks,) of the kernel around each of them.
    """

    paths: tuple[str, ...]
    places: NDArray[np.float64]
    weights: NDArray[np.float64]
    width: float

    def factor(self, layers: Mapping[str, float]) -> float:
        here = np.array([layers.get(path, 0.0) for path in self.paths])
        squares = np.square(self.places - here).sum(axis=1)
        return float(np.exp(self.weights @ np.exp(-squares / (2 * self.width**2))))


@dataclass(frozen=True, kw_only=True)
class LatencyModel:
    """A fitted model.

    Attributes:
        coefficients: time by feature.
        block: channels computed at a time.
        correction: or None.
    """

    coefficients: Mapping[Feature, float]
    block: int = 1
    correction: Correction | None = None

    def predict(self, costs: Sequence[LayerCost]) -> float:
        layers = {cost.path: self.layer(cost) for cost in costs}
        padded = [cost.padded(self.block) for cost in costs]
        beside = sum(self.coefficients.get(key, 0.0) * value for key, value in _beside(padded).items())
        return (beside + sum(layers.values())) * (1.0 if self.correction is None else self.correction.factor(layers))

    def layer(self, cost: LayerCost) -> float:
        return max(
            0.0,
            sum(self.coefficients.get(key, 0.0) * value for key, value in _of_layer(cost.padded(self.block)).items()),
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """Predicted against measured times of networks that a model was not fitted to.

    Attributes:
        spearman: rank correlation; NaN of fewer than three networks.
        interval: of it, 95 %; NaN of fewer than five networks.
    """

    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    median_error: float
    spearman: float
    interval: tuple[float, float]


def fit(samples: Sequence[Sample], *, block: int = 1) -> LatencyModel:
    """Fit a model by least squares of relative errors; the engine computes `block` channels at a time."""
    if not samples or not all(np.isfinite(sample.time) and sample.time > 0 for sample in samples):
        raise SearchError("the latency model needs networks with times above zero")
    rows: list[tuple[dict[Feature, float], float, float]] = []
    for sample in samples:
        costs = [cost.padded(block) for cost in sample.costs]
        rows.append((_features(costs), sample.time, 1 / sample.time))
        scale = _LAYER * len(costs) ** 0.5 / sample.time
        rows += [(_of_layer(cost), sample.layers[cost.path], scale) for cost in costs if cost.path in sample.layers]
    names = sorted({name for features, _, _ in rows for name in features})
    column = {name: i for i, name in enumerate(names)}
    matrix, target = np.zeros((len(rows), len(names))), np.zeros(len(rows))
    for i, (features, time, weight) in enumerate(rows):
        target[i] = time * weight
        for name, value in features.items():
            matrix[i, column[name]] = value * weight
    size = np.abs(matrix).max(axis=0)
    size[size == 0] = 1.0
    single = np.array([name[0].startswith(_SINGLE) for name in names])
    ridge = np.diag(np.where(single, _DEVIATION**0.5, _RIDGE**0.5))
    solved = lsq_linear(
        np.vstack([matrix / size, ridge]),
        np.concatenate([target, np.zeros(len(names))]),
        bounds=(np.where(single, -np.inf, 0.0), np.inf),
    )
    found = solved.x / size
    model = LatencyModel(coefficients={name: float(found[column[name]]) for name in names}, block=block)
    return replace(model, correction=_corrected(model, samples))


def check(predicted: Iterable[float], measured: Iterable[float]) -> Check:
    left, right = np.asarray(tuple(predicted), dtype=float), np.asarray(tuple(measured), dtype=float)
    rank = rank_correlation(left, right)
    return Check(
        predicted=tuple(left.tolist()),
        measured=tuple(right.tolist()),
        median_error=float(np.median(np.abs(left - right) / right)) if len(right) else float("nan"),
        spearman=rank,
        interval=rank_interval(rank, len(left)),
    )


def rank_correlation(
    left: Sequence[float] | NDArray[np.float64], right: Sequence[float] | NDArray[np.float64]
) -> float:
    """Spearman's; NaN for fewer than three values or a constant side."""
    if len(left) < 3 or len(set(map(float, left))) == 1 or len(set(map(float, right))) == 1:
        return float("nan")
    return float(spearmanr(left, right).statistic)


def rank_interval(rank: float, count: int) -> tuple[float, float]:
    """95 % interval of Spearman's rank correlation (Bonett and Wright, Psychometrika 65, 2000).

    It is NaN below five pairs. A correlation of 1 is taken for that of one swapped pair of neighbours.
    """
    if count < 5 or not math.isfinite(rank):
        return float("nan"), float("nan")
    near = 1 - 12 / (count * (count**2 - 1))
    bounded = min(max(rank, -near), near)
    half = 1.96 * math.sqrt((1 + bounded**2 / 2) / (count - 3))
    low, high = math.tanh(math.atanh(bounded) - half), math.tanh(math.atanh(bounded) + half)
    return min(low, rank), max(high, rank)


def _features(costs: Sequence[LayerCost]) -> dict[Feature, float]:
    total = _beside(costs)
    for cost in costs:
        for name, value in _of_layer(cost).items():
            total[name] = total.get(name, 0.0) + value
    return total


def _beside(costs: Sequence[LayerCost]) -> dict[Feature, float]:
    changed = sum(b.read for a, b in itertools.pairwise(costs) if a.format != b.format)
    found: dict[Feature, float] = {(_NETWORK, "", ""): 1.0}
    if changed:
        found[_NETWORK, "", _CONVERT] = changed
    return found


def _corrected(model: LatencyModel, samples: Sequence[Sample]) -> Correction | None:
    """The correction by fitted networks; None if all are alike."""
    paths = tuple(dict.fromkeys(cost.path for sample in samples for cost in sample.costs))
    rows = [{cost.path: model.layer(cost) for cost in sample.costs} for sample in samples]
    places = np.array([[row.get(path, 0.0) for path in paths] for row in rows])
    squares = np.square(places[:, None] - places[None]).sum(axis=2)
    if not squares.any():
        return None
    width = float(np.sqrt(np.median(squares[squares > 0])))
    missed = np.log([sample.time / model.predict(sample.costs) for sample in samples])
    kernel = np.exp(-squares / (2 * width**2)) + _NOISE * np.eye(len(samples))
    return Correction(paths=paths, places=places, weights=np.linalg.solve(kernel, missed), width=width)


def _of_layer(cost: LayerCost) -> dict[Feature, float]:
    return {
        (cost.kind, cost.format, "call"): 1.0,
        (cost.kind, cost.format, "macs"): cost.macs,
        (cost.kind, cost.format, "elements"): cost.read + cost.written,
        (cost.kind, cost.format, "weights"): cost.weights,
        (f"{_SINGLE}{cost.path}", cost.format, "call"): 1.0,
        (f"{_SINGLE}{cost.path}", cost.format, "macs"): cost.macs,
    }
