"""The commands `search` and `sensitivity`."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, print_next, print_table, progress
from compress.cli.options import DeviceOption, FromOption, JsonOption, OutOption, RecipeOption, ResumeOption, SetOption
from compress.cli.report import show_folder
from compress.errors import RecipeError, SearchError
from compress.measure.latency import NOT_MEASURED
from compress.pipeline import default_folder
from compress.pipeline.studies.search import search_run, search_worker
from compress.pipeline.studies.sensitivity import (
    Measured,
    MixedPoint,
    check_costs,
    mixed_front,
    pick,
    plain,
    sensitivity_run,
    write_recipe,
)
from compress.quantization.sensitivity import Sensitivity
from compress.recipe.tree import load_recipe
from compress.search.search import Front, Outcome, pareto
from compress.support.limits import COUNT
from compress.support.meters import metric_title, score_text, shown
from compress.support.text import MISSING, scored


def search(
    recipe: RecipeOption,
    engine: Annotated[str, typer.Option(help="openvino, onnxruntime, cuda, ...: everything is measured on it.")] = (
        "openvino"
    ),
    latency: Annotated[
        float | None, typer.Option(help="The most accurate network in this share of the float network's latency.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="The fastest network that loses at most these points of the metric.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, max=COUNT, help="Configurations built and measured.")] = None,
    hours: Annotated[float | None, typer.Option(help="No trial but the first three begins after so long.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Trials of several workers: a URL that Optuna knows, or a file they all reach.")
    ] = None,
    worker: Annotated[
        bool, typer.Option("--worker", metavar="", help="Take part in the trials of the search that --out holds.")
    ] = False,
    set_: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    effort = {"search.trials": trials, "search.hours": hours}
    changes = [f"{key}={value}" for key, value in effort.items() if value is not None]
    parsed = load_recipe(recipe, [*(set_ or ()), *changes])
    folder = out or default_folder(recipe, "search", resume=resume or worker, recipe=parsed)
    if worker:
        if latency is not None or max_drop is not None:
            raise SearchError("--worker takes part in trials alone: the search that it joins has the bound")
        with progress() as bars:
            front = search_worker(folder, engine=engine, storage=storage, device=device, progress=bars)
        _show_worker(folder, front, as_json=as_json)
        return
    show_folder(folder, named=out is not None, resume=resume)
    with progress() as bars:
        outcome = search_run(
            parsed,
            folder,
            engine=engine,
            latency=latency,
            max_drop=max_drop,
            storage=storage,
            resume=resume,
            device=device,
            progress=bars,
        )
    _show_search(folder, outcome, as_json=as_json)


def _show_search(folder: Path, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "report": str(folder / "report.html"),
                "advice": outcome.advice,
                "chosen": asdict(outcome.chosen) if outcome.chosen else None,
                "front": [asdict(point) for point in outcome.front.front],
            }
        )
        return
    metric = outcome.metric
    columns = ("network", "time", "ms", "error", metric.title)
    rows = [
        (
            point.label,
            point.figures.ratio_text(),
            f"{point.figures.ms:.3f}",
            f"{point.figures.distance:.3g}",
            metric.text(outcome.scores[point.label]) if point.label in outcome.scores else "",
        )
        for point in outcome.front.front
    ]
    print_table("front, before fine-tuning", columns, rows, numbers=columns[1:])
    columns = ("fine-tuned", "time", "ms", metric.title, f"{metric.amount} lost".strip())
    tuned = [
        (
            f"{made.folder} ({made.label}){' chosen' if made is outcome.chosen else ''}",
            made.ratio_text(),
            f"{made.ms:.3f}",
            metric.text(made.score),
            scored(made.drop, metric.unit),
        )
        for made in outcome.attempts
    ]
    print_table(outcome.bound.words, columns, tuned, numbers=columns[1:])
    OUT.print(outcome.advice, highlight=False, soft_wrap=True)
    OUT.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    if outcome.chosen is not None:
        made = folder / outcome.chosen.folder
        print_next(f"report {made}", f"bundle {made} --server triton --variant {outcome.chosen.variant}")


def _show_worker(folder: Path, front: Front, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"folder": str(folder), "points": len(front.points), "front": [p.label for p in pareto(front.points)]}
        )
        return
    OUT.print(f"{folder}: the trials have ended; the search has {len(front.points)} points", highlight=False)


BudgetOption = Annotated[float | None, typer.Option(help="Choose a format for each layer: least noise in this time.")]
DropOption = Annotated[
    float | None,
    typer.Option(help="Choose a format for each layer: fastest that loses at most these points of the metric."),
]


def sensitivity(
    recipe: RecipeOption,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder; default runs/<recipe>-sensitivity.")
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, max=COUNT, help="Images of the evaluation split that effects are measured on.")
    ] = 256,
    weight_bits: Annotated[
        list[int] | None, typer.Option("--weight-bits", help="A further format: weights of so many bits. Repeatable.")
    ] = None,
    budget_ms: BudgetOption = None,
    max_drop: DropOption = None,
    write: Annotated[Path | None, typer.Option(help="Recipe of that choice; default <out>/mixed.yaml.")] = None,
    costs: Annotated[str, typer.Option(help="openvino or onnxruntime, or a device of `roofline`.")] = "openvino",
    batch_size: Annotated[int, typer.Option(min=1, max=COUNT, help="Images of one timed run.")] = 1,
    precision: Annotated[
        str | None, typer.Option(help="Float part on the engine: f32, bf16; default its choice.")
    ] = None,
    from_: FromOption = None,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    _check_choice(budget_ms, max_drop)
    mixed = budget_ms is not None or max_drop is not None
    if write is not None and not mixed:
        raise RecipeError("--write names the recipe of a choice: add --budget-ms or --max-drop")
    if mixed:
        check_costs(costs)
    parsed = load_recipe(recipe, set_ or ())
    folder = out or default_folder(recipe, "sensitivity", resume=resume, recipe=parsed)
    show_folder(folder, named=out is not None, resume=resume)
    points: tuple[MixedPoint, ...] = ()
    chosen, path = None, write or folder / "mixed.yaml"
    with progress() as bars:
        measured = sensitivity_run(
            parsed,
            folder,
            images=images,
            weight_bits=weight_bits or (),
            resume=resume,
            device=device,
            start=from_,
            progress=bars,
        )
        if mixed:
            points = mixed_front(measured, costs=costs, batch_size=batch_size, precision=precision, images=images)
            chosen = pick(points, budget_ms=budget_ms, max_drop=max_drop, metric=measured.run.task.metric)
            write_recipe(measured, chosen, path)
    if as_json:
        print_json(_document(measured, points, chosen, path))
        return
    _show(measured)
    if chosen is not None:
        _show_points(points, chosen, measured.reports[measured.base])
        OUT.print(f"{chosen.label}: {path}", highlight=False, soft_wrap=True)
    print_next(f"qat --recipe {path}" if mixed else f"sensitivity -r {recipe} -o {folder} --resume --max-drop 1")


def _check_choice(budget_ms: float | None, max_drop: float | None) -> None:
    if budget_ms is not None and max_drop is not None:
        raise RecipeError("--budget-ms and --max-drop are two ways to choose: give one of them")
    for option, value in (("--budget-ms", budget_ms), ("--max-drop", max_drop)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise RecipeError(f"{option} is {value}: it must be a finite number, 0 or more")


def _document(measured: Measured, points: tuple[MixedPoint, ...], chosen: MixedPoint | None, path: Path) -> object:
    document: dict[str, object] = {
        "files": [str(file) for file in measured.files],
        "formats": {name: asdict(report) for name, report in measured.reports.items()},
    }
    if chosen is not None:
        document |= {"points": [asdict(point) for point in points], "chosen": chosen.label, "recipe": str(path)}
    return plain(document)


def _show(measured: Measured) -> None:
    for name, report in measured.reports.items():
        title, unit = metric_title(report.metric), report.unit
        column = f"{title} {unit}".strip()
        columns = ("layer", "weights", "alone, dB", column, "left float, dB", column)
        rows = [
            (
                row.layer,
                row.weight_elements,
                f"{row.alone.sqnr_db:.1f}",
                _score(row.alone.score, unit),
                f"{row.left_out.sqnr_db:.1f}",
                _score(row.left_out.score, unit),
            )
            for row in sorted(report.rows, key=lambda row: row.alone.sqnr_db)
        ]
        print_table(f"{name}: worst layer first", columns, rows, numbers=columns[1:])
        whole = report.quantized
        OUT.print(
            f"{report.images} images: float {score_text(report.float_score, unit)} {title}; all quantized "
            f"{score_text(whole.score, unit)}, {whole.sqnr_db:.1f} dB"
        )
    OUT.print("\n".join(map(str, measured.files)), highlight=False, soft_wrap=True)


def _show_points(points: tuple[MixedPoint, ...], chosen: MixedPoint, report: Sensitivity) -> None:
    column = f"{metric_title(report.metric)} {report.unit}".strip()
    columns = ("network", "quantized layers", "sum of layers, ms", "measured, ms", column, "agrees %", "SQNR, dB")
    rows = [
        (
            f"{point.label}{' (chosen)' if point is chosen else ''}",
            sum(name != "float" for name in point.formats.values()),
            f"{point.predicted_ms:.3f}",
            "n/a" if point.latency_ms is None else NOT_MEASURED if point.unquiet else f"{point.latency_ms:.3f}",
            _score(point.score, report.unit),
            "n/a" if point.agreement is None else f"{100 * point.agreement:.2f}",
            f"{point.sqnr_db:.1f}",
        )
        for point in points
    ]
    print_table("formats", columns, rows, numbers=columns[1:])


def _score(value: float | None, unit: str) -> str:
    return MISSING if value is None else scored(shown(value, unit), unit)
