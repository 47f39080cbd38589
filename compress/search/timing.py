"""Times networks until a model predicts unseen ones, and keeps the times in files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.errors import CompressError, EngineError
from compress.export.onnx import export_onnx
from compress.files import cache_folder, read_json, write_json
from compress.measure.latency import loaded, measure_engine_layers, measure_latency
from compress.measure.machine import describe_machine
from compress.search.lab import REFERENCE, Lab, export, fresh_engines, median_ratio, time_engines, with_formats
from compress.search.latency_model import Check, LatencyModel, LayerCost, Sample, check, fit
from compress.search.network import apply
from compress.search.space import BLOCK, FORMAT, SPARSE, Configuration, key_of
from compress.support.progress import Progress

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
    try:
        known = read_json(path)["block"] if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        known = None
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
