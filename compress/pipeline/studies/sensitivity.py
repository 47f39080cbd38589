"""The command `sensitivity`, and formats by layer or float layers: built, timed in turn and judged.

`mixed_front` chooses by noise and time.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from compress.data.base import BatchPlan
from compress.data.load import load_data
from compress.engines.registry import require_engine
from compress.errors import QuantizationError, RecipeError
from compress.export.onnx import export_onnx
from compress.files import write_json, write_text
from compress.measure.accuracy import EngineFigures, compare_figures
from compress.measure.latency import Latency, measure_engine_layers, time_files
from compress.pipeline.run import SENSITIVITY, Run, open_run, read_kept
from compress.pipeline.steps.evaluate import TIMED_ENGINES, judge_file
from compress.pipeline.steps.networks import build_float, calibration_images, check_start, float_step
from compress.plots.style import LIGHT, WIDE, Format, bare, distinct, new_figure, save_figure, styled
from compress.quantization import QuantSpec, check_quant_spec
from compress.quantization.placement.insert import float_graph
from compress.quantization.placement.place import LayerSettings
from compress.quantization.ptq.quantize import quantize
from compress.quantization.sensitivity import (
    FLOAT,
    LayerSensitivity,
    Sensitivity,
    everywhere,
    front,
    layer_settings,
    mixed_spec,
    sensitivity,
)
from compress.recipe.tree import Recipe
from compress.roofline_model.model import find_device, roofline
from compress.support.meters import TaskMetric, metric_title, score_text
from compress.support.progress import NoProgress, Progress, tracked
from compress.support.text import csv_text, shorten
from compress.tasks.classification import TOP1

STEP = SENSITIVITY


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results of `sensitivity_run`; the first of `specs`, by format, is the recipe's own."""

    run: Run
    model: nn.Module
    specs: Mapping[str, QuantSpec]
    reports: Mapping[str, Sensitivity]
    settings: Mapping[str, Mapping[str, LayerSettings]]
    files: tuple[Path, ...]

    @property
    def base(self) -> str:
        return next(iter(self.specs))


def sensitivity_run(
    recipe: Recipe,
    out: Path,
    *,
    images: int = 256,
    weight_bits: Sequence[int] = (),
    resume: bool = False,
    device: str | None = None,
    start: Path | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Baseline, then every layer in every format.

    Writes sensitivity.json, .csv, .md and .png; `images` is their number, `weight_bits` further formats; on `resume`
    measured layers are kept; `start` as of `run`.
    """
    specs = formats_of(recipe, weight_bits)
    if images < 1:
        raise RecipeError(f"images is {images}: it must be 1 or more")
    data = load_data(recipe.data)
    built = build_float(recipe)
    check_start(start, recipe, data)
    found = device or ("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(
        recipe=recipe,
        folder=open_run(out, recipe, STEP, resume=resume, data=data.fingerprints()),
        data=data,
        device=torch.device(found),
        progress=progress or NoProgress(),
        resume=resume,
        start=start,
    )
    try:
        model = float_step(run, built)
        reports = {name: _measure(run, model, name, spec, images) for name, spec in specs.items()}
        graph, _ = float_graph(model, run.example.to(run.device), next(iter(specs.values())))
        return Measured(
            run=run,
            model=model,
            specs=specs,
            reports=reports,
            settings={name: layer_settings(graph, spec) for name, spec in specs.items()},
            files=_write(run, reports),
        )
    finally:
        run.folder.release()


def formats_of(recipe: Recipe, weight_bits: Sequence[int]) -> dict[str, QuantSpec]:
    spec = recipe.quantization
    if spec is None:
        raise RecipeError("sensitivity needs a `quantization` section, and the recipe has quantization: null")
    spec = spec.for_target()  # one placement is studied, the one that training follows
    specs = {f"w{spec.weights.bits_for(spec.only_target)}a{spec.activations.num_bits}": spec}
    for bits in weight_bits:
        other = everywhere(spec, "weights", num_bits=bits)
        check_quant_spec(other)
        specs.setdefault(f"w{bits}a{spec.activations.num_bits}", other)
    return specs


def _measure(run: Run, model: nn.Module, name: str, spec: QuantSpec, images: int) -> Sensitivity:
    path = run.path(f"sensitivity-{name}.json")
    stored = _stored(path, images)
    if stored.report is not None:
        return stored.report

    def keep(row: LayerSensitivity) -> None:
        stored.rows.append(row)
        write_json(path, plain({"images": images, "rows": [asdict(row) for row in stored.rows]}))

    report = sensitivity(
        model,
        run.example.to(run.device),
        calibration_images(run, spec),
        run.data.val.batches(BatchPlan(batch_size=run.recipe.data.batch_size, limit=images), device=run.device),
        spec=spec,
        metric=None if run.task.metric is TOP1 else run.task.metric,
        known={row.layer: row for row in stored.rows},
        keep=keep,
        progress=run.progress,
    )
    write_json(path, plain({"images": images, "report": asdict(report)}))
    return report


@dataclass
class _Stored:
    """Measurements that a run keeps: single layers while it is under way, then the whole report."""

    images: int
    rows: list[LayerSensitivity] = field(default_factory=list)
    report: Sensitivity | None = None


def _stored(path: Path, images: int) -> _Stored:
    """Return the measurements of a stopped run; empty ones if it used another number of images."""
    stored = read_kept(path, _Stored, _Stored(images), "delete it, and its layers are measured again")
    return stored if stored.images == images else _Stored(images)


def plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _write(run: Run, reports: Mapping[str, Sensitivity]) -> tuple[Path, ...]:
    with styled():
        figure = draw_sensitivity(reports, WIDE)
    tables = "\n".join(_table(name, report) for name, report in reports.items())
    return (
        write_json(run.path("sensitivity.json"), plain({name: asdict(report) for name, report in reports.items()})),
        write_text(run.path("sensitivity.csv"), sensitivity_csv(reports)),
        write_text(run.path("sensitivity.md"), f"# Sensitivity\n\n{tables}"),
        save_figure(figure, run.path("sensitivity.png")),
    )


_COLUMNS = ("format", "layer", "kind", "weights", "macs")
_EFFECT = ("sqnr_db", "agreement")


def sensitivity_csv(reports: Mapping[str, Sensitivity]) -> str:
    """Shares are from 0 to 1; an empty field is no number."""
    metric = next(iter(reports.values())).metric if reports else "top1"
    effects = (f"{part}_{name}" for part in ("alone", "left_out") for name in (*_EFFECT, metric))
    rows = (_cells(name, row) for name, report in reports.items() for row in report.rows)
    return csv_text([*_COLUMNS, *effects], rows)


def _cells(name: str, row: LayerSensitivity) -> list[object]:
    effects = [cell for e in (row.alone, row.left_out) for cell in (e.sqnr_db, e.agreement, e.score)]
    return [name, row.layer, row.kind, row.weight_elements, row.macs, *effects]


def _table(name: str, report: Sensitivity) -> str:
    whole, title = report.quantized, metric_title(report.metric)
    unit = report.unit
    lines = [
        f"## {name}",
        "",
        f"{report.images} images; float {title} {score_text(report.float_score, unit)}; all quantized: "
        f"SQNR {whole.sqnr_db:.1f} dB, agreement {_share(whole.agreement)}, {title} {score_text(whole.score, unit)}.",
        "",
        f"| layer | weights | alone: SQNR, dB | agreement | {title} | left float: SQNR, dB | won back, dB | {title} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(report.rows, key=lambda row: row.alone.sqnr_db):
        alone, left = row.alone, row.left_out
        won = "" if math.isinf(left.sqnr_db) else f"{left.sqnr_db - whole.sqnr_db:+.2f}"
        lines.append(
            f"| {row.layer} | {row.weight_elements:,} | {alone.sqnr_db:.1f} | {_share(alone.agreement)} | "
            f"{score_text(alone.score, unit)} | {left.sqnr_db:.1f} | {won} | {score_text(left.score, unit)} |"
        )
    return "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.2f} %"


_COLOURS = ("blue", "amber", "green", "purple", "sky", "alarm")


def draw_sensitivity(reports: Mapping[str, Sensitivity], form: Format) -> Figure:
    names = list(dict.fromkeys(row.layer for report in reports.values() for row in report.rows))
    height = max(2.6, 0.9 + 0.17 * len(names))
    figure = new_figure(form, 2 * height if form.narrow else height)
    rows, columns = (2, 1) if form.narrow else (1, 2)
    left, right = figure.subplots(rows, columns, squeeze=False).ravel()
    colours = itertools.cycle(LIGHT[name] for name in _COLOURS)
    for colour, (name, report) in zip(colours, reports.items(), strict=False):
        whole = report.quantized.sqnr_db
        alone = {row.layer: row.alone.sqnr_db for row in report.rows}
        gain = {row.layer: row.left_out.sqnr_db - whole for row in report.rows}
        _marks(left, names, alone, colour, name)
        _marks(right, names, gain, colour, name)
        if math.isfinite(whole):
            left.axvline(whole, color=colour, linestyle=":", linewidth=1.2, label=f"all layers, {name}")
    left.set_title("Quantized alone")
    left.set_xlabel("SQNR of the logits, dB (less is worse)")
    right.set_title("Left float")
    right.set_xlabel("SQNR won back, dB")
    right.axvline(0, color=LIGHT["muted"], linewidth=0.8)
    short = [shorten(name, 26) for name in distinct(names)]
    for axes in (left, right):
        axes.set_yticks(range(len(names)), short, fontsize=7)
        axes.set_ylim(len(names) - 0.4, -0.6)
        bare(axes, grid="x")
    if not form.narrow:
        right.tick_params(labelleft=False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if form.narrow else 4, fontsize=7)
    return figure


def _marks(axes: Axes, names: list[str], values: Mapping[str, float], colour: str, label: str) -> None:
    places = [(value, names.index(name)) for name, value in values.items() if math.isfinite(value)]
    axes.plot([x for x, _ in places], [y for _, y in places], "o", color=colour, markersize=4.5, label=label)


ENGINE = "openvino"  # of candidates whose times are from a data sheet

_LARGEST_NOISE = 1e6  # a layer that leaves nothing of the signal; the program needs a finite number

Formats = Mapping[str, str]  # format by layer


@dataclass(frozen=True)
class CostTable:
    """The time of each layer in each format, and that of everything that is no layer."""

    ms: Mapping[str, Mapping[str, float]]
    rest_ms: float


@dataclass(frozen=True, kw_only=True)
class MixedPoint:
    """One network between float and all quantized.

    Attributes:
        label: `float`, a format, `mixed 1`, ...
        latency_ms: median; None = a data sheet's times.
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
        return self.predicted_ms if self.latency_ms is None else self.latency_ms


def check_costs(costs: str) -> str:
    """The engine that every candidate is judged on, whatever its times are from."""
    if costs not in TIMED_ENGINES:
        find_device(costs)
        costs = ENGINE
    require_engine(costs)
    return costs


def mixed_front(
    measured: Measured,
    *,
    costs: str = ENGINE,
    batch_size: int = 1,
    precision: str | None = None,
    images: int = 256,
    points: int = 8,
    seconds: float = 3.0,
) -> tuple[MixedPoint, ...]:
    """Measure float, each format and mixtures.

    `costs`: an engine that times its layers, measured here, or a roofline device. `precision`: of float parts; None =
    the engine's. `images`: for accuracy. `points`: most mixtures. `seconds`: for each latency.
    """
    run = measured.run
    layers = [row.layer for row in measured.reports[measured.base].rows]
    named: dict[str, Formats] = {name: dict.fromkeys(layers, name) for name in (FLOAT, *measured.specs)}
    files = {name: _export(run, measured.model, _spec(measured, named[name]), name) for name in named}
    engine = check_costs(costs)
    if costs == engine:
        table = _engine_costs(files, layers, measured.base, engine, batch_size, precision)
    else:
        table = sheet_costs(measured, layers, costs, batch_size)
    for choice in front(_noise(measured), table.ms, points=points):
        if choice.formats not in named.values():
            named[f"mixed {len(named) - len(measured.specs)}"] = choice.formats
    for name in tracked(run.progress, "mixed precision", list(named)[len(files) :], done=len(files)):
        files[name] = _export(run, measured.model, _spec(measured, named[name]), name.replace(" ", "-"))
    timed: dict[str, Latency] = {}
    if costs == engine:
        options: dict[str, Any] = {"runs": 200, "seconds": seconds, "progress": run.progress}
        timed = time_files(files, engine, batch_size=batch_size, precisions=dict.fromkeys(files, precision), **options)
    seen = {name: judge_file(run, path, engine, images, precision=precision) for name, path in files.items()}
    return tuple(_point(measured, name, named[name], table, timed.get(name), seen) for name in named)


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
    return write_text(path, replace(measured.run.recipe, quantization=point.spec).to_yaml())


def _spec(measured: Measured, formats: Formats) -> QuantSpec | None:
    if set(formats.values()) == {FLOAT}:
        return None
    return mixed_spec(measured.specs[measured.base], formats, measured.settings, base=measured.base)


def _export(run: Run, model: nn.Module, spec: QuantSpec | None, name: str) -> Path:
    if spec is not None:
        images = calibration_images(run, spec)
        model = quantize(model, run.example.to(run.device), images, spec=spec, progress=run.progress)
    path = run.path(f"mixed/{name}.onnx")
    return export_onnx(copy.deepcopy(model).cpu(), run.example, path, preprocessing=run.data.val.preprocessing)


def _noise(measured: Measured) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for name, report in measured.reports.items():
        for row in report.rows:
            table.setdefault(row.layer, {FLOAT: 0.0})[name] = min(row.alone.noise, _LARGEST_NOISE)
    return table


def _engine_costs(
    files: Mapping[str, Path], layers: Sequence[str], base: str, engine: str, batch_size: int, precision: str | None
) -> CostTable:
    times = measure_engine_layers(files, layers, engine=engine, batch_size=batch_size, precision=precision)
    ms = {layer: {name: row.ms[layer] for name, row in times.items()} for layer in layers}
    return CostTable(ms, times[base].rest_ms)


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
    return CostTable(ms, rest_ms)
