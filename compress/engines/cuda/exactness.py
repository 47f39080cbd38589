"""Every step of a plan on the device against exact integer arithmetic, on the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.engines.cuda import reference
from compress.engines.cuda.executor import Executor, Runner
from compress.engines.cuda.plan.steps import Step


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """The difference between a step's kernel and the reference.

    Attributes:
        step, kind: name and class.
        codes, differing: how many codes there are, and how many are not equal.
        largest: difference of codes, in steps of the grid.
        relative: error of values, in relation to their norm; a value counts as the smallest normal number of its
            type at least, below which fp16 has fewer bits (an untrained ConvNeXt scales its layers by 1e-6).
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
    """Run one step by `run` and compare each tensor that it writes with exact arithmetic.

    Args:
        step: of a plan.
        run: a way to compute it.
        tensors: what the step reads and where it writes, which `run` overwrites.
    """
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
    least = torch.finfo(result.dtype).tiny * result.numel() ** 0.5 if result.is_floating_point() else 0.0
    scale = max(float(expected.double().norm()), least) or 1.0
    error = float((result.double() - expected.double()).norm()) / scale
    return StepDifference(step=step, kind=kind, codes=0, differing=0, largest=0, relative=error)
