"""Keeps two runs out of one folder."""

from __future__ import annotations

import errno
import os
import re
import socket
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from compress.errors import RunError
from compress.support.process import is_alive

LOCK_FILE = ".lock"
OWNER_FILE = ".owner"
"""The lock of a file system that has none."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of a file system without locks."""

_HOLDER = re.compile(r"process (\d+) on (.+)")


class FolderLock:
    """A lock, held until it is closed or collected, or the process ends."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.close = weakref.finalize(self, release)


def lock_folder(path: Path) -> FolderLock:
    """Return the lock of a folder.

    Raises:
        RunError: another process holds or has left the lock, or the folder is read-only.
    """
    try:
        file = (path / LOCK_FILE).open("a+b")
    except OSError as error:
        raise RunError(f"{path} cannot be written to ({error}): name another folder with --out") from error
    try:
        import fcntl  # optional: only Unix has it

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        file.close()
        return _by_existence(path)
    except BlockingIOError:
        with file:
            raise _held(path, _holder(file)) from None
    except OSError as error:
        file.close()
        if error.errno in _NO_LOCKS:
            return _by_existence(path)
        raise RunError(f"{path} cannot be locked ({error}): name another folder with --out") from error
    try:
        file.truncate(0)
        file.write(_this_process().encode())
        file.flush()
    except OSError:  # on a full disk the lock is held all the same; only its words are missing
        pass
    return FolderLock(file.close)


def _by_existence(path: Path) -> FolderLock:
    owner = path / OWNER_FILE
    try:
        with owner.open("x", encoding="utf-8") as file:
            file.write(_this_process())
    except FileExistsError:
        with owner.open("rb") as there:
            raise _held(path, _holder(there), by_existence=True) from None
    except OSError as error:
        raise RunError(f"{path} cannot be written to ({error}): name another folder with --out") from error
    return FolderLock(partial(_remove, owner, os.getpid()))


def _remove(owner: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not a process that was forked from it
        owner.unlink(missing_ok=True)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _holder(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(200).decode(errors="replace").strip()


def _held(path: Path, holder: str, *, by_existence: bool = False) -> RunError:
    by, found = f" ({holder})" if holder else "", _HOLDER.fullmatch(holder)
    wait = "wait until it has ended, or name another folder with --out"
    here = found is not None and found[2] == socket.gethostname()
    if by_existence and here and found is not None and not is_alive(int(found[1])):
        return RunError(
            f"a process that is not there any more{by} has left its lock in {path}, on a file system that releases "
            f"none: remove {path / OWNER_FILE} and run again"
        )
    if found is None or here:
        return RunError(f"another process is at work in {path}{by}: {wait}")
    file = path / (OWNER_FILE if by_existence else LOCK_FILE)
    return RunError(
        f"another process is at work in {path}{by}: {wait}. If that host is dead and its lock has stayed, remove "
        f"{file} and run again"
    )
