"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.errors import RecipeError
from compress.support.limits import IMAGE_SIDE

FolderArgument = Annotated[Path, typer.Argument(help="A run folder.")]
RecipeOption = Annotated[str, typer.Option("--recipe", "-r", help="A path, or a name such as resnet50.yaml.")]
RecipeChoice = Annotated[str | None, typer.Option("--recipe", "-r", help="A recipe: its model and its data.")]
ModelChoice = Annotated[
    str | None, typer.Option("--model", "-m", help="A model of torchvision, or timm:NAME, without a recipe.")
]
WeightsChoice = Annotated[
    str | None,
    typer.Option("--weights", help="With --model: a file, or a name such as IMAGENET1K_V2; default: random weights."),
]
ImageSizeOption = Annotated[
    int, typer.Option("--image-size", min=8, max=IMAGE_SIDE, help="Side of the input in pixels, without a recipe.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override, such as qat.epochs=1.")
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; default runs/<recipe>-<command>.")]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", help="A finished run: its float network is taken, and its recipe where none is named."),
]
AllOption = Annotated[bool, typer.Option("--all", metavar="", help="Every row of the table.")]
ResumeOption = Annotated[bool, typer.Option("--resume", metavar="", help="Continue the run that the folder holds.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: a GPU where there is one.")]
SizeOption = Annotated[
    str | None, typer.Option("--size", help="Sides that a file leaves open: 320, or 480x640 (height first).")
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document on standard output.")]


def sides_of(size: str) -> tuple[int, int]:
    sides = [int(side) if side.isdecimal() else 0 for side in size.split("x")]
    if len(sides) > 2 or min(sides) < 1:
        raise RecipeError(f"--size is {size!r}: it must be a number of pixels, or height x width such as 480x640")
    return sides[0], sides[-1]
