"""Times networks until a model predicts unseen ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.errors import CompressError, EngineError
from compress.files import read_json, write_json
from compress.measure.layer_times import measure_engine_layers
from compress.search.costs import LayerCost
from compress.search.lab import REFERENCE, Lab, export, fresh_engines, median_ratio, time_engines, with_formats
from compress.search.latency_model import Check, LatencyModel, Sample, check, fit
from compress.search.multiple import cache_path
from compress.search.network import apply
from compress.search.space import BLOCK, FORMAT, SPARSE, Configuration, key_of
from compress.support.progress import Progress

TASK = "latency model"
MEDIAN_ERROR, SPEARMAN = 0.10, 0.95
"""The model is good enough at this error and rank correlation on networks that it has not seen."""

_ROUNDS, _ONE = 3, "one"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The outcome of timing.

    Attributes:
        model: of all timed networks.
        check: on the last networks, before they were added.
        samples: by configuration's key.
        cached: found on disk.
    """

    model: LatencyModel
    check: Check
    samples: Mapping[str, Sample]
    cached: int

    @property
    def fastest(self) -> str:
        """Key of the network of the least time."""
        return min(self.samples, key=lambda key: self.samples[key].time)

    @property
    def smallest(self) -> float:
        """Least time over the float network's."""
        return self.samples[self.fastest].time

    def without(self, costs: tuple[LayerCost, ...]) -> LatencyModel:
        """The model of all networks but those of these costs."""
        others = [sample for sample in self.samples.values() if sample.costs != costs]
        return self.model if len(others) in {0, len(self.samples)} else fit(others, block=self.model.block)


def time_space(lab: Lab, reference: Path, *, progress: Progress) -> Timed:
    """Time networks, fit a model, and check it on others, until it is good or `_ROUNDS` are over.

    Raises:
        CompressError: none can be timed.
    """
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
    """Time further networks, and correct the model by them."""
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
    """Times on disk; a damaged or foreign file counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path, self.hits = path, 0

    def get(self, key: str) -> tuple[float, dict[str, float]] | None:
        row = self._read().get(key)
        if not isinstance(row, dict) or not isinstance(row.get("time"), float):
            return None
        self.hits += 1
        return row["time"], {str(k): float(v) for k, v in dict(row.get("layers") or {}).items()}

    def put(self, rows: Mapping[str, tuple[float, Mapping[str, float]]]) -> None:
        new = {key: {"time": time, "layers": dict(layers)} for key, (time, layers) in rows.items()}
        write_json(self.path, {**self._read(), **new})

    def _read(self) -> dict[str, Any]:
        try:
            tree = read_json(self.path) if self.path.is_file() else {}
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
    """Each layer's share of a run, where the engine reports it."""
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
