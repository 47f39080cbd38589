"""The latency model of a network on an engine: it times whole networks until it predicts those that it has not seen.

Times are kept on disk by engine, version and machine, so that a second search of the same network times nothing anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.errors import CompressError, EngineError
from compress.files import read_json, write_json
from compress.measure.layer_times import measure_engine_layers
from compress.measure.machine import describe_machine
from compress.progress import Progress
from compress.search.lab import REFERENCE, Lab, export, fresh_engines, median_ratio, time_engines, with_formats
from compress.search.latency_model import Check, LatencyModel, Sample, check, fit
from compress.search.network import apply
from compress.search.space import BLOCK, FORMAT, SPARSE, Configuration, key_of

TASK = "latency model"
MEDIAN_ERROR, SPEARMAN = 0.10, 0.95
"""The model is good enough at this error and rank correlation on networks that it has not seen."""

_ROUNDS = 3
_TOGETHER = 6  # networks timed in turn with each other and with the float network


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The outcome of timing.

    Attributes:
        model: fitted to all networks that were timed.
        check: of the model before the last networks were added to it, on those.
        samples: the networks, by key of their configuration.
        smallest: time of the fastest one over the float network's.
        cached: number of networks whose times were on disk.
    """

    model: LatencyModel
    check: Check
    samples: Mapping[str, Sample]
    smallest: float
    cached: int


def time_space(lab: Lab, reference: Path, *, version: str, cache: Path | None, progress: Progress) -> Timed:
    """Time networks of a space, fit a model, and check it on others, until it is good or `_ROUNDS` are over.

    Args:
        lab: everything needed.
        reference: file of the float network.
        version: of the engine's library.
        cache: folder of times; None = that of the user.
        progress: is advanced by every network.

    Raises:
        CompressError: no network can be timed.
    """
    generator = random.Random(lab.spec.seed)
    held_out = max(2, lab.spec.networks // 3)
    store = _Store(cache_path(lab, version, cache))
    known = {**_corners(lab), **_random(lab, generator, max(lab.spec.networks - len(_corners(lab)), 0))}
    progress.start(TASK, len(known) + held_out)
    samples = _samples(lab, list(known.values()), reference, store, progress)
    seen = Check(predicted=(), measured=(), median_error=float("nan"), spearman=float("nan"))
    for _ in range(min(_ROUNDS, 1 + lab.spec.networks // 6)):
        model = fit(list(samples.values()))
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
        model=fit(list(samples.values())),
        check=seen,
        samples=samples,
        smallest=min(sample.time for sample in samples.values()),
        cached=store.hits,
    )


def time_more(
    lab: Lab,
    timed: Timed,
    configurations: Sequence[Configuration],
    reference: Path,
    *,
    version: str,
    cache: Path | None,
    progress: Progress,
) -> Timed:
    """Time further networks, and correct the model by them.

    A search asks for those that it would begin with: the best by a model are those whose time it takes for too short.
    """
    store = _Store(cache_path(lab, version, cache))
    progress.start(TASK, len(configurations))
    samples = dict(timed.samples)
    with contextlib.suppress(CompressError):  # a trial will say why they cannot be built
        samples |= _samples(lab, configurations, reference, store, progress)
    progress.finish(TASK)
    return replace(
        timed,
        model=fit(list(samples.values())),
        samples=samples,
        smallest=min(sample.time for sample in samples.values()),
        cached=timed.cached + store.hits,
    )


def cache_path(lab: Lab, version: str, folder: Path | None) -> Path:
    """The file of times for an engine of a version on this machine."""
    machine = describe_machine()
    gpus = "-".join(gpu.name for gpu in machine.gpus) if lab.engine.startswith(("cuda", "tensorrt")) else ""
    name = f"{lab.engine}-{version}-{machine.cpu}-{machine.usable_cores:g}-{gpus}"
    base = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress" / "search"
    return base / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"


def signature(lab: Lab, configuration: Configuration) -> str:
    """A text that differs between networks whose layers differ in shape, format or order, or that are run otherwise."""
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
    """Times of networks, from disk or measured now; one that the engine refuses is left out."""
    found: dict[str, Sample] = {}
    missing: list[Configuration] = []
    for configuration in configurations:
        row = store.get(signature(lab, configuration))
        if row is None:
            missing.append(configuration)
        else:
            found[key_of(configuration)] = Sample(costs=lab.costs.of(configuration), time=row[0], layers=row[1])
            progress.advance(TASK)
    for first in range(0, len(missing), _TOGETHER):
        found |= _measured(lab, missing[first : first + _TOGETHER], reference, store, progress)
    return found


def _measured(
    lab: Lab, configurations: Sequence[Configuration], reference: Path, store: _Store, progress: Progress
) -> dict[str, Sample]:
    with tempfile.TemporaryDirectory(prefix="compress-timing-") as folder:
        files: dict[str, Path] = {}
        for number, configuration in enumerate(configurations):
            try:
                network = with_formats(lab, apply(lab.structure, configuration, lab.scores), configuration, quick=True)
                files[str(number)] = export(lab, network, Path(folder) / f"{number}.onnx")
            except CompressError:
                if number + 1 == len(configurations) and not files:
                    raise
            progress.advance(TASK)
        timed = [time_engines(lab, engines) for engines in fresh_engines(lab, {REFERENCE: reference, **files})]
        layers = _layer_shares(lab, files)
    times = {name: median_ratio(timed, name) for name in files}
    found, rows = {}, {}
    for name, time in times.items():
        configuration = configurations[int(name)]
        inside = {layer: share * time for layer, share in layers.get(name, {}).items()}
        found[key_of(configuration)] = Sample(costs=lab.costs.of(configuration), time=time, layers=inside)
        rows[signature(lab, configuration)] = (time, inside)
    store.put(rows)
    return found


def _layer_shares(lab: Lab, files: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Share of the time of a run that each layer takes, where the engine reports it."""
    spec, paths = lab.spec, [row.path for row in lab.structure.layers]
    if lab.engine == "onnxruntime":
        return {}  # the model of latency was validated there with times of whole networks
    try:
        times = measure_engine_layers(
            files,
            paths,
            engine=lab.engine,
            batch_size=spec.batch_size,
            precision=spec.precision,
            threads=spec.threads,
            runs=20,
        )
    except EngineError:
        return {}
    return {
        name: {layer: ms / row.total_ms for layer, ms in row.ms.items() if row.total_ms > 0}
        for name, row in times.items()
    }


def _corners(lab: Lab) -> dict[str, Configuration]:
    """Each format everywhere at the largest and at the smallest widths, and the smallest network of all."""
    elements = lab.space.elements
    names = dict.fromkeys(c for e, choices in elements.items() if e.startswith(FORMAT) for c in choices)

    def corner(name: str, place: int) -> Configuration:
        chosen = {e: choices[0 if e.startswith((BLOCK, SPARSE)) else place] for e, choices in elements.items()}
        return {e: name if e.startswith(FORMAT) else choice for e, choice in chosen.items()}

    found = [corner(name, place) for name in names or ("",) for place in (0, -1)]
    found.append({element: choices[-1] for element, choices in elements.items()})
    return {key_of(c): c for c in found}


def _random(lab: Lab, generator: random.Random, count: int) -> dict[str, Configuration]:
    """Networks spread from large to small: each has a level of its own, around which its choices vary."""
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
