"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeOption = Annotated[str, typer.Option("--recipe", "-r", help="A path, or a name such as resnet50.yaml.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override, such as qat.epochs=1.")
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; default runs/<recipe>-<command>.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run that the folder holds.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: a GPU where there is one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
