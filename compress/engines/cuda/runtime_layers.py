"""The steps of a plan as the layers that every engine reports."""

from __future__ import annotations

import torch

from compress.engines.base import RuntimeLayer
from compress.engines.cuda.plan.layout import Copy, Layout
from compress.engines.cuda.plan.steps import Attention, AveragePool, MaxPool, Move, Operation, Product, Step

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

FLOAT_KERNEL = "torch in "
"""Name of a kernel that computes in floating point what the file computes on codes, before its type."""


def runtime_layer(step: Step, layout: Layout, kernel: str) -> RuntimeLayer:
    """A step as a layer.

    Args:
        step: of the layout.
        layout: of the plan.
        kernel: name of the candidate that computes it.
    """
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
    """Type in which a step computes: that of its products; of a step that only moves, that of what it moves."""
    if kernel.startswith(FLOAT_KERNEL):
        return kernel.removeprefix(FLOAT_KERNEL)
    if isinstance(step, (Product, Attention, MaxPool, AveragePool)):
        return "i8"
    if isinstance(step, (Move, Copy)):
        return dtype_name((step.reads or step.writes)[0], layout)
    return dtype_text(layout.plan.dtype) if isinstance(step, Operation) else "f32"


def dtype_name(name: str, layout: Layout) -> str:
    """Type of a tensor, such as `i8`."""
    place, tensor = layout.places.get(name), layout.plan.tensors.get(name)
    dtype = place.dtype if place is not None else tensor.dtype if tensor is not None else None
    return "unknown" if dtype is None else dtype_text(dtype)


def dtype_text(dtype: torch.dtype) -> str:
    """A type in a few characters, such as `i8`."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
