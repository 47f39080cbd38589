"""The command `cast`: an ONNX file in half precision."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from compress.cli.console import OUT, print_json
from compress.cli.onnx_data import (
    ChannelsOption,
    DataOption,
    ImagesOption,
    LayoutOption,
    MeanOption,
    OpsOption,
    SizeOption,
    StdOption,
    batches_of,
    form_of,
)
from compress.cli.options import JsonOption
from compress.onnx_ptq.cast import cast_onnx

_IMAGES = 32
"""Images that ranges are measured on, unless `--images` says more."""


def cast(
    file: Annotated[Path, typer.Argument(help="An ONNX file, float or quantized.")],
    precision: Annotated[str, typer.Option("--precision", help="fp16 or bf16.")] = "fp16",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="New file; default beside the old one.")] = None,
    half_io: Annotated[
        bool, typer.Option("--half-io", metavar="", help="Inputs and outputs in half precision too.")
    ] = False,
    data: DataOption = None,
    size: SizeOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    layout: LayoutOption = "NCHW",
    channels: ChannelsOption = "RGB",
    images: ImagesOption = None,
    ops: OpsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the file in half precision."""
    batches = None
    if data is not None:
        batches = batches_of(data, form_of(file, size, mean, std, layout, channels), images or _IMAGES)
    done = cast_onnx(file, out, precision=precision, batches=batches, keep_io_types=not half_io, ops=ops or ())
    casting = done.casting
    if as_json:
        document = {"file": str(done.path), "precision": precision, "images": done.images, "sqnr_db": done.sqnr_db}
        counts = {"nodes": casting.nodes, "products": casting.products, "casts": casting.casts}
        kept = [asdict(row) for row in casting.kept]
        print_json({**document, **counts, "float32": kept, "notes": list(done.notes)})
        return
    for note in done.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    products = sum(row.product for row in casting.kept)
    OUT.print(
        f"{casting.products} of {casting.products + products} products and {casting.nodes} operations in all are "
        f"{precision}; {len(casting.kept)} stay float32; {casting.casts} Casts"
    )
    if done.sqnr_db is not None:
        OUT.print(f"against float32: {done.sqnr_db:.1f} dB as the file says, ranges of {done.images} images")
    OUT.print(str(done.path), highlight=False, soft_wrap=True)
