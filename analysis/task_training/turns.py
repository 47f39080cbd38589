"""Whose turn it is on the GPU, said by files, so that a process that dies holds nobody up.

A network's process writes `<name>.ready` when its modules and pictures are there, the parent then `<name>.go` with the
time until which it may train, and the process `<name>.off` when it has trained.
"""

from __future__ import annotations

import time
from pathlib import Path

from compress.files import write_text
from compress.progress import NoProgress

_POLL_S = 0.1


def ready(runs: Path, name: str) -> None:
    """Say that a network waits for the GPU, with its modules and pictures there."""
    write_text(runs / f"{name}.ready", "")


def is_ready(runs: Path, name: str) -> bool:
    """Return True if a network waits for the GPU."""
    return (runs / f"{name}.ready").is_file()


def grant(runs: Path, name: str, until: float) -> None:
    """Give the GPU to a network until a time of time.time()."""
    write_text(runs / f"{name}.go", repr(until))


def granted(runs: Path, name: str) -> float:
    """Wait for the GPU; return until when."""
    while not (runs / f"{name}.go").is_file():
        time.sleep(_POLL_S)
    return float((runs / f"{name}.go").read_text())


def hand_on(runs: Path, name: str) -> None:
    """Say that a network needs the GPU no more."""
    write_text(runs / f"{name}.off", "")


def handed_on(runs: Path, name: str) -> bool:
    """Return True if a network needs the GPU no more."""
    return (runs / f"{name}.off").is_file()


class TrainingsOverError(Exception):
    """Ends a run after its trainings; it goes on from its folder, on any machine."""


class Turn(NoProgress):
    """Prints the notes of a run, such as the figures of an epoch, and hands the GPU on when the export begins.

    Args:
        runs: folder of the files.
        name: of the network; None = it has the GPU for itself.
        ends: whether the run ends there.
    """

    def __init__(self, runs: Path, name: str | None, *, ends: bool = False) -> None:
        self.runs, self.name, self.ends = runs, name, ends

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Print that a task begins; with the export the trainings are over."""
        print(time.strftime("%H:%M:%S"), f"{task} begins", flush=True)
        if task != "export":
            return
        if self.name is not None:
            hand_on(self.runs, self.name)
        if self.ends:
            raise TrainingsOverError

    def note(self, text: str) -> None:
        """Print a line with the time."""
        print(time.strftime("%H:%M:%S"), text, flush=True)
