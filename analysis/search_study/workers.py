"""Processes that work side by side, each with a physical core of its own and without the GPU."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def physical_cores() -> list[set[int]]:
    """Logical processors that this process may use, grouped by the core that they share.

    A virtual machine may hide which these are: where none seems to share a core, neighbours are taken to.
    """
    allowed, found = os.sched_getaffinity(0), []
    for cpu in sorted(allowed):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        own = _numbers(file.read_text()) & allowed if file.is_file() else {cpu}
        if own not in found:
            found.append(own or {cpu})
    if all(len(core) == 1 for core in found):
        found = [set().union(*found[first : first + 2]) for first in range(0, len(found), 2)]
    return found


def _numbers(text: str) -> set[int]:
    """Read a list of processors, such as `0-1,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


class Workers:
    """A pool that awaits; the first core stays with this process.

    Args:
        count: of processes, at most one for each other core, and at least one.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        own, *others = physical_cores()
        cores = context.SimpleQueue()
        self.count = self._free = max(1, min(count, len(others)))
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._calls = itertools.count()
        for number in range(self.count):
            cores.put(others[number] if others else own)
        with _without_gpu():
            self.pool = context.Pool(self.count, initializer=_begin, initargs=(cores,))
        os.sched_setaffinity(0, own)

    async def call(self, function: Callable[..., Any], *arguments: Any, soon: bool = False) -> Any:
        """Call a function of a module in the next process that is free, and return what it returns.

        Args:
            function: to be called.
            arguments: of it.
            soon: before calls that wait and are not to be made soon.
        """
        if not self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (not soon, next(self._calls), turn))
            await turn
        else:
            self._free -= 1
        try:
            return await self._call(function, *arguments)
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()

        def end(value: bytes | BaseException) -> None:
            if not future.done():
                if isinstance(value, BaseException):
                    future.set_exception(value)
                else:
                    future.set_result(value)

        def ended(value: bytes | BaseException) -> None:
            loop.call_soon_threadsafe(end, value)

        payload = pickle.dumps((function, arguments))
        self.pool.apply_async(_work, (payload,), callback=ended, error_callback=ended)
        return pickle.loads(await future)

    def close(self) -> None:
        """End all processes, whatever they do."""
        self.pool.terminate()


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Hide GPUs from the processes that begin here."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _begin(cores: Any) -> None:
    """Begin a process on its core."""
    own = cores.get()
    os.sched_setaffinity(0, own)
    torch.set_num_threads(len(own))


def _work(payload: bytes) -> bytes:
    function, arguments = pickle.loads(payload)
    return pickle.dumps(function(*arguments))
