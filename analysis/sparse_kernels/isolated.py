"""Measure item by item, each in a process of its own, so that a hang or a crash is a row of the report.

Processes are forked from one that has imported the libraries and has not used the device, so that a start costs little
more than the device's context. Several start at once, and a lock lets one of them at a time measure. The lock belongs
to the operating system (flock), so a process that dies releases it.
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

from analysis.common.study import Row

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
    """Yield (item, row) as processes end; the row is `{"failed": [reason]}` if one raised, died or took too long.

    Args:
        items: items to measure, first in first out; the caller may append to it meanwhile.
        work: returns the row of an item; runs in a forked process, one at a time.
        prepare: runs before `work`, at the same time in several processes.
        limit_s: seconds for one item, from the moment it has the lock.
        budget_s: seconds for all; items that remain come back as failed without being run.
        workers: number of processes at once.
    """
    end = time.monotonic() + budget_s
    running: list[_Job] = []
    with tempfile.NamedTemporaryFile() as lock:
        try:
            while items or running:
                if items and time.monotonic() > end:
                    yield items.popleft(), {"failed": [f"not run: the {budget_s:.0f} s for all items were over"]}
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
    except Exception as error:  # any failure of one item is the result of its row
        row = {"failed": [f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"]}
    connection.send(row)
    os._exit(0)  # a device in a bad state may hang in its libraries' clean-up


def _look(job: _Job, limit_s: float) -> Row | None:
    """Return the job's row, or None while it runs."""
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
