"""Convolutions of codes whose taps are boxes of the image: loads by tensor descriptors of four dimensions."""

# ruff: noqa: ANN001, ANN202, N803, N806  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, to_codes
from compress.kernels.triton.int8_product import Geometry, Weight


class WindowTile(NamedTuple):
    """The work of one program.

    Attributes:
        stages: steps whose loads are under way at a time.
    """

    images: int
    high: int
    wide: int
    columns: int
    depth: int
    stages: int = 3
    warps: int = 8


def window(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    geometry: Geometry,
    out_size: tuple[int, int],
    tile: WindowTile,
) -> None:
    """Launch the convolution of `x`, whose code of 0 is 0.

    - `x`: int8 (N, C, H, W) with neighbouring channels; pixels begin at multiples of 16 bytes and have room for the
      weight's channels.
    - `finish`: of `finish_of`, on the device; its grid has one scale.
    - `outputs`: codes, in rows at multiples of 16 bytes; no values.
    - `columns`: a multiple of 16.
    - `geometry`: of a filter that moves by one pixel.
    - `out_size`: (OH, OW).
    """
    images, _, height, width = x.shape
    _, taps_y, taps_x, channels = weight.codes.shape
    image_step, _, row_step, pixel_step = x.stride()
    box = [tile.images, tile.high, tile.wide]

    def described(tensor: Tensor, pitch: int) -> TensorDescriptor:
        pixels = out_size[0] * out_size[1]
        strides = [pixels * pitch, out_size[1] * pitch, pitch, 1]
        return TensorDescriptor(tensor, [images, *out_size, columns], strides, [*box, tile.columns])

    image = TensorDescriptor(
        x, [images, height, width, channels], [image_step, row_step, pixel_step, 1], [*box, tile.depth]
    )
    depth = taps_y * taps_x * channels
    filters = TensorDescriptor(weight.codes, [columns, depth], [depth, 1], [tile.columns, tile.depth])
    codes = described(outputs.codes, outputs.codes_pitch)
    residual = described(outputs.residual, outputs.residual_pitch) if finish.kind.residual else codes
    counts = [-(-n // b) for n, b in zip((images, *out_size, columns), (*box, tile.columns), strict=True)]
    _window_kernel[(counts[0] * counts[1] * counts[2] * counts[3],)](
        image,
        filters,
        residual,
        codes,
        finish.vectors,
        finish.numbers,
        channels,
        columns,
        geometry,
        counts[1],
        counts[2],
        finish.kind,
        taps_x,
        taps_y * taps_x * -(-channels // tile.depth),
        *tile[:6],
        num_warps=tile.warps,
    )


@triton.jit(do_not_specialize=["tiles_y", "tiles_x"])
def _window_kernel(
    x,
    filters,
    residual,
    codes,
    vectors,
    numbers,
    channels,
    columns,
    geometry,
    tiles_y,
    tiles_x,
    KIND: tl.constexpr,
    TAPS_X: tl.constexpr,
    STEPS: tl.constexpr,
    IMAGES: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    ROWS: tl.constexpr = IMAGES * HIGH * WIDE
    strips = tl.cdiv(columns, COLUMNS)  # neighbours in time share pixels: those come out of the cache
    tile = tl.program_id(0) // strips
    first_column = (tl.program_id(0) % strips) * COLUMNS
    first_x = (tile % tiles_x) * WIDE
    first_y = (tile // tiles_x % tiles_y) * HIGH
    image = tile // (tiles_x * tiles_y) * IMAGES
    per_tap = tl.cdiv(channels, DEPTH)
    total = tl.zeros([COLUMNS, ROWS], dtype=tl.int32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        tap = step // per_tap
        channel = step % per_tap * DEPTH  # past the last one pixels are 0, and the next tap's weights do not matter
        y = first_y + tap // TAPS_X * geometry.dilation_y - geometry.pad_y
        x_at = first_x + tap % TAPS_X * geometry.dilation_x - geometry.pad_x
        pixels = x.load([image, y, x_at, channel]).reshape([ROWS, DEPTH])
        total = tl.dot(filters.load([first_column, tap * channels + channel]), pixels.T, total, out_dtype=tl.int32)
    column = first_column + tl.arange(0, COLUMNS)
    inside = column < columns
    factor = tl.load(vectors.factor + column, mask=inside, other=0.0)[:, None]
    bias = tl.load(vectors.bias + column, mask=inside, other=0.0)[:, None]
    added = total
    if KIND.residual > 0:
        added = residual.load([image, first_y, first_x, first_column]).reshape([ROWS, COLUMNS]).T
    _, steps = finished(total, added, factor, bias, vectors, column, inside, numbers, KIND)
    result = to_codes(steps, numbers.low, numbers.high, numbers.zero, KIND.has_zero)
    codes.store([image, first_y, first_x, first_column], result.T.reshape([IMAGES, HIGH, WIDE, COLUMNS]))
