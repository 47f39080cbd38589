"""Recipes of mixed precision from sensitivity: the front of accuracy against time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from compress.engines import build_engine
from compress.engines.registry import require_engine
from compress.errors import QuantizationError
from compress.export.onnx import export_onnx
from compress.files import write_text
from compress.measure import EngineFigures, Latency, compare_figures, first_quiet, measure_latency
from compress.measure.layer_times import measure_engine_layers
from compress.pipeline.run import Run
from compress.pipeline.steps.judge import judge
from compress.pipeline.studies.sensitivity import Measured, calibration_batches
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity.mixed import FLOAT, front, mixed_spec
from compress.quantization.spec import QuantSpec
from compress.roofline_model.model import find_device, roofline
from compress.support.meters import TaskMetric
from compress.tasks.classification import TOP1

ENGINE = "openvino"
"""The engine of candidates and of layer times."""

_LARGEST_NOISE = 1e6  # a layer that leaves nothing of the signal; the program needs a finite number

Formats = Mapping[str, str]
"""Format by layer."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """The time of each layer in each format.

    Attributes:
        method: source of the times, in words.
    """

    ms: Mapping[str, Mapping[str, float]]
    rest_ms: float
    method: str


@dataclass(frozen=True, kw_only=True)
class MixedPoint:
    """One network between float and all quantized.

    Attributes:
        label: `float`, a format, or `mixed 1`, ...
        spec: its quantization; None = float.
        latency_ms: median on the engine; None = times of a data sheet.
        score: the metric on the engine.
        agreement: share of images in float's class, 0 to 1; None = no classes.
        sqnr_db: of the logits against float's.
        unquiet: why the time is not comparable; "" = it is.
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
    others: Mapping[str, Formats] | None = None,
) -> tuple[tuple[MixedPoint, ...], CostTable]:
    """Measure a network in float, in each format, and in mixtures of them; return the points and the times used.

    `costs`: `openvino`, measured here, or a roofline device such as `h200`. `precision`: of what is not quantized; None
    =
    the engine's choice. `images`: number for accuracy. `points`: most mixtures. `seconds`: most time for each latency.
    `others`: further mixtures by label.

    Raises:
        EngineError: the engine cannot take a network.
        RooflineError: an unknown device or precision.
    """
    run = measured.run
    layers = [row.layer for row in measured.reports[measured.base].rows]
    named: dict[str, Formats] = {name: dict.fromkeys(layers, name) for name in (FLOAT, *measured.specs)}
    files = {name: _export(measured, name, formats) for name, formats in named.items()}
    if costs == ENGINE:
        table = _engine_costs(files, layers, measured.base, batch_size, precision)
    else:
        table = sheet_costs(measured, layers, costs, batch_size)
    for choice in front(_noise(measured), table.ms, points=points):
        if not any(dict(choice.formats) == dict(seen) for seen in named.values()):
            named[f"mixed {len(named) - len(measured.specs)}"] = choice.formats
    named |= others or {}
    run.progress.start("mixed precision", len(named), done=len(files))
    for name, formats in named.items():
        if name not in files:
            files[name] = _export(measured, name, formats)
            run.progress.advance("mixed precision")
    run.progress.finish("mixed precision")
    latency = _latency(files, batch_size, precision, seconds, run) if costs == ENGINE else {}
    seen = {name: _accuracy(run, path, precision, images) for name, path in files.items()}
    return tuple(_point(measured, name, formats, table, latency, seen) for name, formats in named.items()), table


def _point(
    measured: Measured,
    name: str,
    formats: Formats,
    table: CostTable,
    latency: Mapping[str, Latency],
    seen: Mapping[str, EngineFigures],
) -> MixedPoint:
    """Return one choice with predicted and measured figures."""
    metric = measured.run.task.metric
    parity = compare_figures(seen[FLOAT], seen[name], metric)
    return MixedPoint(
        label=name,
        formats=formats,
        spec=None if name == FLOAT else _spec(measured, formats),
        predicted_ms=table.rest_ms + sum(table.ms[layer][used] for layer, used in formats.items()),
        latency_ms=latency[name].p50_ms if name in latency else None,
        unquiet=latency[name].unquiet if name in latency else "",
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
    """Return the least noisy point within `budget_ms`, or the fastest within `max_drop` percent points of float.

    Raises:
        QuantizationError: both limits or none, or no point meets it.
    """
    if (budget_ms is None) == (max_drop is None):
        raise QuantizationError(f"mixed precision takes one of a budget in ms and a largest drop of {metric.title}")
    if budget_ms is not None:
        fitting = [point for point in points if point.ms <= budget_ms]
        if not fitting:
            least = min(point.ms for point in points)
            raise QuantizationError(f"no choice of formats runs in {budget_ms:g} ms; the fastest takes {least:.4g} ms")
        return max(fitting, key=lambda point: (point.sqnr_db, -point.ms))
    lost = {point.label: metric.drop(points[0].score, point.score) for point in points}
    near = [point for point in points if lost[point.label] <= float(max_drop or 0) + 1e-9]
    if not near:
        raise QuantizationError(
            f"no choice of formats loses {max_drop} points or less; the least is {min(lost.values())}"
        )
    return min(near, key=lambda point: point.ms)


def write_recipe(measured: Measured, point: MixedPoint, path: Path) -> Path:
    """Write the recipe of `point` for `ptq` and `qat`."""
    return write_text(path, replace(measured.run.recipe, quantization=point.spec).to_yaml())


def _spec(measured: Measured, formats: Formats) -> QuantSpec:
    return mixed_spec(measured.specs[measured.base], formats, measured.settings, base=measured.base)


def _export(measured: Measured, name: str, formats: Formats) -> Path:
    """The ONNX file of a choice, quantized from the float baseline."""
    run, model = measured.run, measured.model
    if set(formats.values()) != {FLOAT}:
        spec = _spec(measured, formats)
        model = quantize(model, run.example.to(run.device), calibration_batches(run, spec), spec=spec)
    path = run.path(f"mixed/{name.replace(' ', '-')}.onnx")
    return export_onnx(copy.deepcopy(model).cpu(), run.example, path, preprocessing=run.data.val.preprocessing)


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


def _latency(
    files: Mapping[str, Path], batch_size: int, precision: str | None, seconds: float, run: Run
) -> dict[str, Latency]:
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(build_engine(path, ENGINE, batch_size=batch_size, precision=precision))
            for name, path in files.items()
        }
        timed = first_quiet(
            partial(measure_latency, engines, batch_size=batch_size, runs=200, seconds=seconds, progress=run.progress)
        )
    return {row.label: row for row in timed}


def _accuracy(run: Run, path: Path, precision: str | None, images: int) -> EngineFigures:
    with build_engine(path, ENGINE, precision=precision) as engine:
        return judge(run, engine, limit=min(images, len(run.data.val)))
