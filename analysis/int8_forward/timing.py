"""Calls that the study of INT8 convolutions compares, their timing, and the compilation of kernels ahead of it."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.int8_forward.shapes import LAST, Operands, Shape, candidates, int8_call, operands, values
from compress.kernels.fake_quantize import fused_quantize
from compress.kernels.triton.conv_int8 import ConvTile

Call = Callable[[], Any]

CALLS = 10  # calls in a CUDA graph


def present_calls(shape: Shape, o: Operands, dtype: torch.dtype) -> dict[str, Call]:
    """Return cuDNN's convolution in half precision, alone and with the kernel of QAT after it."""
    x, weight = values(o.x, dtype), values(o.weight, dtype)
    residual = None if o.residual is None else values(o.residual, dtype)

    def conv() -> Tensor:
        return F.conv2d(x, weight, None, shape.geometry.stride, shape.geometry.padding)

    return {
        "conv": conv,
        "present": lambda: fused_quantize(conv(), o.amax, o.epilogue, bias=o.bias, residual=residual, kernels="triton"),
    }


def other_calls(shape: Shape, o: Operands, dtype: torch.dtype) -> dict[str, Call]:
    """Return points of reference: dequantization of the codes, and the product without an epilogue."""
    out = shape.out_size
    codes = torch.ones(o.x[0].shape[0], shape.outputs, out, out, dtype=torch.int8, device=o.amax.device)
    codes = codes.contiguous(memory_format=LAST)
    scale = (o.amax / 127).to(dtype)
    calls: dict[str, Call] = {"dequantize": lambda: codes * scale}
    if shape.taps == 1 and shape.stride == 1 and o.amax.is_cuda:
        rows = o.x.integers.permute(0, 2, 3, 1).reshape(-1, shape.inputs)
        matrix = o.weight.integers.reshape(shape.outputs, shape.inputs).t()
        calls["int_mm"] = lambda: torch._int_mm(rows, matrix)
    return calls


class Timed:
    """A call that is timed: several of them in a CUDA graph on a GPU, one call on a CPU."""

    def __init__(self, call: Call) -> None:
        self.call = call  # a graph records addresses, so the operands must stay alive
        self.ms: list[float] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        if not torch.cuda.is_available():
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(CALLS):
                    call()
        self.graph.replay()

    def time(self) -> None:
        """Time a round and append the milliseconds of a call."""
        if self.graph is None:
            start = time.perf_counter()
            self.call()
            self.ms.append((time.perf_counter() - start) * 1e3)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.ms.append(begin.elapsed_time(end) / CALLS)


def in_turn(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Time calls in turn and return the median milliseconds of each."""
    timed = {name: Timed(call) for name, call in calls.items()}
    for _ in range(rounds):
        for item in timed.values():
            item.time()
    return {name: statistics.median(item.ms) for name, item in timed.items()}


def kernel_key(shape: Shape, tile: ConvTile, writes_values: bool) -> tuple[Any, ...]:
    """Return a key that is the same for shapes that share a compiled kernel."""
    even = shape.inputs % tile.depth == 0
    return shape.taps, shape.stride, shape.residual, shape.inputs < 16, even, tile, writes_values


def compile_one(task: tuple[Shape, ConvTile, bool]) -> str:
    """Compile a kernel into Triton's cache by running it on a few images; return "" or the reason of a failure."""
    shape, tile, writes_values = task
    try:
        o = operands(shape, 16, "cuda")
        int8_call(shape, o, tile, torch.bfloat16 if writes_values else None)()
        torch.cuda.synchronize()
    except Exception as error:  # such as too much shared memory: the tile is left out
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def compile_all(shapes: Iterable[Shape], jobs: int, limit_s: float) -> dict[tuple[Any, ...], str]:
    """Compile all kernels in several processes; return "" or the reason of the failure of each."""
    tasks = {kernel_key(s, t, v): (s, t, v) for s in shapes for t in candidates(s) for v in (True, False)}
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is already in use: processes forked now could not use it")
    end = time.monotonic() + limit_s
    pool = multiprocessing.get_context("fork").Pool(min(jobs, len(tasks)))
    pending = {key: pool.apply_async(compile_one, (task,)) for key, task in tasks.items()}
    found = {}
    for key, result in pending.items():
        try:
            found[key] = result.get(max(0.1, end - time.monotonic()))
        except multiprocessing.TimeoutError:
            found[key] = "not compiled in time"
    pool.terminate()
    pool.join()
    return found
