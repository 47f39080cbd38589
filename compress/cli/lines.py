"""Progress as lines of text, where standard error cannot show bars."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

QUIET_S = 30.0
"""The longest time without a line while work goes on, in seconds."""
_SHORT_S = 3.0
"""A phase that takes fewer seconds has no line."""


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
        write: receives each line, without its end.
        label: text of the newest figures, such as "loss 0.310".
        every: seconds between two lines at most.
        short: seconds; a phase that ends sooner has no line.
    """

    write: Callable[[str], None]
    label: Callable[[dict[str, float]], str]
    every: float = QUIET_S
    short: float = _SHORT_S
    _tasks: dict[str, _Task] = field(default_factory=dict)
    _ended: list[str] = field(default_factory=list)
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
        """Begin to count."""
        with self._lock:
            self.finish(task)
            self._tasks[task] = _Task(total, done, time.monotonic())

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Count; the last unit ends a phase."""
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
                self._flush()
                if time.monotonic() - self._tasks[task].begun >= self.short:
                    self._ended.append(self._state(task, ended=True))
                del self._tasks[task]

    def note(self, text: str) -> None:
        """Write a line; one that begins with the name of the phase that ended last stands for its end."""
        with self._lock:
            self._ended = [line for line in self._ended if line.partition(":")[0] != text.partition(":")[0]]
            self._say(text)

    def _state(self, task: str, *, ended: bool = False) -> str:
        entry = self._tasks[task]
        counted = f"{entry.done} of {entry.total}" if entry.total > 1 else str(entry.done) if entry.done > 1 else ""
        share = counted or ("done" if ended else "at work")
        seconds = time.monotonic() - entry.begun
        time_text = f" after {seconds:.0f} s" if seconds >= 1 else ""
        return ", ".join(part for part in (f"{task}: {share}{time_text}", entry.figures) if part)

    def _say(self, text: str) -> None:
        self._flush()
        self._last = time.monotonic()
        self.write(f"{time.strftime('%H:%M:%S')} {text}")

    def _flush(self) -> None:
        ended, self._ended = self._ended, []
        for line in ended:
            self._say(line)

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.every)):
            with self._lock:
                self._flush()
                if time.monotonic() - self._last >= self.every:
                    self._say(self._state(list(self._tasks)[-1]) if self._tasks else "still at work")
