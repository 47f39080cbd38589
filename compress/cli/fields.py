"""Commands that measure what a network sees and what its time must be: receptive-field, erf, roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.options import JsonOption, SetOption
from compress.data import BatchPlan, load_data
from compress.errors import RecipeError
from compress.models import build_model
from compress.pipeline.again import finished_run, network, variants_in
from compress.receptive_field import ErfOptions
from compress.recipe import Recipe, load_recipe, parse_recipe
from compress.report.erf import drift_report, erf_report, receptive_field_report
from compress.report.roofline_figures import draw_ceilings, draw_roofline, save_figure
from compress.roofline import ceilings_text, measure_ceilings, roofline, rows_text, summary_text, what_if, what_if_text

RecipeChoice = Annotated[str | None, typer.Option("--recipe", "-r", help="A recipe: its model and its data.")]
ModelChoice = Annotated[str | None, typer.Option("--model", "-m", help="A torchvision or timm:NAME model, no recipe.")]
SizeOption = Annotated[int, typer.Option("--image-size", help="Side of the input, in pixels; without a recipe.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("receptive-field")(receptive_field)
    app.command("erf")(erf)
    app.command("roofline")(roofline_command)


def receptive_field(
    recipe: RecipeChoice = None,
    model: ModelChoice = None,
    image_size: SizeOption = 224,
    set_: SetOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the table and the figure.")] = Path("runs/fields"),
    as_json: JsonOption = False,
) -> None:
    """Theoretical receptive field of every layer: size, stride and padding, exact from the graph."""
    parsed, built = _network(recipe, model, image_size, set_ or [])
    name = parsed.model.name
    written = receptive_field_report(built, _blank(parsed), out=out, name=name)
    if as_json:
        print_json({"files": [str(p) for p in written.paths], "rows": written.table.records()})
        return
    keys = ("size", "effective_stride", "effective_padding")
    rows = [
        (r["path"], r["kind"], *(_axes(r[key]) for key in keys), _remarks(r))
        for r in written.table.records()
        if r["path"]
    ]
    print_table(f"{name}: receptive fields", ("layer", "kind", "size", "stride", "padding", "notes"), rows)
    OUT.print("\n".join(map(str, written.paths)), highlight=False)


def _remarks(record: dict[str, Any]) -> str:
    status = "" if record["status"] == "exact" else f"{record['status']}: "
    return "; ".join(part for part in (f"{status}{record['reason']}", *record["notes"]) if part)


def _axes(value: object) -> str:
    """A size, stride or padding of both axes; None is what is global or unknown, which the note tells apart."""
    if not isinstance(value, (list, tuple)):
        return "" if value is None else str(value)
    return "x".join("-" if v is None else f"{v:g}" for v in value)


def erf(
    recipe: RecipeChoice = None,
    model: ModelChoice = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="A run folder: compare its float network with each compressed one.")
    ] = None,
    image_size: SizeOption = 224,
    set_: SetOption = None,
    layer: Annotated[
        list[str] | None, typer.Option("--layer", help="Repeat for several; default: some of each depth.")
    ] = None,
    images: Annotated[int, typer.Option(help="How many images to average over.")] = 16,
    data: Annotated[str, typer.Option(help="Without a recipe: shapes, digits or noise.")] = "shapes",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the pictures.")] = Path("runs/erf"),
    as_json: JsonOption = False,
) -> None:
    """Effective receptive field (arXiv 1701.04128): which pixels move a unit, as pictures and numbers."""
    if run is not None:
        if recipe is not None or model is not None:
            raise RecipeError("--run has a model of its own; leave out --recipe and --model")
        _drift(run, layer or [], images, out, as_json)
        return
    chosen = [*(set_ or []), f"data.name={data}"] if recipe is None and data != "noise" else set_ or []
    parsed, built = _network(recipe, model, image_size, chosen)
    batch = _images(parsed, images, noise=recipe is None and data == "noise")
    with progress() as bars:
        written = erf_report(
            built, batch, out=out, name=parsed.model.name, layers=layer, options=ErfOptions(), progress=bars
        )
    if as_json:
        print_json({"picture": str(written.picture), "page": str(written.page), "numbers": str(written.numbers)})
        return
    OUT.print(f"picture: {written.picture}\npage:    {written.page}\nnumbers: {written.numbers}", highlight=False)


def _drift(folder: Path, layers: list[str], images: int, out: Path, as_json: bool) -> None:
    """How far compression moved the gaze of a run's networks."""
    if len(layers) > 1:
        raise RecipeError(f"--run compares one layer, and --layer names {len(layers)}: {', '.join(layers)}")
    run = finished_run(folder)
    networks = {variant: network(run, variant) for variant in variants_in(folder)}
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


def roofline_command(
    recipe: RecipeChoice = None,
    model: ModelChoice = None,
    image_size: SizeOption = 224,
    set_: SetOption = None,
    device: Annotated[str, typer.Option(help="Such as h200, a100, t4, orin; or machine, after --measure.")] = "h200",
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, int8, int8-2:4, fp8.")] = "int8",
    batch_size: Annotated[int, typer.Option(help="Images of one run.")] = 32,
    measure: Annotated[str | None, typer.Option("--measure", help="cpu or cuda: measure this machine's roofs.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the figures.")] = Path("runs/roofline"),
    as_json: JsonOption = False,
) -> None:
    """Where a network's time must go on a device, and what INT8, 2:4, fusion and batching could buy at most."""
    if measure is not None:
        _measure(measure, out, as_json)
        return
    parsed, built = _network(recipe, model, image_size, set_ or [])
    x = _blank(parsed)[:1].expand(batch_size, -1, -1, -1)
    bound = roofline(built, x, device=device, precision=precision, name=parsed.model.name)
    scenarios = what_if(built, x, device=device)
    figure = save_figure(draw_roofline(bound), out / f"{parsed.model.name.replace(':', '-')}-{device}-{precision}.png")
    if as_json:
        print_json({"figure": str(figure), "roofline": bound.as_dict()})
        return
    OUT.print("\n\n".join((summary_text(bound), rows_text(bound), what_if_text(scenarios))), markup=False)
    OUT.print(f"figure: {figure}", highlight=False)


def _measure(device: str, out: Path, as_json: bool) -> None:
    """Time copies and matrix products here, and keep the roofs for `--device machine`."""
    if device not in {"cpu", "cuda"}:
        raise RecipeError(f"--measure is {device!r}; allowed are cpu and cuda")
    measured = measure_ceilings("cuda" if device == "cuda" else "cpu")
    measured.save()
    path = measured.save(out / f"ceilings_{device}.json")
    figure = save_figure(draw_ceilings(measured), out / f"ceilings_{device}.png")
    if as_json:
        print_json({"file": str(path), "figure": str(figure)})
    else:
        OUT.print(ceilings_text(measured), markup=False)
        OUT.print(f"figure: {figure}", highlight=False)


def _network(recipe: str | None, model: str | None, image_size: int, overrides: list[str]) -> tuple[Recipe, nn.Module]:
    """The recipe (of defaults around a bare model) and its network in evaluation mode."""
    if (recipe is None) == (model is None):
        raise RecipeError("give one of --recipe and --model")
    if recipe is not None:
        parsed = load_recipe(recipe, overrides)
    else:
        tree = {"model": {"name": model}, "data": {"name": "shapes", "image_size": image_size}}
        parsed = parse_recipe(tree, overrides, source="--model")
    torch.manual_seed(parsed.train.seed)
    classes = parsed.model.num_classes or parsed.data.num_classes or 1000
    return parsed, build_model(parsed.model, num_classes=classes).eval()


def _blank(recipe: Recipe) -> Tensor:
    size = recipe.data.image_size
    return torch.zeros(2, 3, size, size)


def _images(recipe: Recipe, count: int, *, noise: bool) -> list[Tensor]:
    """Batches of images: of the recipe's training split, or Gaussian noise."""
    if noise:
        generator = torch.Generator().manual_seed(recipe.data.seed)
        size = recipe.data.image_size
        return list(torch.randn(count, 3, size, size, generator=generator).split(8))
    split = load_data(recipe.data).train
    return [images for images, _ in split.batches(BatchPlan(batch_size=8, limit=count))]
