"""Work item by item, each in a process of its own: what one of them breaks, a hang or a crash included, is a row.

Processes are forked from one that has imported what is needed and has touched no device, so that a start costs little
more than the device's context. Several start at once, and a lock lets one of them at a time do its work: the
others' start-up overlaps with it and does not disturb what it measures. The lock is the kernel's (flock), so a process
that dies gives it back.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Prepare = Callable[[], object]
Work = Callable[[Any], Row]


@dataclass
class _Job:
    item: Any
    process: BaseProcess
    connection: Connection
    deadline: float


def run_isolated(
    items: deque[Any], work: Work, *, prepare: Prepare, limit_s: float, budget_s: float, workers: int = 4
) -> Iterator[tuple[Any, Row]]:
    """(item, what `work` returned) as they come; `{"failed": [reason]}` for one that raised, died or took too long.

    Args:
        items: what to do, first in first out; the caller may append to it meanwhile.
        work: run in a forked process, one at a time.
        prepare: run before it, at the same time as others.
        limit_s: of one item, from when its turn has come.
        budget_s: of all; items that are left then come back as failed without being run.
        workers: processes at once.
    """
    end = time.monotonic() + budget_s
    running: list[_Job] = []
    with tempfile.NamedTemporaryFile() as lock:
        try:
            while items or running:
                if items and time.monotonic() > end:
                    yield items.popleft(), {"failed": [f"not run: the {budget_s:.0f} s for all were over"]}
                    continue
                while items and len(running) < workers:
                    running.append(_start(items.popleft(), work, prepare, lock.name, limit_s * (workers + 1)))
                wait([job.connection for job in running], timeout=0.05)
                for job in list(running):
                    row = _look(job, limit_s)
                    if row is not None:
                        running.remove(job)
                        yield job.item, row
        finally:
            for job in running:
                job.process.kill()
                job.process.join()


def _start(item: Any, work: Work, prepare: Prepare, lock: str, limit_s: float) -> _Job:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(item, work, prepare, lock, there), daemon=True)
    process.start()
    there.close()
    return _Job(item=item, process=process, connection=here, deadline=time.monotonic() + limit_s)


def _child(item: Any, work: Work, prepare: Prepare, lock: str, connection: Connection) -> None:
    try:
        prepare()
        with Path(lock).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            connection.send(None)
            row = work(item)
    except Exception as error:  # whatever it is, it is what this row says
        row = {"failed": [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]}
    connection.send(row)
    os._exit(0)  # a device in a bad state may hang in its libraries' clean-up


def _look(job: _Job, limit_s: float) -> Row | None:
    """The job's row, or None while it runs."""
    try:
        while job.connection.poll():
            row = job.connection.recv()
            if row is not None:
                job.process.join()
                return dict(row)
            job.deadline = time.monotonic() + limit_s
    except EOFError:
        job.process.join()
        code = job.process.exitcode or 0
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return {"failed": [f"the process died with {why}"]}
    if time.monotonic() > job.deadline:
        job.process.kill()
        job.process.join()
        return {"failed": [f"stopped after {limit_s:.0f} s"]}
    return None
