"""INT8 layers without a product: packing the input, elementwise operations, normalization, pools and means."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile, finished, to_codes, write_tile
from compress.kernels.triton.int8_product import Geometry, Sizes, Steps

# Names of combinations, in the order of the kernel's numbers.
COMBINATIONS = ("none", "add", "sub", "mul")

_ELEMENTS = 2048  # of a program


class Operand(NamedTuple):
    """A tensor of at most four axes, of the result's shape (strides of 0 where it broadcasts); scale 1 for values."""

    tensor: Tensor
    scale: float = 1.0
    zero: int = 0


def elementwise(
    x: Operand, y: Operand | None, combination: str, finish: Finish, codes: Tensor | None, value: Tensor | None
) -> None:
    """Launch activation(x combined with y); the shape is that of `x`, `codes` and `value` are written if given.

    The factor and bias of `finish` are single numbers, or one for each index of the last axis in memory.
    """
    tensors = [x.tensor, x.tensor if y is None else y.tensor, codes, value]
    shape, strides = _collapsed(tensors)
    channels = shape[3]
    rows = shape[0] * shape[1] * shape[2]
    block = min(256, triton.next_power_of_2(channels))
    tile = max(1, _ELEMENTS // block)
    other = y or Operand(x.tensor)
    outputs = Outputs(None, codes, value)
    _elementwise_kernel[(triton.cdiv(rows, tile), triton.cdiv(channels, block))](
        x.tensor,
        other.tensor,
        finish.vectors,
        outputs,
        finish.numbers,
        rows,
        channels,
        (shape[1], shape[2]),
        *strides,
        x.scale,
        float(x.zero),
        other.scale,
        float(other.zero),
        finish.kind,
        finish.vectors.factor.numel() > 1,
        COMBINATIONS.index(combination),
        tile,
        block,
    )


def _collapsed(tensors: list[Tensor | None]) -> tuple[list[int], list[tuple[int, ...]]]:
    """(four sizes, strides of each tensor), channels last; axes are joined where all tensors allow it."""
    there = [t for t in tensors if t is not None]
    shape = list(there[0].shape)
    strides = [[0] * len(shape) if t is None else list(t.stride()) for t in tensors]
    result = next(s for t, s in zip(reversed(tensors), reversed(strides), strict=True) if t is not None)
    order = sorted(range(len(shape)), key=lambda axis: (-result[axis], axis))
    shape, strides = [shape[a] for a in order], [[s[a] for a in order] for s in strides]
    keep = [i for i, n in enumerate(shape) if n != 1] or [len(shape) - 1]
    shape, strides = [shape[i] for i in keep], [[s[i] for i in keep] for s in strides]
    i = len(shape) - 3
    while i >= 0:  # channels are the last axis and stay what they are
        if all(s[i] == s[i + 1] * shape[i + 1] for s in strides):
            shape[i : i + 2] = [shape[i] * shape[i + 1]]
            strides = [[*s[:i], *s[i + 1 :]] for s in strides]
        i -= 1
    missing = 4 - len(shape)
    return [1] * missing + shape, [tuple([0] * missing + s) for s in strides]


@triton.jit(do_not_specialize=["sizes"])
def _elementwise_kernel(
    x_ptr,
    y_ptr,
    vectors,
    outputs,
    numbers,
    rows,
    channels,
    sizes,
    x_step,
    y_step,
    codes_step,
    value_step,
    x_scale,
    x_zero,
    y_scale,
    y_zero,
    KIND: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    COMBINATION: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    there = (row < rows)[:, None] & inside[None, :]
    x_at = _places(row, column, sizes, x_step)
    total = (tl.load(x_ptr + x_at, mask=there, other=0).to(tl.float32) - x_zero) * x_scale
    if COMBINATION > 0:
        y_at = _places(row, column, sizes, y_step)
        other = (tl.load(y_ptr + y_at, mask=there, other=0).to(tl.float32) - y_zero) * y_scale
        if COMBINATION == 1:
            total += other
        elif COMBINATION == 2:
            total -= other
        else:
            total *= other
    if PER_CHANNEL:
        factor = tl.load(vectors.factor + column, mask=inside, other=0.0)[None, :]
        bias = tl.load(vectors.bias + column, mask=inside, other=0.0)[None, :]
    else:
        factor = tl.load(vectors.factor)
        bias = tl.load(vectors.bias)
    y, steps = finished(total, total, factor, bias, vectors, column, inside, numbers, KIND)
    if KIND.writes_codes:
        at = _places(row, column, sizes, codes_step)
        tl.store(
            outputs.codes + at, to_codes(steps, numbers.low, numbers.high, numbers.zero, KIND.has_zero), mask=there
        )
    if KIND.writes_value:
        at = _places(row, column, sizes, value_step)
        tl.store(outputs.value + at, y.to(outputs.value.dtype.element_ty), mask=there)


@triton.jit
def _places(row, column, sizes, step):
    line = row // sizes[1]
    rows = (row % sizes[1]).to(tl.int64) * step[2] + (line % sizes[0]).to(tl.int64) * step[1]
    rows += (line // sizes[0]).to(tl.int64) * step[0]
    return rows[:, None] + (column.to(tl.int64) * step[3])[None, :]


def look_up(x: Tensor, table: Tensor, out: Tensor) -> None:
    """Launch out = table[x + 128] for int8 codes that lie alike, without overlap."""
    shape, strides = _collapsed([x, out])
    rows = shape[0] * shape[1] * shape[2]
    block = min(256, triton.next_power_of_2(shape[3]))
    tile = max(1, 2 * _ELEMENTS // block)
    _table_kernel[(triton.cdiv(rows, tile), triton.cdiv(shape[3], block))](
        x, table, out, rows, shape[3], (shape[1], shape[2]), *strides, tile, block
    )


@triton.jit(do_not_specialize=["sizes"])
def _table_kernel(
    x_ptr, table_ptr, out_ptr, rows, channels, sizes, x_step, out_step, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = (row < rows)[:, None] & (column < channels)[None, :]
    code = tl.load(x_ptr + _places(row, column, sizes, x_step), mask=there, other=0).to(tl.int32)
    found = tl.load(table_ptr + (code + 128), mask=there, other=0)
    tl.store(out_ptr + _places(row, column, sizes, out_step), found, mask=there)


def layer_norm(
    x: Tensor,
    finish: Finish,
    epsilon: float,
    outputs: Outputs,
    *,
    scale: float = 1.0,
    zero: int = 0,
    elements: int = 2048,
    warps: int = 4,
) -> None:
    """Launch a normalization of (rows, channels) of codes, or of values (scale 1); factor and bias are `finish`'s."""
    rows, channels = x.shape
    block = triton.next_power_of_2(channels)
    tile = max(1, min(16, elements // block))
    _norm_kernel[(triton.cdiv(rows, tile),)](
        x,
        finish.vectors,
        outputs,
        finish.numbers,
        rows,
        channels,
        x.stride(0),
        epsilon,
        scale,
        float(zero),
        finish.kind,
        tile,
        block,
        num_warps=warps,
    )


@triton.jit
def _norm_kernel(
    x_ptr,
    vectors,
    outputs,
    numbers,
    rows,
    channels,
    pitch,
    epsilon,
    scale,
    x_zero,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, CHANNELS)
    inside = column < channels
    there = (row < rows)[:, None] & inside[None, :]
    x = tl.load(x_ptr + row[:, None] * pitch + column[None, :], mask=there, other=0).to(tl.float32)
    x = tl.where(there, (x - x_zero) * scale, 0.0)
    mean = tl.sum(x, axis=1) / channels
    centred = tl.where(there, x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / channels
    normal = centred * (1.0 / tl.sqrt_rn(variance + epsilon))[:, None]
    factor = tl.load(vectors.factor + column, mask=inside, other=0.0)[None, :]
    bias = tl.load(vectors.bias + column, mask=inside, other=0.0)[None, :]
    y, steps = finished(normal, normal, factor, bias, vectors, column, inside, numbers, KIND)
    write_tile(y, steps, row, column[None, :], there, outputs, numbers, KIND)


_PACK_ELEMENTS = 2048  # of a program


def pack_image(
    x: Tensor,
    out: Tensor,
    before: tuple[int, int],
    block: tuple[int, int],
    inverse: float,
    limits: tuple[int, int],
    zero: int,
) -> None:
    """Launch out[n, i, j, (dy, dx, c)] = code of x[n, c, i * move - before + dy, j * move - before + dx].

    - `x`: (N, C, H, W), floating point, any strides.
    - `out`: int8 (N, rows, columns, V), dense, V at least side * side * C, filled up with the code of 0.
    - `block`: (side, move).
    - `limits`: lowest and highest integer, without the zero.
    """
    grid, arguments = pack_launch(x, out, before, block, inverse, limits, zero)
    _pack_kernel[grid](*arguments)


def pack_launch(
    x: Tensor,
    out: Tensor,
    before: tuple[int, int],
    block: tuple[int, int],
    inverse: float,
    limits: tuple[int, int],
    zero: int,
) -> tuple[tuple[int], tuple[Any, ...]]:
    _, channels, height, width = x.shape
    images, rows, columns, vector = out.shape
    wide = triton.next_power_of_2(vector)
    tile = max(1, _PACK_ELEMENTS // wide)
    count = images * rows * columns
    arguments = (
        x,
        out,
        count,
        (rows, columns, height, width),
        x.stride(),
        before,
        inverse,
        float(limits[0]),
        float(limits[1]),
        zero,
        zero != 0,
        channels,
        *block,
        vector,
        tile,
        wide,
    )
    return (triton.cdiv(count, tile),), arguments


@triton.jit(do_not_specialize=["sizes", "before", "zero"])
def _pack_kernel(
    x_ptr,
    out_ptr,
    count,
    sizes,
    step,
    before,
    inverse,
    low,
    high,
    zero,
    HAS_ZERO: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    rows, columns, height, width = sizes
    place = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, WIDE)
    across = element // CHANNELS % BLOCK
    down = element // CHANNELS // BLOCK
    first_y = place // columns % rows * MOVE - before[0]
    first_x = place % columns * MOVE - before[1]
    y = first_y[:, None] + down[None, :]
    x = first_x[:, None] + across[None, :]
    there = (place < count)[:, None] & (element < BLOCK * BLOCK * CHANNELS)[None, :]
    there = there & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    begin = (place // columns // rows).to(tl.int64) * step[0]
    begin += first_y.to(tl.int64) * step[2] + first_x.to(tl.int64) * step[3]
    channel = element % CHANNELS
    within = channel.to(tl.int64) * step[1] + down.to(tl.int64) * step[2] + across.to(tl.int64) * step[3]
    at = begin[:, None] + within[None, :]
    value = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    codes = to_codes(value * inverse, low, high, zero, HAS_ZERO)
    out_at = place.to(tl.int64)[:, None] * VECTOR + element[None, :]
    tl.store(out_ptr + out_at, codes, mask=(place < count)[:, None] & (element < VECTOR)[None, :])


_THREADS = 128


def max_pool(
    x: Tensor,
    out: Tensor,
    kernel: tuple[int, int],
    geometry: Geometry,
    out_size: tuple[int, int],
    *,
    each: int = 16,
    repeats: tuple[int, int] = (1, 1),
) -> None:
    """Launch a maximum over windows of int8 (N, C, H, W) with neighbouring channels, into rows (pixels, C)."""
    # Each pixel of the result is written `repeats` times in height and width, which `out_size` counts.
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
        out.stride(0),
        *kernel,
        *geometry,
        *repeats,
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
    REPEATS_Y: tl.constexpr,
    REPEATS_X: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    line = row // sizes.out_width
    first_y = (line % sizes.out_height) // REPEATS_Y * STRIDE_Y - PAD_Y
    first_x = (row % sizes.out_width) // REPEATS_X * STRIDE_X - PAD_X
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
    """Launch an average over windows; `finish` has the factor of the sum over a whole window."""
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
    """Launch the average over whole images; `finish` has the factor of the sum over an image."""
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
