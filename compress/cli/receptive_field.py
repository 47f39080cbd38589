"""The commands `receptive-field` and `erf`: theoretical and effective fields, the latter also of a run's networks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.networks import blank_images, chosen_recipe, network_of, weights_text
from compress.cli.options import ImageSizeOption, JsonOption, ModelChoice, RecipeChoice, SetOption, WeightsChoice
from compress.data.base import BatchPlan
from compress.data.load import load_data
from compress.errors import RecipeError
from compress.pipeline.again import finished_run, network, variants_in
from compress.receptive import ErfOptions
from compress.recipe.tree import Recipe
from compress.report.receptive_field import drift_report, erf_report, receptive_field_report
from compress.support.limits import COUNT


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


def erf(
    recipe: RecipeChoice = None,
    model: ModelChoice = None,
    weights: WeightsChoice = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="A run folder: compare its float network with each compressed one.")
    ] = None,
    image_size: ImageSizeOption = 224,
    set_: SetOption = None,
    layer: Annotated[
        list[str] | None, typer.Option("--layer", help="Repeat for several; default: some of each depth.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, max=COUNT, help="How many images to average over.")] = 16,
    data: Annotated[str, typer.Option(help="Without a recipe: shapes, digits or noise.")] = "shapes",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the figures.")] = Path("runs/erf"),
    as_json: JsonOption = False,
) -> None:
    """Measure effective receptive fields."""
    if run is not None:
        if recipe is not None or model is not None or weights is not None:
            raise RecipeError("--run has a model of its own; leave out --recipe, --model and --weights")
        _drift(run, layer or [], images, out, as_json)
        return
    noise = recipe is None and data == "noise"
    overrides = [*(set_ or []), f"data.name={data}"] if recipe is None and not noise else set_
    parsed = chosen_recipe(recipe, model, overrides, image_size=image_size, weights=weights)
    built, batch = network_of(parsed), _images(parsed, images, noise=noise)
    with progress() as bars:
        written = erf_report(
            built,
            batch,
            out=out,
            name=parsed.model.name,
            weights=weights_text(parsed),
            layers=layer,
            options=ErfOptions(),
            progress=bars,
        )
    if as_json:
        files = {"picture": str(written.picture), "page": str(written.page), "numbers": str(written.numbers)}
        print_json({**files, "weights": weights_text(parsed)})
        return
    OUT.print(f"network: {parsed.model.name}, {weights_text(parsed)}", highlight=False, soft_wrap=True)
    OUT.print(f"image:   {written.picture}\npage:    {written.page}\nnumbers: {written.numbers}", highlight=False)


def _drift(folder: Path, layers: list[str], images: int, out: Path, as_json: bool) -> None:
    if len(layers) > 1:
        raise RecipeError(f"--run compares one layer, and --layer names {len(layers)}: {', '.join(layers)}")
    run = finished_run(folder)
    networks = {str(variant): network(run, variant) for variant in variants_in(folder)}
    name = run.recipe.model.name
    batch = _images(run.recipe, images, noise=False)
    written = drift_report(networks, batch, out=out, name=name, layer=layers[0] if layers else None)
    if as_json:
        print_json({"pictures": [str(p) for p in written.pictures], "numbers": str(written.numbers)})
        return
    rows = [
        (
            key,
            f"{100 * d.total_variation:.1f} %",
            f"{d.moved_px:.2f}",
            f"{d.radius_change_px:+.2f}",
            f"{d.size_ratio:.3f}",
        )
        for key, d in written.drifts.items()
    ]
    columns = ("network", "influence on other pixels", "moved, px", "mean radius, px", "side, ratio")
    print_table(f"{name}: effective receptive field against the float network's", columns, rows)
    OUT.print("\n".join(map(str, (*written.pictures, written.numbers))), highlight=False)


def _images(recipe: Recipe, count: int, *, noise: bool) -> list[Tensor]:
    if noise:
        generator = torch.Generator().manual_seed(recipe.data.seed)
        return list(torch.randn(count, 3, *recipe.data.height_width, generator=generator).split(8))
    split = load_data(recipe.data).train
    return [images for images, _ in split.batches(BatchPlan(batch_size=8, limit=count))]
