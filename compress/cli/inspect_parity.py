"""The command `inspect parity`: engines against fake quantization, layer by layer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, print_table
from compress.cli.options import JsonOption, RecipeChoice, SetOption
from compress.errors import RecipeError
from compress.measure.layer_parity import LayerParity
from compress.pipeline.studies.parity import parity_of_recipe, parity_of_run
from compress.pipeline.studies.sensitivity import plain
from compress.recipe import load_recipe


def inspect_parity(
    recipe: RecipeChoice = None,
    run: Annotated[Path | None, typer.Option("--run", help="A run folder in place of a recipe.")] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the engines and print a table for each.

    Raises:
        RecipeError: a recipe and a run, or neither.
    """
    if (recipe is None) == (run is None):
        raise RecipeError("inspect parity compares one network: give --recipe, or --run with a run folder")
    results = parity_of_recipe(load_recipe(recipe, set_ or ())) if recipe is not None else parity_of_run(Path(str(run)))
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
