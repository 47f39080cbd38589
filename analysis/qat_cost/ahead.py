"""Variants that compile beside each other, each in a process of its own, which then waits until it is timed alone.

A process keeps its compiled step, so nothing is traced a second time, and gives the GPU's memory back while it waits.
While others compute, cuDNN's benchmark would choose wrong algorithms: it is off until the process is asked for its
first round.
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
from analysis.qat_cost.steps import Step, make_step, profiled, timed_round

Key = tuple[str, str, str, str]
"""Network, precision, mode, variant."""
_SETTLING_STEPS = 3
_ALGORITHMS = 4
"""Algorithms that cuDNN's benchmark tries for each convolution; with its default of ten it takes 20 s for a network."""
_KERNELS = -1
"""Asks a process for the kernels of its step; any other number is one of steps to time."""


class RemoteStep(Step):
    """A training step in another process.

    Args:
        key: of the variant.
    """

    def __init__(self, key: Key) -> None:
        super().__init__(run=_nothing)
        self.key = key
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(key, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def arrived(self) -> str:
        """Take the process's word after its first steps; "" or why there are none."""
        try:
            self.first_s, self.own_bytes, problem = self.pipe.recv()
        except EOFError:
            return "its process ended"
        return str(problem)

    def time(self, repeats: int) -> None:
        """See `Step.time`."""
        self.pipe.send(repeats)
        ms, self.peak_bytes = self.pipe.recv()
        self.ms.append(ms)

    def kernels(self) -> list[Row]:
        """See `Step.kernels`."""
        self.pipe.send(_KERNELS)
        found: list[Row] = self.pipe.recv()
        return found

    def close(self) -> None:
        """End the process."""
        self.process.kill()


def _nothing() -> None:
    """Stand for the step, which runs elsewhere."""


def compiled_ahead(
    keys: Sequence[Key], *, seconds: float, jobs: int, miss: Callable[[str, str], None]
) -> dict[Key, RemoteStep]:
    """Start a process for each variant, at most `jobs` compiling at a time, and wait until all are ready.

    Args:
        keys: in the order in which they begin.
        seconds: after which those that are not ready are ended.
        jobs: processes that compile at a time.
        miss: is called with a variant's name and the reason for each that is not ready.

    Returns:
        Those that are ready.
    """
    end = time.monotonic() + seconds
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    left, compiling, ready = list(keys), dict[Any, RemoteStep](), dict[Key, RemoteStep]()
    while (left or compiling) and time.monotonic() < end:
        while left and len(compiling) < jobs:
            step = RemoteStep(left.pop(0))
            compiling[step.pipe] = step
        for pipe in wait(list(compiling), timeout=max(0.0, end - time.monotonic())):
            step = compiling.pop(pipe)
            problem = step.arrived()
            if problem:
                miss("/".join(step.key), problem)
                step.close()
            else:
                ready[step.key] = step
    for step in compiling.values():
        step.close()
    for key in [*left, *(step.key for step in compiling.values())]:
        miss("/".join(key), f"not compiled in {seconds:.0f} s beside the others")
    return ready


def _serve(key: Key, pipe: Connection) -> None:
    """Compile, tell, and take steps when asked, until the other end closes."""
    name, precision, mode, variant = key
    fast_arithmetic()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = False  # both belong to the key of cuDNN's cache
    try:
        step = make_step(variant, NETWORKS[name], precision, mode)
    except Exception as error:
        pipe.send((0.0, 0, f"{type(error).__name__}: {str(error)[:300]}"))
        return
    _give_back()
    pipe.send((step.first_s, step.own_bytes, ""))
    settled = False
    while True:
        try:
            repeats = pipe.recv()
        except EOFError:
            return
        if not settled:
            fast_arithmetic()
            torch.backends.cudnn.benchmark_limit = _ALGORITHMS
            for _ in range(_SETTLING_STEPS):
                step.run()
            settled = True
        pipe.send(profiled(step) if repeats == _KERNELS else timed_round(step, repeats))
        _give_back()


def _give_back() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
