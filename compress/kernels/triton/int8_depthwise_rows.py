"""Depthwise convolutions of codes for inference by products of four bytes (dp4a), several rows at a time."""

# ruff: noqa: ANN001, ANN202, N803, N806  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_depthwise import place_of
from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, write_tile
from compress.kernels.triton.int8_product import ALIGNED, Geometry, Sizes, Steps, Weight, zero_correction

WORD = 4
"""Bytes that one instruction multiplies."""
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
    """The tile of one program.

    Attributes:
        chunk: words of four channels that a program takes of a position; a divisor of all of them.
    """

    high: int
    strip: int
    chunk: int
    warps: int = 4


def pack_dots(weight: Tensor, zero: int = 0, *, device: torch.device | str = "cpu") -> Weight:
    """A weight (C, 1, R, S) as the kernel reads it: int32 (R, S + 3, 4, C / 4), C filled up with zeros.

    The word of row r, shift d + 3, and place j holds for the channels 4 w + j the taps d to d + 3 of that row.
    `zero` is the code of 0 of the input.
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
    - `weight`: of `pack_dots`.
    - `finish`: on the device; its grid has one scale.
    - `outputs`: what is written, in rows at multiples of 4 elements; nothing is added.
    - `columns`: channels, a multiple of 4.
    - `geometry`: without dilation.
    - `out_size`: (OH, OW).
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
    x_ptr, weight_ptr, correction_ptr, vectors, outputs, numbers, positions, groups, blocks, chunk, chunks, words,
    columns, step, sizes, pad_y, pad_x, filler,
    KIND: tl.constexpr, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    X_ZERO: tl.constexpr, HIGH: tl.constexpr, STRIP: tl.constexpr, UNITS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
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
