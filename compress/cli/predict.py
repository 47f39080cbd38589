"""The command `predict`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, print_table
from compress.cli.options import FolderArgument, JsonOption
from compress.pipeline.predict import Prediction
from compress.pipeline.predict import predict as predict_images


def predict(
    folder: FolderArgument,
    images: Annotated[list[Path], typer.Argument(help="Files or folders of pictures.")],
    engine: Annotated[str, typer.Option(help="Engine that runs the network.")] = "openvino",
    variant: Annotated[str, typer.Option(help="float, ptq, qat, ...; default: the last that the run made.")] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of drawn masks and boxes; default RUN/predictions.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what the network finds in each image."""
    found = predict_images(folder, images, engine=engine, variant=variant, out=out)
    if as_json:
        print_json([asdict(prediction) for prediction in found])
        return
    for prediction in found:
        _show(prediction)


def _show(prediction: Prediction) -> None:
    if prediction.boxes or not prediction.classes:
        boxes = [(name, f"{score:.1%}", *(f"{side:.0f}" for side in box)) for name, score, box in prediction.boxes]
        columns = ("class", "score", "left", "top", "right", "bottom")
        print_table(prediction.image, columns, boxes, numbers=columns[1:])
    else:
        rows = [(name, f"{share:.1%}") for name, share in prediction.classes]
        print_table(prediction.image, ("class", "share"), rows, numbers=("share",))
    if prediction.drawn:
        OUT.print(prediction.drawn, highlight=False, soft_wrap=True)
