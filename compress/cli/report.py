"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json
from compress.cli.options import FolderArgument, JsonOption
from compress.cli.run_summary import show_run
from compress.report import write_comparison, write_report

OtherArgument = Annotated[Path | None, typer.Argument(help="A second run folder, which the first is compared with.")]


def report(folder: FolderArgument, other: OtherArgument = None, as_json: JsonOption = False) -> None:
    """Write the report anew; with a second folder, compare two runs."""
    if other is None:
        write_report(folder)
        show_run(folder, as_json=as_json)
        return
    markdown, page = write_comparison(folder, other)
    if as_json:
        print_json({"comparison": str(page)})
        return
    OUT.print(markdown.read_text(encoding="utf-8"), highlight=False, soft_wrap=True, markup=False)
    OUT.print(f"comparison: {page}\n            {markdown}", highlight=False, soft_wrap=True)
