"""Pools of codes for inference: maxima, and averages on another grid."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile
from compress.kernels.triton.int8_product import Geometry, Sizes, Steps

_THREADS = 128


def max_pool(
    x: Tensor,
    out: Tensor,
    pitch: int,
    kernel: tuple[int, int],
    geometry: Geometry,
    out_size: tuple[int, int],
    *,
    each: int = 16,
) -> None:
    """Launch a maximum over windows.

    - `x`: int8 (N, C, H, W), any strides with neighbouring channels.
    - `out`: int8, rows of pixels `pitch` apart.
    - `pitch`: elements from one pixel of the result to the next.
    - `out_size`: (OH, OW).
    """
    images, channels, height, width = x.shape
    rows = images * out_size[0] * out_size[1]
    block = min(128, max(16, triton.next_power_of_2(channels)))
    tile = max(1, each * _THREADS // block)
    _max_kernel[(triton.cdiv(rows, tile), triton.cdiv(channels, block))](
        x,
        out,
        rows,
        channels,
        Steps(x.stride(0), x.stride(2), x.stride(3)),
        Sizes(height, width, *out_size),
        pitch,
        *kernel,
        *geometry,
        tile,
        block,
    )


@triton.jit(do_not_specialize=["sizes"])
def _max_kernel(
    x_ptr,
    out_ptr,
    rows,
    channels,
    step,
    sizes,
    pitch,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    line = row // sizes.out_width
    first_y = (line % sizes.out_height) * STRIDE_Y - PAD_Y
    first_x = (row % sizes.out_width) * STRIDE_X - PAD_X
    image = (line // sizes.out_height).to(tl.int64) * step.image
    best = tl.full([ROWS, CHANNELS], -128, tl.int8)
    for tap in tl.static_range(TAPS_Y * TAPS_X):
        y = first_y + (tap // TAPS_X) * DILATION_Y
        x = first_x + (tap % TAPS_X) * DILATION_X
        there = ((y >= 0) & (y < sizes.height) & (x >= 0) & (x < sizes.width))[:, None] & inside
        at = image + y.to(tl.int64) * step.row + x.to(tl.int64) * step.pixel
        best = tl.maximum(best, tl.load(x_ptr + at[:, None] + column[None, :], mask=there, other=-128))
    tl.store(out_ptr + row.to(tl.int64)[:, None] * pitch + column[None, :], best, mask=inside)


def average_pool(
    x: Tensor,
    finish: Finish,
    outputs: Outputs,
    kernel: tuple[int, int],
    geometry: Geometry,
    out_size: tuple[int, int],
    *,
    zero: int = 0,
    counts_padding: bool = True,
) -> None:
    """Launch an average over windows.

    - `x`: int8 (N, C, H, W), any strides with neighbouring channels.
    - `finish`: its factor is that of the sum over a whole window.
    - `out_size`: (OH, OW).
    - `zero`: code of 0.
    - `counts_padding`: padding counts as zeros; else it is left out.
    """
    images, channels, height, width = x.shape
    rows = images * out_size[0] * out_size[1]
    block = min(128, max(16, triton.next_power_of_2(channels)))
    tile = 4 * _THREADS // block if rows * channels < 2**20 else 16 * _THREADS // block
    _average_kernel[(triton.cdiv(rows, tile), triton.cdiv(channels, block))](
        x,
        finish.vectors,
        outputs,
        finish.numbers,
        rows,
        channels,
        Steps(x.stride(0), x.stride(2), x.stride(3)),
        Sizes(height, width, *out_size),
        kernel,
        geometry,
        zero,
        finish.kind,
        counts_padding,
        tile,
        block,
    )


@triton.jit(do_not_specialize=["sizes", "taps", "x_zero"])
def _average_kernel(
    x_ptr,
    vectors,
    outputs,
    numbers,
    rows,
    channels,
    step,
    sizes,
    taps,
    geometry,
    x_zero,
    KIND: tl.constexpr,
    COUNTS_PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * CHANNELS
    column = first_column + tl.arange(0, CHANNELS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    line = row // sizes.out_width
    first_y = (line % sizes.out_height) * geometry.stride_y - geometry.pad_y
    first_x = (row % sizes.out_width) * geometry.stride_x - geometry.pad_x
    image = (line // sizes.out_height).to(tl.int64) * step.image
    total = tl.zeros([ROWS, CHANNELS], dtype=tl.int32)
    count = tl.zeros([ROWS], dtype=tl.int32)
    for tap in tl.range(taps[0] * taps[1], loop_unroll_factor=8):  # several loads under way
        y = first_y + tap // taps[1]
        x = first_x + tap % taps[1]
        there = (y >= 0) & (y < sizes.height) & (x >= 0) & (x < sizes.width)
        at = image + y.to(tl.int64) * step.row + x.to(tl.int64) * step.pixel
        code = tl.load(x_ptr + at[:, None] + column[None, :], mask=there[:, None] & inside, other=0)
        total += tl.where(there[:, None], code.to(tl.int32) - x_zero, 0)
        count += there.to(tl.int32)
    if not COUNTS_PADDING:
        share = tl.cast(taps[0] * taps[1], tl.float32) / tl.maximum(count, 1).to(tl.float32)
        scaled = total.to(tl.float32) * share[:, None]
    else:
        scaled = total.to(tl.float32)
    finish_tile(
        scaled,
        scaled,
        row.to(tl.int64),
        row < rows,
        first_column,
        channels,
        vectors,
        outputs,
        numbers,
        KIND,
        False,
        ROWS,
        CHANNELS,
        CHANNELS,
    )


def image_mean(x: Tensor, finish: Finish, outputs: Outputs, columns: int, *, zero: int = 0) -> None:
    """Launch the average over whole images.

    - `x`: int8 (N, C, H, W), any strides with neighbouring channels.
    - `finish`: its factor is that of the sum over an image.
    - `zero`: code of 0.
    """
    images, channels, height, width = x.shape
    pixels = min(64, triton.next_power_of_2(height * width))
    _mean_kernel[(images, triton.cdiv(channels, columns))](
        x,
        finish.vectors,
        outputs,
        finish.numbers,
        channels,
        Steps(x.stride(0), x.stride(2), x.stride(3)),
        height * width,
        width,
        zero,
        finish.kind,
        pixels,
        columns,
    )


@triton.jit(do_not_specialize=["size", "width", "x_zero"])
def _mean_kernel(
    x_ptr,
    vectors,
    outputs,
    numbers,
    channels,
    step,
    size,
    width,
    x_zero,
    KIND: tl.constexpr,
    PIXELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    image = tl.program_id(0)
    first_column = tl.program_id(1) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    inside = (column < channels)[None, :]
    x_ptr += image.to(tl.int64) * step.image
    total = tl.zeros([COLUMNS], dtype=tl.int32)
    for first in range(0, size, PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        at = (pixel // width) * step.row + (pixel % width) * step.pixel
        there = (pixel < size)[:, None] & inside
        codes = tl.load(x_ptr + at[:, None] + column[None, :], mask=there, other=0).to(tl.int32)
        total += tl.sum(codes, axis=0)
    total = (total - x_zero * size).to(tl.float32)[None, :]
    row = image.to(tl.int64) + tl.arange(0, 1)
    finish_tile(
        total,
        total,
        row,
        row >= 0,
        first_column,
        channels,
        vectors,
        outputs,
        numbers,
        KIND,
        False,
        1,
        COLUMNS,
        COLUMNS,
    )
