"""Depthwise convolutions of training in half precision, of filters of 7 x 7 and more that move by one pixel."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.memory_format import empty_channels_last, is_channels_last
from compress.kernels.triton.launch import launch, refuse_second_derivative, tl, triton

_LAST = torch.channels_last
_LEAST_TAPS, _MOST_TAPS = 7, 9  # for fewer cuDNN has kernels of its own
_LARGEST = 2**31  # elements: indices have 32 bits
_POSITIONS, _CHANNELS, _STRIP = 16, 32, 8
_WARPS = 4
_PROGRAMS = 1056  # of the filter's gradient, in all: 8 on each of 132 multiprocessors


@triton.jit
def _place(position, groups, height, STRIP: tl.constexpr):
    """(image, row, first column) of groups of STRIP neighbouring pixels."""
    line = position // groups
    return line // height, line % height, (position % groups) * STRIP


@triton.jit
def convolution_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    positions,
    groups,
    channels,
    height,
    width,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Compute STRIP pixels of each position; `weight` is (TAPS_Y, TAPS_X, channels). TURNED: the filter backwards."""
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    image, row, first_x = _place(position, groups, height, STRIP)
    start = tl.zeros([POSITIONS, CHANNELS], dtype=tl.float32)
    if HAS_BIAS:
        start += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sums = ()
    for _ in tl.static_range(STRIP):
        sums = sums + (start,)  # noqa: RUF005  (Triton knows no unpacking)
    for tap_y in range(TAPS_Y):
        y = row + tap_y - TAPS_Y // 2
        row_there = (position < positions) & (y >= 0) & (y < height)
        weights = ()
        for tap_x in tl.static_range(TAPS_X):
            tap = tap_y * TAPS_X + tap_x
            if TURNED:
                tap = TAPS_Y * TAPS_X - 1 - tap
            found = tl.load(weight_ptr + tap * channels + column, mask=inside, other=0.0)
            weights = weights + (found.to(tl.float32)[None, :],)  # noqa: RUF005
        for place in tl.static_range(STRIP + TAPS_X - 1):
            x = first_x + (place - TAPS_X // 2)
            there = row_there & (x >= 0) & (x < width)
            pixels = _loaded(x_ptr, (image * height + y) * width + x, there, channels, column)
            sums = _with_pixels(sums, pixels, weights, place, TAPS_X, STRIP)
    for i in tl.static_range(STRIP):
        at = ((image * height + row) * width + first_x + i)[:, None] * channels + column[None, :]
        there = ((position < positions) & (first_x + i < width))[:, None] & inside[None, :]
        tl.store(out_ptr + at, sums[i].to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _loaded(base_ptr, pixel, there, channels, column):
    """The channels `column` of pixels of an image batch in channels_last, float32; 0 where there is none."""
    mask = there[:, None] & (column < channels)[None, :]
    return tl.load(base_ptr + pixel[:, None] * channels + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _with_pixels(sums, pixels, weights, PLACE: tl.constexpr, TAPS: tl.constexpr, STRIP: tl.constexpr):
    """The sums of a strip with the products of a column of pixels."""
    found = ()
    for i in tl.static_range(STRIP):
        if i <= PLACE and PLACE - i < TAPS:
            found = found + (sums[i] + pixels * weights[PLACE - i],)  # noqa: RUF005
        else:
            found = found + (sums[i],)  # noqa: RUF005
    return found


@triton.jit
def filter_gradient_kernel(
    grad_ptr,
    x_ptr,
    sums_ptr,
    positions,
    groups,
    channels,
    height,
    width,
    steps,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Sum the products of gradients and pixels under a row of taps; the last row is the bias's gradient."""
    tap_y = tl.program_id(0) % TAPS_Y  # neighbours in time read the same pixels
    program = tl.program_id(0) // TAPS_Y
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    nothing = tl.zeros([POSITIONS, CHANNELS], dtype=tl.float32)
    of_bias = nothing
    sums = ()
    for _ in tl.static_range(TAPS_X):
        sums = sums + (nothing,)  # noqa: RUF005
    for step in range(steps):
        position = (program * steps + step) * POSITIONS + tl.arange(0, POSITIONS)
        image, row, first_x = _place(position, groups, height, STRIP)
        y = row + tap_y - TAPS_Y // 2
        row_there = (position < positions) & (y >= 0) & (y < height)
        grads = ()
        for i in tl.static_range(STRIP):
            there = (position < positions) & (first_x + i < width)
            grad = _loaded(grad_ptr, (image * height + row) * width + first_x + i, there, channels, column)
            of_bias += grad
            grads = grads + (grad,)  # noqa: RUF005
        for place in tl.static_range(STRIP + TAPS_X - 1):
            x = first_x + (place - TAPS_X // 2)
            there = row_there & (x >= 0) & (x < width)
            pixels = _loaded(x_ptr, (image * height + y) * width + x, there, channels, column)
            sums = _with_grads(sums, pixels, grads, place, TAPS_X, STRIP)
    sums_ptr += program * ((TAPS_Y * TAPS_X + 1) * channels) + column
    for tap_x in tl.static_range(TAPS_X):
        tl.store(sums_ptr + (tap_y * TAPS_X + tap_x) * channels, tl.sum(sums[tap_x], axis=0), mask=inside)
    if tap_y == 0:
        tl.store(sums_ptr + TAPS_Y * TAPS_X * channels, tl.sum(of_bias, axis=0), mask=inside)


@triton.jit
def _with_grads(sums, pixels, grads, PLACE: tl.constexpr, TAPS: tl.constexpr, STRIP: tl.constexpr):
    """The sums of a row of taps with the products of a column of pixels."""
    found = ()
    for tap in tl.static_range(TAPS):
        if tap <= PLACE and PLACE - tap < STRIP:
            found = found + (sums[tap] + pixels * grads[PLACE - tap],)  # noqa: RUF005
        else:
            found = found + (sums[tap],)  # noqa: RUF005
    return found


class Grid(NamedTuple):
    """Division of an image batch into programs."""

    groups: int
    positions: int
    blocks: int
    columns: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Grid:
        images, channels, height, width = shape
        groups = -(-width // _STRIP)
        positions = images * height * groups
        return cls(groups, positions, -(-positions // _POSITIONS), -(-channels // _CHANNELS))


def fits(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> bool:
    """Whether the kernels compute (N, C, H, W) with a filter (C, 1, R, S) for each channel, and pay off."""
    if x.dim() != 4 or weight.dim() != 4 or dtype not in (torch.float16, torch.bfloat16) or not is_channels_last(x):
        return False
    taps = weight.shape[2:]
    same = all(count % 2 == 1 and 2 * p == count - 1 for count, p in zip(taps, padding, strict=True))
    sized = min(taps) >= _LEAST_TAPS and max(taps) <= _MOST_TAPS and 0 < x.numel() < _LARGEST
    own = weight.shape[1] == 1 and weight.shape[0] == x.shape[1]
    return own and sized and same and tuple(stride) == tuple(dilation) == (1, 1)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of `x` for which `fits`, in its type and channels_last; sums are float32."""
    return _Depthwise.apply(x.contiguous(memory_format=_LAST), weight, bias)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _convolved(x, weight, bias, turned=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        refuse_second_derivative(grad)
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype) if grad.dtype != x.dtype else grad
        grad = grad.contiguous(memory_format=_LAST)
        of_x = _convolved(grad, weight, None, turned=True) if ctx.needs_input_grad[0] else None
        channels, _, taps_y, taps_x = weight.shape
        g = Grid.of(tuple(x.shape))
        steps = -(-g.blocks * g.columns * taps_y // _PROGRAMS)
        programs = -(-g.blocks // steps)
        sums = torch.empty((programs, taps_y * taps_x + 1, channels), dtype=torch.float32, device=x.device)
        launch(
            filter_gradient_kernel,
            (programs * taps_y, g.columns),
            (grad, x, sums),
            (g.positions, g.groups, channels, *x.shape[2:], steps, taps_y, taps_x, _POSITIONS, _CHANNELS, _STRIP),
            num_warps=_WARPS,
        )
        found = sums.sum(0)
        of_weight = found[:-1].t().reshape(weight.shape).to(weight.dtype)
        return of_x, of_weight, None if ctx.bias_dtype is None else found[-1].to(ctx.bias_dtype)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool) -> Tensor:
    to_out, out = empty_channels_last(tuple(x.shape), x.dtype, x.device)
    taps_y, taps_x = weight.shape[2:]
    rows = weight.reshape(weight.shape[0], taps_y * taps_x).t().contiguous()
    g = Grid.of(tuple(x.shape))
    launch(
        convolution_kernel,
        (g.blocks, g.columns),
        (x, rows, rows if bias is None else bias, to_out),
        (g.positions, g.groups, *x.shape[1:], taps_y, taps_x, turned, bias is not None, _POSITIONS, _CHANNELS, _STRIP),
        num_warps=_WARPS,
    )
    return out
