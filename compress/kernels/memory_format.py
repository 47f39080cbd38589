"""Memory formats: tensors without gaps, in the usual order or with channels last, and booleans packed in bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_channels_last(y: Tensor) -> bool:
    """Whether `y` is dense in that order and not in the usual one."""
    return y.dim() == 4 and not y.is_contiguous() and y.is_contiguous(memory_format=torch.channels_last)


def dense(y: Tensor) -> Tensor:
    """`y` without gaps, in the usual order or channels_last."""
    return y if is_channels_last(y) or y.is_contiguous() else y.contiguous()


def like(x: Tensor, y: Tensor) -> Tensor:
    """`x` in the memory format of a dense `y` of the same shape."""
    return x.contiguous(memory_format=torch.channels_last if is_channels_last(y) else torch.contiguous_format)


def memory_order(y: Tensor) -> Tensor:
    """A dense `y` with its axes in the order of memory."""
    return y.permute(0, 2, 3, 1) if is_channels_last(y) else y


def inner_size(y: Tensor, axis: int) -> int:
    """Elements between neighbours along `axis` of a dense `y`."""
    axis %= y.dim()
    if is_channels_last(y):
        sizes = {0: y.shape[1] * y.shape[2] * y.shape[3], 1: 1, 2: y.shape[1] * y.shape[3], 3: y.shape[1]}
        return sizes[axis]
    return math.prod(y.shape[axis + 1 :])


def along_axis(values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Broadcasts against `x`: (C,) along axis 1 becomes (1, C, 1, ...); None = unchanged."""
    if axis is None:
        return values
    return values.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])


def empty_channels_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the memory that a kernel writes to, the same memory as a channels_last tensor of `shape`): two views."""
    n, c, h, w = shape
    if torch.compiler.is_compiling():
        # the compiler merges two equal `empty_strided` calls and copies, and fills a channels_last `empty` with zeros
        base = torch.empty((n, h, w, c), dtype=dtype, device=device)
        return base, base.permute(0, 3, 1, 2)
    view = torch.empty_strided(shape, (c * h * w, 1, c * w, c), dtype=dtype, device=device)
    return view, view


def empty_as(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(the memory that a kernel writes to, the same memory in the shape and memory format of a dense `y`)."""
    if is_channels_last(y):
        return empty_channels_last(y.shape, dtype, y.device)
    made = torch.empty(y.shape, dtype=dtype, device=y.device)
    return made, made


BITS_PER_BYTE = 8


def pack(bits: Tensor) -> Tensor:
    """Pack the booleans of a dense tensor, lowest bit first, padded with zeros; uint8, (ceil(elements / 8),)."""
    flat = memory_order(bits).reshape(-1)
    missing = -flat.numel() % BITS_PER_BYTE
    flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, missing)) if missing else flat.to(torch.uint8)
    return (flat.view(-1, BITS_PER_BYTE) << _shifts(flat)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, like: Tensor) -> Tensor:
    flat = ((packed[:, None] >> _shifts(packed)) & 1).reshape(-1)[: like.numel()].bool()
    shape = memory_order(like).shape
    if is_channels_last(like):
        return flat.view(shape).permute(0, 3, 1, 2)
    return flat.view(shape)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(BITS_PER_BYTE, dtype=torch.uint8, device=like.device)
