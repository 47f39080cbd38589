"""Time of each node of a traced model in torch, node by node, the fastest run of each."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import RooflineError
from compress.graph.inputs import Inputs, as_inputs
from compress.graph.trace import trace
from compress.roofline_model.counting import count

_AHEAD_CYCLES = 100_000_000  # some 50 ms on a GPU of 2 GHz: time for Python to queue a whole network


def measure_torch_times(
    model: nn.Module, example_inputs: Inputs, *, repeats: int = 10, warmup: int = 2
) -> dict[str, float]:
    """The ms of every node that computes or moves something, for the batch, by name.

    The fastest of `repeats` runs counts; on a CPU it includes torch's dispatch of some microseconds.

    Raises:
        RooflineError: `repeats` is below 1, or `warmup` is negative.
        ModelError: the model fails on its inputs or cannot be traced.
    """
    if repeats < 1 or warmup < 0:
        raise RooflineError(f"repeats must be 1 or more and warmup 0 or more, got {repeats} and {warmup}")
    inputs = as_inputs(example_inputs)
    graph_module = trace(model, inputs)
    wanted = {name for op in count(graph_module, inputs).operations for name in op.members}
    timed = _OnCuda(graph_module) if inputs[0].is_cuda else _OnCpu(graph_module)
    with torch.inference_mode():
        runs = [timed.time(inputs) for _ in range(warmup + repeats)][warmup:]
    return {name: min(run[name] for run in runs) for name in runs[0] if name in wanted}


class _OnCpu(fx.Interpreter):
    """Runs a graph with a clock before and after every node."""

    def time(self, inputs: tuple[Tensor, ...]) -> dict[str, float]:
        self.ms: dict[str, float] = {}
        self.run(*inputs)
        return self.ms

    def run_node(self, n: fx.Node) -> Any:
        start = time.perf_counter()
        result = super().run_node(n)
        self.ms[n.name] = (time.perf_counter() - start) * 1e3
        return result


class _OnCuda(fx.Interpreter):
    """Records an event after every node, evaluated when the GPU has finished."""

    def time(self, inputs: tuple[Tensor, ...]) -> dict[str, float]:
        self.events: list[tuple[str, torch.cuda.Event]] = []
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        self._mark("")
        self.run(*inputs)
        torch.cuda.synchronize()
        pairs = zip(self.events, self.events[1:], strict=False)
        return {name: max(before.elapsed_time(after), 1e-6) for (_, before), (name, after) in pairs}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self._mark(n.name)
        return result

    def _mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append((name, event))
