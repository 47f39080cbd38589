"""The files of a run folder that people read: the report, the model card, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from compress.errors import RunError
from compress.files import replacing, write_text
from compress.measure.metric import judged_by
from compress.records.files import RunData, is_untrained, read_run, recipe_tree
from compress.records.summary import SummaryRow, summary_columns, summary_table
from compress.report.blocks import (
    FIGURES,
    Block,
    Column,
    Document,
    Section,
    Table,
    Text,
    Tiles,
    code,
    number,
    table,
    to_html,
    to_markdown,
)
from compress.report.document import build_document
from compress.report.figures import draw_figures, pictures
from compress.report.headline import headline
from compress.support.text import MISSING, display, fixed, plain, scored, signed, significant
from compress.version import DISTRIBUTION

_SAME = 0.02  # latencies within 2 % are called equal, as in headlines


def write_comparison(first: Path | str, second: Path | str) -> tuple[Path, Path]:
    """Write `comparison-<second>.md` and `.html` into the first run's folder."""
    runs = (read_run(first), read_run(second))
    if runs[0].folder.resolve() == runs[1].folder.resolve():
        raise RunError(f"{first} and {second} are the same folder: name two runs")
    document = compare_runs(*runs)
    stem = f"comparison-{runs[1].folder.resolve().name}"
    return (
        write_text(runs[0].folder / f"{stem}.md", to_markdown(document)),
        write_text(runs[0].folder / f"{stem}.html", to_html(document)),
    )


def compare_runs(first: RunData, second: RunData) -> Document:
    names = _names(first, second)
    pairs = list(_pairs(first, second))
    if not pairs:
        raise RunError(
            f"{first.folder} and {second.folder} have no variant on the same engine and batch size in common: nothing "
            "can be compared"
        )
    results = table_of(pairs, names, first)
    both = zip(names, (first, second), strict=True)
    said = [
        f"{name}: {headline(run.metrics, intervals=run.intervals, untrained=is_untrained(run)).sentence}"
        for name, run in both
    ]
    recipes = [recipe_tree(run) for run in (first, second)]
    machines = [{**(run.environment or {}), "load_average": None} for run in (first, second)]
    same = "Both were measured on the same machine with the same versions."
    sections = (
        Section("figures", "Figures of both", (results, _note(names))),
        Section("recipes", "Keys that differ", (_differing(code("key"), names, recipes, "The recipes are the same."),)),
        Section("machines", "Machines", (_differing("what", names, machines, same),)),
    )
    return Document(
        title=f"{names[0]} and {names[1]}",
        subtitle="two runs compared",
        headline=" ".join(said),
        tiles=Tiles(()),
        summary="\n".join([*said, "", *(" | ".join(row) for row in results.rows)]),
        sections=sections,
    )


def table_of(pairs: list[tuple[SummaryRow, SummaryRow]], names: tuple[str, str], run: RunData) -> Table:
    title = summary_columns(run.metrics)[3]
    columns = [number(f"{title}, {name}") for name in names] + [number("difference")]
    columns += [number(f"p50 ms, {name}") for name in names] + [number("ratio")]
    return table("engine", number("batch"), "variant", *columns, rows=[_row(*pair) for pair in pairs])


def _row(one: SummaryRow, other: SummaryRow) -> tuple[str, ...]:
    change = None if one.score is None or other.score is None else other.score - one.score
    ratio = MISSING if not one.p50_ms or other.p50_ms is None else fixed(other.p50_ms / one.p50_ms, 2, "×")
    ratio = "not measured" if "p50_ms" in one.partial | other.partial else ratio
    return (
        display(one.engine),
        "not timed" if one.batch_size is None else str(one.batch_size),
        display(one.variant),
        scored(one.score, one.unit),
        scored(other.score, other.unit),
        MISSING if change is None else signed(change, one.unit),
        significant(one.p50_ms),
        significant(other.p50_ms),
        ratio,
    )


def _pairs(first: RunData, second: RunData) -> Iterator[tuple[SummaryRow, SummaryRow]]:
    there = {(row.engine, row.batch_size, row.variant): row for row in summary_table(second.metrics)}
    if judged_by(first.metrics).name != judged_by(second.metrics).name:
        raise RunError(
            f"{first.folder} is judged by {judged_by(first.metrics).title} and {second.folder} by "
            f"{judged_by(second.metrics).title}: runs of one task can be compared"
        )
    for row in summary_table(first.metrics):
        if (key := (row.engine, row.batch_size, row.variant)) in there:
            yield row, there[key]


def _names(first: RunData, second: RunData) -> tuple[str, str]:
    paths = (first.folder.resolve(), second.folder.resolve())
    if paths[0].name != paths[1].name:
        return plain(paths[0].name), plain(paths[1].name)
    return plain(f"{paths[0].parent.name}/{paths[0].name}"), plain(f"{paths[1].parent.name}/{paths[1].name}")


def _note(names: tuple[str, str]) -> Text:
    return Text(
        f"Differences and ratios are {names[1]} against {names[0]}; a busy machine gives no ratio. Both were measured "
        f"at different times: a ratio of latencies within {100 * _SAME:.0f} % says nothing, and on different machines "
        "none does.",
        note=True,
    )


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, plain(str(value))


def _differing(title: Column | str, names: tuple[str, str], trees: Sequence[Any], equal: str) -> Block:
    facts = [dict(_leaves(tree)) for tree in trees]
    keys = [key for key in dict.fromkeys([*facts[0], *facts[1]]) if facts[0].get(key) != facts[1].get(key)]
    rows = [(key, *(fact.get(key, MISSING) for fact in facts)) for key in keys]
    return table(title, *names, rows=rows) if rows else Text(equal)


def write_report(folder: Path | str) -> tuple[Path, Path]:
    """Write figures, report.md and report.html over earlier ones; equal input gives equal files.

    The pages are written last; a figure without data any more is removed.

    Returns:
        (report.md beside figures/, report.html that holds them).
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
    "restoration": "image-to-image",
    "own": "other",
}


def write_card(folder: Path | str) -> Path:
    run = read_run(folder)
    return write_text(run.folder / CARD_FILE, card_of(run))


def card_of(run: RunData) -> str:
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
