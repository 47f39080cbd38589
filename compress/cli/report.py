"""The command `report`, and what is printed of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from compress.cli.console import ERRORS, OUT, print_json, print_next, print_table
from compress.cli.options import FolderArgument, JsonOption
from compress.pipeline.folder import read_state
from compress.records.files import read_run
from compress.records.summary import (
    RULES_TITLE,
    best_variant,
    foreign_files,
    rules_text,
    slower_sentences,
    summary_columns,
    summary_notes,
    summary_table,
    unavailable_engines,
)
from compress.report.write import write_comparison, write_report
from compress.support.text import MISSING, display

OtherArgument = Annotated[Path | None, typer.Argument(help="A second run folder, which the first is compared with.")]


def report(folder: FolderArgument, other: OtherArgument = None, as_json: JsonOption = False) -> None:
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


def show_finished_steps(folder: Path) -> None:
    """Print which steps `--resume` finds finished: a misspelt folder would go unnoticed for hours."""
    if (folder / "state.json").is_file():
        text = f"{folder}: finished so far: {', '.join(read_state(folder).steps) or 'no step'}"
    else:
        text = f"{folder} holds no run: a new one begins"
    ERRORS.print(text, highlight=False, soft_wrap=True)


def show_run(folder: Path, *, as_json: bool) -> None:
    data = read_run(folder)
    if as_json:
        metrics = [metric.to_dict() for metric in data.metrics]
        print_json(
            {"folder": str(folder), "report": str(folder / "report.html"), "metrics": metrics, "notes": data.notes}
        )
        return
    agreement = {(m.variant, m.engine): m.value for m in data.metrics if m.name == "agreement"}
    found = summary_table(data.metrics)
    rows = []
    for row in [row for row in found if row.batch_size is not None] or found:  # torch is not timed: shown if alone
        agrees = agreement.get((row.variant, row.engine))
        rows.append((*row.cells(), MISSING if agrees is None else f"{agrees:.2f}"))
    columns = (*summary_columns(data.metrics), "agrees %")
    shown = len(columns) if agreement else -1
    print_table(str(folder), columns[:shown], [row[:shown] for row in rows], numbers=columns[3:shown])
    if agreement:
        OUT.print(
            "agrees %: share of images (of pixels in segmentation) with the same class as torch's fake quantization"
        )
    for note in summary_notes(data.metrics):
        OUT.print(note)
    for note in (*foreign_files(data), *slower_sentences(data.slower)):
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    if rules := rules_text(data.slower):
        OUT.print(RULES_TITLE)
        OUT.print(rules, markup=False, highlight=False, soft_wrap=True)
    for note in data.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    for engine, reason in unavailable_engines(data.metrics).items():
        OUT.print(f"[yellow]unavailable[/] {escape(engine)}: {escape(reason)}", markup=True)
    best = best_variant(data.metrics)
    if best is not None:
        OUT.print(f"[bold]ship {display(best[0])}[/]: {escape(best[1])}", markup=True, highlight=False, soft_wrap=True)
    OUT.print(f"report: {folder / 'report.html'}\n        {folder / 'report.md'}", highlight=False, soft_wrap=True)
    if best is None:
        print_next(f"ptq --from {folder}", f"qat --from {folder}")
    else:
        print_next(f"predict {folder} IMAGE.jpg", f"bundle {folder} --server triton", f"sensitivity --from {folder}")
