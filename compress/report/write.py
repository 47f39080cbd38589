"""The files of a run folder that people read: the report and the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from compress.files import replacing, write_text
from compress.measure.metric import judged_by
from compress.records.files import RunData, read_run
from compress.records.summary import SummaryRow, summary_columns, summary_table
from compress.report.document import build_document
from compress.report.figures import draw_figures, pictures
from compress.report.writers import FIGURES, to_html, to_markdown
from compress.support.text import display
from compress.version import DISTRIBUTION


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


CARD_FILE = "model_card.md"
_PIPELINES = {
    "classification": "image-classification",
    "segmentation": "image-segmentation",
    "detection": "object-detection",
    "own": "other",
}


def write_card(folder: Path | str) -> Path:
    """Write `model_card.md`, over an earlier one.

    Raises:
        RunError: `folder` is no run folder, or one of its files is not what its name says.
    """
    run = read_run(folder)
    return write_text(run.folder / CARD_FILE, card_of(run))


def card_of(run: RunData) -> str:
    """Return the card of a run."""
    recipe: dict[str, Any] = yaml.safe_load(run.recipe or "") or {}
    rows = [row for row in summary_table(run.metrics) if row.score is not None]
    once = {(row.variant, row.engine): row for row in reversed(rows)}  # the score is the same for every batch size
    model, data = (str((recipe.get(part) or {}).get("name", "")) for part in ("model", "data"))
    task = str(recipe.get("task", "classification"))
    front = {
        "library_name": "onnx",
        "pipeline_tag": _PIPELINES.get(task, task),
        "tags": ["compress", "onnx", "quantization", *sorted({row.variant for row in rows})],
        "model-index": [{"name": model, "results": [_result(run, row, task, data) for row in reversed(once.values())]}],
    }
    titles = summary_columns(run.metrics)
    table = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    table += [f"| {' | '.join(row.cells())} |" for row in rows]
    machine = (run.environment or {}).get("cpu") or (run.environment or {}).get("machine") or "see environment.json"
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {model}, compressed\n\n"
        f"Made by {DISTRIBUTION} from the recipe below. Every number is an engine's, measured on {machine}; "
        f"`report.html` says how.\n\n"
        + "\n".join(table)
        + f"\n\n## Recipe\n\n```yaml\n{(run.recipe or '').strip()}\n```\n"
    )


def _result(run: RunData, row: SummaryRow, task: str, data: str) -> dict[str, Any]:
    judged = judged_by(run.metrics)
    return {
        "task": {"type": _PIPELINES.get(task, task)},
        "dataset": {"name": data, "type": data},
        "metrics": [
            {
                "type": judged.name,
                "name": f"{judged.title}, {display(row.variant)} on {display(row.engine)}",
                "value": round(float(row.score or 0.0), 4),
            }
        ],
    }
