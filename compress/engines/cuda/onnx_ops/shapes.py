"""Shapes: what reads, moves and makes tensors; and how a shape or a number is read from an input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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


def _shape(attributes: Attributes, x: Tensor) -> Tensor:
    sizes = list(x.shape)
    start, end = int(attributes.get("start", 0)), attributes.get("end")
    return torch.tensor(sizes[start : None if end is None else int(end)], dtype=torch.int64)


def _reshape(attributes: Attributes, x: Tensor, target: Tensor | None = None) -> Tensor:
    sizes = [int(n) for n in numbers(target, of="the target of a Reshape")]
    if not attributes.get("allowzero", 0):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(attributes: Attributes, x: Tensor) -> Tensor:
    axis = int(attributes.get("axis", 1))
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(attributes: Attributes, x: Tensor) -> Tensor:
    return x.permute(tuple(attributes.get("perm", range(x.dim() - 1, -1, -1))))


def _squeeze(attributes: Attributes, x: Tensor, chosen: Tensor | None = None) -> Tensor:
    axes = axes_of(attributes, chosen)
    return x.squeeze(tuple(axes)) if axes else x.squeeze()


def _unsqueeze(attributes: Attributes, x: Tensor, chosen: Tensor | None = None) -> Tensor:
    axes = axes_of(attributes, chosen)
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def _concat(attributes: Attributes, *parts: Tensor) -> Tensor:
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1 and all(part.is_floating_point() for part in parts):
        lowest = min(kinds, key=lambda dtype: dtype.itemsize)
        parts = tuple(part.to(lowest) for part in parts)
    return torch.cat(parts, int(attributes["axis"]))


def _split(attributes: Attributes, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = int(attributes.get("axis", 0))
    sizes = [int(n) for n in attributes.get("split", ())] or [
        int(n) for n in numbers(lengths, of="the sizes of a Split")
    ]
    if not sizes:
        count = int(attributes.get("num_outputs", 0) or attributes.get("outputs", 2))
        sizes = [len(part) for part in torch.arange(x.shape[axis]).chunk(count)]
    return tuple(torch.split(x, sizes, axis))


def _slice(attributes: Attributes, x: Tensor, *bounds: Tensor | None) -> Tensor:
    if "starts" in attributes:
        starts, ends = list(attributes["starts"]), list(attributes["ends"])
        axes, steps = list(attributes.get("axes", range(len(starts)))), [1] * len(starts)
    else:
        starts, ends, axes, steps = (
            [int(n) for n in numbers(given(bounds, i), of="the range of a Slice")] for i in range(4)
        )
        axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= x.dim()
        chosen = range(x.shape[axis])[slice(start, end, step)]
        if step < 0:  # a negative step counts back; an end before the first element is none
            size = x.shape[axis]
            start = min(start + size if start < 0 else start, size - 1)
            end = max(end + size if end < 0 else end, -1)
            chosen = range(start, end, step)
            x = x.index_select(axis, torch.tensor(list(chosen), dtype=torch.int64, device=x.device))
        else:
            first = chosen.start if len(chosen) else 0
            x = x.narrow(axis, first, len(chosen)) if step == 1 else _strided(x, axis, chosen)
    return x


def _strided(x: Tensor, axis: int, chosen: range) -> Tensor:
    index: list[slice] = [slice(None)] * x.dim()
    index[axis] = slice(chosen.start, chosen.stop, chosen.step)
    return x[tuple(index)]


def _gather(attributes: Attributes, x: Tensor, places: Tensor) -> Tensor:
    axis = int(attributes.get("axis", 0))
    axis %= x.dim()
    if places.numel() == 1 and not places.is_meta:
        found = x.narrow(axis, int(places.item()) % x.shape[axis], 1)
        return found.squeeze(axis) if places.dim() == 0 else found
    flat = places.reshape(-1).to(x.device)
    flat = torch.where(flat < 0, flat + x.shape[axis], flat)
    found = x.index_select(axis, flat)
    return found.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _gather_elements(attributes: Attributes, x: Tensor, places: Tensor) -> Tensor:
    axis = int(attributes.get("axis", 0))
    return torch.gather(x, axis, torch.where(places < 0, places + x.shape[axis], places).to(x.device))


def _gather_nd(attributes: Attributes, x: Tensor, places: Tensor) -> Tensor:
    if attributes.get("batch_dims", 0):
        raise EngineError("GatherND with batch_dims is not supported; run the file with 'onnxruntime'")
    return x[tuple(places.to(x.device).unbind(-1))]


def _expand(attributes: Attributes, x: Tensor, target: Tensor | None = None) -> Tensor:
    sizes = [int(n) for n in numbers(target, of="the target of an Expand")]
    return x.expand(torch.broadcast_shapes(x.shape, tuple(sizes)))


def _tile(attributes: Attributes, x: Tensor, repeats: Tensor | None = None) -> Tensor:
    return x.repeat([int(n) for n in numbers(repeats, of="the repeats of a Tile")])


def pads_of(attributes: Attributes, inputs: Inputs, rank: int) -> list[tuple[int, int]]:
    """(before, after) of each axis of a Pad."""
    pads = [int(n) for n in attributes.get("pads", ())] or [
        int(n) for n in numbers(given(inputs, 1), of="the amounts of a Pad")
    ]
    axes = [int(n) % rank for n in numbers(given(inputs, 3), of="the axes of a Pad")] or list(range(rank))
    found = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        found[axis] = (pads[i], pads[len(axes) + i])
    return found


def _pad(attributes: Attributes, x: Tensor, *others: Tensor | None) -> Tensor:
    pairs = pads_of(attributes, (x, *others), x.dim())
    mode = attributes.get("mode", "constant")
    flat = [n for pair in reversed(pairs) for n in pair]
    if mode == "constant":
        value = given(others, 1)
        number = float(attributes.get("value", 0.0)) if value is None else value.item()
        return F.pad(x, flat, value=number)
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in names:
        raise EngineError(f"Pad of mode {mode!r} is not supported; the modes are constant, {', '.join(names)}")
    while len(flat) > 2 * (x.dim() - 2) and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    return F.pad(x, flat, mode=names[mode])


def _constant_of_shape(attributes: Attributes, target: Tensor | None = None) -> Tensor:
    value = attributes.get("value", torch.zeros(1))
    sizes = [int(n) for n in numbers(target, of="the size of a ConstantOfShape")]
    return torch.full(sizes, value.reshape(-1)[0].item(), dtype=value.dtype)


def _constant(attributes: Attributes) -> Tensor:
    for name, value in attributes.items():
        if name == "value":
            return torch.as_tensor(value)
        if name in {"value_float", "value_floats"}:
            return torch.tensor(value, dtype=torch.float32)
        if name in {"value_int", "value_ints"}:
            return torch.tensor(value, dtype=torch.int64)
    raise EngineError("a Constant of text or of a sparse tensor is not supported")


def _range(attributes: Attributes, start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype)


def _depth_to_space(attributes: Attributes, x: Tensor) -> Tensor:
    b = int(attributes["blocksize"])
    n, c, h, w = x.shape
    if attributes.get("mode", "DCR") == "CRD":
        return x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // b**2, h * b, w * b)
    return x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)


def _space_to_depth(attributes: Attributes, x: Tensor) -> Tensor:
    b = int(attributes["blocksize"])
    n, c, h, w = x.shape
    if attributes.get("mode", "DCR") != "DCR":
        raise EngineError("SpaceToDepth of another mode than DCR is not supported; run the file with 'onnxruntime'")
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b**2, h // b, w // b)


def _trilu(attributes: Attributes, x: Tensor, k: Tensor | None = None) -> Tensor:
    function = torch.triu if attributes.get("upper", 1) else torch.tril
    return function(x, 0 if k is None else int(k.item()))


def _one_hot(attributes: Attributes, places: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    hot = F.one_hot(places.long() % int(depth.item()), int(depth.item()))
    axis = int(attributes.get("axis", -1))
    found = torch.where(hot.bool(), values[1], values[0])
    return found if axis in (-1, places.dim()) else found.movedim(-1, axis)


def _eye_like(attributes: Attributes, x: Tensor) -> Tensor:
    if attributes.get("k", 0):
        raise EngineError("EyeLike off the main diagonal is not supported; run the file with 'onnxruntime'")
    dtype = DTYPES[int(attributes["dtype"])] if "dtype" in attributes else x.dtype
    return torch.eye(x.shape[0], x.shape[1], dtype=dtype)


OPERATIONS: dict[str, Operation] = {
    "Shape": _shape,
    "Size": lambda a, x: torch.tensor(x.numel(), dtype=torch.int64),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Trilu": _trilu,
    "OneHot": _one_hot,
    "EyeLike": _eye_like,
}
