"""Which way to compute each step is the fastest: every candidate is compiled ahead and measured once.

Steps of one signature (the same kernel on the same sizes and strides) share one measurement, so ResNet-50's 57 steps
are about 25. What was found is a `Choices`, which a plan file keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.engines.cuda.exactness import compared_with_exact
from compress.engines.cuda.executor import Candidate, Executor
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.quantizers import Grid
from compress.engines.cuda.plan.steps import Step
from compress.engines.cuda.timing import launch_ms
from compress.errors import EngineError
from compress.kernels.triton.ahead import Request, recorded
from compress.progress import NoProgress, Progress

_QUIET = NoProgress()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The candidates of a step and their times.

    Attributes:
        step: its name.
        times_ms: of each candidate that can be chosen, by its name.
        refused: why a candidate cannot be, by its name: it did not run, or its result was wrong.
    """

    step: str
    times_ms: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """Name of the fastest; "" if none ran."""
        return min(self.times_ms, key=lambda name: self.times_ms[name], default="")


def kernel_requests(executor: Executor, ways: Sequence[Sequence[Candidate]]) -> list[Request]:
    """The Triton kernels that the candidates of all steps need; nothing is launched.

    Args:
        executor: of the plan.
        ways: the candidates of each step.
    """
    tensors = executor.start(executor.empty_inputs())
    with recorded() as recording:
        for index, candidates in enumerate(ways):
            for candidate in candidates[1:]:
                candidate.run(tensors)
            executor.runners[index] = candidates[0].run
            executor.step(index, tensors)
    return list(recording.requests)


def measure(
    executor: Executor,
    ways: Sequence[Sequence[Candidate]],
    *,
    known: dict[str, Measured] | None = None,
    progress: Progress = _QUIET,
) -> list[Measured]:
    """Time the candidates of each step on its own tensors, and give the executor the fastest that is right.

    The fastest is compared with exact arithmetic; if it is wrong, it is refused and the next one is tried.

    Args:
        executor: of the plan; its runners are replaced.
        ways: the candidates of each step.
        known: measurements by signature, which are used and added to.
        progress: a task of as many units as there are steps.

    Raises:
        EngineError: no candidate of a step computes it right.
    """
    known = {} if known is None else known
    tensors = executor.start(executor.random_inputs())
    results = []
    progress.start("tuning", len(ways))
    for index, candidates in enumerate(ways):
        step = executor.layout.steps[index]
        key = signature(step, executor.layout)
        if key not in known:
            known[key] = _measured(step, candidates, tensors, executor.device)
        found = known[key]
        results.append(found)
        executor.runners[index] = chosen(candidates, found.best).run
        executor.step(index, tensors)
        progress.advance("tuning")
    progress.finish("tuning")
    return results


def chosen(candidates: Sequence[Candidate], name: str) -> Candidate:
    """The candidate of a name; the guess where there is none of it."""
    return next((c for c in candidates if c.name == name), candidates[0])


def _measured(
    step: Step, candidates: Sequence[Candidate], tensors: dict[str, Tensor], device: torch.device
) -> Measured:
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    for candidate in candidates if len(candidates) > 1 else ():
        try:
            times[candidate.name] = launch_ms(partial(candidate.run, tensors), device)
        except Exception as error:  # such as too much shared memory: the tile is left out
            refused[candidate.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    while times:
        fastest = min(times, key=lambda name: times[name])
        wrong = _wrong(step, chosen(candidates, fastest), tensors)
        if not wrong:
            break
        del times[fastest]
        refused[fastest] = wrong
    if len(candidates) > 1 and not times:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise EngineError(f"cuda: no kernel computes {step.name} right here ({reasons}); run the file with onnxruntime")
    return Measured(step=step.name, times_ms=times, refused=refused)


def _wrong(step: Step, candidate: Candidate, tensors: dict[str, Tensor]) -> str:
    """How the result of a candidate differs from exact arithmetic by more than rounding; "" if it is right."""
    found = [d for d in compared_with_exact(step, candidate.run, tensors) if d.wrong]
    return "; ".join(
        f"wrong: {d.differing} of {d.codes} codes differ from exact arithmetic, by up to {d.largest}"
        if d.codes
        else f"wrong: values differ from exact arithmetic by {d.relative:.1e} of their norm"
        for d in found
    )


def signature(step: Step, layout: Layout) -> str:
    """A text that is the same for steps that launch the same kernels on tensors that lie the same way."""
    return repr((type(step).__name__, [(f.name, _described(getattr(step, f.name), layout)) for f in _content(step)]))


def _content(value: Any) -> list[Any]:
    return [f for f in fields(value) if f.name not in {"name", "origins"} or not isinstance(value, Step)]


def _described(value: Any, layout: Layout) -> Any:
    """A field of a step without what does not decide about its time: names and scales."""
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
