"""Output and progress of the command line.

With `--json` standard output holds one JSON document and nothing else; the rest, progress included, is on standard
error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column, Table

from compress.cli.lines import LineProgress
from compress.support.progress import NoProgress, Progress

_WIDE = 140
"""Columns of what is not a terminal: a file or a pipe does not wrap."""

OUT = Console(width=None if sys.stdout.isatty() else _WIDE, markup=False, emoji=False)
ERRORS = Console(stderr=True, markup=False, emoji=False)
"""Without markup and emoji: a folder may be named `o[/red]`, an extra is `compress[rtx]`, `:b:` is no image."""

_FIGURES = {"loss": ".3f", "accuracy": ".1%", "images_per_s": ".0f", "images": ".0f"}


class BarProgress:
    """Progress as bars on standard error."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Show a bar."""
        self.finish(task)
        self._tasks[task] = self._bars.add_task(task, total=total or None, completed=done, figures="")

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Move a bar on."""
        if task not in self._tasks:
            return
        shown = _figures(fields)
        if shown:
            self._bars.update(self._tasks[task], advance=amount, figures=shown)
        else:
            self._bars.update(self._tasks[task], advance=amount)

    def finish(self, task: str) -> None:
        """Stop the clock of a bar."""
        if task in self._tasks:
            self._bars.stop_task(self._tasks.pop(task))

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, highlight=False)


def _figures(fields: dict[str, float]) -> str:
    return "  ".join(
        f"{k.replace('images_per_s', 'images/s')} {v:{_FIGURES[k]}}" for k, v in fields.items() if k in _FIGURES
    )


def _print_line(text: str) -> None:
    ERRORS.print(text, highlight=False, soft_wrap=True)


@dataclass
class Verbosity:
    """Amount of progress shown: -1 nothing, 0 the default, 1 a line at least every second."""

    level: int = 0


VERBOSITY = Verbosity()
"""The choice of `--quiet` and `--verbose`, which come before the command."""


def lines_of(level: int) -> LineProgress:
    """Progress as lines, with `--verbose` at least every second."""
    if level > 0:
        return LineProgress(_print_line, _figures, every=1.0, short=0.0)
    return LineProgress(_print_line, _figures)


@contextmanager
def progress(show: bool = True) -> Iterator[Progress]:
    """Show progress on standard error: bars on a terminal, lines elsewhere and with `--verbose`.

    Nothing with `--quiet`, nor on processes that are not to print.
    """
    if not show or VERBOSITY.level < 0:
        yield NoProgress()
        return
    if not ERRORS.is_terminal or VERBOSITY.level > 0:
        with lines_of(VERBOSITY.level) as lines:
            yield lines
        return
    with Bars(*bar_columns(ERRORS.width), console=ERRORS) as bars:
        yield BarProgress(bars)


def bar_columns(width: int) -> tuple[ProgressColumn, ...]:
    """Columns for a terminal of `width` characters."""
    narrow = width < _NARROW
    return (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=20 if narrow else None)),
        *([] if narrow else [BarColumn(bar_width=24)]),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        *([] if narrow else [TimeElapsedColumn(table_column=Column(no_wrap=True))]),
        TimeRemainingColumn(elapsed_when_finished=narrow, table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )


_NARROW = 100
"""Terminals of fewer columns have no room for all parts of a bar."""
_SENTENCE = 40
"""A column with longer cells holds sentences."""
_NAMED = 3
"""Rows that are named before a sentence; more are counted."""


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Iterable[str] = ()
) -> None:
    """Print a table; `numbers` names the columns that are right-aligned.

    Where it is wider than the terminal and its last column holds sentences, these are printed below it, each once;
    otherwise its last columns of numbers are left out, which a line says.
    """
    right, cells = set(numbers), [[str(cell) for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(columns, *cells, strict=True)]
    too_wide = OUT.is_terminal and _needs(widths) > OUT.width
    below = too_wide and len(widths) > 2 and widths[-1] > _SENTENCE
    shown = len(columns) - below
    while too_wide and not below and shown > 3 and columns[shown - 1] in right and _needs(widths[:shown]) > OUT.width:
        shown -= 1
    OUT.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)  # a path is longer than a table
    table = Table(header_style="bold")
    for place, column in enumerate(columns[:shown]):
        number = column in right
        table.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
            min_width=None if place else min(widths[0], OUT.width // 3),
        )
    for row in cells:
        table.add_row(*row[:shown])
    OUT.print(table)
    if left := columns[shown : len(columns) - below]:
        OUT.print(f"not shown in {OUT.width} columns: {', '.join(left)}", markup=False, highlight=False)
    if below:
        _print_sentences(columns[-1], cells)


def _print_sentences(title: str, cells: Sequence[Sequence[str]]) -> None:
    about: dict[str, list[str]] = {}
    for row in cells:
        about.setdefault(row[-1], []).append(row[0])
    OUT.print(f"{title}:", style="bold")
    for text, names in about.items():
        if text:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            OUT.print(f"- {', '.join(names[:_NAMED])}{more}: {text}", markup=False, highlight=False)


def _needs(widths: Sequence[int]) -> int:
    return sum(widths) + 3 * len(widths) + 1


def _width(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def print_next(*commands: str) -> None:
    """Print commands that go on from here, ready to be typed."""
    OUT.print("next:", *(f"  python -m compress {command}" for command in commands), sep="\n", soft_wrap=True)


def decibels(value: float, mend: str) -> str:
    """Explain a signal-to-noise ratio in words; `mend` is the command that finds the layers that cause the noise.

    >>> decibels(40.0, "inspect parity")
    '40.0 dB, good: the noise is 1.0 % of the signal'
    """
    share = f"the noise is {100 * 10 ** (-value / 20):.1f} % of the signal"
    if value >= _GOOD_DB:
        return f"{value:.1f} dB, good: {share}"
    word = "fair" if value >= _POOR_DB else "poor"
    return f"{value:.1f} dB, {word}: {share}; `python -m compress {mend}` finds the layers that cost it"


_GOOD_DB, _POOR_DB = 20.0, 10.0
"""Noise of a tenth and of a third of the signal's amplitude."""


def print_json(value: Any) -> None:
    """Print one JSON document."""
    OUT.file.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
    OUT.file.flush()
