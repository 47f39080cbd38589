"""fp16 by torch.compile in channels_last, as one CUDA graph: what the engine is compared with.

Each network has a process of its own, which compiles beside everything else, then waits, and measures alone when it is
asked. Only then does it let cuDNN's benchmark choose the algorithms: while others compute, it would choose wrong ones.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.cuda_engine.networks import image_size, images, network

SETTINGS = "torch.compile, mode default (products and convolutions of the libraries), cuDNN's benchmark, one CUDA graph"
_WARMUP = 3


class Baseline:
    """A network that compiles in another process now, and is measured when `measured` is called.

    Args:
        name: of the network.
        batch: images.
    """

    def __init__(self, name: str, batch: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        self.process = context.Process(target=_serve, args=(name, batch, theirs), daemon=True)
        self.process.start()
        self._state: dict[str, Any] | None = None

    def compiled(self, seconds: float) -> dict[str, Any]:
        if self._state is None and self._ours.poll(max(0.0, seconds)):
            self._state = self._ours.recv()
        return self._state or {"fp16_failed": "not compiled in time"}

    def measured(self, seconds: float) -> dict[str, Any]:
        found = dict(self.compiled(seconds))
        if "fp16_failed" not in found:
            self._ours.send("go")
            found |= self._ours.recv() if self._ours.poll(seconds) else {"fp16_failed": "not measured in time"}
        self.process.kill()
        return found


def _serve(name: str, batch: int, pipe: Connection) -> None:
    start = time.monotonic()
    try:
        with torch.inference_mode():
            torch.backends.cudnn.allow_tf32 = False  # part of the key of cuDNN's cache: chosen again below
            model = network(name).cuda().half().to(memory_format=torch.channels_last)
            x = images(batch, image_size(name)).cuda().half().contiguous(memory_format=torch.channels_last)
            fast = torch.compile(model)
            fast(x)
            torch.cuda.synchronize()
            pipe.send({"fp16_compile_s": round(time.monotonic() - start, 1)})
            pipe.recv()
            pipe.send(_measured(fast, x))
    except Exception as error:
        pipe.send({"fp16_failed": f"{type(error).__name__}: {str(error)[:300]}"})


def _measured(fast: Any, x: Tensor) -> dict[str, Any]:
    """Times of a CUDA graph of the compiled network; fp16 convolutions do not depend on TF32."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARMUP):
            fast(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast(x)
    queued, waiting = call_ms(graph.replay)
    return {"fp16_ms": queued, "fp16_waiting_ms": waiting, "fp16_images_per_s": len(x) / queued * 1e3}


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
