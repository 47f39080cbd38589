"""Types, shapes and numbers for the tables of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.errors import EngineError

Attributes = Mapping[str, Any]
Inputs = tuple[Tensor | None, ...]
Operation = Callable[..., Tensor | tuple[Tensor, ...]]
"""A function of the attributes, followed by the inputs in ONNX's order; an optional input that is left out is None."""

DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""Types of `onnx.TensorProto.DataType`, by their numbers."""


def given(inputs: Sequence[Tensor | None], index: int) -> Tensor | None:
    """An optional input; None where it is left out."""
    return inputs[index] if index < len(inputs) else None


def numbers(tensor: Tensor | None, *, of: str) -> list[Any]:
    """The values of a small input that decides about a shape.

    Raises:
        EngineError: it depends on the data that the network is run with.
    """
    if tensor is None:
        return []
    if tensor.is_meta:
        raise EngineError(
            f"{of} is computed from the network's input: only shapes that are fixed beforehand can be run"
        )
    return list(tensor.reshape(-1).tolist())


def axes_of(attributes: Attributes, axes: Tensor | None) -> list[int]:
    """Axes that are an attribute in older opsets and an input in newer ones; [] where there are none."""
    if "axes" in attributes:
        return [int(axis) for axis in attributes["axes"]]
    return [int(axis) for axis in numbers(axes, of="an operator's axes")]


def alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of one type: a float32 constant beside float16 activations becomes float16."""
    if x.dtype != y.dtype and x.is_floating_point() and y.is_floating_point():
        lower = x.dtype if x.element_size() <= y.element_size() else y.dtype
        return x.to(lower), y.to(lower)
    return x, y


def mean_of(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """A mean that is summed in float32 at least."""
    return x.mean(axes, keepdim=keep, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
