"""The two models of a search: latency as a sum over layers, from timed networks, and the error of each choice alone."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from scipy.stats import spearmanr
from torch import fx, nn

from compress.errors import CompressError, EngineError, SearchError
from compress.export.onnx import export_onnx
from compress.files import cache_folder, read_json, write_json
from compress.graph.inputs import flat_tensors
from compress.measure.latency import loaded, measure_engine_layers, measure_latency
from compress.measure.machine import describe_machine
from compress.quantization.placement.insert import float_graph, read_fx
from compress.quantization.placement.place import place
from compress.quantization.sensitivity import run_subset, subset_of
from compress.search.lab import (
    REFERENCE,
    Lab,
    build,
    export,
    fresh_engines,
    median_ratio,
    quantization_of,
    time_engines,
    with_formats,
)
from compress.search.network import apply, distance
from compress.search.space import BLOCK, FLOAT, FORMAT, SPARSE, Configuration, LayerCost, key_of
from compress.support.progress import Progress
from compress.training.optim import recalibrate_batchnorm

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


GPU_BLOCK = 16
_GPUS = ("cuda", "tensorrt")
_WIDTHS = (64, 72, 80, 96)
_LAYERS, _SIDE = 6, 28
_LOADS, _RUNS, _SECONDS = 2, 60, 0.1
_SMALL = 0.33  # share of the growth from 64 channels: less than it from 72 to 80, or from 80 to 96, is none


def cache_path(engine: str, version: str, folder: Path | None, *, what: str = "") -> Path:
    machine = describe_machine()
    gpus = "-".join(gpu.name for gpu in machine.gpus) if engine.startswith(("cuda", "tensorrt")) else ""
    name = f"{what} {engine}-{version}-{machine.cpu}-{machine.usable_cores:g}-{gpus}"
    base = folder or cache_folder() / "search"
    return base / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"


def channel_block(engine: str, *, version: str, cache: Path | None = None) -> int:
    """Return the block of an engine: 8, 16 or 32 on CPUs, measured once and kept on disk; 16 on GPUs."""
    if engine.startswith(_GPUS):
        return GPU_BLOCK
    path = cache_path(engine, version, cache, what="block")
    known = _kept(path).get("block")
    if isinstance(known, int) and known > 0:
        return known
    found = block_of(_times(engine))
    write_json(path, {"block": found})
    return found


def block_of(times: Mapping[int, float]) -> int:
    """Return the block that times by number of channels show; 8 where they show nothing.

    >>> block_of({64: 1.0, 72: 1.44, 80: 1.43, 96: 1.97}), block_of({64: 1.0, 72: 1.2, 80: 1.4, 96: 1.9})
    (16, 8)
    """
    grown = times[96] - times[64]
    if grown < 0.1 * times[64]:
        return 8
    if times[96] - times[80] < _SMALL * grown:
        return 32
    return 16 if times[80] - times[72] < _SMALL * (times[80] - times[64]) else 8


def _times(engine: str) -> dict[int, float]:
    example = torch.zeros(1, 3, _SIDE, _SIDE)
    with tempfile.TemporaryDirectory(prefix="compress-block-") as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        files = {
            str(width): export_onnx(_network(width), example, Path(folder) / f"{width}.onnx", dynamic_batch=False)
            for width in _WIDTHS
        }
        rows = []
        for _ in range(_LOADS):
            with loaded(files, engine, batch_size=1, threads=1) as engines:
                timed = measure_latency(engines, batch_size=1, runs=_RUNS, seconds=_SECONDS)
                rows.append([float(np.quantile(row.turns_ms, 0.25)) for row in timed])
    return dict(zip(_WIDTHS, np.min(rows, axis=0).tolist(), strict=True))


def _network(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 1)]
    for number in range(_LAYERS):
        layers += [nn.Conv2d(width if number else 64, width, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


TASK = "latency model"
# The model is good enough at this error and rank correlation on networks that it has not seen.
MEDIAN_ERROR, SPEARMAN = 0.10, 0.95

_ROUNDS, _ONE = 3, "one"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The outcome of timing.

    Attributes:
        check: on the last networks, before they were added.
        cached: found on disk.
    """

    model: LatencyModel
    check: Check
    samples: Mapping[str, Sample]
    cached: int

    @property
    def fastest(self) -> str:
        return min(self.samples, key=lambda key: self.samples[key].time)

    @property
    def smallest(self) -> float:
        return self.samples[self.fastest].time

    def without(self, costs: tuple[LayerCost, ...]) -> LatencyModel:
        others = [sample for sample in self.samples.values() if sample.costs != costs]
        return self.model if len(others) in {0, len(self.samples)} else fit(others, block=self.model.block)


def time_space(lab: Lab, reference: Path, *, progress: Progress) -> Timed:
    """Time networks, fit a model, and check it on others, until it is good or `_ROUNDS` are over."""
    generator = random.Random(lab.spec.seed)
    held_out = max(2, lab.spec.networks // 3)
    store = _Store(cache_path(lab.engine, lab.version, lab.cache))
    known = {**_corners(lab), **_random(lab, generator, max(lab.spec.networks - len(_corners(lab)), 0))}
    progress.start(TASK, len(known) + held_out)
    samples = _samples(lab, list(known.values()), reference, store, progress)
    seen = check([], [])
    for _ in range(min(_ROUNDS, 1 + lab.spec.networks // 6)):
        model = fit(list(samples.values()), block=lab.block)
        fresh = [c for key, c in _random(lab, generator, held_out).items() if key not in samples]
        unseen = _samples(lab, fresh, reference, store, progress)
        seen = check(
            [model.predict(sample.costs) for sample in unseen.values()], [sample.time for sample in unseen.values()]
        )
        samples |= unseen
        if seen.median_error <= MEDIAN_ERROR and not seen.spearman < SPEARMAN:
            break
    progress.finish(TASK)
    return Timed(
        model=fit(list(samples.values()), block=lab.block),
        check=seen,
        samples=samples,
        cached=store.hits,
    )


def time_more(
    lab: Lab, timed: Timed, configurations: Sequence[Configuration], reference: Path, *, progress: Progress
) -> Timed:
    store = _Store(cache_path(lab.engine, lab.version, lab.cache))
    progress.start(TASK, len(configurations))
    samples = dict(timed.samples)
    with contextlib.suppress(CompressError):  # a trial will say why they cannot be built
        samples |= _samples(lab, configurations, reference, store, progress)
    progress.finish(TASK)
    return replace(
        timed,
        model=fit(list(samples.values()), block=lab.block),
        samples=samples,
        cached=timed.cached + store.hits,
    )


def signature(lab: Lab, configuration: Configuration) -> str:
    """A text that differs between networks of different layers, formats, order or runs."""
    spec = lab.spec
    facts = [spec.batch_size, spec.threads, spec.precision, lab.quantization.target]
    rows = [[asdict(cost) for cost in lab.costs.of(c)] for c in ({}, configuration)]
    return hashlib.sha256(json.dumps([facts, rows]).encode()).hexdigest()[:24]


class _Store:
    def __init__(self, path: Path) -> None:
        self.path, self.hits = path, 0

    def get(self, key: str) -> tuple[float, dict[str, float]] | None:
        row = _kept(self.path).get(key)
        if not isinstance(row, dict) or not isinstance(row.get("time"), float):
            return None
        self.hits += 1
        return row["time"], {str(k): float(v) for k, v in dict(row.get("layers") or {}).items()}

    def put(self, rows: Mapping[str, tuple[float, Mapping[str, float]]]) -> None:
        new = {key: {"time": time, "layers": dict(layers)} for key, (time, layers) in rows.items()}
        write_json(self.path, {**_kept(self.path), **new})


def _kept(path: Path) -> dict[str, Any]:
    """A file of the cache; a damaged or foreign one counts as empty."""
    try:
        tree = read_json(path) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _samples(
    lab: Lab, configurations: Sequence[Configuration], reference: Path, store: _Store, progress: Progress
) -> dict[str, Sample]:
    """Times of networks, from disk or now; refused ones are left out, unless all are."""
    found: dict[str, Sample] = {}
    refused: list[CompressError] = []
    for configuration in configurations:
        key = signature(lab, configuration)
        row = store.get(key)
        if row is None:
            try:
                row = _measured(lab, configuration, reference)
                store.put({key: row})
            except CompressError as error:
                refused.append(error)
        if row is not None:
            found[key_of(configuration)] = Sample(costs=lab.costs.of(configuration), time=row[0], layers=row[1])
        progress.advance(TASK)
    if refused and not found:
        raise refused[0]
    return found


def _measured(lab: Lab, configuration: Configuration, reference: Path) -> tuple[float, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="compress-timing-") as folder:
        network = with_formats(lab, apply(lab.structure, configuration, lab.scores), configuration, quick=True)
        path = export(lab, network, Path(folder) / f"{_ONE}.onnx")
        files = {REFERENCE: reference, _ONE: path}
        time = median_ratio([time_engines(lab, engines) for engines in fresh_engines(lab, files)], _ONE)
        shares = _layer_shares(lab, path)
    return time, {layer: share * time for layer, share in shares.items()}


def _layer_shares(lab: Lab, path: Path) -> dict[str, float]:
    spec, paths = lab.spec, [row.path for row in lab.structure.layers]
    if lab.engine == "onnxruntime":
        return {}  # the model was validated on it with times of whole networks alone
    try:
        times = measure_engine_layers(
            {_ONE: path},
            paths,
            engine=lab.engine,
            batch_size=spec.batch_size,
            precision=spec.precision,
            threads=spec.threads,
            runs=20,
        )[_ONE]
    except EngineError:
        return {}
    return {layer: ms / times.total_ms for layer, ms in times.ms.items() if times.total_ms > 0}


def _corners(lab: Lab) -> dict[str, Configuration]:
    """Each format everywhere at the largest and smallest widths, and the smallest network."""
    elements = lab.space.elements
    names = dict.fromkeys(c for e, choices in elements.items() if e.startswith(FORMAT) for c in choices)

    def corner(name: str, place: int) -> Configuration:
        chosen = {e: choices[0 if e.startswith((BLOCK, SPARSE)) else place] for e, choices in elements.items()}
        return {e: name if e.startswith(FORMAT) else choice for e, choice in chosen.items()}

    found = [corner(name, place) for name in names or ("",) for place in (0, -1)]
    found.append({element: choices[-1] for element, choices in elements.items()})
    return {key_of(c): c for c in found}


def _random(lab: Lab, generator: random.Random, count: int) -> dict[str, Configuration]:
    """Networks spread from large to small, each varied around its own level."""
    found: dict[str, Configuration] = {}
    for number in range(count):
        level, formats = (number + generator.random()) / count, generator.choice((0.0, 0.5, 1.0))
        configuration = {}
        for element, choices in lab.space.elements.items():
            if element.startswith((FORMAT, SPARSE)):
                configuration[element] = choices[-1] if generator.random() < formats else choices[0]
                continue
            last = len(choices) - 1
            drawn = level * last + generator.gauss(0, 0.35 * last)
            if element.startswith(BLOCK):
                drawn = float(generator.random() < 0.3 * level)
            configuration[element] = choices[min(max(round(drawn), 0), last)]
        found[key_of(configuration)] = configuration
    return found


_ACCURACY = "accuracy model"
_MOST = 1e6  # error of a choice whose outputs are not finite: the integer program needs a number


# Costs of choices by element: squared error added to outputs, over their variance.
Distances = Mapping[str, Mapping[str, float]]


def predicted_distance(distances: Distances, configuration: Configuration) -> float:
    return sum(distances.get(element, {}).get(choice, 0.0) for element, choice in configuration.items())


def rate_choices(lab: Lab, *, progress: Progress) -> Distances:
    elements = {element: choices for element, choices in lab.space.elements.items() if len(choices) > 1}
    again = apply(lab.structure, {})
    recalibrate_batchnorm(again, lab.fit)
    with torch.no_grad():
        plain, measured_again = _outputs(lab, lab.structure.graph), _outputs(lab, again)
    progress.start(_ACCURACY, sum(len(choices) for choices in elements.values()))
    distances = {element: dict.fromkeys(choices, 0.0) for element, choices in elements.items()}
    formats = [element for element in elements if element.startswith(FORMAT)]
    for name in sorted({choice for element in formats for choice in elements[element]} - {FLOAT}):
        for element, far in _formats_alone(lab, formats, name, plain):
            distances[element][name] = far
            progress.advance(_ACCURACY)
    for element in [element for element in elements if element not in formats]:
        for choice in elements[element]:
            distances[element][choice] = _alone(lab, element, choice, measured_again)
            progress.advance(_ACCURACY)
    progress.finish(_ACCURACY)
    return distances


def _formats_alone(
    lab: Lab, elements: Sequence[str], name: str, reference: list[torch.Tensor]
) -> Iterator[tuple[str, float]]:
    base = replace(lab.quantization, adaround=None, bias_correction=None)
    lab = replace(lab, quantization=base)
    network = build(lab, {}, steps=0)
    whole = with_formats(lab, network, dict.fromkeys(elements, name), quick=True)
    view = read_fx(float_graph(network, lab.fit[0][:2], base)[0])
    for element in elements:
        spec = quantization_of(lab, network, {element: name})
        subset = subset_of(place(view, spec)) if spec is not None else None
        if subset is None or not isinstance(whole, fx.GraphModule):
            yield element, 0.0
            continue
        yield element, _bounded(distance(_outputs(lab, partial(run_subset, whole, subset)), reference))


def _alone(lab: Lab, element: str, choice: str, reference: list[torch.Tensor]) -> float:
    if lab.space.largest().get(element) == choice:
        return 0.0
    with torch.no_grad():
        return _bounded(distance(_outputs(lab, build(lab, {element: choice}, steps=0)), reference))


def _bounded(far: float) -> float:
    return min(far, _MOST) if far == far else _MOST  # NaN differs from itself


def _outputs(lab: Lab, network: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
    rows = [[x.cpu() for x in flat_tensors(network(images))] for images in lab.held]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]
