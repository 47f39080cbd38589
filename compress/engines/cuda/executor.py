"""Runs the steps of a plan over one arena, by the functions that a backend binds to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compress.engines.base import RuntimeLayer
from compress.engines.cuda import reference
from compress.engines.cuda.plan.layout import Copy, Layout
from compress.engines.cuda.plan.steps import Attention, AveragePool, MaxPool, Move, Operation, Product, Step

Tensors = dict[str, Tensor]
# Runs a step on the tensors of a plan: writes to those that have a place, and puts the others in.
Runner = Callable[[Tensors], None]


class Candidate(NamedTuple):
    """One way to compute a step; `name` is the same in every process."""

    name: str
    run: Runner


def bind_reference(step: Step, layout: Layout, device: torch.device) -> Runner:
    def run(tensors: Tensors) -> None:
        for name, value in reference.compute(step, tensors).items():
            if name in layout.places:
                tensors[name].copy_(value)
            else:
                tensors[name] = value

    return run


class Executor:
    """A laid out plan with memory and a runner for every step."""

    def __init__(self, layout: Layout, runners: Sequence[Runner], device: torch.device) -> None:
        self.layout = layout
        self.runners = list(runners)
        self.device = device
        self.arena = torch.zeros(max(1, layout.arena_bytes), dtype=torch.uint8, device=device)
        self._placed = layout.views(self.arena)
        self._constants = {name: value.to(device) for name, value in layout.plan.constants.items()}
        self._forgotten = _forgotten(layout)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensors:
        tensors = self.start(inputs)
        for index in range(len(self.runners)):
            self.step(index, tensors)
        return self.results(tensors)

    def empty_inputs(self) -> Tensors:
        tensors = self.layout.plan.tensors
        return {
            name: torch.zeros(tensors[name].shape, dtype=tensors[name].dtype, device=self.device)
            for name in self.layout.plan.inputs
        }

    def random_inputs(self) -> Tensors:
        """Standard normal numbers from a fixed seed; zeros for types other than floating point."""
        found = self.empty_inputs()
        generator = torch.Generator(self.device).manual_seed(0)
        for value in found.values():
            if value.is_floating_point():
                value.normal_(generator=generator)
        return found

    def start(self, inputs: Mapping[str, Tensor]) -> Tensors:
        return {**self._placed, **self._constants, **inputs}

    def step(self, index: int, tensors: Tensors) -> None:
        """Run one step, and drop what no later step needs and has no place of its own."""
        self.runners[index](tensors)
        for name in self._forgotten[index]:
            tensors.pop(name, None)

    def forgotten(self, index: int) -> tuple[str, ...]:
        return self._forgotten[index]

    def results(self, tensors: Tensors) -> Tensors:
        plan = self.layout.plan
        return {name: tensors[made].to(plan.tensors[made].dtype) for name, made in plan.outputs.items()}


def _forgotten(layout: Layout) -> list[tuple[str, ...]]:
    """After each step: the tensors without a place that no later step reads."""
    last: dict[str, int] = {}
    for i, step in enumerate(layout.steps):
        for name in (*step.reads, *step.writes):
            last[name] = i
    kept = {*layout.plan.outputs.values(), *layout.places, *layout.plan.inputs, *layout.plan.constants}
    found: list[list[str]] = [[] for _ in layout.steps]
    for name, i in last.items():
        if name not in kept:
            found[i].append(name)
    return [tuple(names) for names in found]


_NAMES = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}

# Name of a kernel that computes in floating point what the file computes on codes, before its type.
FLOAT_KERNEL = "torch in "


def runtime_layer(step: Step, layout: Layout, kernel: str) -> RuntimeLayer:
    kind = step.op if isinstance(step, Operation) else type(step).__name__
    return RuntimeLayer(
        name=step.name,
        kind=kind,
        precision=precision(step, layout, kernel),
        output_precisions=tuple(dtype_name(name, layout) for name in step.writes),
        kernel=kernel,
        original_names=step.origins,
    )


def precision(step: Step, layout: Layout, kernel: str) -> str:
    """Type in which a step computes, or of what it moves."""
    if kernel.startswith(FLOAT_KERNEL):
        return kernel.removeprefix(FLOAT_KERNEL)
    if isinstance(step, Attention) and step.x.grid is None:  # its scores are of floats
        return dtype_text(layout.plan.dtype)
    if isinstance(step, (Product, Attention, MaxPool, AveragePool)):
        return "i8"
    if isinstance(step, (Move, Copy)):
        return dtype_name((step.reads or step.writes)[0], layout)
    return dtype_text(layout.plan.dtype) if isinstance(step, Operation) else "f32"


def dtype_name(name: str, layout: Layout) -> str:
    place, tensor = layout.places.get(name), layout.plan.tensors.get(name)
    dtype = place.dtype if place is not None else tensor.dtype if tensor is not None else None
    return "unknown" if dtype is None else dtype_text(dtype)


def dtype_text(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
