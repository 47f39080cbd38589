"""A plan for one set of input shapes on one GPU: an arena, kernels, and a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.engines.base import GpuTimes
from compress.engines.cuda.executor import FLOAT_KERNEL, Candidate, Executor, Tensors, bind_reference, dtype_text
from compress.engines.cuda.float_network import FloatNetwork, compiled
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.steps import Attention, Product, Step
from compress.engines.cuda.plan_file import PlanFile
from compress.engines.cuda.timing import bare_ms, launch_ms, repeated_ms
from compress.engines.cuda.tuning import (
    Measured,
    chosen,
    kernel_requests,
    kernels_of,
    measure,
    refusals,
    signature,
)
from compress.errors import EngineError
from compress.kernels.triton.ahead import compile_requests
from compress.support.progress import NoProgress, Progress

_QUIET = NoProgress()
_COPIED_BYTES = 4 << 20
"""Inputs up to this size are copied; 4 MiB take 2 us at 4 TB/s, a launch from Python 10 to 50."""
_MOST_DIRECT = 3
"""Steps that are launched outside of the graph at most."""

_INTEGERS, _FLOATS = "integers", "floats"
_MOST_APART = 0.5
"""Largest relative error, in the norm, of results in floating point; beyond it they are refused."""

Ways = Callable[[Step, Layout], list[Candidate]]


class Recorded(NamedTuple):
    """A CUDA graph of a network, or of what follows its first steps.

    Attributes:
        static: where it reads the network's inputs, by name.
        direct: steps that are launched before it; they read the inputs where these lie.
    """

    graph: torch.cuda.CUDAGraph
    results: Tensors
    static: Tensors
    direct: int


class Program:
    """A laid out plan, ready to run again and again on one stream at a time.

    Args:
        device: a GPU; or the CPU, where there is no graph.
        candidates: gives all ways to compute a step; None = exact arithmetic (`reference`).
        plan: measured choices, which are used and added to; None = the guess for every step.
        jobs: processes that compile at a time; 0 = a kernel is compiled when it is first launched.
        network: makes the same network in floating point; None = only integers are computed.

    Attributes:
        kernels: name of the candidate that computes each step.
        measured: times of all candidates of each step, if measured now.
        floats: the whole network runs in floating point, compiled by torch.
        graphs_ms: milliseconds of each graph that was compared.

    Raises:
        EngineError: the memory of the device does not suffice.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        candidates: Ways | None,
        plan: PlanFile | None,
        jobs: int = 1,
        network: Callable[[], FloatNetwork] | None = None,
        progress: Progress = _QUIET,
    ) -> None:
        self.layout = layout
        try:
            if candidates is None:
                ways = [[Candidate("exact", bind_reference(step, layout, device))] for step in layout.steps]
            else:
                ways = [candidates(step, layout) for step in layout.steps]
            self.executor = Executor(layout, [way[0].run for way in ways], device)
            self.measured: list[Measured] = []
            self.kernels = self._choose(ways, plan, jobs, progress)
            self._recorded: Recorded | None = None
            self.floats = False
            self.graphs_ms: dict[str, float] = {}
            if device.type == "cuda":
                with torch.cuda.device(device):
                    self._recorded = self._capture()
                    if network is not None and plan is not None and any(map(_multiplies_codes, layout.steps)):
                        self._recorded = self._faster(self._recorded, network, plan)
        except torch.OutOfMemoryError as error:
            shapes = ", ".join(str(tuple(layout.plan.tensors[name].shape)) for name in layout.plan.inputs)
            free, whole = (torch.cuda.mem_get_info(device)) if device.type == "cuda" else (0, 0)
            raise EngineError(
                f"cuda: inputs of {shapes} need {layout.arena_bytes / 1e6:.0f} MB for activations alone, and "
                f"{free / 1e6:.0f} of the GPU's {whole / 1e6:.0f} MB are free: use a smaller batch"
            ) from error

    def run(self, inputs: Mapping[str, Tensor]) -> Tensors:
        """Run on the current stream; the results are new tensors."""
        if self._recorded is None:
            return self._copied(self.executor.run(inputs))
        return self._replayed(self._recorded, inputs)

    def _replayed(self, recorded: Recorded, inputs: Mapping[str, Tensor]) -> Tensors:
        for name, tensor in recorded.static.items():
            tensor.copy_(inputs[name])
        if recorded.direct:
            tensors = self.executor.start(inputs)
            for index in range(recorded.direct):
                self.executor.step(index, tensors)
        recorded.graph.replay()
        return self._copied(recorded.results)

    def step_ms(self, inputs: Mapping[str, Tensor]) -> list[float]:
        """Milliseconds of each step alone, on the data of a run."""
        tensors, times = self.executor.start(inputs), []
        for index, runner in enumerate(self.executor.runners):
            times.append(launch_ms(partial(runner, tensors), self.executor.device, rounds=3))
            self.executor.step(index, tensors)
        return times

    def _choose(
        self, ways: Sequence[Sequence[Candidate]], plan: PlanFile | None, jobs: int, progress: Progress
    ) -> list[str]:
        """Give the executor the fastest way of each step; return their names."""
        signatures = [signature(step, self.layout) for step in self.layout.steps]
        known = [plan.get(text) or "" if plan is not None else "" for text in signatures]
        known = [name if name in {w.name for w in way} else "" for way, name in zip(ways, known, strict=True)]
        unknown = [len(way) > 1 and not name for way, name in zip(ways, known, strict=True)]
        if plan is not None and any(unknown):
            tried = [way if new else [chosen(way, name)] for way, new, name in zip(ways, unknown, known, strict=True)]
            refused = _compile(self.executor, tried, jobs, progress)
            self.measured = measure(self.executor, tried, refused=refused, progress=progress)
            for i, found in enumerate(self.measured):
                if unknown[i]:
                    known[i] = found.best
                    plan.add(signatures[i], found.best, found.refused)
            plan.save()
        found_ways = [chosen(way, name) for way, name in zip(ways, known, strict=True)]
        self.executor.runners = [way.run for way in found_ways]
        return [way.name for way in found_ways]

    @staticmethod
    def _copied(results: Tensors) -> Tensors:
        return {name: tensor.clone() for name, tensor in results.items()}

    def _capture(self) -> Recorded:
        executor = self.executor
        given = executor.empty_inputs()
        direct = _direct_steps(self.layout, sum(t.numel() * t.element_size() for t in given.values()))
        executor.run(given)  # loads what is loaded at the first launch
        tensors = executor.start(given)
        for index in range(direct):
            executor.step(index, tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(direct, len(executor.runners)):
                executor.step(index, tensors)
            results = executor.results(tensors)
        return Recorded(graph, results, {} if direct else given, direct)

    def _faster(self, recorded: Recorded, network: Callable[[], FloatNetwork], plan: PlanFile) -> Recorded:
        place = "; ".join(["whole network", *(signature(step, self.layout) for step in self.layout.steps)])
        choice, inputs = plan.get(place), self.executor.random_inputs()
        ours = partial(self._replayed, recorded, inputs)
        other = None
        if choice is None:
            self.graphs_ms[_INTEGERS] = repeated_ms(ours)
        if choice == _FLOATS or (choice is None and self.graphs_ms[_INTEGERS] >= self._bare_ms()):
            other = recorded_network(network, inputs, list(self.layout.plan.outputs))
        if other is not None:
            theirs = partial(self._replayed, other, inputs)
            if _alike(ours(), theirs()):
                self.graphs_ms[_FLOATS] = repeated_ms(theirs)
            faster = self.graphs_ms.get(_FLOATS, math.inf) < self.graphs_ms.get(_INTEGERS, math.inf)
            other = other if faster else None
        self.floats = other is not None
        plan.add(place, _FLOATS if self.floats else _INTEGERS)
        plan.save()
        if other is None:
            return recorded
        self.kernels = [FLOAT_KERNEL + dtype_text(self.layout.plan.dtype)] * len(self.kernels)
        return other

    def _bare_ms(self) -> float:
        dtype, device = self.layout.plan.dtype, self.executor.device
        return sum(bare_ms(step, self.layout, dtype, device) or 0.0 for step in self.layout.steps)


def recorded_network(network: Callable[[], FloatNetwork], inputs: Tensors, outputs: list[str]) -> Recorded | None:
    """The network in floating point as a graph; None if torch cannot compile it."""
    last = torch.channels_last
    static = {k: x.contiguous(memory_format=last) if x.dim() == 4 else x.clone() for k, x in inputs.items()}
    try:
        with torch.no_grad():
            run = compiled(network(), static)
            for _ in range(2):
                run(*static.values())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = dict(zip(outputs, run(*static.values()), strict=True))
    except Exception:  # the compiler may raise anything; the integer plan remains
        return None
    return Recorded(graph, results, static, 0)


def _multiplies_codes(step: Step) -> bool:
    return isinstance(step, (Product, Attention))


def _alike(ours: Tensors, floats: Tensors) -> bool:
    """True if results in floating point differ from those of integers by rounding."""
    pairs = [(value.double(), floats[name].double()) for name, value in ours.items() if value.is_floating_point()]
    return all(float((a - b).norm()) <= _MOST_APART * float(a.norm()) for a, b in pairs)


def _direct_steps(layout: Layout, input_bytes: int) -> int:
    """Number of steps launched outside of the graph; 0 if the inputs are copied instead."""
    inputs = set(layout.plan.inputs)
    readers = [i for i, step in enumerate(layout.steps) if inputs & set(step.reads)]
    given_back = inputs & set(layout.plan.outputs.values())
    first = layout.steps[: max(readers, default=0) + 1]
    placed = all(name in layout.places for step in first for name in step.writes)
    if input_bytes <= _COPIED_BYTES or given_back or not placed or len(first) > _MOST_DIRECT:
        return 0
    return len(first)


def _compile(
    executor: Executor, ways: Sequence[Sequence[Candidate]], jobs: int, progress: Progress
) -> list[dict[str, str]]:
    if executor.device.type != "cuda" or not jobs:
        return [{} for _ in ways]
    found = kernels_of(executor, ways)
    requests = kernel_requests(found)
    progress.start("compiling kernels", len(requests))
    results = compile_requests(
        requests,
        torch.cuda.get_device_capability(executor.device),
        jobs=jobs,
        progress=lambda done: progress.advance("compiling kernels"),
    )
    progress.finish("compiling kernels")
    return refusals(found, {request: result.error for request, result in zip(requests, results, strict=True)})


def time_program(program: Program, inputs: Mapping[str, NDArray[np.generic]], *, warmup: int, runs: int) -> GpuTimes:
    """Time a batch on the current device.

    Raises:
        EngineError: a number is out of range.
    """
    if runs < 1 or warmup < 0:
        raise EngineError(f"gpu_times: runs is {runs} and warmup {warmup}; they must be 1 or more, and 0 or more")
    pinned = {name: torch.from_numpy(array).pin_memory() for name, array in inputs.items()}
    given = {name: tensor.to(program.executor.device) for name, tensor in pinned.items()}
    results = program.run(given)
    back = {name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for name, tensor in results.items()}

    def copy_in() -> None:
        for name, tensor in given.items():
            tensor.copy_(pinned[name], non_blocking=True)

    def compute() -> None:
        results.update(program.run(given))

    def copy_out() -> None:
        for name, tensor in back.items():
            tensor.copy_(results[name], non_blocking=True)

    for _ in range(warmup):
        compute()
    marks = [_marked((copy_in, compute, copy_out)) for _ in range(runs)]
    torch.cuda.current_stream().synchronize()
    columns = [[a.elapsed_time(b) for a, b in pairwise(row)] for row in marks]
    moved_in, computed, moved_out = (tuple(column) for column in zip(*columns, strict=True))
    return GpuTimes(
        batch_size=_batch(given),
        copy_in_ms=moved_in,
        compute_ms=computed,
        copy_out_ms=moved_out,
        total_ms=tuple(row[0].elapsed_time(row[-1]) for row in marks),
    )


def _batch(given: Mapping[str, Tensor]) -> int:
    return int(next(iter(given.values())).shape[0])


def _marked(steps: tuple[Callable[[], None], ...]) -> list[torch.cuda.Event]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        step()
        event.record()
    return events
