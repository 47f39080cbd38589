"""Depthwise convolutions of codes for inference, with all that follows them in the same kernel."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile
from compress.kernels.triton.int8_product import ALIGNED, Geometry, Sizes, Steps, Weight, zero_correction

MOST_FLOAT_TAPS = 512
"""Taps whose sum with its correction float32 holds: 2 * 512 * 128 * 128 = 2^24."""


class DepthwiseTile(NamedTuple):
    """The tile of one program.

    Attributes:
        positions: groups of neighbouring outputs of a row.
        floats: sums are float32, not int32.
    """

    positions: int
    channels: int
    strip: int = 4
    warps: int = 4
    floats: bool = False


def pack_depthwise(weight: Tensor, zero: int = 0, *, floats: bool, device: torch.device | str = "cpu") -> Weight:
    """A weight (C, 1, R, S), int8, as the kernel reads it: (R, S, C), int32 or float32, C filled up with zeros.

    - `zero`: the input's code of 0.
    - `floats`: for tiles whose sums are float32; at most `MOST_FLOAT_TAPS` taps.
    """
    codes = torch.nn.functional.pad(weight[:, 0].permute(1, 2, 0), (0, -weight.shape[0] % ALIGNED))
    return Weight(
        codes.to(device, torch.float32 if floats else torch.int32).contiguous(), zero_correction(weight, zero, device)
    )


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

    - `x`: int8 (N, C, H, W), any strides with neighbouring channels.
    - `weight`: of `pack_depthwise`, with the tile's `floats`.
    - `out_size`: (OH, OW).
    - `zero`: code of 0 of the input, which pads.
    """
    images, _, height, width = x.shape
    image_step, _, row_step, pixel_step = x.stride()
    taps_y, taps_x, channels = weight.codes.shape
    groups = -(-out_size[1] // tile.strip)
    positions = images * out_size[0] * groups
    grid = (-(-positions // tile.positions), -(-columns // tile.channels))
    strides = (geometry.stride_y, geometry.stride_x, geometry.dilation_y, geometry.dilation_x)
    _depthwise_kernel[grid](
        x,
        weight.codes,
        weight.correction,
        finish.vectors,
        outputs,
        finish.numbers,
        positions,
        groups,
        channels,
        columns,
        Steps(image_step, row_step, pixel_step),
        Sizes(height, width, *out_size),
        geometry.pad_y,
        geometry.pad_x,
        zero,
        finish.kind,
        taps_y,
        taps_x,
        *strides,
        zero != 0,
        tile.strip,
        tile.positions,
        tile.channels,
        num_warps=tile.warps,
    )


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
    _, _, out_x, first_y, first_x, first = place_of(
        position, groups, sizes.out_height, step, pad_y, pad_x, STRIDE_Y, STRIDE_X, 1, STRIP
    )
    at = x_ptr + first[:, None] + column[None, :]
    filler = x_zero.to(tl.int8) if X_ZERO else 0
    wide = weight_ptr.dtype.element_ty
    start = tl.zeros([POSITIONS, CHANNELS], dtype=wide)
    if X_ZERO:
        start += tl.load(correction_ptr + column, mask=inside, other=0)[None, :].to(wide)
    sums = ()
    for _ in tl.static_range(STRIP):
        sums = sums + (start,)  # noqa: RUF005  (Triton knows no unpacking)
    for tap_y in range(TAPS_Y):  # a loop: unrolled, a filter of 7 x 7 would take the compiler half a minute
        y = first_y + tap_y * DILATION_Y
        row_there = found & (y >= 0) & (y < sizes.height)
        weights = ()
        for tap_x in tl.static_range(TAPS_X):
            at_tap = weight_ptr + (tap_y * TAPS_X + tap_x) * channels + column
            weights = weights + (tl.load(at_tap, mask=inside, other=0)[None, :],)  # noqa: RUF005
        for place in tl.static_range((STRIP - 1) * STRIDE_X + (TAPS_X - 1) * DILATION_X + 1):
            x = first_x + place
            there = (row_there & (x >= 0) & (x < sizes.width))[:, None] & inside[None, :]
            pixels = tl.load(at + (tap_y * DILATION_Y * step.row + place * step.pixel), mask=there, other=filler)
            sums = _with_pixels(sums, pixels.to(wide), weights, place, STRIDE_X, DILATION_X, TAPS_X, STRIP)
    for i in tl.static_range(STRIP):
        row = (position // groups).to(tl.int64) * sizes.out_width + (out_x + i)
        finish_tile(
            sums[i],
            sums[i],
            row,
            found & (out_x + i < sizes.out_width),
            first_column,
            columns,
            vectors,
            outputs,
            numbers,
            KIND,
            False,
            POSITIONS,
            CHANNELS,
            CHANNELS,
        )


@triton.jit
def place_of(
    position,
    groups,
    blocks,
    step,
    pad_y,
    pad_x,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HIGH: tl.constexpr,
    STRIP: tl.constexpr,
):
    """(image as int64, first row and column of the results, row and column of the first pixel, its distance)."""
    line = position // groups
    out_x = (position % groups) * STRIP
    out_y = (line % blocks) * HIGH
    x = out_x * STRIDE_X - pad_x
    y = out_y * STRIDE_Y - pad_y
    image = (line // blocks).to(tl.int64)
    return image, out_y, out_x, y, x, image * step.image + (y.to(tl.int64) * step.row + x.to(tl.int64) * step.pixel)


@triton.jit
def _with_pixels(
    sums,
    pixels,
    weights,
    PLACE: tl.constexpr,
    STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
    TAPS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """The sums of a strip with the products of a column of pixels, which lies PLACE after the first one."""
    found = ()
    for i in tl.static_range(STRIP):
        if i * STRIDE <= PLACE and PLACE - i * STRIDE < TAPS * DILATION and (PLACE - i * STRIDE) % DILATION == 0:
            found = found + (sums[i] + pixels * weights[(PLACE - i * STRIDE) // DILATION],)  # noqa: RUF005
        else:
            found = found + (sums[i],)  # noqa: RUF005
    return found
