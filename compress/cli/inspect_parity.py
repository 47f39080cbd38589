"""The command `inspect parity`, with `--mend` and `--mend-sqnr`."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from compress.cli.console import OUT, print_json, print_next, print_table, progress
from compress.cli.options import (
    DataOption,
    FileOption,
    FormOptions,
    ImagesOption,
    JsonOption,
    MetricOption,
    RecipeChoice,
    SetOption,
    TargetOption,
    batches_of,
    spec_of,
)
from compress.errors import RecipeError
from compress.measure.latency import NOT_MEASURED
from compress.measure.parity import LayerParity
from compress.pipeline.studies.parity import (
    MendReport,
    Results,
    mend_file,
    mend_recipe,
    mend_run,
    parity_of_recipe,
    parity_of_run,
)
from compress.pipeline.studies.sensitivity import plain
from compress.quantization.sensitivity import Effect, Goal
from compress.recipe.tree import load_recipe
from compress.support.imports import imported
from compress.support.meters import metric_title, score_text

_ROWS = 12


def show_mended(found: MendReport, *, as_json: bool, then: str = "ptq") -> None:
    mended = found.mended
    if as_json:
        document = plain(
            {
                "diagnosis": asdict(mended.diagnosis),
                "goal": mended.goal,
                "met": mended.met,
                "changes": [asdict(change) for change in mended.changes],
                "effect": asdict(mended.effect),
                "prices": [asdict(price) for price in found.prices],
                "not_timed": found.not_timed,
                "recipe": None if found.recipe is None else str(found.recipe),
            }
        )
        print_json(document)
        return
    _show_diagnosis(found)
    unit = mended.diagnosis.unit
    if mended.changes:
        columns = ("change", "because", "without it")
        rows = [
            (change.text, change.cause, "" if change.without is None else _effect(change.without, unit))
            for change in mended.changes
        ]
        print_table("the smallest set of changes that was found", columns, rows)
    verdict = "met" if mended.met else "NOT met, whatever was changed"
    OUT.print(f"{mended.goal}: {verdict}; {_effect(mended.effect, unit)}")
    if found.prices:
        columns = ("network", "p50 ms", "mended takes")
        rows_ms = [
            (price.label, f"{price.p50_ms:.3f}", NOT_MEASURED if price.unquiet else f"{price.ratio:.3f}")
            for price in found.prices
        ]
        print_table("time of a run, in turn", columns, rows_ms, numbers=columns[1:])
    elif mended.changes:
        OUT.print(escape(found.not_timed))
    if found.recipe is not None:
        OUT.print(str(found.recipe), highlight=False, soft_wrap=True)
        print_next(f"{then} --recipe {found.recipe}")


def _show_diagnosis(found: MendReport) -> None:
    seen = found.mended.diagnosis
    columns = ("layer", "alone, dB", "share of noise", "why")
    rows = [
        (row.layer, f"{row.alone.sqnr_db:.1f}", f"{row.share:.1%}", "; ".join(c.text for c in row.causes[:2]))
        for row in seen.rows[:_ROWS]
    ]
    print_table(f"noisiest layers of {len(seen.rows)}", columns, rows, numbers=columns[1:3])
    if seen.first is not None:
        OUT.print(
            f"first tensor that diverges: {seen.first.tensor}, {seen.first.sqnr_db:.1f} dB; what it is computed from "
            f"has {seen.first.before_db:.1f} dB"
        )
    score = ""
    if seen.float_score is not None:
        score = f", {metric_title(seen.metric)} {score_text(seen.float_score, seen.unit)} in float"
    OUT.print(f"{seen.images} images{score}; quantized {_effect(seen.quantized, seen.unit)}")


def _effect(effect: Effect, unit: str) -> str:
    parts = [f"{effect.sqnr_db:.1f} dB"]
    if effect.agreement is not None:
        parts.append(f"{effect.agreement:.1%} agree with float")
    if effect.score is not None:
        parts.append(score_text(effect.score, unit))
    return ", ".join(parts)


def inspect_parity(
    *,
    recipe: RecipeChoice = None,
    run: Annotated[Path | None, typer.Option("--run", help="A run folder in place of a recipe.")] = None,
    set_: SetOption = None,
    mend: Annotated[
        float | None, typer.Option(help="Find the smallest change that loses at most these points against float.")
    ] = None,
    mend_sqnr: Annotated[float | None, typer.Option(help="The same for a least signal to noise in dB.")] = None,
    write: Annotated[Path | None, typer.Option(help="Recipe with the changes; default mended.yaml.")] = None,
    onnx: FileOption = None,
    data: DataOption = None,
    target: TargetOption = None,
    form: FormOptions,
    images: ImagesOption = None,
    metric: MetricOption = None,
    as_json: JsonOption = False,
) -> None:
    goal = _goal(mend, mend_sqnr, write)
    if onnx is not None:
        if goal is None or run is not None:
            raise RecipeError("--onnx FILE is compared with float: add --mend or --mend-sqnr, and no --run")
        spec = spec_of(recipe, set_, target, images)
        batches = batches_of(data, form.of(onnx), spec.calibration_images)
        judge = None if metric is None else imported(metric, key="--metric", error=RecipeError)
        with progress() as bars:
            show = mend_file(onnx, batches, spec, goal, metric=judge, out=write or Path("mended.yaml"), progress=bars)
        show_mended(show, as_json=as_json, then=f"ptq --onnx {onnx} --data {data}")
        return
    if metric is not None:
        raise RecipeError("--metric judges a file: add --onnx; the metric of a recipe or a run is that of its task")
    if (recipe is None) == (run is None):
        raise RecipeError("inspect parity compares one network: give --recipe, or --run with a run folder")
    if goal is not None:
        out, count = write or Path("mended.yaml"), images or _IMAGES
        with progress() as bars:
            if run is not None:
                show = mend_run(run, goal, images=count, out=out, progress=bars)
            else:
                show = mend_recipe(load_recipe(str(recipe), set_ or ()), goal, images=count, out=out, progress=bars)
        show_mended(show, as_json=as_json)
        return
    results = parity_of_recipe(load_recipe(recipe, set_ or ())) if recipe is not None else parity_of_run(Path(str(run)))
    _show_engines(results, as_json=as_json)
    if not as_json:
        print_next(f"inspect parity {f'--run {run}' if recipe is None else f'--recipe {recipe}'} --mend 0.5")


def _show_engines(results: Results, *, as_json: bool) -> None:
    if as_json:
        rows = {
            engine: {**asdict(found), "verdict": found.verdict}
            if isinstance(found, LayerParity)
            else {"error": str(found)}
            for engine, found in results.items()
        }
        print_json(plain(rows))
        return
    for engine, found in results.items():
        if isinstance(found, LayerParity):
            _show(found)
        else:
            OUT.print(f"unavailable {engine}: {found}")


_IMAGES = 256


def _goal(mend: float | None, mend_sqnr: float | None, write: Path | None) -> Goal | None:
    if mend is None and mend_sqnr is None:
        if write is not None:
            raise RecipeError("--write names the recipe of --mend or --mend-sqnr: add one of them")
        return None
    value = mend if mend_sqnr is None else mend_sqnr
    if (mend is not None and mend_sqnr is not None) or not math.isfinite(float(value or 0)) or float(value or 0) < 0:
        raise RecipeError(
            "--mend takes points of the metric, --mend-sqnr a number of dB, 0 or more; give one of the two"
        )
    return Goal(drop=mend, sqnr_db=mend_sqnr)


def _show(found: LayerParity) -> None:
    columns = ("tensor", "operations before", "1 step, %", "more, %", "most steps", "SQNR, dB", "")
    rows = [
        (
            point.tensor,
            ", ".join(point.operations),
            f"{100 * point.one_step:.3f}",
            f"{100 * point.more_steps:.3f}",
            point.largest_steps,
            f"{point.sqnr_db:.1f}",
            "diverges" if point.diverges else "",
        )
        for point in found.points
    ]
    print_table(f"{found.engine}: at every quantizer", columns, rows, numbers=columns[2:6])
    OUT.print(found.verdict)
    OUT.print(
        f"logits: {found.logits.sqnr_db:.1f} dB, {found.logits.agreement:.1%} in the same class as fake quantization; "
        f"values read from {found.method}"
    )
    if found.missing:
        OUT.print(f"not in the file: {', '.join(found.missing)}")
