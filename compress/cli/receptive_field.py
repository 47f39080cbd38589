"""The command `receptive-field`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.console import OUT, print_json, print_table
from compress.cli.networks import blank_images, chosen_recipe, network_of, weights_text
from compress.cli.options import ImageSizeOption, JsonOption, ModelChoice, RecipeChoice, SetOption, WeightsChoice
from compress.report.receptive_field import receptive_field_report


def receptive_field(
    recipe: RecipeChoice = None,
    model: ModelChoice = None,
    weights: WeightsChoice = None,
    image_size: ImageSizeOption = 224,
    set_: SetOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the table and the figure.")] = Path("runs/fields"),
    as_json: JsonOption = False,
) -> None:
    """Write the table and its figure."""
    parsed = chosen_recipe(recipe, model, set_, image_size=image_size, weights=weights)
    name = parsed.model.name
    written = receptive_field_report(network_of(parsed), blank_images(parsed), out=out, name=name)
    if as_json:
        print_json(
            {"files": [str(p) for p in written.paths], "rows": written.table.records(), "weights": weights_text(parsed)}
        )
        return
    keys = ("size", "effective_stride", "effective_padding")
    rows = [
        (r["path"], r["kind"], *(_axes(r[key]) for key in keys), _remarks(r))
        for r in written.table.records()
        if r["path"]
    ]
    print_table(
        f"{name}, {weights_text(parsed)}: receptive fields",
        ("layer", "kind", "size", "stride", "padding", "notes"),
        rows,
    )
    OUT.print("\n".join(map(str, written.paths)), highlight=False)


def _remarks(record: dict[str, Any]) -> str:
    status = "" if record["status"] == "exact" else f"{record['status']}: "
    return "; ".join(part for part in (f"{status}{record['reason']}", *record["notes"]) if part)


def _axes(value: object) -> str:
    """Both axes; "-" is global or unknown, which the note distinguishes."""
    if not isinstance(value, (list, tuple)):
        return "" if value is None else str(value)
    return "x".join("-" if v is None else f"{v:g}" for v in value)
