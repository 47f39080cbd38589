"""From sensitivity to a recipe of mixed precision: the front of accuracy against time, and the point of it that fits."""

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
"""The engine that candidates are evaluated on; it also reports the time of each layer."""

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
        label: `float`, a format that all layers have, or `mixed 1`, ...
        spec: its quantization; None for the float network.
        latency_ms: median of a run on the engine; None where times come from a data sheet.
        score: the task's metric on the engine, by default the share of images that it classifies correctly, 0 to 1.
        agreement: share of the images in the same class as the float network on the engine, 0 to 1; None for outputs
            that decide for no class.
        sqnr_db: of the engine's logits against the float network's.
        unquiet: why the measured time is not to be compared with the others; "" = it is.
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
    """Refuse a source of times that `mixed_front` does not know, before hours are spent on what it needs.

    Raises:
        RooflineError: neither `openvino` nor a device of the roofline's table.
        EngineUnavailableError: OpenVINO is not on this machine.
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
    """Measure a network in float, in each format everywhere, and in the choices between them.

    Args:
        measured: of `sensitivity_run`.
        costs: `openvino`, for times measured here; or a device of the roofline's table, such as `h200`.
        batch_size: images of one run.
        precision: of what is not quantized, on the engine; None = its own choice.
        images: of the evaluation split that accuracy is measured on.
        points: choices tried, at most.
        seconds: time for the latency of each, at most.
        others: further choices of formats to measure along with them, by label.

    Returns:
        The points, float first, and the times that the choices were made by.

    Raises:
        EngineError: a network that the engine cannot take.
        RooflineError: an unknown device, or a precision that it lacks.
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
    """One choice of formats with its predicted and measured figures; `seen` holds the float network's too."""
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
    """The point of least noise within a time, or the fastest whose metric is near float's.

    Args:
        points: of `mixed_front`, float first.
        budget_ms: longest time of a run.
        max_drop: largest loss of the metric against float, in its unit (percent points); exactly one of the two.
        metric: by which the points were judged.

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
    """Write the recipe that `ptq` and `qat` run to make the network of `point`."""
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
    """Least times by a data sheet: float layers in fp16, quantized ones in int8, whatever the bits of their weights."""
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
