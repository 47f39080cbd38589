"""Write the report of a run folder."""

from __future__ import annotations

from pathlib import Path

from compress.files import replacing, write_text
from compress.records.run import read_run
from compress.report.document import build_document
from compress.report.figures import draw_figures, pictures
from compress.report.html import to_html
from compress.report.markdown import FIGURES, to_markdown


def write_report(folder: Path | str) -> tuple[Path, Path]:
    """Write figures, report.md and report.html over earlier ones; equal input gives equal files.

    The pages are written last; a figure without data any more is removed.

    Returns:
        (report.md beside figures/, report.html that holds them).

    Raises:
        RunError: `folder` is no run folder, or one of its files is not what its name says.
    """
    run = read_run(folder)
    drawn = draw_figures(run)
    document = build_document(run, drawn)
    markdown, page = to_markdown(document), to_html(document)
    for picture in pictures(drawn):
        with replacing(run.folder / FIGURES / f"{picture.name}.png") as path:
            path.write_bytes(picture.png)
    for name in set(drawn) - {picture.name for picture in pictures(drawn)}:
        (run.folder / FIGURES / f"{name}.png").unlink(missing_ok=True)
    return write_text(run.folder / "report.md", markdown), write_text(run.folder / "report.html", page)
