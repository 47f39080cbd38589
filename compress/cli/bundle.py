"""The command `bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json
from compress.cli.options import FolderArgument, JsonOption
from compress.pipeline.bundle import SERVERS, write_bundle
from compress.support.limits import BATCH


def bundle(
    folder: FolderArgument,
    server: Annotated[str, typer.Option(help=", ".join(SERVERS))] = "triton",
    out: Annotated[Path, typer.Option("--out", "-o", help="The server's model repository.")] = Path("models"),
    variant: Annotated[str, typer.Option(help="float, ptq, qat, ...; default: the last that the run made.")] = "",
    name: Annotated[str, typer.Option(help="Of the model in the repository; default: the run folder's.")] = "",
    max_batch_size: Annotated[int, typer.Option(min=1, max=BATCH, help="Triton: largest batch.")] = 32,
    as_json: JsonOption = False,
) -> None:
    """Write the files of a model server."""
    written = write_bundle(folder, server, out, variant=variant, name=name, max_batch_size=max_batch_size)
    if as_json:
        print_json([str(path) for path in written])
    else:
        OUT.print("\n".join(map(str, written)), highlight=False, soft_wrap=True)
