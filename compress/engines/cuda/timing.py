"""Times of what is launched on a GPU, without the host's own time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.steps import Convolution, Linear, Step

_TARGET_MS = 1.0
"""A graph of launches takes about this long: far longer than its own start, which takes 5 to 10 us."""
_MOST_LAUNCHES = 50


def launch_ms(run: Callable[[], None], device: torch.device, *, rounds: int = 5) -> float:
    """Return the median milliseconds of one call of `run`, which launches kernels and does not wait for them.

    `run` allocates nothing that it keeps and may be captured into a CUDA graph. On a CPU one call is timed.

    Raises:
        Exception: what the first call raises, such as a kernel that needs more shared memory than there is.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        run()  # compiles, and fails here if it fails
        rough = min(_elapsed(run) for _ in range(3))
        launches = max(2, min(_MOST_LAUNCHES, round(_TARGET_MS / max(rough, 1e-3))))

        def repeated() -> None:
            for _ in range(launches):
                run()

        graph = captured(repeated)
        graph.replay()
        return statistics.median(_elapsed(graph.replay) / launches for _ in range(rounds))


def repeated_ms(run: Callable[[], object], *, calls: int = 20, rounds: int = 5) -> float:
    """Median milliseconds of a call of `run` whose calls are queued one after another."""

    def repeated() -> None:
        for _ in range(calls):
            run()

    repeated()
    return statistics.median(_elapsed(repeated) / calls for _ in range(rounds))


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The launches of `run` as a CUDA graph that is not yet replayed."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _elapsed(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


_KNOWN: dict[object, float] = {}


def bare_ms(
    step: Step, layout: Layout, dtype: torch.dtype = torch.float16, device: torch.device | None = None
) -> float | None:
    """Return the milliseconds of a convolution or linear layer in floating point; None for other steps."""
    if not isinstance(step, (Convolution, Linear)):
        return None
    place = device or torch.device("cuda")
    shape = layout.plan.tensors[step.x.name].shape
    geometry = (step.stride, step.padding, step.dilation, step.groups) if isinstance(step, Convolution) else ()
    key = (shape, tuple(step.weight.shape), geometry, dtype, place)
    if key not in _KNOWN:
        _KNOWN[key] = _measured(step, shape, dtype, place)
    return _KNOWN[key]


def _measured(step: Convolution | Linear, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(step.weight.shape, device=device).to(dtype)
    bias = torch.randn(weight.shape[0], device=device).to(dtype)
    if isinstance(step, Linear):
        return launch_ms(partial(_linear, x, weight, bias), device)
    (above, below), (left, right) = step.padding
    if (above, left) != (below, right):
        x = nn.functional.pad(x, (left, right, above, below))
        above = left = 0
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    stride, dilation, groups = step.stride, step.dilation, step.groups

    def run() -> None:
        nn.functional.conv2d(x, weight, bias, stride, (above, left), dilation, groups)

    return launch_ms(run, device)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    nn.functional.linear(x, weight, bias)
