"""The command `search`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.options import DeviceOption, JsonOption, OutOption, RecipeOption, ResumeOption, SetOption
from compress.cli.report import show_finished_steps
from compress.errors import SearchError
from compress.pipeline import default_folder
from compress.pipeline.studies.search import search_run, search_worker
from compress.recipe.tree import load_recipe
from compress.search.front import Front, Outcome, pareto
from compress.support.limits import COUNT
from compress.support.text import scored


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
    """Search under measured latency."""
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
    if resume:
        show_finished_steps(folder)
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
    _show(folder, outcome, as_json=as_json)


def _show(folder: Path, outcome: Outcome, *, as_json: bool) -> None:
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


def _show_worker(folder: Path, front: Front, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"folder": str(folder), "points": len(front.points), "front": [p.label for p in pareto(front.points)]}
        )
        return
    OUT.print(f"{folder}: the trials have ended; the search has {len(front.points)} points", highlight=False)
