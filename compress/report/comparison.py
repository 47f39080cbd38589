"""Two runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.errors import RunError
from compress.files import write_text
from compress.measure.latency import NOT_MEASURED
from compress.measure.metric import judged_by
from compress.records.files import RunData, is_untrained, read_run, recipe_tree
from compress.records.summary import SummaryRow, summary_columns, summary_table
from compress.report.blocks import Block, Document, Section, Table, Text, Tiles, code, number, table
from compress.report.headline import headline
from compress.report.writers import to_html, to_markdown
from compress.support.text import MISSING, display, fixed, plain, scored, signed, significant

_SAME = 0.02  # latencies within 2 % are called equal, as in headlines


def write_comparison(first: Path | str, second: Path | str) -> tuple[Path, Path]:
    """Write `comparison-<second>.md` and `.html` into the first run's folder.

    Raises:
        RunError: a folder is no run folder, both are the same, or they have no figure in common.
        OSError: a file cannot be written.
    """
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
    """The page of two runs.

    Raises:
        RunError: they have no figure in common.
    """
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
    sections = (
        Section("figures", "Figures of both", (results, _note(names))),
        Section("recipes", "Keys that differ", tuple(_keys(first, second, names))),
        Section("machines", "Machines", tuple(_machines(first, second, names))),
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
    """A row for each variant and engine of both runs."""
    title = summary_columns(run.metrics)[3]
    columns = [number(f"{title}, {name}") for name in names] + [number("difference")]
    columns += [number(f"p50 ms, {name}") for name in names] + [number("ratio")]
    return table("engine", number("batch"), "variant", *columns, rows=[_row(*pair) for pair in pairs])


def _row(one: SummaryRow, other: SummaryRow) -> tuple[str, ...]:
    change = None if one.score is None or other.score is None else other.score - one.score
    ratio = MISSING if not one.p50_ms or other.p50_ms is None else fixed(other.p50_ms / one.p50_ms, 2, "×")
    ratio = NOT_MEASURED if "p50_ms" in one.partial | other.partial else ratio
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
    """The folders' names, with their parents' where they are equal."""
    paths = (first.folder.resolve(), second.folder.resolve())
    if paths[0].name != paths[1].name:
        return plain(paths[0].name), plain(paths[1].name)
    return plain(f"{paths[0].parent.name}/{paths[0].name}"), plain(f"{paths[1].parent.name}/{paths[1].name}")


def _note(names: tuple[str, str]) -> Text:
    return Text(
        f"Differences and ratios are {names[1]} against {names[0]}. The two were measured at different times: a ratio "
        f"of latencies within {100 * _SAME:.0f} % says nothing, and on different machines none does.",
        note=True,
    )


def _keys(first: RunData, second: RunData, names: tuple[str, str]) -> Iterator[Block]:
    recipes = [dict(_leaves(recipe_tree(run))) for run in (first, second)]
    keys = [key for key in dict.fromkeys([*recipes[0], *recipes[1]]) if recipes[0].get(key) != recipes[1].get(key)]
    if not keys:
        yield Text("The recipes are the same.")
        return
    yield table(code("key"), *names, rows=[(key, *(recipe.get(key, MISSING) for recipe in recipes)) for key in keys])


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, plain(str(value))


def _machines(first: RunData, second: RunData, names: tuple[str, str]) -> Iterator[Block]:
    facts = [dict(_leaves(run.environment or {})) for run in (first, second)]
    keys = [key for key in dict.fromkeys([*facts[0], *facts[1]]) if facts[0].get(key) != facts[1].get(key)]
    if not keys:
        yield Text("Both were measured on the same machine with the same versions.")
        return
    yield table("what", *names, rows=[(key, *(fact.get(key, MISSING) for fact in facts)) for key in keys])
