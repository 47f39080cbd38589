"""The commands on the networks of a finished run: `export`, `bundle`, `predict`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json
from compress.cli.options import FolderArgument, JsonOption
from compress.errors import RunError, near_misses
from compress.pipeline.bundle import SERVERS, write_bundle
from compress.pipeline.predict import Prediction
from compress.pipeline.predict import predict as predict_images
from compress.pipeline.saved import export_again
from compress.quantization.spec import TARGETS
from compress.support.limits import BATCH


def export(
    folder: FolderArgument,
    variant: Annotated[str, typer.Option(help="float, ptq, qat, ...; default: the best by the run's figures.")] = "",
    target: Annotated[
        str | None, typer.Option(help="Of a run for several targets: which one's file; default: the first's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default <variant>-<precision>.onnx.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32 or fp16, of all that is not quantized.")] = "fp32",
    opset: Annotated[int, typer.Option(help="19 or later.")] = 19,
    static_batch: Annotated[bool, typer.Option("--static-batch", metavar="", help="Fix the batch size to 1.")] = False,
    as_json: JsonOption = False,
) -> None:
    if target is not None and target not in TARGETS:
        raise RunError(f"--target is {target!r}{near_misses(target, TARGETS)} (one of: {', '.join(TARGETS)})")
    path = export_again(
        folder,
        variant=variant,
        target=target,
        out=out,
        precision=precision,
        opset=opset,
        dynamic_batch=not static_batch,
    )
    if as_json:
        print_json({"onnx": str(path), "bytes": path.stat().st_size})
    else:
        OUT.print(f"{path} ({path.stat().st_size:,} bytes)", highlight=False)


def bundle(
    folder: FolderArgument,
    server: Annotated[str, typer.Option(help=", ".join(SERVERS))] = "triton",
    out: Annotated[Path, typer.Option("--out", "-o", help="The server's model repository.")] = Path("models"),
    variant: Annotated[str, typer.Option(help="float, ptq, qat, ...; default: the best by the run's figures.")] = "",
    name: Annotated[str, typer.Option(help="Of the model in the repository; default: the run folder's.")] = "",
    max_batch_size: Annotated[int, typer.Option(min=1, max=BATCH, help="Triton: largest batch.")] = 32,
    as_json: JsonOption = False,
) -> None:
    written = write_bundle(folder, server, out, variant=variant, name=name, max_batch_size=max_batch_size)
    if as_json:
        print_json([str(path) for path in written])
    else:
        OUT.print("\n".join(map(str, written)), highlight=False, soft_wrap=True)


def predict(
    folder: FolderArgument,
    images: Annotated[list[Path], typer.Argument(help="Files or folders of images.")],
    engine: Annotated[str, typer.Option(help="Engine that runs the network.")] = "openvino",
    variant: Annotated[str, typer.Option(help="float, ptq, qat, ...; default: the best by the run's figures.")] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of drawn masks and boxes; default RUN/predictions.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    found = predict_images(folder, images, engine=engine, variant=variant, out=out)
    if as_json:
        print_json([asdict(prediction) for prediction in found])
        return
    for prediction in found:
        OUT.print(f"{prediction.image}: {_found(prediction)}", highlight=False, soft_wrap=True)


def _found(prediction: Prediction) -> str:
    boxes = [
        f"{name} {score:.0%} at {', '.join(f'{side:.0f}' for side in box)}" for name, score, box in prediction.boxes
    ]
    shares = [f"{name} {share:.1%}" for name, share in prediction.classes]
    drawn = f" ({prediction.drawn})" if prediction.drawn else ""
    return ("; ".join(boxes or shares) or "no box") + drawn
