"""Products of codes that load their tiles by tensor descriptors (TMA): `pointwise`, `deep` and `window`."""

# ruff: noqa: ANN001, ANN202, N803, N806  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple, Protocol

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile, finished, to_codes
from compress.kernels.triton.int8_product import Geometry, Tile, Weight, tiles_of


class ProductTile(Protocol):
    """The sizes that the tile of every product has."""

    @property
    def rows(self) -> int:
        """Output pixels."""

    @property
    def columns(self) -> int:
        """Output channels."""

    @property
    def depth(self) -> int:
        """Input channels of one product."""


def describe_operands(
    x: Tensor, weight: Weight, columns: int, tile: ProductTile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The descriptors of the pixels and of the filters, of operands as `pointwise` takes them."""
    rows, channels = x.shape[0], weight.codes.shape[-1]
    return (
        TensorDescriptor(x, [rows, channels], [x.stride(0), 1], [tile.rows, tile.depth]),
        TensorDescriptor(weight.codes, [columns, channels], [channels, 1], [tile.columns, tile.depth]),
    )


def describe_results(
    finish: Finish, outputs: Outputs, rows: int, columns: int, tile: ProductTile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The descriptors of the residual and of the codes; without a residual both are the same."""

    def described(tensor: Tensor, pitch: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [rows, columns], [pitch, 1], [tile.rows, tile.columns])

    codes = described(outputs.codes, outputs.codes_pitch)
    return described(outputs.residual, outputs.residual_pitch) if finish.kind.residual else codes, codes


# GPUs that have the copy engine; on others Triton would compute every address.
LEAST_CAPABILITY = (9, 0)


class PointwiseTile(NamedTuple):
    """The work of one program; the loads of `stages` tiles are under way at a time."""

    rows: int
    columns: int
    depth: int
    stages: int = 2
    warps: int = 4
    programs: int = 2


def pointwise(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    tile: PointwiseTile,
    multiprocessors: int,
    *,
    zero: int = 0,
) -> None:
    """Launch the product of `x` and the weight, limited by memory: programs that go over many tiles.

    - `x`: int8 (rows, K), channels dense, rows at multiples of 16 bytes.
    - `weight`: of one tap and one group.
    - `outputs`: codes, in rows at multiples of 16 bytes; no values.
    - `columns`: a multiple of 16: the copy engine writes whole 16 bytes.
    """
    rows, channels = x.shape[0], weight.codes.shape[-1]
    pixels, filters = describe_operands(x, weight, columns, tile)
    residual, codes = describe_results(finish, outputs, rows, columns, tile)
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    programs = min(tiles, tile.programs * multiprocessors)
    _pointwise_kernel[(programs,)](
        pixels,
        filters,
        residual,
        codes,
        weight.correction,
        finish.vectors,
        finish.numbers,
        rows,
        columns,
        finish.kind,
        zero != 0,
        -(-channels // tile.depth),
        tile.rows,
        tile.columns,
        tile.depth,
        tile.stages,
        num_warps=tile.warps,
    )


@triton.jit
def _pointwise_kernel(
    x,
    weight,
    residual,
    codes,
    correction_ptr,
    vectors,
    numbers,
    rows,
    columns,
    KIND: tl.constexpr,
    X_ZERO: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    strips = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * strips
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        first_row = (tile // strips) * ROWS
        first_column = (tile % strips) * COLUMNS
        column = first_column + tl.arange(0, COLUMNS)
        inside = column < columns
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
        for step in tl.static_range(STEPS):  # unrolled, so that the loop over tiles is the one that loads ahead
            pixels = x.load([first_row, step * DEPTH])
            filters = weight.load([first_column, step * DEPTH])
            total = tl.dot(pixels, filters.T, total, out_dtype=tl.int32)
        if X_ZERO:
            total += tl.load(correction_ptr + column, mask=inside, other=0)[None, :]
        added = total
        if KIND.residual > 0:
            added = residual.load([first_row, first_column])
        factor = tl.load(vectors.factor + column, mask=inside, other=0.0)[None, :]
        bias = tl.load(vectors.bias + column, mask=inside, other=0.0)[None, :]
        _, steps = finished(total, added, factor, bias, vectors, column, inside, numbers, KIND)
        result = to_codes(steps, numbers.low, numbers.high, numbers.zero, KIND.has_zero)
        codes.store([first_row, first_column], result)


def deep(
    x: Tensor, weight: Weight, finish: Finish, outputs: Outputs, columns: int, tile: Tile, *, zero: int = 0
) -> None:
    """Launch a product with a weight of many input channels, a program for each tile; operands of `pointwise`."""
    rows, channels = x.shape[0], weight.codes.shape[-1]
    pixels, filters = describe_operands(x, weight, columns, tile)
    _deep_kernel[(tiles_of(rows, columns, tile),)](
        pixels,
        filters,
        weight.correction,
        finish.vectors,
        outputs,
        finish.numbers,
        rows,
        columns,
        finish.kind,
        zero != 0,
        -(-channels // tile.depth),
        tile.rows,
        tile.columns,
        tile.depth,
        tile.stages,
        min(tile.part, tile.columns),
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )


@triton.jit
def _deep_kernel(
    x,
    weight,
    correction_ptr,
    vectors,
    outputs,
    numbers,
    rows,
    columns,
    KIND: tl.constexpr,
    X_ZERO: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PART: tl.constexpr,
):
    strips = tl.cdiv(columns, COLUMNS)  # neighbours in time share pixels: those come out of the cache
    first_row = (tl.program_id(0) // strips) * ROWS
    first_column = (tl.program_id(0) % strips) * COLUMNS
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        pixels = x.load([first_row, step * DEPTH])
        filters = weight.load([first_column, step * DEPTH])
        total = tl.dot(pixels, filters.T, total, out_dtype=tl.int32)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    if X_ZERO:
        total += tl.load(correction_ptr + column, mask=column < columns, other=0)[None, :]
    finish_tile(
        total,
        total,
        row.to(tl.int64),
        row < rows,
        first_column,
        columns,
        vectors,
        outputs,
        numbers,
        KIND,
        False,
        ROWS,
        COLUMNS,
        PART,
    )


class WindowTile(NamedTuple):
    """The work of one program; the loads of `stages` steps are under way at a time."""

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
