"""Run Python modules side by side, each in a process of its own, so that a crash is a result and not the end.

A study that takes an hour on one core takes minutes on a machine with many: each part is one process with one thread.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _PATH}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that came to an end.

    Attributes:
        name: name of the part.
        returncode: exit status of the process; None if it ran past the limit.
        output: text that it printed on standard output.
        errors: text that it printed on standard error.
        seconds: duration by the clock.
    """

    name: str
    returncode: int | None
    output: str
    errors: str
    seconds: float

    @property
    def last_line(self) -> str:
        return self.output.strip().rpartition("\n")[2]

    @property
    def why(self) -> str:
        if self.returncode is None:
            return f"not done after {self.seconds:.0f} s"
        return f"process ended with {self.returncode}: {(self.errors.strip().splitlines() or [''])[-1][:300]}"


def side_by_side(
    commands: Iterable[tuple[str, Sequence[str]]], *, processes: int, timeout: float, budget_s: float | None = None
) -> Iterator[Ended]:
    """Run modules `processes` at a time, in order, and yield each as it ends.

    Args:
        commands: name of a part, and the arguments that follow `python -m`.
        processes: number of processes at a time, each with one thread (OMP_NUM_THREADS=1).
        timeout: seconds for each; a process that takes longer is killed and yielded without a return code.
        budget_s: seconds for all; later no process starts, and those that still run are killed and not yielded.
    """
    end = math.inf if budget_s is None else time.monotonic() + budget_s
    with ThreadPoolExecutor(processes) as pool:
        futures = [pool.submit(_run, name, arguments, timeout, end) for name, arguments in commands]
        for future in as_completed(futures):
            if (ended := future.result()) is not None:
                yield ended


def _run(name: str, arguments: Sequence[str], timeout: float, end: float) -> Ended | None:
    start = time.monotonic()
    limit = min(timeout, end - start)
    if limit <= 0:
        return None
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=_ENVIRONMENT, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        seconds = time.monotonic() - start
        return None if limit < timeout else Ended(name=name, returncode=None, output="", errors="", seconds=seconds)
    seconds = time.monotonic() - start
    return Ended(name=name, returncode=done.returncode, output=done.stdout, errors=done.stderr, seconds=seconds)
