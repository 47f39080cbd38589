"""How long each node of a traced model takes in torch: the points under the roof, without an engine.

The graph is interpreted node by node and each one is timed alone, so what torch does between kernels (dispatch, some
microseconds a node) is in the times, and nothing is fused. Every node gets the median over the repeats.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import fx, nn

from compress.errors import RooflineError
from compress.graph.trace import Inputs, as_inputs, trace
from compress.roofline.counting import count


def measure_layer_times(
    model: nn.Module, example_inputs: Inputs, *, repeats: int = 5, warmup: int = 2
) -> dict[str, float]:
    """Milliseconds of every node that computes or moves something, for the batch of `example_inputs`.

    Args:
        model: any module that fx can trace, on the device that is to be timed.
        example_inputs: its inputs, on the same device.
        repeats: runs that are timed; the median counts.
        warmup: runs before them.

    Returns:
        Node name -> ms, as `Roofline.with_times` takes it.

    Raises:
        RooflineError: `repeats` below 1.
        ModelError: the model fails on its inputs or cannot be traced.
    """
    if repeats < 1 or warmup < 0:
        raise RooflineError(f"repeats must be 1 or more and warmup 0 or more, got {repeats} and {warmup}")
    inputs = as_inputs(example_inputs)
    graph_module = trace(model, inputs)
    wanted = {name for op in count(graph_module, inputs).operations for name in op.members}
    timed = _Timed(graph_module, cuda=inputs[0].is_cuda)
    with torch.inference_mode():
        for _ in range(warmup):
            timed.run(*inputs)
        timed.seconds.clear()
        for _ in range(repeats):
            timed.run(*inputs)
    return {name: statistics.median(times) * 1e3 for name, times in timed.seconds.items() if name in wanted}


class _Timed(fx.Interpreter):
    """Runs a graph and notes the seconds of every node."""

    def __init__(self, graph_module: fx.GraphModule, *, cuda: bool) -> None:
        super().__init__(graph_module)
        self.cuda = cuda
        self.seconds: dict[str, list[float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._wait()
        start = time.perf_counter()
        result = super().run_node(n)
        self._wait()
        self.seconds.setdefault(n.name, []).append(time.perf_counter() - start)
        return result

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
