"""Commands side by side, each a process of its own, so that a crash is a result and not the end.

Scripts that take an hour on one core take minutes on a machine of many: each part is one process with one thread, and
the parts run N at a time. With a budget none starts after it is spent, and those still running are ended and not
reported: a second run does them again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
_PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _PATH}
_PAUSE = 0.1


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that came to an end.

    Attributes:
        name: of it.
        returncode: of the process; None where it ran past the limit.
        output: what it printed on standard output.
        errors: and on standard error.
        seconds: by the clock.
    """

    name: str
    returncode: int | None
    output: str
    errors: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Last line of the output."""
        return self.output.strip().rpartition("\n")[2]

    @property
    def why(self) -> str:
        """What went wrong, in a line."""
        if self.returncode is None:
            return f"not done after {self.seconds:.0f} s"
        return f"process ended with {self.returncode}: {(self.errors.strip().splitlines() or [''])[-1][:300]}"


@dataclass
class _Running:
    name: str
    process: subprocess.Popen[str]
    output: IO[str]
    errors: IO[str]
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def ended(self, *, timed_out: bool = False) -> Ended:
        texts = []
        for file in (self.output, self.errors):
            file.seek(0)
            texts.append(file.read())
            file.close()
        code = None if timed_out else self.process.returncode
        return Ended(name=self.name, returncode=code, output=texts[0], errors=texts[1], seconds=self.seconds)

    def kill(self) -> None:
        """End the process and what it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def side_by_side(
    commands: Iterable[tuple[str, Sequence[str]]], *, processes: int, timeout: float, budget_s: float | None = None
) -> Iterator[Ended]:
    """Run Python commands `processes` at a time, in order; yield each as it ends.

    Args:
        commands: name and the arguments behind `python`; one thread each (OMP_NUM_THREADS=1), the repository on the
            path.
        processes: how many at a time.
        timeout: seconds for each; one past it is ended and yielded without a return code.
        budget_s: seconds for all; none starts later, and those that still run then are ended and not yielded.
    """
    start, waiting = time.monotonic(), list(commands)[::-1]
    running: list[_Running] = []
    try:
        while waiting or running:
            if budget_s is not None and time.monotonic() - start > budget_s:
                return
            while waiting and len(running) < processes:
                running.append(_started(*waiting.pop()))
            for one in list(running):
                ended = one.process.poll() is not None
                late = not ended and one.seconds > timeout
                if not (ended or late):
                    continue
                if late:
                    one.kill()
                running.remove(one)
                yield one.ended(timed_out=late)
            time.sleep(_PAUSE)
    finally:
        for one in running:
            one.kill()


def _started(name: str, arguments: Sequence[str]) -> _Running:
    output, errors = _temporary(), _temporary()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=output, stderr=errors, text=True, env=_ENVIRONMENT, start_new_session=True
    )
    return _Running(name, process, output, errors)


def _temporary() -> IO[str]:
    """A file that is closed, and with it gone, where `_Running` reads it."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
