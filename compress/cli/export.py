"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json
from compress.cli.options import FolderArgument, JsonOption
from compress.errors import RunError, near_misses
from compress.pipeline.again import export_again
from compress.quantization.spec import TARGETS


def export(
    folder: FolderArgument,
    variant: Annotated[str, typer.Option(help="float, ptq, qat, ...; default: the last that the run made.")] = "",
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
    """Export a network of a run."""
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
