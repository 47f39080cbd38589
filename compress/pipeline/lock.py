"""The lock that keeps two runs out of one folder.

It is on a file of its own that is made once and never replaced or removed: a lock on a file that is renamed over is a
lock on nothing. The system lets go of it when the process ends, in whatever way. On network file systems it holds
between hosts too (Linux maps it to a lock of the server, for which the file must be open for writing).
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import IO

from compress.errors import RunError

LOCK_FILE = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Answers of a file system that has no locks."""


def lock_folder(path: Path) -> IO[bytes] | None:
    """Return the folder's lock, which is released as the file is closed; None where there are no such locks.

    Raises:
        RunError: another process holds the lock, or the folder cannot be written to.
    """
    try:
        import fcntl  # optional: only Unix has it
    except ImportError:
        return None
    try:
        file = (path / LOCK_FILE).open("a+b")
    except OSError as error:
        raise RunError(f"{path} cannot be written to ({error}): name another folder with --out") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).decode(errors="replace").strip()
        file.close()
        by = f" ({holder})" if holder else ""
        raise RunError(
            f"another process is at work in {path}{by}: wait until it has ended, or name another folder with --out"
        ) from None
    except OSError as error:
        file.close()
        if error.errno in _NO_LOCKS:
            return None
        raise RunError(f"{path} cannot be locked ({error}): name another folder with --out") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    return file
