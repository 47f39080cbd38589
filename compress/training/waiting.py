"""The time in which a device had no training step to compute, because its pictures were read, decoded or drawn."""

from __future__ import annotations

import time
from types import TracebackType

import torch


class Waiting:
    """Times the blocks in which the next batch is fetched.

    On a GPU it is the time from the end of the step before to the start of the next one, in which the GPU itself may
    make pictures; where the host is ahead, nothing else is counted. On the CPU it is the clock's.

    Args:
        device: that computes the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._clock = 0.0
        self._begin = 0.0

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._pairs.append((self._recorded(), torch.cuda.Event(enable_timing=True)))
        else:
            self._begin = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self._pairs[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._clock += time.perf_counter() - self._begin

    def seconds(self) -> float:
        """Return the seconds since the last call, and forget them; waits for the GPU's last block."""
        milliseconds = 0.0
        for begin, end in self._pairs:
            end.synchronize()
            milliseconds += begin.elapsed_time(end)
        found = self._clock + milliseconds / 1e3
        self._pairs.clear()
        self._clock = 0.0
        return found

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
