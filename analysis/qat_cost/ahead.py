"""Variants that are built and compiled beside each other, in processes, each of which then waits until it is asked.

A compiled variant has a process of its own. The eager variants of a network share one, so that cuDNN's benchmark is run
once for all; their recorded passes are in it too. A process keeps its steps, so nothing is traced a second time, and
gives the GPU's memory back while it waits. While others compute, cuDNN's benchmark would choose wrong algorithms: it is
off until the process is asked for its first round. Nothing is timed before all have been built.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from analysis.common.qat_variants import DEVICE, NETWORKS, fast_arithmetic
from analysis.common.study import Row
from analysis.qat_cost.steps import Step, make_step, profiled, recorded

Key = tuple[str, str, str, str]
"""Network, precision, mode, variant."""
Case = tuple[str, str, str, tuple[str, ...]]
"""Network, precision, mode and variants."""
SHARED = ("eager", "recorded")
"""Modes whose variants share the process of their network."""
_SETTLING_STEPS = 3
_ALGORITHMS = 4
"""Algorithms that cuDNN's benchmark tries for each convolution; with its default of ten it takes 20 s for a network."""
_KERNELS = -1
"""Asks a process for the kernels of its step; any other number is one of steps to time."""
_ANSWER_S = 60.0
_SHARE = 0.6
"""Part of the time after which a process begins to build no further variant."""


class StepFailedError(Exception):
    """A process did not take its step; the text says why."""


class RemoteStep(Step):
    """A training step in another process.

    Args:
        key: of the variant.
        pipe: to its process.
    """

    def __init__(self, key: Key, pipe: Connection) -> None:
        super().__init__(run=_nothing, replays=key[2] in ("graphs", "recorded"))
        self.key, self._pipe = key, pipe

    def time(self, repeats: int) -> None:
        """See `Step.time`.

        Raises:
            StepFailedError: there is no time.
        """
        ms, self.peak_bytes = self._ask(repeats)
        self.ms.append(ms)

    def kernels(self) -> list[Row]:
        """See `Step.kernels`."""
        found: list[Row] = self._ask(_KERNELS)
        return found

    def _ask(self, number: int) -> Any:
        try:
            self._pipe.send((self.key, number))
            if not self._pipe.poll(_ANSWER_S):
                raise StepFailedError(f"no answer in {_ANSWER_S:.0f} s")
            answer, problem = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise StepFailedError("its process ended") from error
        if problem:
            raise StepFailedError(problem)
        return answer


def _nothing() -> None:
    """Stand for the step, which runs elsewhere."""


class Ahead:
    """The processes of a run, all of which begin at once, up to a number of them.

    Args:
        keys: variants, in the order in which they will be asked for.
        seconds: after which nobody waits for those that are not ready.
        jobs: processes that build at a time.
        miss: is called with a variant's name and the reason for each that is not ready.
    """

    def __init__(self, keys: Sequence[Key], *, seconds: float, jobs: int, miss: Callable[[str, str], None]) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        self._ends, self._jobs, self._miss = time.monotonic() + seconds, jobs, miss
        self._last_begin = time.monotonic() + _SHARE * seconds
        self._left: dict[tuple[str, ...], list[Key]] = {}
        for key in dict.fromkeys(_built(key) for key in keys):
            self._left.setdefault(_process_of(key), []).append(key)
        self._building: dict[Any, list[Key]] = {}
        self._ready: dict[Key, tuple[Connection, float, int]] = {}
        self._failed: dict[Key, str] = {}
        self._processes: dict[tuple[str, ...], Any] = {}
        self._begin()

    def wait(self) -> None:
        """Wait until all variants are built, so that nothing else uses the machine when they are timed.

        Processes that are not ready when the time is over are ended.
        """
        while (self._building or self._left) and time.monotonic() < self._ends:
            self._receive()
        for pipe, keys in self._building.items():
            self._failed |= dict.fromkeys(keys, "not built in its time beside the others")
            self._processes.pop(_process_of(keys[0])).kill()
            pipe.close()
        self._failed |= dict.fromkeys((key for keys in self._left.values() for key in keys), "no time to begin it")
        self._building.clear()
        self._left.clear()

    def step(self, key: Key) -> RemoteStep | None:
        """Return a variant that is built, after `wait`; None if it is not, which is noted."""
        built = _built(key)
        if built not in self._ready or _process_of(key) not in self._processes:
            self._miss("/".join(key), self._failed.get(built, "its process was ended while it built another variant"))
            return None
        pipe, first_s, own_bytes = self._ready[built]
        step = RemoteStep(key, pipe)
        step.first_s, step.own_bytes = first_s, own_bytes
        return step

    def close(self, remaining: Sequence[Key]) -> None:
        """End the processes that no remaining variant needs."""
        needed = {_process_of(key) for key in remaining}
        for name in [name for name in self._processes if name not in needed]:
            self._processes.pop(name).kill()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        while self._left and len(self._building) < self._jobs:
            name, keys = next(iter(self._left.items()))
            del self._left[name]
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(keys, theirs, self._last_begin), daemon=True)
            process.start()
            theirs.close()
            self._processes[name] = process
            self._building[ours] = list(keys)

    def _receive(self) -> None:
        """Take the words of processes that have built a variant, waiting for one until the end of the time at most."""
        pipes: list[Any] = wait(list(self._building), timeout=max(0.0, self._ends - time.monotonic()))
        for pipe in pipes:
            keys = self._building[pipe]
            try:
                key, first_s, own_bytes, problem = pipe.recv()
            except EOFError:
                self._failed |= dict.fromkeys(keys, "its process ended")
                keys.clear()
            else:
                keys.remove(key)
                if problem:
                    self._failed[key] = problem
                else:
                    self._ready[key] = (pipe, first_s, own_bytes)
            if not keys:
                del self._building[pipe]
        self._begin()


def _built(key: Key) -> Key:
    """The variant that is built for a variant: recorded passes are those of the eager one."""
    name, precision, mode, variant = key
    return (name, precision, "eager" if mode == "recorded" else mode, variant)


def _process_of(key: Key) -> tuple[str, ...]:
    return key[:2] if key[2] in SHARED else key


def _serve(keys: Sequence[Key], pipe: Connection, last_begin: float) -> None:
    """Build variants and tell of each; then take steps when asked, until the other end closes."""
    fast_arithmetic()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = False  # both belong to the key of cuDNN's cache
    steps: dict[Key, Step] = {}
    for key in keys:
        name, precision, mode, variant = key
        if time.monotonic() > last_begin and steps:
            pipe.send((key, 0.0, 0, "no time to build it"))
            continue
        try:
            steps[key] = step = make_step(variant, NETWORKS[name], precision, mode)
            pipe.send((key, step.first_s, step.own_bytes, ""))
        except Exception as error:
            pipe.send((key, 0.0, 0, f"{type(error).__name__}: {str(error)[:300]}"))
        _give_back()
    fast_arithmetic()
    torch.backends.cudnn.benchmark_limit = _ALGORITHMS
    settled: set[Key] = set()
    while True:
        try:
            key, number = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((_answer(steps, settled, key, number), ""))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {str(error)[:300]}"))
        _give_back()


def _answer(steps: dict[Key, Step], settled: set[Key], key: Key, number: int) -> Any:
    """Milliseconds of a step and its peak memory, or its kernels."""
    built = _built(key)
    if built not in settled:
        for _ in range(_SETTLING_STEPS):
            steps[built].run()
        settled.add(built)
    for other in [other for other in steps if other[2] == "recorded" and key[2] == "eager"]:
        del steps[other]  # with the memory of its graph
    if key not in steps:
        steps[key] = recorded(steps[built])
    if number == _KERNELS:
        return profiled(steps[key])
    steps[key].ms.clear()
    steps[key].time(number)
    return steps[key].ms[0], steps[key].peak_bytes


def _give_back() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
