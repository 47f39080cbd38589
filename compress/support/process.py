"""Processes of this machine, and the cores that this one may use."""

from __future__ import annotations

import os
from pathlib import Path


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended unwaited does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except (OSError, IndexError, OverflowError):  # another user's process, no /proc, or no such number
        return True
