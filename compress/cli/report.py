"""The command `report`."""

from __future__ import annotations

from compress.cli.options import FolderArgument, JsonOption
from compress.cli.run_summary import show_run
from compress.report import write_report


def report(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Write the report and print the run's table."""
    write_report(folder)
    show_run(folder, as_json=as_json)
