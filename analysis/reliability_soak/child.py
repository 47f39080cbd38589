"""One session of the run that `analysis.reliability_soak.run` kills: it goes on, and notes memory."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch

from compress.pipeline import run
from compress.progress import NoProgress
from compress.recipe import load_recipe

EVERY_S = 1.0
"""Time between two notes."""

NOTES = "memory.jsonl"


class Notes(NoProgress):
    """Appends memory, open files and threads of this process to a file while it trains."""

    def __init__(self, path: Path, session: str) -> None:
        self._path, self._session = path, session
        self._done: dict[str, int] = {}
        self._last = 0.0

    def start(self, task: str, total: int, *, done: int = 0) -> None:
        """Begin to count the steps of a task."""
        self._done[task] = done

    def advance(self, task: str, amount: int = 1, **fields: float) -> None:
        """Count a step, and write a note if the last one is old enough."""
        self._done[task] = self._done.get(task, 0) + amount
        if task == "qat" and time.monotonic() - self._last >= EVERY_S:
            self._last = time.monotonic()
            self._write(self._done[task])

    def _write(self, step: int) -> None:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        row = {
            "session": self._session,
            "step": step,
            "host_bytes": pages * os.sysconf("SC_PAGESIZE"),
            "gpu_bytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
            "gpu_reserved_bytes": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Begin the run, or go on with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path, help="run folder")
    parser.add_argument("--session", default="0", help="name of this session in the notes")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    notes = Notes(options.out.with_name(f"{options.out.name}.{NOTES}"), options.session)
    run(load_recipe(options.recipe), "qat", options.out, resume=True, device=options.device, progress=notes)


if __name__ == "__main__":
    main()
