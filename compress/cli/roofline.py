"""The command `roofline`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, progress
from compress.cli.networks import blank_images, chosen_recipe, network_of, weights_text
from compress.cli.options import ImageSizeOption, JsonOption, ModelChoice, RecipeChoice, SetOption, WeightsChoice
from compress.errors import RecipeError
from compress.graph.trace import trace
from compress.plots.roofline import draw_ceilings, draw_roofline
from compress.plots.style import save_figure
from compress.roofline_model import ceilings_text, measure_ceilings, rows_text, summary_text, what_if_text
from compress.roofline_model.counting import count
from compress.roofline_model.model import find_device, roofline_of, scenarios
from compress.support.limits import COUNT
from compress.support.text import image_size_text


def roofline(
    recipe: RecipeChoice = None,
    model: ModelChoice = None,
    weights: WeightsChoice = None,
    image_size: ImageSizeOption = 224,
    set_: SetOption = None,
    device: Annotated[
        str, typer.Option(help="Such as h200, a100, thor, xeon-8480; or machine, after --measure.")
    ] = "h200",
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, int8, int8-2:4, fp8.")] = "int8",
    batch_size: Annotated[int, typer.Option(min=1, max=COUNT, help="Images of one run.")] = 32,
    unfused: Annotated[
        bool, typer.Option("--unfused", metavar="", help="Each operation alone, not fused as in an engine.")
    ] = False,
    measure: Annotated[str | None, typer.Option("--measure", help="cpu or cuda: measure this machine's roofs.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the figures.")] = Path("runs/roofline"),
    as_json: JsonOption = False,
) -> None:
    """Draw the roofline; with `--measure`, time this machine instead."""
    if measure is not None:
        _measure(measure, out, as_json)
        return
    parsed = chosen_recipe(recipe, model, set_, image_size=image_size, weights=weights)
    find_device(device).peak_flops_per_s(precision)  # an unknown name is refused before the network is built
    name, images = parsed.model.name, blank_images(parsed)
    with progress() as bars:
        bars.note(f"{name} at {image_size_text(parsed.data.image_size)} is counted from its shapes, without its images")
        graph = trace(network_of(parsed), images)
    plain, fused = (count(graph, images, fused=fuse).with_batch(batch_size) for fuse in (False, True))
    bound = roofline_of(replace(plain if unfused else fused, model=name), device=device, precision=precision)
    figure = save_figure(draw_roofline(bound), out / f"{name.replace(':', '-')}-{device}-{precision}.png")
    if as_json:
        print_json({"figure": str(figure), "roofline": bound.as_dict(), "weights": weights_text(parsed)})
        return
    OUT.print(f"network: {name}, {weights_text(parsed)}", highlight=False, soft_wrap=True)
    OUT.print(
        "\n\n".join((summary_text(bound), rows_text(bound), what_if_text(scenarios(plain, fused, device=device))))
    )
    OUT.print(f"figure: {figure}", highlight=False)


def _measure(device: str, out: Path, as_json: bool) -> None:
    if device not in {"cpu", "cuda"}:
        raise RecipeError(f"--measure is {device!r}; allowed are cpu and cuda")
    measured = measure_ceilings("cuda" if device == "cuda" else "cpu")
    measured.save()
    path = measured.save(out / f"ceilings_{device}.json")
    figure = save_figure(draw_ceilings(measured), out / f"ceilings_{device}.png")
    if as_json:
        print_json({"file": str(path), "figure": str(figure)})
    else:
        OUT.print(ceilings_text(measured))
        OUT.print(f"figure: {figure}", highlight=False)
