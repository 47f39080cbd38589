"""The command `sensitivity`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import TypeAdapter
from torch import nn

from compress.data.base import BatchPlan
from compress.data.load import load_data
from compress.errors import RecipeError, RunError
from compress.files import read_json, write_json, write_text
from compress.pipeline.folder import SENSITIVITY, open_run
from compress.pipeline.run import Run
from compress.pipeline.steps.ptq import calibration_images
from compress.pipeline.steps.training import build_float, check_start, float_step
from compress.plots.style import LIGHT, WIDE, Format, bare, distinct, new_figure, save_figure, styled
from compress.quantization.placement.insert import float_graph
from compress.quantization.placement.requests import LayerSettings
from compress.quantization.sensitivity.sensitivity import (
    LayerSensitivity,
    Sensitivity,
    everywhere,
    layer_settings,
    sensitivity,
)
from compress.quantization.spec import QuantSpec, check_quant_spec
from compress.recipe.tree import Recipe
from compress.support.meters import metric_title, score_text
from compress.support.progress import NoProgress, Progress
from compress.support.text import shorten
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
        """The recipe's own format."""
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

    Raises:
        RecipeError: no `quantization` section, or no images.
        CompressError: as its steps do.
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
    """Return the quantization in each weight format, by names such as `w8a8`."""
    spec = recipe.quantization
    if spec is None:
        raise RecipeError("sensitivity needs a `quantization` section, and the recipe has quantization: null")
    spec = spec.for_target()  # one placement is studied, the one that training follows
    specs = {f"w{spec.weights.num_bits}a{spec.activations.num_bits}": spec}
    for bits in weight_bits:
        other = everywhere(spec, "weights", num_bits=bits)
        check_quant_spec(other)
        specs.setdefault(f"w{bits}a{spec.activations.num_bits}", other)
    return specs


def _measure(run: Run, model: nn.Module, name: str, spec: QuantSpec, images: int) -> Sensitivity:
    """Sensitivity in one format; its rows are kept in the folder as they are measured."""
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
    try:
        stored = TypeAdapter(_Stored).validate_python(read_json(path)) if path.exists() else _Stored(images)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete it, and its layers are measured again") from error
    return stored if stored.images == images else _Stored(images)


def plain(value: object) -> object:
    """Return `value` for JSON: infinity becomes `inf` or `-inf`."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _write(run: Run, reports: Mapping[str, Sensitivity]) -> tuple[Path, ...]:
    with styled():
        figure = draw_sensitivity(reports, WIDE)
    return (
        write_json(run.path("sensitivity.json"), plain({name: asdict(report) for name, report in reports.items()})),
        write_text(run.path("sensitivity.csv"), sensitivity_csv(reports)),
        write_text(run.path("sensitivity.md"), f"# Sensitivity\n\n{sensitivity_markdown(reports)}"),
        save_figure(figure, run.path("sensitivity.png")),
    )


_COLUMNS = ("format", "layer", "kind", "weights", "macs")
_EFFECT = ("sqnr_db", "agreement")


def sensitivity_csv(reports: Mapping[str, Sensitivity]) -> str:
    """Shares are from 0 to 1; an empty field is no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metric = next(iter(reports.values())).metric if reports else "top1"
    writer.writerow([*_COLUMNS, *(f"{part}_{name}" for part in ("alone", "left_out") for name in (*_EFFECT, metric))])
    for name, report in reports.items():
        writer.writerows(_cells(name, row) for row in report.rows)
    return text.getvalue()


def _cells(name: str, row: LayerSensitivity) -> list[object]:
    effects = [cell for e in (row.alone, row.left_out) for cell in (e.sqnr_db, e.agreement, e.score)]
    return [name, row.layer, row.kind, row.weight_elements, row.macs, *effects]


def sensitivity_markdown(reports: Mapping[str, Sensitivity]) -> str:
    """A table for each format, the worst layer first."""
    return "\n".join(_table(name, report) for name, report in reports.items())


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
    """Both as panels over the layers, a row of marks for each format."""
    names = list(dict.fromkeys(row.layer for report in reports.values() for row in report.rows))
    height = max(2.6, 0.9 + 0.17 * len(names))
    figure = new_figure(form, 2 * height if form.narrow else height)
    rows, columns = (2, 1) if form.narrow else (1, 2)
    left, right = figure.subplots(rows, columns, squeeze=False).ravel()
    for colour, (name, report) in zip(_cycle(len(reports)), reports.items(), strict=True):
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


def _cycle(count: int) -> list[str]:
    return [LIGHT[_COLOURS[i % len(_COLOURS)]] for i in range(count)]


def _marks(axes: Axes, names: list[str], values: Mapping[str, float], colour: str, label: str) -> None:
    places = [(value, names.index(name)) for name, value in values.items() if math.isfinite(value)]
    axes.plot([x for x, _ in places], [y for _, y in places], "o", color=colour, markersize=4.5, label=label)
