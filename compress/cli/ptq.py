"""The command `ptq`: of a recipe, or of an ONNX file without its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.markup import escape

from compress.audit.onnx import audit_onnx
from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.options import DeviceOption, JsonOption, OutOption, RecipeChoice, ResumeOption, SetOption
from compress.cli.run import ptq as ptq_of_recipe
from compress.data.files import Layout, PictureInput, unlabelled
from compress.errors import RecipeError
from compress.files import write_json, write_text
from compress.onnx_ptq.quantize import QuantizedFile, quantize_onnx_file
from compress.quantization.spec import TARGETS, QuantSpec
from compress.recipe import load_recipe

_BATCH = 8
_ONNX = "ONNX files"


def ptq(
    recipe: RecipeChoice = None,
    set_: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    onnx: Annotated[Path | None, typer.Option(help="A float ONNX file to quantize.", rich_help_panel=_ONNX)] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder of pictures, an .npz of inputs, or package.module:function.", rich_help_panel=_ONNX
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help=", ".join(TARGETS), rich_help_panel=_ONNX)] = None,
    size: Annotated[
        str | None, typer.Option(help="Pictures: 224, or 480x640 (height first).", rich_help_panel=_ONNX)
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Pictures: such as 0.485,0.456,0.406.", rich_help_panel=_ONNX)
    ] = None,
    std: Annotated[str | None, typer.Option(help="Pictures: such as 0.229,0.224,0.225.", rich_help_panel=_ONNX)] = None,
    layout: Annotated[str, typer.Option(help="Pictures: NCHW or NHWC.", rich_help_panel=_ONNX)] = "NCHW",
    channels: Annotated[str, typer.Option(help="Pictures: RGB or BGR.", rich_help_panel=_ONNX)] = "RGB",
    images: Annotated[
        int | None, typer.Option(help="Pictures to calibrate with.", min=1, rich_help_panel=_ONNX)
    ] = None,
) -> None:
    """Run a recipe, or quantize a file."""
    if onnx is None:
        if recipe is None:
            raise RecipeError("give --recipe, or --onnx FILE and --data for a network of which only the file is there")
        if data is not None or target is not None:
            raise RecipeError(
                "--data and --target belong to --onnx FILE; a recipe has a data and a quantization section"
            )
        ptq_of_recipe(recipe, set_, out, resume, device, as_json)
        return
    if data is None:
        raise RecipeError(
            "--onnx needs --data: a folder of pictures, an .npz file of inputs, or package.module:function"
        )
    if set_ and recipe is None:
        raise RecipeError("--set changes a recipe; give --recipe too")
    spec = _spec(recipe, set_, target, images)
    form = _form(size, mean, std, layout, channels)
    batches = unlabelled(data, form, limit=spec.calibration_images, batch_size=_BATCH)
    folder = out or Path("runs") / f"{onnx.stem}-ptq"
    with progress() as bars:
        done = quantize_onnx_file(onnx, batches, spec=spec, out=folder / f"{onnx.stem}.int8.onnx", progress=bars)
    write_text(folder / "placement.csv", done.placement.to_csv())
    _show(done, folder, as_json=as_json)


def _spec(recipe: str | None, set_: list[str] | None, target: str | None, images: int | None) -> QuantSpec:
    """Return the quantization section of a recipe with what the options change."""
    spec = QuantSpec()
    if recipe is not None:
        found = load_recipe(recipe, set_ or ()).quantization
        if found is None:
            raise RecipeError(f"{recipe} has no quantization section, which says how to quantize the file")
        spec = found
    if target is not None:
        if target not in TARGETS:
            raise RecipeError(f"--target is {target!r} (one of: {', '.join(TARGETS)})")
        spec = replace(spec, target=target)
    return spec if images is None else replace(spec, calibration_images=images)


def _form(size: str | None, mean: str | None, std: str | None, layout: str, channels: str) -> PictureInput:
    if layout not in get_args(Layout) or channels not in {"RGB", "BGR"}:
        raise RecipeError(f"--layout is {layout!r} and --channels {channels!r}: they must be NCHW or NHWC, RGB or BGR")
    form = PictureInput(layout=cast(Layout, layout), channels=channels)  # type: ignore[arg-type]
    if size is not None:
        sides = [int(side) if side.isdecimal() else 0 for side in size.split("x")]
        if len(sides) > 2 or min(sides) < 1:
            raise RecipeError(f"--size is {size!r}: it must be a number of pixels, or height x width such as 480x640")
        form = replace(form, size=(sides[0], sides[-1]))
    return replace(form, mean=_numbers("mean", mean, form.mean), std=_numbers("std", std, form.std))


def _numbers(name: str, text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    if text is None:
        return default
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) not in (1, 3) or (name == "std" and min(found) <= 0):
        positive = " above 0" if name == "std" else ""
        raise RecipeError(f"--{name} is {text!r}: it must be one number{positive} or three, such as 0.5,0.5,0.5")
    return found * 3 if len(found) == 1 else found


def _show(done: QuantizedFile, folder: Path, *, as_json: bool) -> None:
    audit = audit_onnx(done.path)
    count = sum(row.int8 for row in audit.rows)
    document = {
        "file": str(done.path), "placement": str(folder / "placement.csv"), "target": done.placement.target,
        "images": done.calibration.images, "layers": len(audit.rows), "int8_layers": count,
        "int8_share": audit.int8_share, "opset": audit.opset, "notes": list(done.notes),
    }  # fmt: skip
    write_json(folder / "quantization.json", document)
    if as_json:
        print_json(document)
        return
    rows = [(row.layer, row.rule, row.reason) for row in done.placement.decisions if row.decision == "float"]
    if rows:
        print_table("stays float", ("operation", "rule", "reason"), rows)
    for note in done.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}")
    OUT.print(
        f"{count} of {len(audit.rows)} weighted operations are INT8 ({audit.int8_share:.1%} of the weights), "
        f"calibrated on {done.calibration.images} images; opset {audit.opset}"
    )
    OUT.print(f"{done.path}\n{folder / 'placement.csv'}", highlight=False, soft_wrap=True)
