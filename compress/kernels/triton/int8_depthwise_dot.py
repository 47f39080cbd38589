"""Depthwise convolutions of codes by products of four bytes at a time (dp4a), for inference.

Ordinary cores multiply four pairs of bytes and add the products in one instruction, but the four must be neighbours in
a register, and neighbours in memory are channels, not pixels. So a thread reads the same four channels of four pixels
of a row and transposes these 16 bytes by eight instructions; a word then holds four pixels of one channel, and meets a
word of the filter that the host has packed for each shift of the filter against the word. Nothing is widened, and a
product costs a quarter of an instruction in place of three.

A program computes UNITS groups of 16 channels and STRIP neighbouring outputs. Units count channels before pixels, so
that a warp reads whole pixels and no channel is computed in vain, whatever their number.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_depthwise import place_of
from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, residual_of, write_tile
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


class DotTile(NamedTuple):
    """The tile of one program.

    Attributes:
        units: groups of 16 channels of a position.
        strip: neighbouring outputs of a position.
        parts: groups of 16 channels that a program takes in turn; a divisor of all of them.
        warps: of a program.
    """

    units: int
    strip: int
    parts: int
    warps: int = 4


def pack_dots(weight: Tensor, zero: int = 0, *, device: torch.device | str = "cpu") -> Weight:
    """A weight (C, 1, R, S) as the kernel reads it: int32 (R, S + 3, 4, C / 4), C filled up with zeros.

    The word of row r, shift d + 3, and place j holds for the channels 4 w + j the taps d to d + 3 of that row.

    Args:
        weight: int8.
        zero: code of 0 of the input.
        device: where it is put.
    """
    codes = torch.nn.functional.pad(weight[:, 0].permute(1, 2, 0), (0, -weight.shape[0] % ALIGNED, 3, 3))
    shifted = codes.unfold(1, WORD, 1)  # (R, S + 3, C, 4 taps)
    words = shifted.contiguous().view(torch.int32)[..., 0].unflatten(-1, (-1, WORD)).transpose(-1, -2)
    return Weight(words.contiguous().to(device), zero_correction(weight, zero, device))


def words_of(x: Tensor) -> Tensor:
    """The memory of codes (N, C, H, W) as int32, from their first word on; strides are the kernel's."""
    return x.as_strided((1, WORD), (WORD, 1)).view(torch.int32)


def word_of(code: int) -> int:
    """A word of four times the same code, as int32."""
    return int.from_bytes(bytes([code & 255]) * WORD, "little", signed=True)


def depthwise_dot(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    geometry: Geometry,
    out_size: tuple[int, int],
    tile: DotTile,
    *,
    zero: int = 0,
) -> None:
    """Launch the depthwise convolution of `x`.

    Args:
        x: int8 (N, C, H, W) with neighbouring channels; pixels begin at multiples of 16 bytes and have room for a
            multiple of 16 channels.
        weight: of `pack_dots`.
        finish: of `finish_of`, on the device; its grid has one scale.
        outputs: what is added and written.
        columns: channels.
        geometry: of the filter; its horizontal dilation is 1.
        out_size: (OH, OW).
        tile: of a program.
        zero: code of 0 of the input, which pads.
    """
    images, _, height, width = x.shape
    taps_y, shifts, _, words = weight.codes.shape
    image_step, row_step, pixel_step = (x.stride(i) // ALIGNED for i in (0, 2, 3))
    groups = -(-out_size[1] // tile.strip)
    positions = images * out_size[0] * groups
    whole = words // WORD
    grid = (-(-positions * tile.parts // tile.units), whole // tile.parts)
    _dot_kernel[grid](
        words_of(x), weight.codes, weight.correction, finish.vectors, outputs, finish.numbers, positions, groups,
        tile.parts, whole, columns, Steps(image_step, row_step, pixel_step), Sizes(height, width, *out_size),
        geometry.pad_y, geometry.pad_x, word_of(zero),
        finish.kind, taps_y, shifts - 3, geometry.stride_y, geometry.stride_x, geometry.dilation_y, zero != 0,
        tile.strip, tile.units, x.is_cuda, num_warps=tile.warps,
    )  # fmt: skip


@triton.jit
def transposed(pixels, ON_GPU: tl.constexpr):
    """Four words of four pixels' bytes as four words of one channel's bytes each."""
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


_FIRST_KEY = getattr(transposed, "cache_key", "")
"""See `int8_epilogue`: `transposed` uses a constant, and kernels of two modules call it."""


@triton.jit
def dot(pixels, taps, total, ON_GPU: tl.constexpr):
    """`total` with the products of the four signed bytes of two words."""
    if ON_GPU:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [pixels, taps, total], tl.int32, True, 1
        )
    else:
        for i in tl.static_range(4):
            total += ((pixels << (24 - 8 * i)) >> 24) * ((taps << (24 - 8 * i)) >> 24)
    return total


@triton.jit(do_not_specialize=["positions", "groups", "parts", "sizes", "filler"])
def _dot_kernel(
    x_ptr, weight_ptr, correction_ptr, vectors, outputs, numbers, positions, groups, parts, whole, columns, step, sizes,
    pad_y, pad_x, filler,
    KIND: tl.constexpr, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr, X_ZERO: tl.constexpr, STRIP: tl.constexpr, UNITS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    position = unit // parts
    part = unit % parts + tl.program_id(1) * parts
    found = position < positions
    _, _, out_x, first_y, first_x, first = place_of(
        position, groups, sizes.out_height, step, pad_y, pad_x, STRIDE_Y, STRIDE_X, 1, STRIP
    )
    word = part[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = x_ptr + ((4 * first)[:, None] + word)  # steps are 16 bytes long, so that the compiler knows of the alignment
    words = 4 * whole
    sums = ()
    for _ in tl.static_range(4 * STRIP):
        sums = sums + (tl.zeros([UNITS, 4], dtype=tl.int32),)  # noqa: RUF005  (Triton knows no unpacking)
    for tap_y in range(TAPS_Y):
        y = first_y + tap_y * DILATION_Y
        row_there = found & (y >= 0) & (y < sizes.height)
        row_at = at + 4 * (tap_y * DILATION_Y * step.row)
        taps_at = weight_ptr + tap_y * ((TAPS_X + 3) * 4) * words + word
        for k in tl.static_range(((STRIP - 1) * STRIDE_X + TAPS_X + 3) // 4):
            pixels = ()
            for i in tl.static_range(4):
                x = first_x + 4 * k + i
                there = (row_there & (x >= 0) & (x < sizes.width))[:, None]
                if 4 * k + i >= (STRIP - 1) * STRIDE_X + TAPS_X:  # the filter's word is 0 there
                    there = there & False
                loaded = tl.load(row_at + 4 * ((4 * k + i) * step.pixel), mask=there, other=filler)
                pixels = pixels + (loaded,)  # noqa: RUF005
            turned = transposed(pixels, ON_GPU)
            sums = _with_words(sums, turned, taps_at, words, k, TAPS_X, STRIDE_X, STRIP, ON_GPU)
    column = part[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < columns
    for i in tl.static_range(STRIP):
        low = tl.join(sums[4 * i], sums[4 * i + 2])
        total = tl.join(low, tl.join(sums[4 * i + 1], sums[4 * i + 3])).reshape([UNITS, 16])
        row = (position // groups).to(tl.int64) * sizes.out_width + (out_x + i)
        there = (found & (out_x + i < sizes.out_width))[:, None] & inside
        _finish(total, correction_ptr, row, column, inside, there, vectors, outputs, numbers, KIND, X_ZERO)


@triton.jit
def _with_words(
    sums, turned, taps_at, words, PLACE: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, STRIP: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """The sums of a strip with the products of the PLACE-th four pixels of a row."""
    found = ()
    for i in tl.static_range(STRIP):
        for j in tl.static_range(4):
            if 4 * PLACE - i * STRIDE > -4 and 4 * PLACE - i * STRIDE < TAPS:
                taps = tl.load(taps_at + ((4 * PLACE - i * STRIDE + 3) * 4 + j) * words)
                found = found + (dot(turned[j], taps, sums[4 * i + j], ON_GPU),)  # noqa: RUF005
            else:
                found = found + (sums[4 * i + j],)  # noqa: RUF005
    return found


@triton.jit
def _finish(
    total, correction_ptr, row, column, inside, there, vectors, outputs, numbers, KIND: tl.constexpr,
    X_ZERO: tl.constexpr,
):  # fmt: skip
    """Finish the sums of units and write them; see `int8_epilogue.finish_tile`."""
    if X_ZERO:
        total += tl.load(correction_ptr + column, mask=inside, other=0)
    factor = tl.load(vectors.factor + column, mask=inside, other=0.0)
    bias = tl.load(vectors.bias + column, mask=inside, other=0.0)
    added = residual_of(total, row, column, there, outputs, KIND)
    y, steps = finished(total, added, factor, bias, vectors, column, inside, numbers, KIND)
    write_tile(y, steps, row, column, there, outputs, numbers, KIND)
