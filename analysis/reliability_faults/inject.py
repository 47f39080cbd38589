"""Makes one file operation of a run go wrong: it fails, its file is cut short, or the process dies there.

Every result of a run is written through `compress.files.replacing`: a temporary file is made, written, synchronized and
renamed. Those three operations are counted; the n-th of them is made to go wrong.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from compress.errors import CompressError
from compress.pipeline import run
from compress.recipe import Recipe

Kind = Literal["fails", "cut", "dies"]
KINDS: tuple[Kind, ...] = ("fails", "cut", "dies")
DIED, REFUSED, BROKEN = 9, 2, 1
"""Exit statuses of a run: it died at the fault, it ended with an error that says why, or with a traceback."""

WEIGHTS = "*.safetensors"


@contextmanager
def fault(kind: Kind, at: int) -> Iterator[list[str]]:
    """Make operation `at`, counted from 0, go wrong while the block runs; -1 = none. Yields the operations so far."""
    seen: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            if len(seen) - 1 == at:
                if kind == "dies":
                    os._exit(DIED)
                if kind == "cut" and name == "fsync":
                    path = Path(f"/proc/self/fd/{arguments[0]}")
                    os.truncate(path, path.stat().st_size // 2)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **options)

        return operation

    with (
        mock.patch.object(tempfile, "mkstemp", counted("create", tempfile.mkstemp)),
        mock.patch.object(os, "fsync", counted("fsync", os.fsync)),
        mock.patch.object(Path, "replace", counted("rename", Path.replace)),
    ):
        yield seen


def operations(recipe: Recipe, command: str, out: Path) -> list[str]:
    """Run undisturbed, and return the names of the file operations in order."""
    with fault("fails", -1) as seen:
        run(recipe, command, out, device="cpu")
    return seen


def disturbed(recipe: Recipe, command: str, out: Path, kind: Kind, at: int) -> int:
    """Run in a process of its own with one fault, and return the exit status.

    The process is forked from one that has imported everything and computed nothing: after a fork, a process in which
    autograd's threads have run cannot train.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    child = context.Process(target=_disturb, args=(recipe, command, out, kind, at, torch.get_num_threads()))
    child.start()
    child.join()
    return int(child.exitcode or 0)


def _disturb(recipe: Recipe, command: str, out: Path, kind: Kind, at: int, threads: int) -> None:
    status = BROKEN
    try:
        torch.set_num_threads(threads)
        with fault(kind, at):
            run(recipe, command, out, device="cpu")
        status = 0
    except (CompressError, OSError):
        status = REFUSED
    finally:
        os._exit(status)


def digests(out: Path) -> dict[str, str]:
    """Return the SHA-256 of each weights file of a run, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob(WEIGHTS))}
