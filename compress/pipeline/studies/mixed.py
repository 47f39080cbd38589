"""Formats by layer, or float layers: built, timed in turn and judged.

`mixed_front` chooses by noise and time, `faster` by layers that ran slower in INT8.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from compress.engines import build_engine
from compress.engines.registry import require_engine
from compress.errors import QuantizationError, RunError
from compress.export.onnx import export_onnx
from compress.files import write_text
from compress.measure.accuracy import EngineFigures, compare_figures
from compress.measure.latency import Latency, measure_engine_layers, time_files
from compress.measure.spec import BenchSpec
from compress.pipeline.again import finished_run, network
from compress.pipeline.run import Run
from compress.pipeline.steps.judge import judge
from compress.pipeline.steps.ptq import calibration_images
from compress.pipeline.steps.slower import precision_of
from compress.pipeline.studies.sensitivity import Measured
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity.sensitivity import FLOAT, front, mixed_spec
from compress.quantization.spec import TARGETS, QuantSpec, Rule
from compress.records.files import SLOWER
from compress.records.rows import MixedRow, SlowRow
from compress.records.slower import costly
from compress.records.summary import family
from compress.roofline_model.model import find_device, roofline
from compress.support.meters import TaskMetric
from compress.support.progress import NoProgress, Progress, tracked
from compress.tasks.classification import TOP1
from compress.variants import Variant

ENGINE = "openvino"
"""The engine of candidates and of layer times."""

_LARGEST_NOISE = 1e6  # a layer that leaves nothing of the signal; the program needs a finite number

Formats = Mapping[str, str]
"""Format by layer."""

_SHARES = (0.25, 0.5, 1.0)
"""Shares of the costly layers that are left in float."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Times by layer and format.

    Attributes:
        method: their source in words.
    """

    ms: Mapping[str, Mapping[str, float]]
    rest_ms: float
    method: str


@dataclass(frozen=True, kw_only=True)
class MixedPoint:
    """One network between float and all quantized.

    Attributes:
        label: `float`, a format, `mixed 1`, ...
        spec: None = float.
        latency_ms: median; None = a data sheet's times.
        score: on the engine.
        agreement: with float's class, 0 to 1; None = no classes.
        sqnr_db: logits against float's.
        unquiet: why not comparable, or "".
    """

    label: str
    formats: Formats
    spec: QuantSpec | None
    predicted_ms: float
    latency_ms: float | None
    score: float
    agreement: float | None
    sqnr_db: float
    unquiet: str = ""

    @property
    def ms(self) -> float:
        """The measured time where there is one."""
        return self.predicted_ms if self.latency_ms is None else self.latency_ms


def check_costs(costs: str) -> None:
    """Refuse an unknown source of times.

    Raises:
        RooflineError: neither `openvino` nor a known device.
        EngineUnavailableError: OpenVINO is not here.
    """
    if costs != ENGINE:
        find_device(costs)
    require_engine(ENGINE)  # every candidate is judged on it, whatever its times are from


def mixed_front(
    measured: Measured,
    *,
    costs: str = ENGINE,
    batch_size: int = 1,
    precision: str | None = None,
    images: int = 256,
    points: int = 8,
    seconds: float = 3.0,
) -> tuple[tuple[MixedPoint, ...], CostTable]:
    """Measure float, each format and mixtures; return points and times.

    `costs`: `openvino`, measured here, or a roofline device. `precision`: of float parts; None = the engine's.
    `images`: for accuracy. `points`: most mixtures. `seconds`: for each latency.

    Raises:
        EngineError: the engine cannot take a network.
        RooflineError: an unknown device or precision.
    """
    run = measured.run
    layers = [row.layer for row in measured.reports[measured.base].rows]
    named: dict[str, Formats] = {name: dict.fromkeys(layers, name) for name in (FLOAT, *measured.specs)}
    files = {name: _export(run, measured.model, _spec(measured, named[name]), name) for name in named}
    if costs == ENGINE:
        table = _engine_costs(files, layers, measured.base, batch_size, precision)
    else:
        table = sheet_costs(measured, layers, costs, batch_size)
    for choice in front(_noise(measured), table.ms, points=points):
        if choice.formats not in named.values():
            named[f"mixed {len(named) - len(measured.specs)}"] = choice.formats
    for name in tracked(run.progress, "mixed precision", list(named)[len(files) :], done=len(files)):
        files[name] = _export(run, measured.model, _spec(measured, named[name]), name.replace(" ", "-"))
    timed: dict[str, Latency] = {}
    if costs == ENGINE:
        options: dict[str, Any] = {"runs": 200, "seconds": seconds, "progress": run.progress}
        timed = time_files(files, ENGINE, batch_size=batch_size, precisions=dict.fromkeys(files, precision), **options)
    seen = {name: _figures(run, path, ENGINE, precision, images) for name, path in files.items()}
    return tuple(_point(measured, name, named[name], table, timed.get(name), seen) for name in named), table


def _point(
    measured: Measured,
    name: str,
    formats: Formats,
    table: CostTable,
    timed: Latency | None,
    seen: Mapping[str, EngineFigures],
) -> MixedPoint:
    metric = measured.run.task.metric
    parity = compare_figures(seen[FLOAT], seen[name], metric)
    return MixedPoint(
        label=name,
        formats=formats,
        spec=_spec(measured, formats),
        predicted_ms=table.rest_ms + sum(table.ms[layer][used] for layer, used in formats.items()),
        latency_ms=timed.p50_ms if timed else None,
        unquiet=timed.unquiet if timed else "",
        score=seen[name].values[metric.name],
        agreement=parity.agreement,
        sqnr_db=parity.sqnr_db,
    )


def pick(
    points: Sequence[MixedPoint],
    *,
    budget_ms: float | None = None,
    max_drop: float | None = None,
    metric: TaskMetric = TOP1,
) -> MixedPoint:
    """The least noise within `budget_ms`, or the fastest within `max_drop` percent points.

    Raises:
        QuantizationError: both, none, or unmet.
    """
    if (budget_ms is None) == (max_drop is None):
        raise QuantizationError(f"mixed precision takes one of a budget in ms and a largest drop of {metric.title}")
    if budget_ms is not None:
        fitting = [point for point in points if point.ms <= budget_ms]
        if not fitting:
            least = min(point.ms for point in points)
            raise QuantizationError(f"no choice of formats runs in {budget_ms:g} ms; the fastest takes {least:.4g} ms")
        return max(fitting, key=lambda point: (point.sqnr_db, -point.ms))
    lost = [metric.drop(points[0].score, point.score) for point in points]
    near = [point for point, drop in zip(points, lost, strict=True) if drop <= float(max_drop or 0) + 1e-9]
    if not near:
        raise QuantizationError(f"no choice of formats loses {max_drop} points or less; the least is {min(lost)}")
    return min(near, key=lambda point: point.ms)


def write_recipe(measured: Measured, point: MixedPoint, path: Path) -> Path:
    """Write the recipe of `point` for `ptq` and `qat`."""
    return write_text(path, replace(measured.run.recipe, quantization=point.spec).to_yaml())


def _spec(measured: Measured, formats: Formats) -> QuantSpec | None:
    if set(formats.values()) == {FLOAT}:
        return None
    return mixed_spec(measured.specs[measured.base], formats, measured.settings, base=measured.base)


def _export(run: Run, model: nn.Module, spec: QuantSpec | None, name: str) -> Path:
    """Write the ONNX file of a float network, or of what PTQ makes of it."""
    if spec is not None:
        images = calibration_images(run, spec)
        model = quantize(model, run.example.to(run.device), images, spec=spec, progress=run.progress)
    path = run.path(f"mixed/{name}.onnx")
    return export_onnx(copy.deepcopy(model).cpu(), run.example, path, preprocessing=run.data.val.preprocessing)


def _figures(run: Run, path: Path, engine: str, precision: str | None, images: int | None = None) -> EngineFigures:
    """Return the metric of a file over so many evaluation images; None = all."""
    with build_engine(path, engine, precision=precision) as built:
        return judge(run, built, limit=images)


def _noise(measured: Measured) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for name, report in measured.reports.items():
        for row in report.rows:
            table.setdefault(row.layer, {FLOAT: 0.0})[name] = min(row.alone.noise, _LARGEST_NOISE)
    return table


def _engine_costs(
    files: Mapping[str, Path], layers: Sequence[str], base: str, batch_size: int, precision: str | None
) -> CostTable:
    times = measure_engine_layers(files, layers, engine=ENGINE, batch_size=batch_size, precision=precision)
    ms = {layer: {name: row.ms[layer] for name, row in times.items()} for layer in layers}
    label = times[base].label
    return CostTable(ms=ms, rest_ms=times[base].rest_ms, method=f"layer times on {label}, batch {batch_size}")


def sheet_costs(measured: Measured, layers: Sequence[str], device: str, batch_size: int) -> CostTable:
    """Return least times by a data sheet: float layers in fp16, quantized ones in int8."""
    run, ms = measured.run, {layer: dict.fromkeys((FLOAT, *measured.specs), 0.0) for layer in layers}
    image = run.example[:1].repeat(batch_size, 1, 1, 1).to(run.device)
    rest_ms = 0.0
    for precision, names in (("fp16", [FLOAT]), ("int8", list(measured.specs))):
        rows = roofline(measured.model, image, device=device, precision=precision, fused=True).rows
        for row in rows:
            for layer in set(layers) & set(row.paths):
                ms[layer] |= dict.fromkeys(names, row.least_time_ms or 0.0)
        rest_ms = sum(row.least_time_ms or 0.0 for row in rows if not set(layers) & set(row.paths))
    return CostTable(ms=ms, rest_ms=rest_ms, method=f"least times by the roofline of {device}, fp16 and int8")


def quantizing_run(folder: Path) -> Run:
    """Return a finished run that quantizes, with its data.

    Raises:
        RunError: no run, or none that quantizes.
        DataError: its data are not here.
    """
    run = finished_run(folder)
    if run.recipe.quantization is None:
        raise RunError(f"{folder} is of a recipe with quantization: null, so that nothing of it can be left in float")
    return run


def faster(folder: Path, spec: BenchSpec, *, progress: Progress | None = None) -> tuple[SlowRow, ...]:
    """Build and measure a mixed network for each engine that is slower in INT8; return the folder's rows.

    Raises:
        RunError: no run, or none that quantizes.
        EngineError: an engine cannot take a network.
    """
    rows = tuple(SLOWER.read(folder) or ())
    # PTQ is made anew, at the first batch size: its own row comes first.
    chosen = {row.engine: row for row in reversed(rows) if family(row.engine) in spec.engines and costly(row)}
    if not chosen:
        return rows
    run = quantizing_run(folder)
    run.progress = progress or NoProgress()
    model = network(run, Variant.FLOAT).eval()
    found = {engine: _without_costly(run, model, row, spec) for engine, row in chosen.items()}
    rows = tuple(replace(row, mixed=found[row.engine]) if row.engine in found else row for row in rows)
    SLOWER.write(folder, rows)
    return rows


def _without_costly(run: Run, model: nn.Module, row: SlowRow, spec: BenchSpec) -> MixedRow:
    """Leave the costliest layers in float, and return the choice that runs fastest."""
    engine, tried = family(row.engine), {f"{len(layers)} layers": layers for layers in choices(costly(row))}
    target = next((target for target in TARGETS if target == row.target), None)
    files, specs = {FLOAT: run.path(Variant.FLOAT.onnx_file)}, {}
    for label, layers in tried.items():
        rules = (Rule(match=layer, enable=False, target=target) for layer in layers)
        specs[label] = replace(run.quantization, rules=(*run.quantization.rules, *rules))
        files[label] = _export(run, model, specs[label].for_target(target), f"{engine}-{len(layers)}")
    times = time_files(
        files,
        engine,
        batch_size=row.batch_size,
        threads=spec.threads,
        precisions=dict.fromkeys(specs, precision_of(row.engine)) | {FLOAT: precision_of(row.float_engine)},
        warmup=spec.warmup,
        runs=spec.runs,
        seconds=spec.seconds,
        progress=run.progress,
    )
    best = min(specs, key=lambda label: times[label].p50_ms)
    name, metric = f"mixed-{engine}.yaml", run.task.metric
    write_text(run.path(name), replace(run.recipe, quantization=specs[best]).to_yaml())
    score = _figures(run, files[best], engine, precision_of(row.engine)).values[metric.name]
    return MixedRow(
        layers=tried[best],
        p50_ms=times[best].p50_ms,
        float_p50_ms=times[FLOAT].p50_ms,
        score=f"{metric.text(score)} {metric.title}",
        recipe=name,
        unquiet=next((one.unquiet for one in times.values() if one.unquiet), ""),
    )


def choices(layers: Sequence[str]) -> list[tuple[str, ...]]:
    """The costliest quarter, half, all.

    >>> choices(["a", "b", "c"])
    [('a',), ('a', 'b'), ('a', 'b', 'c')]
    """
    counts = dict.fromkeys(math.ceil(share * len(layers)) for share in _SHARES)
    return [tuple(layers[:count]) for count in counts]
