"""Output and progress of the command line: bars, or lines of text where standard error cannot show bars.

With `--json` standard output holds one JSON document and nothing else; the rest, progress included, is on standard
error.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from compress.support.progress import NoProgress, Progress

QUIET_S = 30.0  # the longest time without a line while work goes on, in seconds
_SHORT_S = 3.0  # a phase that takes fewer seconds has no line


@dataclass
class _Task:
    total: int
    done: int
    begun: float
    figures: str = ""


@dataclass
class LineProgress:
    """Writes a line as each longer phase ends, unless a note tells its result, and at least every 30 s.

    Attributes:
        label: text of the newest figures, such as "loss 0.310".
        short: seconds; a phase that ends sooner has no line.
    """

    write: Callable[[str], None]
    label: Callable[[dict[str, float]], str]
    every: float = QUIET_S
    short: float = _SHORT_S
    _tasks: dict[str, _Task] = field(default_factory=dict)
    _ended: list[tuple[str, str]] = field(default_factory=list)  # time and line of phases
    _newest: str = ""  # the phase that ended last
    _last: float = field(default_factory=time.monotonic)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> LineProgress:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        for task in list(self._tasks) if exception[0] is None else ():
            self.finish(task)
        self._flush()

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        with self._lock:
            self.finish(task)
            self._tasks[task] = _Task(total, done, time.monotonic())

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        with self._lock:
            if task not in self._tasks:
                return
            entry = self._tasks[task]
            entry.done += amount
            entry.figures = self.label(fields) or entry.figures
            if entry.total and entry.done >= entry.total:
                self.finish(task)
            elif time.monotonic() - self._last >= self.every:
                self._say(self._state(task))

    def finish(self, task: str) -> None:
        """End a phase; its line is written unless a note of the same name follows."""
        with self._lock:
            if task in self._tasks:
                if any(_subject(line) != _subject(task) for _, line in self._ended):
                    self._flush()
                if time.monotonic() - self._tasks[task].begun >= self.short:
                    self._ended.append((time.strftime("%H:%M:%S"), self._state(task, ended=True)))
                del self._tasks[task]
                self._newest = task

    def note(self, text: str) -> None:
        """Write a line; one that begins with the name of the phase that ended last stands for its end."""
        with self._lock:
            self._ended = [ended for ended in self._ended if _subject(ended[1]) != _subject(text)]
            self._say(text)

    def _state(self, task: str, *, ended: bool = False) -> str:
        entry = self._tasks[task]
        counted = f"{entry.done} of {entry.total}" if entry.total > 1 else str(entry.done) if entry.done > 1 else ""
        seconds = time.monotonic() - entry.begun
        share = counted or ("done" if ended else "at work")
        word = "in" if ended else "after" if counted else "for"
        time_text = f" {word} {seconds:.0f} s" if seconds >= 1 else ""
        return ", ".join(part for part in (f"{task}: {share}{time_text}", entry.figures) if part)

    def _say(self, text: str) -> None:
        self._flush()
        self._last = time.monotonic()
        self.write(f"{time.strftime('%H:%M:%S')} {text}")

    def _flush(self) -> None:
        ended, self._ended = self._ended, []
        for clock, line in ended:
            self.write(f"{clock} {line}")

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.every)):
            with self._lock:
                if time.monotonic() - self._last >= self.every:
                    between = f"at work after {self._newest}" if self._newest else "at work"
                    self._say(self._state(list(self._tasks)[-1]) if self._tasks else between)


def _subject(line: str) -> str:
    return line.partition(":")[0]


_WIDE = 140  # columns of what is not a terminal: a file or a pipe does not wrap

for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, io.TextIOWrapper):  # a file's name that is no UTF-8, or a terminal of ASCII
        _stream.reconfigure(errors="backslashreplace")

OUT = Console(width=None if sys.stdout.isatty() else _WIDE, markup=False, emoji=False)
# Without markup and emoji: a folder may be named `o[/red]`, an extra is `compress[rtx]`, `:b:` is no image.
ERRORS = Console(stderr=True, markup=False, emoji=False)

_FIGURES = {"loss": ".3f", "accuracy": ".1%", "images_per_s": ".0f", "images": ".0f"}


class BarProgress:
    """Progress as bars on standard error."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        self.finish(task)
        self._tasks[task] = self._bars.add_task(task, total=total or None, completed=done, figures="")

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        if task not in self._tasks:
            return
        shown = _figures(fields)
        if shown:
            self._bars.update(self._tasks[task], advance=amount, figures=shown)
        else:
            self._bars.update(self._tasks[task], advance=amount)

    def finish(self, task: str) -> None:
        if task in self._tasks:
            self._bars.stop_task(self._tasks.pop(task))

    def note(self, text: str) -> None:
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


VERBOSITY = Verbosity()  # the choice of `--quiet` and `--verbose`, which come before the command


@contextmanager
def progress(show: bool = True) -> Iterator[Progress]:
    """Show progress on standard error: bars on a terminal, lines elsewhere and with `--verbose`.

    Nothing with `--quiet`, nor on processes that are not to print.
    """
    if not show or VERBOSITY.level < 0:
        yield NoProgress()
        return
    loud = VERBOSITY.level > 0
    if loud or not ERRORS.is_terminal:
        every, short = (1.0, 0.0) if loud else (QUIET_S, _SHORT_S)
        with LineProgress(_print_line, _figures, every=every, short=short) as lines:
            yield lines
        return
    with Bars(*bar_columns(ERRORS.width), console=ERRORS) as bars:
        yield BarProgress(bars)


def bar_columns(width: int) -> tuple[ProgressColumn, ...]:
    narrow = width < _NARROW
    return (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=20 if narrow else None)),
        *([] if narrow else [BarColumn(bar_width=24)]),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        *([] if narrow else [TimeElapsedColumn(table_column=Column(no_wrap=True))]),
        TimeRemainingColumn(elapsed_when_finished=narrow, table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )


_NARROW = 100  # terminals of fewer columns have no room for all parts of a bar
_SENTENCE = 40  # a column with longer cells holds sentences
_NAMED = 3  # rows that are named before a sentence; more are counted


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


_GOOD_DB, _POOR_DB = 20.0, 10.0  # noise of a tenth and of a third of the signal's amplitude


def print_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    OUT.file.write(text.encode(errors="backslashreplace").decode() + "\n")  # names of files that are no UTF-8
    OUT.file.flush()
