"""Depthwise convolutions of codes for inference, with all that follows them in the same kernel."""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile, finished, write_tile
from compress.kernels.triton.int8_product import ALIGNED, Geometry, Sizes, Steps, Weight, zero_correction

# Taps whose sum with its correction float32 holds: 2 * 512 * 128 * 128 = 2^24.
MOST_FLOAT_TAPS = 512


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
    """A weight (C, 1, R, S), int8, as the kernel reads it: (R, S, C), int32 or float32, C filled up with zeros."""
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
    """Launch the depthwise convolution of int8 (N, C, H, W) with neighbouring channels; `zero` pads."""
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
    x_ptr,
    weight_ptr,
    correction_ptr,
    vectors,
    outputs,
    numbers,
    positions,
    groups,
    channels,
    columns,
    step,
    sizes,
    pad_y,
    pad_x,
    x_zero,
    KIND: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    X_ZERO: tl.constexpr,
    STRIP: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
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


# Bytes that one instruction multiplies.
WORD = 4
_TRANSPOSE = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, $5, 0x5140;
    prmt.b32 b, $4, $5, 0x7362;
    prmt.b32 c, $6, $7, 0x5140;
    prmt.b32 d, $6, $7, 0x7362;
    prmt.b32 $0, a, c, 0x5410;
    prmt.b32 $1, a, c, 0x7632;
    prmt.b32 $2, b, d, 0x5410;
    prmt.b32 $3, b, d, 0x7632;
}""")
_WARP = 32


class RowsTile(NamedTuple):
    """The tile of one program; `chunk` words of four channels of a position divide all of them."""

    high: int
    strip: int
    chunk: int
    warps: int = 4


def pack_dots(weight: Tensor, zero: int = 0, *, device: torch.device | str = "cpu") -> Weight:
    """A weight (C, 1, R, S) as the kernel reads it: int32 (R, S + 3, 4, C / 4), C filled up with zeros.

    The word of row r, shift d + 3, and place j holds for the channels 4 w + j the taps d to d + 3 of that row.
    """
    codes = torch.nn.functional.pad(weight[:, 0].permute(1, 2, 0), (0, -weight.shape[0] % ALIGNED, 3, 3))
    shifted = codes.unfold(1, WORD, 1)  # (R, S + 3, C, 4 taps)
    words = shifted.contiguous().view(torch.int32)[..., 0].unflatten(-1, (-1, WORD)).transpose(-1, -2)
    return Weight(words.contiguous().to(device), zero_correction(weight, zero, device))


def _words_of(x: Tensor) -> Tensor:
    """The memory of codes (N, C, H, W) as int32, from their first word on; strides are the kernel's."""
    return x.as_strided((1, WORD), (WORD, 1)).view(torch.int32)


def _word_of(code: int) -> int:
    return int.from_bytes(bytes([code & 255]) * WORD, "little", signed=True)


def depthwise_rows(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    geometry: Geometry,
    out_size: tuple[int, int],
    tile: RowsTile,
    *,
    zero: int = 0,
) -> None:
    """Launch the depthwise convolution of `x`.

    - `x`: int8 (N, C, H, W) with neighbouring channels; pixels begin at multiples of 16 bytes and have room for a
      multiple of 16 channels.
    - `finish`: on the device; its grid has one scale.
    - `outputs`: what is written, in rows at multiples of 4 elements; nothing is added.
    - `columns`: channels, a multiple of 4.
    - `geometry`: without dilation.
    """
    images, _, height, width = x.shape
    taps_y, shifts, _, words = weight.codes.shape
    image_step, row_step, pixel_step = (x.stride(i) // WORD for i in (0, 2, 3))
    groups, blocks = -(-out_size[1] // tile.strip), -(-out_size[0] // tile.high)
    positions, units, chunks = images * blocks * groups, _WARP * tile.warps, words // tile.chunk
    _rows_kernel[(-(-positions * tile.chunk // units) * chunks,)](
        _words_of(x),
        weight.codes,
        weight.correction,
        finish.vectors,
        outputs,
        finish.numbers,
        positions,
        groups,
        blocks,
        tile.chunk,
        chunks,
        words,
        columns,
        Steps(image_step, row_step, pixel_step),
        Sizes(height, width, *out_size),
        geometry.pad_y,
        geometry.pad_x,
        _word_of(zero),
        finish.kind,
        taps_y,
        shifts - 3,
        geometry.stride_y,
        geometry.stride_x,
        zero != 0,
        tile.high,
        tile.strip,
        units,
        x.is_cuda,
        num_warps=tile.warps,
    )


@triton.jit
def _transposed(pixels, ON_GPU: tl.constexpr):
    a, b, c, d = pixels
    if ON_GPU:
        return tl.inline_asm_elementwise(
            _TRANSPOSE, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    found = ()
    for j in tl.static_range(4):
        low = ((a >> (8 * j)) & 255) | (((b >> (8 * j)) & 255) << 8)
        found = found + (low | (((c >> (8 * j)) & 255) << 16) | (((d >> (8 * j)) & 255) << 24),)  # noqa: RUF005
    return found


@triton.jit
def _dot(pixels, taps, total, ON_GPU: tl.constexpr):
    if ON_GPU:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [pixels, taps, total], tl.int32, True, 1
        )
    else:
        for i in tl.static_range(4):
            total += ((pixels << (24 - 8 * i)) >> 24) * ((taps << (24 - 8 * i)) >> 24)
    return total


@triton.jit(do_not_specialize=["positions", "groups", "blocks", "chunk", "chunks", "sizes", "filler"])
def _rows_kernel(
    x_ptr,
    weight_ptr,
    correction_ptr,
    vectors,
    outputs,
    numbers,
    positions,
    groups,
    blocks,
    chunk,
    chunks,
    words,
    columns,
    step,
    sizes,
    pad_y,
    pad_x,
    filler,
    KIND: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    X_ZERO: tl.constexpr,
    HIGH: tl.constexpr,
    STRIP: tl.constexpr,
    UNITS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    unit = (tl.program_id(0) // chunks) * UNITS + tl.arange(0, UNITS)
    word = (tl.program_id(0) % chunks) * chunk + unit % chunk
    position = unit // chunk
    found = position < positions
    image, out_y, out_x, first_y, first_x, first = place_of(
        position, groups, blocks, step, pad_y, pad_x, STRIDE_Y, STRIDE_X, HIGH, STRIP
    )
    at = x_ptr + (first + word)
    PIXELS: tl.constexpr = (STRIP - 1) * STRIDE_X + TAPS_X
    across = ()
    for place in tl.static_range(PIXELS):
        x = (first_x + place).to(tl.uint32, bitcast=True)
        across = across + (x < tl.cast(sizes.width, tl.uint32),)  # noqa: RUF005  (Triton knows no unpacking)
    turned = ()
    for row in tl.static_range((HIGH - 1) * STRIDE_Y + TAPS_Y):
        y = (first_y + row).to(tl.uint32, bitcast=True)
        there = found & (y < tl.cast(sizes.height, tl.uint32))
        turned = turned + _row(at + row * step.row, there, across, step.pixel, filler, PIXELS, UNITS, ON_GPU)
    sums = ()
    for _ in tl.static_range(4 * HIGH * STRIP):
        sums = sums + (tl.zeros([UNITS], dtype=tl.int32),)  # noqa: RUF005
    for tap_y in tl.static_range(TAPS_Y):
        taps_at = weight_ptr + tap_y * ((TAPS_X + 3) * 4) * words + word
        sums = _with_row(sums, turned, taps_at, words, tap_y, TAPS_X, STRIDE_Y, STRIDE_X, HIGH, STRIP, ON_GPU)
    column = 4 * word[:, None] + tl.arange(0, 4)[None, :]
    inside = 4 * word < columns
    factor = tl.load(vectors.factor + column, mask=inside[:, None], other=0.0)
    bias = tl.load(vectors.bias + column, mask=inside[:, None], other=0.0)
    for i in tl.static_range(HIGH * STRIP):
        low = tl.join(sums[4 * i], sums[4 * i + 2])
        total = tl.join(low, tl.join(sums[4 * i + 1], sums[4 * i + 3])).reshape([UNITS, 4])
        if X_ZERO:
            total += tl.load(correction_ptr + column, mask=inside[:, None], other=0)
        y = out_y + i // STRIP
        x = out_x + i % STRIP
        there = found & inside & (y < sizes.out_height) & (x < sizes.out_width)
        real, steps = finished(total, total, factor, bias, vectors, column, inside, numbers, KIND)
        row = (image * sizes.out_height + y) * sizes.out_width + x
        write_tile(real, steps, row, column, there[:, None], outputs, numbers, KIND)


@triton.jit
def _row(at, there, across, pixel_step, filler, PIXELS: tl.constexpr, UNITS: tl.constexpr, ON_GPU: tl.constexpr):
    """A row's pixels as words of four neighbouring pixels of one channel: four words for every four pixels."""
    turned = ()
    for k in tl.static_range((PIXELS + 3) // 4):
        pixels = ()
        for i in tl.static_range(4):
            if 4 * k + i < PIXELS:
                pixel = tl.load(at + (4 * k + i) * pixel_step, mask=there & across[4 * k + i], other=filler)
            else:  # the filter's word is 0 there
                pixel = tl.zeros([UNITS], dtype=tl.int32)
            pixels = pixels + (pixel,)  # noqa: RUF005
        turned = turned + _transposed(pixels, ON_GPU)
    return turned


@triton.jit
def _with_row(
    sums,
    turned,
    taps_at,
    words,
    TAP_Y: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HIGH: tl.constexpr,
    STRIP: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    QUADS: tl.constexpr = ((STRIP - 1) * STRIDE_X + TAPS + 3) // 4
    taps = ()
    for i in tl.static_range(STRIP * QUADS):
        for j in tl.static_range(4):
            if 4 * (i % QUADS) - i // QUADS * STRIDE_X > -4 and 4 * (i % QUADS) - i // QUADS * STRIDE_X < TAPS:
                shift = 4 * (i % QUADS) - i // QUADS * STRIDE_X + 3
                taps = taps + (tl.load(taps_at + (shift * 4 + j) * words),)  # noqa: RUF005
            else:
                taps = taps + (0,)  # noqa: RUF005
    found = ()
    for row in tl.static_range(HIGH):
        for i in tl.static_range(STRIP):
            for j in tl.static_range(4):
                total = sums[4 * (row * STRIP + i) + j]
                for k in tl.static_range(QUADS):
                    if 4 * k - i * STRIDE_X > -4 and 4 * k - i * STRIDE_X < TAPS:
                        pixels = turned[4 * ((row * STRIDE_Y + TAP_Y) * QUADS + k) + j]
                        total = _dot(pixels, taps[4 * (i * QUADS + k) + j], total, ON_GPU)
                found = found + (total,)  # noqa: RUF005
    return found
