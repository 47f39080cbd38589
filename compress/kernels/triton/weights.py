"""Quantization of a group of weights in one launch, through a table of pointers."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compress.kernels.epilogue import IntegerGrid
from compress.kernels.memory_format import BITS_PER_BYTE, is_channels_last
from compress.kernels.triton.launch import BoundedCache, Launch, refuse_second_derivative, tl, triton

_GROUPS = 256  # of eight elements, in a tile
_ALIGNMENT = 256  # elements: offsets in the buffer are its multiples
_COLUMNS = tl.constexpr(5)  # of `about`
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _weights_kernel(
    pointers_ptr,
    about_ptr,
    tiles_ptr,
    out_ptr,
    bits_ptr,
    codes_ptr,
    TYPE: tl.constexpr,
    EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
):
    weight = tl.load(tiles_ptr + tl.program_id(0) * 2).to(tl.int64)
    first = tl.load(tiles_ptr + tl.program_id(0) * 2 + 1) * GROUPS  # of a weight, which has fewer than 2^31 elements
    x_ptr = tl.load(pointers_ptr + weight * 2).to(tl.pointer_type(TYPE))
    amax_ptr = tl.load(pointers_ptr + weight * 2 + 1).to(tl.pointer_type(tl.float32))
    n = tl.load(about_ptr + weight * _COLUMNS).to(tl.int32)
    inner = tl.load(about_ptr + weight * _COLUMNS + 1).to(tl.int32)
    base = tl.multiple_of(tl.load(about_ptr + weight * _COLUMNS + 2), 8)
    low = tl.load(about_ptr + weight * _COLUMNS + 3).to(tl.float32)
    high = tl.load(about_ptr + weight * _COLUMNS + 4).to(tl.float32)
    group = first + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    whole = group < (n + 7) // 8
    there = whole[:, None] if EVEN else at < n
    x = tl.load(tl.multiple_of(x_ptr, 16) + at, mask=there, other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr + at // inner, mask=there, other=1.0)
    scale = tl.div_rn(amax, tl.full(at.shape, 0.0, tl.float32) + high)
    steps = tl.div_rn(x, scale)
    steps = tl.where(steps > 4096.0, 4096.0, steps)
    steps = tl.where(steps < -4096.0, -4096.0, steps)
    rounded = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no fraction bits, so it rounds half to even
    passes = (rounded >= low) & (rounded <= high)
    rounded = tl.where(rounded > high, high, rounded)
    rounded = tl.where(rounded < low, low, rounded)
    tl.store(out_ptr + base + at, (rounded * scale).to(out_ptr.dtype.element_ty), mask=there)
    if codes_ptr is not None:
        tl.store(codes_ptr + base + at, rounded.to(tl.int8), mask=there)
    bits = tl.sum((passes & there).to(tl.int32) << lane[None, :], axis=1)
    tl.store(bits_ptr + base // 8 + group, bits.to(tl.uint8), mask=whole)


@triton.jit
def _weight_gradients_kernel(
    pointers_ptr, about_ptr, tiles_ptr, out_ptr, bits_ptr, TYPE: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr
):
    weight = tl.load(tiles_ptr + tl.program_id(0) * 2).to(tl.int64)
    first = tl.load(tiles_ptr + tl.program_id(0) * 2 + 1) * GROUPS
    address = tl.load(pointers_ptr + weight)  # 0 where there is no gradient
    grad_ptr = address.to(tl.pointer_type(TYPE))
    n = tl.where(address == 0, 0, tl.load(about_ptr + weight * _COLUMNS)).to(tl.int32)
    base = tl.multiple_of(tl.load(about_ptr + weight * _COLUMNS + 2), 8)
    group = first + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    whole = group < (n + 7) // 8
    there = whole[:, None] if EVEN else at < n
    grad = tl.load(tl.multiple_of(grad_ptr, 16) + at, mask=there, other=0.0)
    bits = tl.load(bits_ptr + base // 8 + group, mask=whole, other=0).to(tl.int32)
    passed = tl.where(((bits[:, None] >> lane[None, :]) & 1) != 0, grad.to(tl.float32), 0.0)
    tl.store(out_ptr + base + at, passed.to(out_ptr.dtype.element_ty), mask=there)


def quantize_weights(
    owner: Any, weights: list[Tensor], grids: list[IntegerGrid], dtype: torch.dtype, coded: Sequence[bool] = ()
) -> tuple[Tensor | None, ...] | None:
    """Quantize the weights, with straight-through gradients; None where the kernels do not fit.

    - `owner`: key of a cache for everything that depends on shapes alone: the same object call after call.
    - `coded`: of which weights the integers are wanted too; they follow, int8, None where they are not.
    """
    shapes = [(w.shape, w.stride(), w.dtype, *grid[1:]) for w, grid in zip(weights, grids, strict=True)]
    key = (shapes, dtype, weights[0].get_device())
    group = _KEPT.get(owner)
    if group is None or group.key != key:
        group = _KEPT[owner] = _Group(key, weights, grids) if _fits(weights, grids) else _Group(key, [], [])
    if not group.places:
        return None
    pointers, joined = [], 0
    for weight, grid in zip(weights, grids, strict=True):
        address = weight.data_ptr()
        joined |= address
        pointers += [address, grid.amax.data_ptr()]
    if joined & 15:
        return None
    group.ranges.fill(pointers)
    *results, codes = _QuantizeWeights.apply(group, any(coded), *weights)
    return (*results, *group.views(codes, coded))


_KEPT: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()
_LAUNCHES = BoundedCache()


def _fits(weights: list[Tensor], grids: list[IntegerGrid]) -> bool:
    first = weights[0]
    return first.dtype in _TYPES and all(
        w.dtype == first.dtype
        and w.device == first.device == grid.amax.device
        and 0 < w.numel() < 2**31
        and grid.amax.dtype == torch.float32
        and (grid.axis is None or grid.axis % w.dim() == 0)
        and (w.is_contiguous() or is_channels_last(w))
        for w, grid in zip(weights, grids, strict=True)
    )


class _Pointers:
    """A table of addresses on the device, copied there when they have changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: list[int] = []
        self.table = torch.empty(0, dtype=torch.int64, device=device)

    def fill(self, addresses: list[int]) -> None:
        """Make the table hold `addresses`: a new table, as a kernel may still read the old one."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.table, self._addresses = written_on_device(addresses, self._device), []
        elif addresses != self._addresses:
            pinned = torch.tensor(addresses, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self.table = pinned.to(self._device, non_blocking=True)
            self._addresses = addresses


def written_on_device(numbers: list[int], device: torch.device) -> Tensor:
    """A tensor (N,) of integers that are arguments of kernels, and so need no copy from the host."""
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(list(table.unbind()), numbers)
    return table


class _Group:
    """The tables of a group, which depend on types and shapes alone: on `key`."""

    def __init__(self, key: tuple[Any, ...], weights: list[Tensor], grids: list[IntegerGrid]) -> None:
        self.key = key
        self.places: list[tuple[torch.Size, tuple[int, ...], int, torch.memory_format]] = []
        self.size = 0
        if not weights:
            return
        _, self.dtype, self.device_index = key
        self.device, self.weight_dtype = weights[0].device, weights[0].dtype
        self.ranges, self.gradients = _Pointers(self.device), _Pointers(self.device)
        self.even = all(weight.numel() % BITS_PER_BYTE == 0 for weight in weights)
        about, tiles = [], []
        for i, (weight, grid) in enumerate(zip(weights, grids, strict=True)):
            n = weight.numel()
            inner = n if grid.axis is None else n // weight.shape[0]
            about.append([n, inner, self.size, grid.low, grid.high])
            tiles += [[i, tile] for tile in range(triton.cdiv(n, BITS_PER_BYTE * _GROUPS))]
            memory_format = torch.channels_last if is_channels_last(weight) else torch.contiguous_format
            self.places.append((weight.shape, weight.stride(), self.size, memory_format))
            self.size += triton.cdiv(n, _ALIGNMENT) * _ALIGNMENT
        self.about = torch.tensor(about, device=self.device)
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=self.device)

    def launch(self, kernel: Any, read: torch.dtype, written: torch.dtype, *tensors: Tensor | None) -> None:
        wanted = tensors[-1] is not None
        key = (kernel is _weights_kernel, wanted, read, written, self.even, len(self.tiles), self.device_index)
        if key not in _LAUNCHES:
            _LAUNCHES[key] = Launch(kernel, (len(self.tiles),), _TYPES[read], self.even, _GROUPS)
        _LAUNCHES[key](self.device_index, *tensors)

    def forward(self, coded: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """(the buffer of quantized weights, the packed bits, the buffer of integers if wanted)."""
        out = torch.empty(self.size, dtype=self.dtype, device=self.device)
        bits = torch.empty(self.size // BITS_PER_BYTE, dtype=torch.uint8, device=self.device)
        codes = torch.empty(self.size, dtype=torch.int8, device=self.device) if coded else None
        tensors = (self.ranges.table, self.about, self.tiles, out, bits, codes)
        self.launch(_weights_kernel, self.weight_dtype, self.dtype, *tensors)
        return out, bits, codes

    def backward(self, grads: list[Tensor | None], bits: Tensor) -> Tensor:
        """The buffer of masked gradients; undefined for weights without a gradient."""
        addresses = []
        for i, (grad, place) in enumerate(zip(grads, self.places, strict=True)):
            if grad is None:
                addresses.append(0)
                continue
            if grad.stride() != place[1]:
                grads[i] = grad = grad.contiguous(memory_format=place[3])
            if grad.data_ptr() & 15:
                grads[i] = grad = grad.clone()
            addresses.append(grad.data_ptr())
        self.gradients.fill(addresses)
        out = torch.empty(self.size, dtype=self.weight_dtype, device=self.device)
        tensors = (self.gradients.table, self.about, self.tiles, out, bits)
        self.launch(_weight_gradients_kernel, self.dtype, self.weight_dtype, *tensors)
        return out

    def views(self, buffer: Tensor | None, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Each weight's part of a buffer, shaped and laid out as the weight; `wanted` may be empty."""
        return [
            buffer.as_strided(shape, stride, begin) if buffer is not None and asked else None
            for asked, (shape, stride, begin, _) in zip(wanted, self.places, strict=False)
        ]


class _QuantizeWeights(torch.autograd.Function):
    """Keeps the packed bits; the results are kept by the layers that consume them."""

    @staticmethod
    def forward(ctx: Any, group: _Group, coded: bool, *weights: Tensor) -> tuple[Tensor | None, ...]:
        buffer, bits, codes = group.forward(coded)
        ctx.save_for_backward(bits)
        ctx.group = group
        ctx.set_materialize_grads(False)
        results = group.views(buffer, [True] * len(weights))
        frozen = [result for result, needed in zip(results, ctx.needs_input_grad[2:], strict=True) if not needed]
        frozen += [] if codes is None else [codes]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return (*results, codes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        refuse_second_derivative(*grads)
        grads = grads[:-1]  # integers have none
        buffer = ctx.group.backward(list(grads), bits)
        return None, None, *ctx.group.views(buffer, [grad is not None for grad in grads])
