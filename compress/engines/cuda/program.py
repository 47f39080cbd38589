"""A plan, or a network in floating point, for one set of input shapes on one GPU; the file of fastest kernels."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.engines.base import GpuTimes, time_batch
from compress.engines.cuda import reference
from compress.engines.cuda.executor import (
    FLOAT_KERNEL,
    Candidate,
    Executor,
    Runner,
    Tensors,
    bind_reference,
    dtype_text,
)
from compress.engines.cuda.onnx_ops import apply, is_read_by_the_host
from compress.engines.cuda.plan.activation import Activation, recognize_activations
from compress.engines.cuda.plan.graph import Graph, Node, without_dead
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.quantizers import Grid, real_weight, resolve_quantizers
from compress.engines.cuda.plan.steps import Attention, Convolution, FloatOperation, Linear, Product, Step
from compress.errors import EngineError
from compress.files import read_json, write_json
from compress.kernels.triton.ahead import Request, compile_requests, recorded
from compress.onnx_graph import WEIGHTED_OPS
from compress.support.process import nvidia_driver

# A graph of launches takes about this long: far longer than its own start, which takes 5 to 10 us.
_TARGET_MS = 1.0
_MOST_LAUNCHES = 50


def launch_ms(run: Callable[[], object], device: torch.device, *, rounds: int = 5) -> float:
    """The median ms of a call of `run`, which launches kernels, does not wait, and keeps no memory."""
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
    """Milliseconds of a convolution or linear layer in floating point; None for other steps."""
    if not isinstance(step, (Convolution, Linear)):
        return None
    place = device or torch.device("cuda")
    shape = layout.plan.tensors[step.x.name].shape
    geometry = (step.stride, step.padding, step.dilation, step.groups) if isinstance(step, Convolution) else ()
    key = (shape, tuple(step.weight.shape), geometry, dtype, place)
    if key not in _KNOWN:
        _KNOWN[key] = _product_time(step, shape, dtype, place)
    return _KNOWN[key]


def _product_time(
    step: Convolution | Linear, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> float:
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(step.weight.shape, device=device).to(dtype)
    bias = torch.randn(weight.shape[0], device=device).to(dtype)
    if isinstance(step, Linear):
        return launch_ms(partial(nn.functional.linear, x, weight, bias), device)
    (above, below), (left, right) = step.padding
    if (above, left) != (below, right):
        x = nn.functional.pad(x, (left, right, above, below))
        above = left = 0
    x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    stride, dilation, groups = step.stride, step.dilation, step.groups

    def run() -> None:
        nn.functional.conv2d(x, weight, bias, stride, (above, left), dilation, groups)

    return launch_ms(run, device)


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """The difference between a step's kernel and the reference.

    Attributes:
        codes, differing: how many codes there are, and how many are not equal.
        largest: difference of codes, in steps of the grid.
        relative: error of values, in relation to their norm.
    """

    step: str
    kind: str
    codes: int
    differing: int
    largest: int
    relative: float

    @property
    def wrong(self) -> bool:
        """True for more than float32's and fp16's rounding explains."""
        return self.largest > 1 or self.differing > max(3, 2e-3 * self.codes) or not self.relative < 5e-3


def differences(executor: Executor, x: dict[str, Tensor]) -> list[StepDifference]:
    """Run a network step by step, and compare each step for the inputs that the device computed."""
    tensors = executor.start(x)
    found = []
    for index, step in enumerate(executor.layout.steps):
        found += compared_with_exact(step, executor.runners[index], tensors)
        for name in executor.forgotten(index):
            tensors.pop(name, None)
    return found


def compared_with_exact(step: Step, run: Runner, tensors: dict[str, Tensor]) -> list[StepDifference]:
    """Run one step, which overwrites `tensors`, and compare its results with exact arithmetic."""
    expected = {name: value.clone() for name, value in reference.compute(step, tensors).items()}
    run(tensors)
    kind = type(step).__name__
    return [
        _compared(step.name, kind, tensors[name], value.to(tensors[name].device)) for name, value in expected.items()
    ]


def _compared(step: str, kind: str, result: Tensor, expected: Tensor) -> StepDifference:
    if result.dtype == torch.int8:
        off = (result.int() - expected.int()).abs()
        return StepDifference(
            step=step,
            kind=kind,
            codes=off.numel(),
            differing=int(off.count_nonzero()),
            largest=int(off.max()),
            relative=0.0,
        )
    # The norm of as many smallest normal numbers (2^-14 in fp16). Below these a step is 2^-24 whatever the value, so
    # that rounding alone may be all of it; over this floor its error of 2^-25 is at most 2^-11, as of larger values.
    least = torch.finfo(result.dtype).tiny * result.numel() ** 0.5 if result.is_floating_point() else 0.0
    scale = max(float(expected.double().norm()), least) or 1.0
    error = float((result.double() - expected.double()).norm()) / scale
    return StepDifference(step=step, kind=kind, codes=0, differing=0, largest=0, relative=error)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of the candidates of a step that can be chosen, and why others cannot, by their names."""

    step: str
    times_ms: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        return min(self.times_ms, key=lambda name: self.times_ms[name], default="")


class Kernels(NamedTuple):
    """The Triton kernels of a candidate, or why it has none."""

    requests: tuple[Request, ...] = ()
    error: str = ""


def kernels_of(executor: Executor, ways: Sequence[Sequence[Candidate]]) -> list[dict[str, Kernels]]:
    tensors = executor.start(executor.empty_inputs())
    found = []
    for index, candidates in enumerate(ways):
        found.append({candidate.name: _kernels(candidate, tensors, len(candidates) > 1) for candidate in candidates})
        for name in executor.forgotten(index):
            tensors.pop(name, None)
    return found


def _kernels(candidate: Candidate, tensors: dict[str, Tensor], others: bool) -> Kernels:
    with recorded() as requests:
        try:
            candidate.run(tensors)
        except Exception as error:  # such as a shape that no descriptor can describe
            if not others:
                raise
            return Kernels(error=_reason(error))
    return Kernels(tuple(requests))


def kernel_requests(found: Sequence[Mapping[str, Kernels]]) -> list[Request]:
    return list(dict.fromkeys(request for step in found for kernels in step.values() for request in kernels.requests))


def refusals(found: Sequence[Mapping[str, Kernels]], errors: Mapping[Request, str]) -> list[dict[str, str]]:
    """Why candidates cannot be launched or compiled, for each step and by their names."""

    def reason(kernels: Kernels) -> str:
        return kernels.error or next(filter(None, map(errors.get, kernels.requests)), "")

    return [{name: reason(kernels) for name, kernels in step.items() if reason(kernels)} for step in found]


def measure(
    executor: Executor,
    ways: Sequence[Sequence[Candidate]],
    *,
    refused: Sequence[Mapping[str, str]] | None = None,
) -> list[Measured]:
    """Give the executor the fastest candidate of each step on its own tensors that is right by exact arithmetic."""
    known: dict[str, Measured] = {}
    tensors = executor.start(executor.random_inputs())
    results = []
    for index, candidates in enumerate(ways):
        step = executor.layout.steps[index]
        key = signature(step, executor.layout)
        if key not in known:
            known[key] = _measured(step, candidates, tensors, executor, refused[index] if refused else {})
        found = known[key]
        results.append(found)
        executor.runners[index] = chosen(candidates, found.best).run
        executor.step(index, tensors)
    return results


def chosen(candidates: Sequence[Candidate], name: str) -> Candidate:
    return next((c for c in candidates if c.name == name), candidates[0])


def _measured(
    step: Step,
    candidates: Sequence[Candidate],
    tensors: dict[str, Tensor],
    executor: Executor,
    refused: Mapping[str, str],
) -> Measured:
    if len(candidates) == 1:
        return Measured(step=step.name)
    times, refused = {}, dict(refused)
    for candidate in candidates:
        if candidate.name in refused:
            continue
        try:
            times[candidate.name] = launch_ms(partial(candidate.run, tensors), executor.device)
        except Exception as error:  # such as too much shared memory: the tile is left out
            refused[candidate.name] = _reason(error)
            _check_usable(executor.device, f"{candidate.name} of {step.name}")
    while times:
        fastest = min(times, key=lambda name: times[name])
        wrong = _wrong(step, chosen(candidates, fastest), tensors, executor)
        if not wrong:
            return Measured(step=step.name, times_ms=times, refused=refused)
        del times[fastest]
        refused[fastest] = wrong
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise EngineError(f"cuda: no kernel computes {step.name} right here ({reasons}); run the file with onnxruntime")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check_usable(device: torch.device, culprit: str) -> None:
    """Refuse to go on after an error that ends all launches of a process."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise EngineError(
            f"cuda: {culprit} has made the GPU unusable for this process ({_reason(error)}): load the file in a new "
            "process with the option tune='no'"
        ) from error


def _wrong(step: Step, candidate: Candidate, tensors: dict[str, Tensor], executor: Executor) -> str:
    results = [tensors[name] for name in step.writes if name in executor.layout.places]
    before = _sum_beside(results, executor.arena)
    found = [d for d in compared_with_exact(step, candidate.run, tensors) if d.wrong]
    if not found and _sum_beside(results, executor.arena) != before:
        return "wrong: it writes beside its result"
    return "; ".join(
        f"wrong: {d.differing} of {d.codes} codes differ from exact arithmetic, by up to {d.largest}"
        if d.codes
        else f"wrong: values differ from exact arithmetic by {d.relative:.1e} of their norm"
        for d in found
    )


def _sum_beside(results: Sequence[Tensor], arena: Tensor) -> int:
    for result in results:
        result.zero_()
    return int(arena.sum(dtype=torch.int64))


def signature(step: Step, layout: Layout) -> str:
    """The same for steps that launch the same kernels on tensors that lie alike."""
    return repr((type(step).__name__, [(f.name, _described(getattr(step, f.name), layout)) for f in _content(step)]))


def _content(value: Any) -> list[Any]:
    return [f for f in fields(value) if f.name not in {"name", "origins"} or not isinstance(value, Step)]


def _described(value: object, layout: Layout) -> object:
    if isinstance(value, Grid):
        return ("grid", len(value.scale), value.zero != 0)
    if isinstance(value, Tensor):
        return ("constant", tuple(value.shape), str(value.dtype))
    if is_dataclass(value):
        return [(f.name, _described(getattr(value, f.name), layout)) for f in _content(value)]
    if isinstance(value, (tuple, list)):
        return [_described(element, layout) for element in value]
    if isinstance(value, Mapping):
        return sorted((str(key), repr(_described(element, layout))) for key, element in value.items())
    if isinstance(value, str) and value in layout.places:
        place = layout.places[value]
        return (place.shape, place.strides, str(place.dtype))
    if isinstance(value, str) and value in layout.plan.tensors:
        tensor = layout.plan.tensors[value]
        return (tensor.shape, str(tensor.dtype))
    return value


# From the network's inputs, in its order, to its outputs.
FloatNetwork = Callable[..., tuple[Tensor, ...]]


def float_graph(graph: Graph) -> Graph:
    quantized = resolve_quantizers(recognize_activations(graph))
    inner = quantized.graph
    constants = {**inner.constants, **{name: real_weight(weight) for name, weight in quantized.weights.items()}}
    same: dict[str, str] = {}
    nodes: list[Node] = []
    for node in inner.nodes:
        node = replace(node, inputs=tuple(same.get(name, name) for name in node.inputs))
        if node.op == "Dequantize" and node.outputs[0] not in inner.outputs:
            same[node.outputs[0]] = node.inputs[0]
        elif node.op == "Dequantize":
            nodes.append(replace(node, op="Identity", inputs=node.inputs[:1], attributes={}))
        elif node.op == "Quantize":
            grid: Grid = node.attributes["grid"]
            low, high = ((n - grid.zero) * grid.scale[0] for n in (grid.low, grid.high))
            limits = Activation("clip", low, high)
            nodes.append(replace(node, op="Activation", inputs=node.inputs[:1], attributes={"activation": limits}))
        else:
            nodes.append(node)
    return without_dead(replace(inner, constants=constants), nodes)


def float_network(graph: Graph, dtype: torch.dtype, device: torch.device) -> FloatNetwork:
    """The function of a graph without quantizers, computed in `dtype`; outputs have the types of the file."""

    def own(node: Node) -> dict[int, Tensor]:
        return {i: graph.constants[name] for i, name in enumerate(node.inputs) if name in graph.constants}

    types = {node.name: reference.type_for(own(node).values(), dtype) for node in graph.nodes}

    def fitting(node: Node, index: int, value: Tensor) -> Tensor:
        if is_read_by_the_host(node.op, index, value):
            return value.cpu()
        value = value.to(device, types[node.name]) if value.is_floating_point() else value.to(device)
        image = node.op == "Conv" and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if image else value

    constants = {(node.name, i): fitting(node, i, x) for node in graph.nodes for i, x in own(node).items()}

    fixed = {name: graph.constants[name].to(device) for name in graph.outputs if name in graph.constants}

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = {
            name: x.to(dtype) if x.is_floating_point() else x for name, x in zip(graph.inputs, inputs, strict=True)
        }
        for node in graph.nodes:
            given = [constants.get((node.name, i), values.get(name)) for i, name in enumerate(node.inputs)]
            if types[node.name] == dtype:
                made = _results(node, given)
            else:
                wide = [x.float() if x is not None and x.is_floating_point() else x for x in given]
                made = tuple(reference.fitted(x, dtype) for x in _results(node, wide))
            values.update(zip(node.outputs, made, strict=False))
        values |= fixed
        return tuple(values[name].to(graph.dtypes[name]) for name in graph.outputs)

    return run


def _results(node: Node, given: list[Tensor | None]) -> tuple[Tensor, ...]:
    if node.op == "Activation" and given[0] is not None:
        return (node.attributes["activation"](given[0]),)
    return apply(node.op, node.attributes, given)


def compiled(network: FloatNetwork, examples: Mapping[str, Tensor], backend: str = "inductor") -> FloatNetwork:
    from torch.fx.experimental.proxy_tensor import make_fx  # lazy: half a second, for few files

    with torch.no_grad():
        traced = make_fx(network)(*examples.values())
        found: FloatNetwork = torch.compile(traced, dynamic=False, backend=backend)
    return found


# Inputs up to this size are copied; 4 MiB take 2 us at 4 TB/s, a launch from Python 10 to 50.
_COPIED_BYTES = 4 << 20
# Steps that are launched outside of the graph at most.
_MOST_DIRECT = 3

_INTEGERS, _FLOATS = "integers", "floats"
# Largest relative error, in the norm, of results in floating point; beyond it they are refused.
_MOST_APART = 0.5
# Parts of a batch that run beside each other: ResNet-50 at batch 128 was slower in 4 parts on 2 streams.
_PARTS = 2
# The same of results of a batch in parts, which differ where kernels round a tie in another way.
_PARTS_APART = 0.02
# A batch runs in parts if that takes at most this share of the time.
_LEAST_GAIN = 0.98
# Milliseconds of networks in floating point by their products. One that differs in its quantizers alone, as those that
# `tune` tries, is not compiled where its integers take less than this share of them.
_FLOATS_MS: dict[str, float] = {}
_LEAST_APART = 0.9

Ways = Callable[[Step, Layout], list[Candidate]]
Make = Callable[[Layout, int], "Program"]


class Recorded(NamedTuple):
    """A CUDA graph of a network, or of what follows its first steps.

    Attributes:
        static: captured input buffers, by name.
        direct: steps that are launched before it; they read the caller's inputs.
        kept: what holds the weights that it reads.
    """

    graph: torch.cuda.CUDAGraph
    results: list[Tensors]
    static: Tensors
    direct: int
    kept: object = None


class Program:
    """A laid out plan, ready to run again and again on one stream at a time.

    Args:
        device: a GPU; or the CPU, where there is no graph.
        candidates: gives all ways to compute a step; None = exact arithmetic (`reference`).
        plan: measured choices, which are used and added to; None = the guess for every step.
        jobs: processes that compile at a time; 0 = a kernel is compiled when it is first launched.
        parts: how many batches of the layout's size are run at a time, each on a stream of its own.
        beside: gives the ways for another part, which shares no workspace; None = those of `candidates`.

    Attributes:
        measured: times of all candidates of each step, if measured now.
        floats: the whole network runs in floating point, compiled by torch.
        graphs_ms: milliseconds of each graph that was compared.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        candidates: Ways | None,
        plan: PlanFile | None,
        jobs: int = 1,
        parts: int = 1,
        beside: Callable[[], Ways] | None = None,
    ) -> None:
        self.layout = layout
        try:
            ways = _ways(layout, candidates, device)
            self.executor = Executor(layout, [way[0].run for way in ways], device)
            self.executors = [self.executor]
            self.measured: list[Measured] = []
            self.kernels = self._choose(ways, plan, jobs)
            for _ in range(1, parts):
                ways = _ways(layout, candidates if beside is None else beside(), device)
                runners = [chosen(way, name).run for way, name in zip(ways, self.kernels, strict=True)]
                self.executors.append(Executor(layout, runners, device))
            self._recorded: Recorded | None = None
            self.floats = False
            self.graphs_ms: dict[str, float] = {}
            if device.type == "cuda":
                with torch.cuda.device(device):
                    self._recorded = self._capture()
        except torch.OutOfMemoryError as error:
            shapes = ", ".join(str(tuple(layout.plan.tensors[name].shape)) for name in layout.plan.inputs)
            free, whole = (torch.cuda.mem_get_info(device)) if device.type == "cuda" else (0, 0)
            raise EngineError(
                f"cuda: inputs of {shapes} need {layout.arena_bytes / 1e6:.0f} MB for activations alone, and "
                f"{free / 1e6:.0f} of the GPU's {whole / 1e6:.0f} MB are free: use a smaller batch"
            ) from error

    def run(self, inputs: Mapping[str, Tensor]) -> Tensors:
        """Run on the current stream; the results are new tensors."""
        return self.run_eagerly(inputs) if self._recorded is None else self._replayed(self._recorded, inputs)

    def run_eagerly(self, inputs: Mapping[str, Tensor]) -> Tensors:
        return _joined([e.run(part) for e, part in zip(self.executors, self.split(inputs), strict=True)])

    def split(self, inputs: Mapping[str, Tensor]) -> list[Tensors]:
        if len(self.executors) == 1:
            return [dict(inputs)]
        sizes = {name: self.layout.plan.tensors[name].shape[0] for name in inputs}
        return [
            {name: x.narrow(0, index * sizes[name], sizes[name]) for name, x in inputs.items()}
            for index in range(len(self.executors))
        ]

    def empty_inputs(self) -> Tensors:
        return self._whole([executor.empty_inputs() for executor in self.executors])

    def random_inputs(self) -> Tensors:
        """The last images have the largest numbers."""
        found = self._whole([executor.random_inputs() for executor in self.executors])
        for x in found.values():
            if x.is_floating_point() and x.dim():
                x *= torch.linspace(0.5, 2.0, len(x), dtype=x.dtype, device=x.device).view(-1, *(1,) * (x.dim() - 1))
        return found

    @staticmethod
    def _whole(parts: list[Tensors]) -> Tensors:
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _replayed(self, recorded: Recorded, inputs: Mapping[str, Tensor]) -> Tensors:
        for name, tensor in recorded.static.items():
            tensor.copy_(inputs[name])
        if recorded.direct:
            self._start(inputs, recorded.direct)
        recorded.graph.replay()
        return _joined(recorded.results)

    def _start(self, inputs: Mapping[str, Tensor], steps: int) -> list[Tensors]:
        started = []
        for executor, part in zip(self.executors, self.split(inputs), strict=True):
            started.append(executor.start(part))
            for index in range(steps):
                executor.step(index, started[-1])
        return started

    def step_ms(self, inputs: Mapping[str, Tensor]) -> list[float]:
        """Milliseconds of each step alone, for all parts one after another, on the data of a run."""
        tensors, times = self.executor.start(self.split(inputs)[0]), []
        for index, runner in enumerate(self.executor.runners):
            ms = launch_ms(partial(runner, tensors), self.executor.device, rounds=3)
            times.append(ms * len(self.executors))
            self.executor.step(index, tensors)
        return times

    def _choose(self, ways: Sequence[Sequence[Candidate]], plan: PlanFile | None, jobs: int) -> list[str]:
        signatures = [signature(step, self.layout) for step in self.layout.steps]
        known = [plan.get(text) or "" if plan is not None else "" for text in signatures]
        known = [name if name in {w.name for w in way} else "" for way, name in zip(ways, known, strict=True)]
        unknown = [len(way) > 1 and not name for way, name in zip(ways, known, strict=True)]
        if plan is not None and any(unknown):
            tried = [way if new else [chosen(way, name)] for way, new, name in zip(ways, unknown, known, strict=True)]
            refused = _compile(self.executor, tried, jobs)
            self.measured = measure(self.executor, tried, refused=refused)
            for i, found in enumerate(self.measured):
                if unknown[i]:
                    known[i] = found.best
                    plan.add(signatures[i], found.best, found.refused)
            plan.save()
        found_ways = [chosen(way, name) for way, name in zip(ways, known, strict=True)]
        self.executor.runners = [way.run for way in found_ways]
        return [way.name for way in found_ways]

    def _capture(self) -> Recorded:
        given = self.empty_inputs()
        direct = _direct_steps(self.layout, sum(t.numel() * t.element_size() for t in given.values()))
        self.run_eagerly(given)  # a kernel is loaded at its first launch, which a capture does not allow
        started = self._start(given, direct)
        beside = [torch.cuda.Stream() for _ in started[1:]]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            for other in beside:
                other.wait_stream(stream)
            results = []
            for executor, tensors, own in zip(self.executors, started, [stream, *beside], strict=True):
                with torch.cuda.stream(own):
                    for index in range(direct, len(executor.runners)):
                        executor.step(index, tensors)
                    results.append(executor.results(tensors))
            for other in beside:
                stream.wait_stream(other)
        return Recorded(graph, results, {} if direct else given, direct)

    def in_floats_if_faster(self, network: Callable[[], FloatNetwork], plan: PlanFile) -> None:
        """Take the network of all parts in floating point where its graph is faster and computes the same."""
        # Without them a network has too little to compute for the minute that torch's compiler takes.
        products = self._products()
        if self._recorded is not None and products:
            own = str((products, self.layout.plan.dtype, self.executor.device, len(self.executors)))
            with torch.cuda.device(self.executor.device):
                self._recorded = self._faster(self._recorded, network, plan, own)

    def _products(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """The sizes of results and weights of products, in integers or not, in one order."""
        found = []
        for step in self.layout.steps:
            if isinstance(step, FloatOperation) and step.op in WEIGHTED_OPS:
                weights = [x for x in step.inputs[1:2] if isinstance(x, Tensor)]
            elif isinstance(step, (Product, Attention)):
                weights = [step.weight] if isinstance(step, Product) else []
            else:
                continue
            found.append((self.layout.plan.tensors[step.writes[0]].shape, sorted(n for w in weights for n in w.shape)))
        return sorted(found)

    def _faster(
        self, recorded: Recorded, network: Callable[[], FloatNetwork], plan: PlanFile, products: str
    ) -> Recorded:
        place = "; ".join(["whole network", *(signature(step, self.layout) for step in self.layout.steps)])
        choice, inputs = plan.get(place), self.random_inputs()
        ours = partial(self._replayed, recorded, inputs)
        other = None
        if choice is None:
            self.graphs_ms[_INTEGERS] = repeated_ms(ours)
            least = max(self._bare_ms(), _LEAST_APART * _FLOATS_MS.get(products, 0.0))
        if choice == _FLOATS or (choice is None and self.graphs_ms[_INTEGERS] >= least):
            other = recorded_network(network, inputs, list(self.layout.plan.outputs))
        if other is not None:
            theirs = partial(self._replayed, other, inputs)
            if _apart(ours(), theirs()) <= _MOST_APART:
                self.graphs_ms[_FLOATS] = _FLOATS_MS[products] = repeated_ms(theirs)
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
        return len(self.executors) * sum(bare_ms(step, self.layout, dtype, device) or 0.0 for step in self.layout.steps)


def faster_program(whole: Layout, half: Callable[[], Layout] | None, make: Make, plan: PlanFile | None) -> Program:
    """The program of a batch, whole or in two halves beside each other, as the plan says or the clock."""
    if half is None or plan is None:
        return make(whole, 1)
    place = "; ".join(["parts", *(signature(step, whole) for step in whole.steps)])
    choice = plan.get(place)
    if choice is not None:
        return make(half(), _PARTS) if choice == str(_PARTS) else make(whole, 1)
    program, best = make(whole, 1), "1"
    inputs = program.random_inputs()
    try:
        other = make(half(), _PARTS)
        if _apart(program.run(inputs), other.run(inputs)) <= _PARTS_APART:
            ms = [repeated_ms(partial(p.run, inputs)) for p in (program, other, program, other)]
            if ms[1] + ms[3] <= _LEAST_GAIN * (ms[0] + ms[2]):
                program, best = other, str(_PARTS)
    except EngineError:  # such as memory that does not suffice for both
        pass
    plan.add(place, best)
    plan.save()
    return program


def _ways(layout: Layout, candidates: Ways | None, device: torch.device) -> list[list[Candidate]]:
    if candidates is None:
        return [[Candidate("exact", bind_reference(step, layout, device))] for step in layout.steps]
    return [candidates(step, layout) for step in layout.steps]


def _joined(results: Sequence[Tensors]) -> Tensors:
    if len(results) == 1:
        return {name: tensor.clone() for name, tensor in results[0].items()}
    return {name: torch.cat([part[name] for part in results]) for name in results[0]}


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
    return Recorded(graph, [results], static, 0, run)


def _apart(ours: Tensors, others: Tensors) -> float:
    """Largest relative error, in the norm, of results that are floating-point numbers."""
    pairs = [(value.double(), others[name].double()) for name, value in ours.items() if value.is_floating_point()]
    return max((float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs), default=0.0)


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


def _compile(executor: Executor, ways: Sequence[Sequence[Candidate]], jobs: int) -> list[dict[str, str]]:
    if executor.device.type != "cuda" or not jobs:
        return [{} for _ in ways]
    found = kernels_of(executor, ways)
    requests = kernel_requests(found)
    results = compile_requests(requests, torch.cuda.get_device_capability(executor.device), jobs=jobs)
    return refusals(found, dict(zip(requests, results, strict=True)))


def time_program(program: Program, inputs: Mapping[str, NDArray[np.generic]], *, warmup: int, runs: int) -> GpuTimes:
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

    return time_batch(
        copy_in,
        compute,
        copy_out,
        torch.cuda.current_stream(),
        batch_size=len(next(iter(given.values()))),
        warmup=warmup,
        runs=runs,
    )


FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPU, its compute capability (such as "9.0"), driver and versions under which a measurement is valid."""

    gpu: str
    capability: str
    driver: str
    torch: str
    triton: str


@dataclass
class PlanFile:
    """Choices of one machine.

    Attributes:
        choices: name of the fastest candidate, by `key` of a signature.
        refused: why candidates were left out, by `key` and by their names.
        changed: there are choices that the file does not have yet.
    """

    path: Path
    machine: Machine
    choices: dict[str, str] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    changed: bool = False

    def add(self, signature: str, candidate: str, refused: Mapping[str, str] | None = None) -> None:
        if self.get(signature) != candidate:
            self.choices[key(signature)] = candidate
            self.changed = True
        if refused:
            self.refused[key(signature)] = dict(refused)

    def get(self, signature: str) -> str | None:
        return self.choices.get(key(signature))

    def save(self) -> None:
        """Write the file, whole or not at all, if there is something new."""
        if not self.changed:
            return
        try:
            content = {"format": FORMAT, "machine": asdict(self.machine), "choices": self.choices}
            write_json(self.path, content | ({"refused": self.refused} if self.refused else {}))
        except OSError as error:
            raise EngineError(
                f"{self.path}: the plan cannot be written ({error.strerror or error}); name another place with the "
                "option plan, or measure nothing with tune='no'"
            ) from error
        self.changed = False


def key(signature: str) -> str:
    return hashlib.sha256(signature.encode()).hexdigest()[:20]


def machine_of(device: torch.device) -> Machine:
    versions = {"torch": torch.__version__, "triton": _version("triton")}
    if device.type != "cuda":
        return Machine(gpu="none", capability="0.0", driver="none", **versions)
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        driver=nvidia_driver() or f"CUDA {torch.version.cuda}",
        **versions,
    )


def default_path(model: Path, machine: Machine) -> Path:
    return model.with_name(model.stem + _ending(machine))


def _ending(machine: Machine) -> str:
    gpu = "-".join(word for word in machine.gpu.lower().split() if word not in {"nvidia", "geforce", "tesla"})
    return f".{gpu}.plan.json"


def plan_beside(model: Path, machine: Machine) -> PlanFile:
    """The plan beside a model; where there is none, one with the choices of the other plans in its folder."""
    path = default_path(model, machine)
    plan = read_plan(path, machine)
    if path.exists():
        return plan
    for other in sorted(model.parent.glob(f"*{_ending(machine)}")):
        with suppress(EngineError):
            plan.choices |= read_plan(other, machine).choices
    plan.changed = bool(plan.choices)
    return plan


def read_plan(path: Path, machine: Machine) -> PlanFile:
    if not path.exists():
        return PlanFile(path, machine)
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, {FORMAT} is known")
        measured, choices = Machine(**content["machine"]), _choices(content["choices"])
        refused = {name: _choices(reasons) for name, reasons in content.get("refused", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{path} is no plan of the cuda engine, or is damaged ({type(error).__name__}: {error}): delete it, and it "
            "is measured again"
        ) from error
    if measured != machine:
        own, other = asdict(machine), asdict(measured)
        differing = ", ".join(f"{name} {other[name]} (here {own[name]})" for name in own if own[name] != other[name])
        raise EngineError(
            f"{path} was measured on another machine: {differing}; delete it to measure here, or name another file "
            "with the option plan"
        )
    return PlanFile(path, machine, choices, refused)


def _choices(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for pair in value.items() for x in pair):
        raise ValueError("its choices are not names of kernels")
    return dict(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
