"""Makes one file operation of a run go wrong: it fails, its file is cut short, or the process dies there.

Every result of a run is written through `compress.files.replacing`: a temporary file is made, written, synchronized and
renamed. Each of those operations can be made to go wrong; a write does where the disk is full from some file on.
"""

import errno
import hashlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch

from compress import CompressError, Recipe, run
from tests.fresh import CONTEXT

Kind = Literal["fails", "cut", "dies", "full"]
KINDS: tuple[Kind, ...] = ("fails", "cut", "dies", "full")
# Exit statuses of a run: it died at the fault, it ended with an error that says why, or with a traceback.
DIED, REFUSED, BROKEN = 9, 2, 1

WEIGHTS = "*.safetensors"
# The one operation at which some kinds of faults happen; the others happen at any.
_AT = {"cut": "fsync", "full": "create"}


def happens(kind: Kind, operation: str) -> bool:
    return _AT.get(kind, operation) == operation


class Point(NamedTuple):
    # A file operation of a run.
    #
    # file: that is written.
    # operation: `create`, `fsync` or `rename`.
    # steps: of the run that were finished before it; several files are written anew after each step.
    file: str
    operation: str
    steps: int


@contextmanager
def faults(
    out: Path, kind: Kind, chosen: Callable[[Point], bool], die: Callable[[], None] = lambda: os._exit(DIED)
) -> Iterator[list[Point]]:
    # Make the chosen operations on files in `out` go wrong while the block runs; yields the operations so far.
    #
    # out: folder of the run.
    # kind: what goes wrong; a file is cut short where it is synchronized, and from the making of a file on the disk is
    # `full`: nothing can be written to any file while the block runs.
    # chosen: whether an operation goes wrong.
    # die: what the death of the process is.
    seen: list[Point] = []
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def operation(name: str, real: Callable[..., Any], file_of: Callable[..., Path | None]) -> Callable[..., Any]:
        def replaced(*arguments: Any, **options: Any) -> Any:
            file = file_of(*arguments, **options)
            if file is None or not file.resolve().is_relative_to(out.resolve()):
                return real(*arguments, **options)
            seen.append(point := Point(file.name, name, _finished(out)))
            if happens(kind, name) and chosen(point):
                if kind == "full":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
                    return real(*arguments, **options)
                if kind == "dies":
                    die()
                if kind == "cut":
                    path = Path(f"/proc/self/fd/{arguments[0]}")
                    os.truncate(path, path.stat().st_size // 2)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **options)

        return replaced

    with (
        mock.patch.object(os, "open", operation("create", os.open, _created)),
        mock.patch.object(os, "fsync", operation("fsync", os.fsync, _synchronized)),
        mock.patch.object(Path, "replace", operation("rename", Path.replace, lambda source, target: Path(target))),
    ):
        try:
            yield seen
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))


def _created(path: Any, flags: int, mode: int = 0o777, **options: Any) -> Path | None:
    named = str(path).endswith(".part") and flags & os.O_CREAT
    return _final(Path(path)) if named else None


def _synchronized(descriptor: int) -> Path:
    return _final(Path(f"/proc/self/fd/{descriptor}").resolve())


def _final(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".part").rpartition(".")[0].removeprefix("."))


def _finished(out: Path) -> int:
    state = out / "state.json"
    return len(json.loads(state.read_text(encoding="utf-8"))["steps"]) if state.is_file() else 0


def operations(recipe: Recipe, command: str, out: Path) -> list[Point]:
    with faults(out, "fails", lambda point: False) as seen:
        run(recipe, command, out, device="cpu")
    return seen


def disturbed(recipe: Recipe, command: str, out: Path, kind: Kind, point: Point) -> int:
    # Run in a process of its own with one fault, and return the exit status.
    #
    # The process is forked from one that has imported everything and computed nothing (see `tests.fresh`).
    child = CONTEXT.Process(target=_disturb, args=(recipe, command, out, kind, point, torch.get_num_threads()))
    child.start()
    child.join()
    return int(child.exitcode or 0)


def _disturb(recipe: Recipe, command: str, out: Path, kind: Kind, point: Point, threads: int) -> None:
    status = BROKEN
    try:
        torch.set_num_threads(threads)
        with faults(out, kind, lambda seen: seen == point):
            run(recipe, command, out, device="cpu")
        status = 0
    except (CompressError, OSError):
        status = REFUSED
    finally:
        os._exit(status)


def digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob(WEIGHTS))}
