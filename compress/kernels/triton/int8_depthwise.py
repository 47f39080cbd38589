"""Depthwise convolutions of codes for inference, with all that follows them in the same kernel.

Each output channel reads one input channel, so there is no matrix product: tensor cores would compute 16 times as
much as needed. A program computes STRIP neighbouring outputs of each of its positions, so that a pixel is read and
widened once for all of them; sums are INT32 and exact.
"""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile
from compress.kernels.triton.int8_product import ALIGNED, Geometry, Sizes, Steps, Weight


class DepthwiseTile(NamedTuple):
    """The tile of one program.

    Attributes:
        positions: groups of neighbouring outputs of a row.
        channels: of each.
        strip: outputs of a group, 1, 2 or 4.
        warps: of a program.
    """

    positions: int
    channels: int
    strip: int = 4
    warps: int = 4


def pack_depthwise(weight: Tensor, zero: int = 0, device: torch.device | str = "cpu") -> Weight:
    """A weight (C, 1, R, S) as the kernel reads it: (R, S, C), C filled up with zeros; see `pack_weight`."""
    correction = (-zero * weight.flatten(1).sum(1, dtype=torch.int32)).to(device) if zero else None
    codes = torch.nn.functional.pad(weight[:, 0].permute(1, 2, 0), (0, -weight.shape[0] % ALIGNED))
    return Weight(codes.contiguous().to(device), correction)


def depthwise(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    geometry: Geometry,
    out_size: tuple[int, int],
    tile: DepthwiseTile,
    *,
    zero: int = 0,
) -> None:
    """Launch the depthwise convolution of `x`.

    Args:
        x: int8 (N, C, H, W), any strides with neighbouring channels.
        weight: of `pack_depthwise`.
        finish: of `finish_of`, on the device.
        outputs: what is added and written.
        columns: channels.
        geometry: of the filter.
        out_size: (OH, OW).
        tile: of a program.
        zero: code of 0 of the input, which pads.
    """
    images, _, height, width = x.shape
    image_step, _, row_step, pixel_step = x.stride()
    taps_y, taps_x, channels = weight.codes.shape
    groups = -(-out_size[1] // tile.strip)
    positions = images * out_size[0] * groups
    grid = (-(-positions // tile.positions), -(-columns // tile.channels))
    strides = (geometry.stride_y, geometry.stride_x, geometry.dilation_y, geometry.dilation_x)
    _depthwise_kernel[grid](
        x, weight.codes, weight.correction, finish.vectors, outputs, finish.numbers,
        positions, groups, channels, columns, Steps(image_step, row_step, pixel_step), Sizes(height, width, *out_size),
        geometry.pad_y, geometry.pad_x, zero,
        finish.kind, taps_y, taps_x, *strides, zero != 0, tile.strip, tile.positions, tile.channels,
        num_warps=tile.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sizes", "positions", "groups", "x_zero"])
def _depthwise_kernel(
    x_ptr, weight_ptr, correction_ptr, vectors, outputs, numbers,
    positions, groups, channels, columns, step, sizes, pad_y, pad_x, x_zero,
    KIND: tl.constexpr, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr, DILATION_X: tl.constexpr, X_ZERO: tl.constexpr, STRIP: tl.constexpr,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    first_column = tl.program_id(1) * CHANNELS
    column = first_column + tl.arange(0, CHANNELS)
    inside = column < columns
    found = position < positions
    line = position // groups  # of image and row
    out_x = (position % groups) * STRIP
    first_x = out_x * STRIDE_X - pad_x
    first_y = (line % sizes.out_height) * STRIDE_Y - pad_y
    base = (line // sizes.out_height).to(tl.int64) * step.image
    base += first_y.to(tl.int64) * step.row + first_x.to(tl.int64) * step.pixel
    at = x_ptr + base[:, None] + column[None, :]
    filler = x_zero.to(tl.int8) if X_ZERO else 0
    start = tl.zeros([POSITIONS, CHANNELS], dtype=tl.int32)
    if X_ZERO:
        start += tl.load(correction_ptr + column, mask=inside, other=0)[None, :]
    sum_0 = start
    sum_1 = start
    sum_2 = start
    sum_3 = start
    for tap_y in tl.static_range(TAPS_Y):
        y = first_y + tap_y * DILATION_Y
        row_there = found & (y >= 0) & (y < sizes.height)
        weight_row = weight_ptr + tap_y * TAPS_X * channels + column
        for place in tl.static_range((STRIP - 1) * STRIDE_X + (TAPS_X - 1) * DILATION_X + 1):
            x = first_x + place
            there = (row_there & (x >= 0) & (x < sizes.width))[:, None] & inside[None, :]
            pixels = tl.load(at + (tap_y * DILATION_Y * step.row + place * step.pixel), mask=there, other=filler)
            pixels = pixels.to(tl.int32)
            sum_0 = _add_tap(sum_0, pixels, weight_row, inside, channels, place, DILATION_X, TAPS_X)
            if STRIP > 1:
                sum_1 = _add_tap(sum_1, pixels, weight_row, inside, channels, place - STRIDE_X, DILATION_X, TAPS_X)
            if STRIP > 2:
                sum_2 = _add_tap(sum_2, pixels, weight_row, inside, channels, place - 2 * STRIDE_X, DILATION_X, TAPS_X)
                sum_3 = _add_tap(sum_3, pixels, weight_row, inside, channels, place - 3 * STRIDE_X, DILATION_X, TAPS_X)
    for i in tl.static_range(STRIP):
        total = sum_0 if i == 0 else sum_1 if i == 1 else sum_2 if i == 2 else sum_3
        row = line.to(tl.int64) * sizes.out_width + (out_x + i)
        finish_tile(
            total, total, row, found & (out_x + i < sizes.out_width), first_column, columns, vectors, outputs, numbers,
            KIND, False, POSITIONS, CHANNELS, CHANNELS,
        )  # fmt: skip


@triton.jit
def _add_tap(
    total, pixels, weight_row, inside, channels, OFFSET: tl.constexpr, DILATION: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """Add the products of a column of pixels that lies OFFSET after an output's first one, if a tap lies there."""
    if OFFSET >= 0 and OFFSET % DILATION == 0 and OFFSET // DILATION < TAPS:
        weight = tl.load(weight_row + (OFFSET // DILATION) * channels, mask=inside, other=0).to(tl.int32)
        total += pixels * weight[None, :]
    return total
