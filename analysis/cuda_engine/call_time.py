"""The time of a call that starts work on a GPU."""

from collections.abc import Callable

import numpy as np
import torch


def call_ms(run: Callable[[], object], *, calls: int = 50, warmup: int = 20) -> tuple[float, float]:
    """Milliseconds of a call: (of many that are queued one after another, median of one that is waited for).

    The first is the GPU's time where the host keeps up; the second also holds the host's time before the GPU starts.
    """

    def between(action: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def queued() -> None:
        for _ in range(calls):
            run()

    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    rounds = [between(queued) / calls for _ in range(3)]
    return float(np.median(rounds)), float(np.median([between(run) for _ in range(calls)]))
