"""Which way to compute each step is the fastest: every candidate is compiled ahead and measured once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.engines.cuda import reference
from compress.engines.cuda.executor import Candidate, Executor, Runner
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.quantizers import Grid
from compress.engines.cuda.plan.steps import Convolution, Linear, Step
from compress.errors import EngineError
from compress.kernels.triton.ahead import Request, recorded

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
    """Run a network step by step, each compared on what the device computed before it."""
    tensors = executor.start(x)
    found = []
    for index, step in enumerate(executor.layout.steps):
        found += compared_with_exact(step, executor.runners[index], tensors)
        for name in executor.forgotten(index):
            tensors.pop(name, None)
    return found


def compared_with_exact(step: Step, run: Runner, tensors: dict[str, Tensor]) -> list[StepDifference]:
    """Run one step by `run`, which overwrites `tensors`, and compare what it writes with exact arithmetic."""
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
    with recorded() as recording:
        try:
            candidate.run(tensors)
        except Exception as error:  # such as a shape that no descriptor can describe
            if not others:
                raise
            return Kernels(error=_reason(error))
    return Kernels(tuple(recording.requests))


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
