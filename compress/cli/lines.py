"""Progress as lines of text, where standard error cannot show bars."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

QUIET_S = 30.0
"""The longest time without a line while work goes on, in seconds."""


@dataclass
class _Task:
    total: int
    done: int
    begun: float
    figures: str = ""


@dataclass
class LineProgress:
    """Writes a line as each phase begins and ends, and at least every 30 s.

    Attributes:
        write: receives each line, without its end.
        label: text of the newest figures, such as "loss 0.310".
        every: seconds between two lines at most.
    """

    write: Callable[[str], None]
    label: Callable[[dict[str, float]], str]
    every: float = QUIET_S
    _tasks: dict[str, _Task] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> LineProgress:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for task in list(self._tasks) if exception[0] is None else ():
            self.finish(task)

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Write that a phase begins."""
        with self._lock:
            self.finish(task)
            self._tasks[task] = _Task(total, done, time.monotonic())
            self._say(f"{task}: {f'{done} of {total}' if total else 'begins'}")

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
        """Write what a phase has done."""
        with self._lock:
            if task in self._tasks:
                self._say(self._state(task))
                del self._tasks[task]

    def note(self, text: str) -> None:
        """Write a line."""
        with self._lock:
            self._say(text)

    def _state(self, task: str) -> str:
        entry = self._tasks[task]
        share = f"{entry.done} of {entry.total}" if entry.total else str(entry.done)
        parts = (f"{task}: {share} after {time.monotonic() - entry.begun:.0f} s", entry.figures)
        return ", ".join(part for part in parts if part)

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        self.write(f"{time.strftime('%H:%M:%S')} {text}")

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.every)):
            with self._lock:
                if time.monotonic() - self._last >= self.every:
                    self._say(self._state(list(self._tasks)[-1]) if self._tasks else "still at work")
