"""A run in which every file operation goes wrong once, one after the other.

A session ends at the first operation that has not gone wrong yet, and the next one goes on in the folder that it left.
So a run of a hundred operations takes a hundred sessions, each of which repeats only the step that was cut off, and the
run has to bear all faults together. A death leaves the folder as it is at that moment: it is copied, the session is
given up, and the next one goes on in the copy.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from analysis.reliability_faults.inject import Kind, Point, digests, faults
from compress.errors import CompressError
from compress.pipeline import run
from compress.recipe import Recipe

END = "end of the run"
FINE = "goes on"
SAME = "same bits, no temporary file"
SILENT = "ends as if nothing had happened"


class _DeadError(BaseException):
    """The process would have ended here."""


@dataclass
class _Session:
    """One process's share of a run.

    Attributes:
        folder: of the run.
        heir: where the folder is copied as the process dies.
        kind: what goes wrong.
        met: operations that have gone wrong in earlier sessions.
        hit: the one that went wrong in this session; None = none was left.
    """

    folder: Path
    heir: Path
    kind: Kind
    met: frozenset[Point]
    hit: Point | None = field(default=None, init=False)

    def _chosen(self, point: Point) -> bool:
        if self.hit is not None or point in self.met:
            return False
        self.hit = point
        return True

    def _die(self) -> None:
        shutil.copytree(self.folder, self.heir)
        raise _DeadError

    def run(self, recipe: Recipe, command: str) -> str:
        """Start or resume the run; return the error that no fault explains, "" if there is none."""
        try:
            with faults(self.folder, self.kind, self._chosen, self._die):
                run(recipe, command, self.folder, resume=True, device="cpu")
        except _DeadError:
            return ""
        except (CompressError, OSError) as error:
            return "" if self.hit is not None else f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"traceback: {type(error).__name__}: {error}"
        return "" if self.hit is None else SILENT


def chain(
    recipe: Recipe, command: str, scratch: Path, kind: Kind, expected: dict[str, str], end: float
) -> Iterator[tuple[Point, str]]:
    """Let each operation go wrong once, and yield it with what became of the run; last, the end of the run.

    Args:
        recipe: of the run.
        command: of the run.
        scratch: folder for run folders.
        kind: what goes wrong.
        expected: digests of the weights of an undisturbed run.
        end: `time.monotonic()` after which no session begins; what became of the last fault is then not yielded.
    """
    met: frozenset[Point] = frozenset()
    last, number = None, 0
    folder = scratch / f"{kind}0"
    while time.monotonic() < end:
        number += 1
        session = _Session(folder=folder, heir=scratch / f"{kind}{number}", kind=kind, met=met)
        wrong = session.run(recipe, command)
        if session.hit is None and not wrong:
            wrong = _ending(folder, expected)
        if last is not None:
            yield last, wrong or FINE
        if session.hit is None and not wrong:
            yield Point(file="", operation=END, steps=0), SAME
            return
        if session.hit is None and last is None:  # nothing went wrong, and yet a new run does not end well
            raise RuntimeError(wrong)
        last, met = session.hit, met | ({session.hit} if session.hit else set())
        if kind == "dies" or wrong:  # after something wrong, the operations that are left are tried on a new run
            shutil.rmtree(folder, ignore_errors=True)
            folder = session.heir


def _ending(folder: Path, expected: dict[str, str]) -> str:
    if digests(folder) != expected:
        return "other bits"
    return "temporary files are left" if list(folder.rglob("*.part")) else ""
