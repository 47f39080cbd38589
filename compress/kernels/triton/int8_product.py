"""The kernel of INT8 convolutions and matrix products of an engine; one that holds the whole weight."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile, finished, residual_of, write_tile

# Bytes of one memory access; rows of channels are multiples of it.
ALIGNED = 16


class Geometry(NamedTuple):
    """How a filter moves; padding is above and on the left."""

    stride_y: int = 1
    stride_x: int = 1
    pad_y: int = 0
    pad_x: int = 0
    dilation_y: int = 1
    dilation_x: int = 1


class Steps(NamedTuple):
    """Elements from one image, row and pixel of the input to the next."""

    image: int
    row: int
    pixel: int


class Sizes(NamedTuple):
    """Height and width of the input and of the result."""

    height: int
    width: int
    out_height: int
    out_width: int


class Tile(NamedTuple):
    """The work of one program.

    Attributes:
        stages: steps whose loads are under way at a time.
        part: columns that the epilogue holds in registers at a time.
        registers: most registers of a thread; None = as many as the compiler takes.
        splits: programs that share the sum of one tile.
    """

    rows: int
    columns: int
    depth: int
    stages: int = 3
    warps: int = 4
    part: int = 64
    registers: int | None = None
    splits: int = 1


class Weight(NamedTuple):
    """A weight as the kernel reads it.

    Attributes:
        codes: int8 (O, R, S, C), C filled up with zeros to a multiple of 16.
        correction: int32 (O,), -zero * sum of the weight; None where the input's zero is 0.
        groups: of output channels, which read as many groups of input channels.
        step: input channels from one group to the next.
    """

    codes: Tensor
    correction: Tensor | None
    groups: int = 1
    step: int = 0


def zero_correction(weight: Tensor, zero: int, device: torch.device | str) -> Tensor | None:
    """Sums that the code of 0 adds to each output channel, negative: int32 (O,); None if `zero` is 0."""
    return (-zero * weight.flatten(1).sum(1, dtype=torch.int32)).to(device) if zero else None


def pack_weight(weight: Tensor, zero: int = 0, groups: int = 1, device: torch.device | str = "cpu") -> Weight:
    """Lay int8 (O, C / groups, R, S), or (O, C), out; groups of fewer than 16 channels are joined, zeros between."""
    weight = weight.reshape(*weight.shape, *[1] * (4 - weight.dim()))
    correction = zero_correction(weight, zero, device)
    joined = 1
    while groups // joined % 2 == 0 and (weight.shape[1] * joined) % ALIGNED:
        joined *= 2
    if joined > 1:
        weight, groups = _joined_groups(weight, groups, joined), groups // joined
    codes = torch.nn.functional.pad(weight.permute(0, 2, 3, 1), (0, -weight.shape[1] % ALIGNED)).contiguous()
    return Weight(codes.to(device), correction, groups, weight.shape[1])


def _joined_groups(weight: Tensor, groups: int, joined: int) -> Tensor:
    outputs, inputs, *taps = weight.shape
    each = outputs // groups
    wide = weight.new_zeros(groups // joined, joined, each, joined, inputs, *taps)
    old = weight.reshape(groups // joined, joined, each, inputs, *taps)
    for i in range(joined):
        wide[:, i, :, i] = old[:, i]
    return wide.reshape(outputs, joined * inputs, *taps)


class Workspace(NamedTuple):
    """Memory for int32 sums that are split, and counts of tiles; zeros before and after every run."""

    sums: Tensor
    counts: Tensor


def workspace(device: torch.device, tiles: int, elements: int) -> Workspace:
    return Workspace(
        torch.zeros(tiles * elements, dtype=torch.int32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )


def tiles_of(rows: int, columns: int, tile: Tile) -> int:
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def product(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    geometry: Geometry,
    out_size: tuple[int, int],
    tile: Tile,
    *,
    zero: int = 0,
    space: Workspace | None = None,
) -> None:
    """Launch the convolution of `x`.

    - `x`: int8 (N, C, H, W), any strides with neighbouring channels; (rows, K, 1, 1) for a matrix product.
    - `columns`, `out_size`: output channels and (OH, OW).
    - `space`: memory for a tile with splits.
    """
    images, _, height, width = x.shape
    image_step, _, row_step, pixel_step = x.stride()
    _, taps_y, taps_x, channels = weight.codes.shape
    rows = images * out_size[0] * out_size[1]
    padded = _reaches_out((height, width), (taps_y, taps_x), geometry, out_size)
    dense = row_step == width * pixel_step and image_step == height * row_step
    flat = taps_y * taps_x == 1 and geometry.stride_y == geometry.stride_x == 1 and not padded and dense
    columns //= weight.groups
    grid = (tiles_of(rows, columns, tile), tile.splits, weight.groups)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    _product_kernel[grid](
        x,
        weight.codes,
        weight.correction,
        finish.vectors,
        outputs,
        finish.numbers,
        *(space or (None, None)),
        rows,
        channels,
        columns,
        Steps(image_step, row_step, pixel_step),
        Sizes(height, width, *out_size),
        geometry,
        zero,
        weight.step,
        finish.kind,
        taps_y,
        taps_x,
        flat,
        padded,
        channels % tile.depth == 0,
        zero != 0,
        tile.splits,
        *(tile.rows, tile.columns, tile.depth),
        min(tile.part, tile.columns),
        **options,
    )


def _reaches_out(size: tuple[int, int], taps: tuple[int, int], geometry: Geometry, out_size: tuple[int, int]) -> bool:
    pairs = zip(*[iter(geometry)] * 2, strict=True)
    for n, k, s, p, d, o in zip(size, taps, *pairs, out_size, strict=True):
        if p > 0 or (o - 1) * s + d * (k - 1) >= n + p:
            return True
    return False


@triton.jit(do_not_specialize=["sizes", "x_zero"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    correction_ptr,
    vectors,
    outputs,
    numbers,
    sums_ptr,
    counts_ptr,
    rows,
    channels,
    columns,
    step,
    sizes,
    geometry,
    x_zero,
    group_step,
    KIND: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    FLAT: tl.constexpr,
    PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    X_ZERO: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
):
    strips = tl.cdiv(columns, COLUMNS)  # neighbours in time share pixels: those come out of the cache
    tile = tl.program_id(0)
    group = tl.program_id(2)
    first_row = (tile // strips) * ROWS
    first_column = (tile % strips) * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    x_ptr, at, y, x = _first_taps(x_ptr + group * group_step, row, first_row, rows, step, sizes, geometry, FLAT)
    weight_ptr += group * columns * (TAPS_Y * TAPS_X * channels)
    filter_at = tl.where(column < columns, column, 0) * (TAPS_Y * TAPS_X * channels)
    total = _sums(
        x_ptr,
        weight_ptr,
        at,
        filter_at,
        y,
        x,
        channels,
        step,
        sizes,
        geometry,
        x_zero,
        TAPS_Y,
        TAPS_X,
        PADDED,
        EVEN,
        X_ZERO,
        SPLITS,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    last = True
    if SPLITS > 1:
        total, last = _joined(total, tile + group * tl.num_programs(0), sums_ptr, counts_ptr, SPLITS, ROWS, COLUMNS)
    if last:
        if X_ZERO:
            total += tl.load(correction_ptr + group * columns + column, mask=column < columns, other=0)[None, :]
        finish_tile(
            total,
            total,
            row.to(tl.int64),
            row < rows,
            first_column + group * columns,
            (group + 1) * columns,
            vectors,
            outputs,
            numbers,
            KIND,
            False,
            ROWS,
            COLUMNS,
            PART,
        )


@triton.jit
def _first_taps(x_ptr, row, first_row, rows, step, sizes, geometry, FLAT: tl.constexpr):
    """(where a tile begins, its pixels' first taps, their vertical and horizontal places in the image)."""
    pixel = tl.where(row < rows, row, rows - 1)  # read something that is there; it is not stored
    if FLAT:
        x_ptr += first_row.to(tl.int64) * step.pixel
        at = (pixel - first_row) * step.pixel
        y = pixel
        x = pixel
    else:
        size = sizes.out_height * sizes.out_width
        within = pixel % size
        first_image = first_row // size
        x_ptr += first_image.to(tl.int64) * step.image
        y = (within // sizes.out_width) * geometry.stride_y - geometry.pad_y
        x = (within % sizes.out_width) * geometry.stride_x - geometry.pad_x
        at = (pixel // size - first_image) * step.image + y * step.row + x * step.pixel
    return x_ptr, at, y, x


@triton.jit
def _sums(
    x_ptr,
    weight_ptr,
    at,
    filter_at,
    y,
    x,
    channels,
    step,
    sizes,
    geometry,
    x_zero,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    X_ZERO: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Sums of products of a tile over all taps and channels, or over one program's share."""
    depth = tl.arange(0, DEPTH)
    x_at = at[:, None] + depth[None, :]
    weight_at = filter_at[None, :] + depth[:, None]
    per_tap = tl.cdiv(channels, DEPTH)
    steps = TAPS_Y * TAPS_X * per_tap
    first = 0
    if SPLITS > 1:
        each = tl.cdiv(steps, SPLITS)
        first = tl.program_id(1) * each
        steps = tl.maximum(tl.minimum(each, steps - first), 0)
    tap = first // per_tap
    channel = (first % per_tap) * DEPTH
    tap_y = tap // TAPS_X
    tap_x = tap % TAPS_X
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for _ in range(steps):
        pixels_ptr = (
            x_ptr + x_at + (tap_y * geometry.dilation_y * step.row + tap_x * geometry.dilation_x * step.pixel + channel)
        )
        filters_ptr = weight_ptr + weight_at + ((tap_y * TAPS_X + tap_x) * channels + channel)
        left = channels - channel
        there_y = y + tap_y * geometry.dilation_y
        there_x = x + tap_x * geometry.dilation_x
        pixels = _pixels(pixels_ptr, there_y, there_x, depth, left, sizes, x_zero, PADDED, EVEN, X_ZERO)
        filters = tl.load(filters_ptr) if EVEN else tl.load(filters_ptr, mask=(depth < left)[:, None], other=0)
        total = tl.dot(pixels, filters, total, out_dtype=tl.int32)
        channel += DEPTH
        if TAPS_Y * TAPS_X > 1:  # by selection, not by branches: loads after a branch would not be made ahead of time
            done = channel >= channels
            channel = tl.where(done, 0, channel)
            tap_x = tl.where(done, tap_x + 1, tap_x)
            done = tap_x == TAPS_X
            tap_x = tl.where(done, 0, tap_x)
            tap_y = tl.where(done, tap_y + 1, tap_y)
    return total


@triton.jit
def _pixels(ptr, y, x, depth, left, sizes, x_zero, PADDED: tl.constexpr, EVEN: tl.constexpr, X_ZERO: tl.constexpr):
    """A step's pixels, whose last channels lie `left` after its first; the zero's code outside of the image."""
    if PADDED:
        there = y.to(tl.uint32, bitcast=True) < tl.cast(sizes.height, tl.uint32)
        there = (there & (x.to(tl.uint32, bitcast=True) < tl.cast(sizes.width, tl.uint32)))[:, None]
        filler = x_zero.to(tl.int8) if X_ZERO else 0
        if EVEN:
            pixels = tl.load(ptr, mask=there, other=filler)
        else:
            pixels = tl.load(ptr, mask=there & (depth < left)[None, :], other=filler)
    else:
        pixels = tl.load(ptr) if EVEN else tl.load(ptr, mask=(depth < left)[None, :], other=0)
    return pixels


@triton.jit
def _joined(total, tile, sums_ptr, counts_ptr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(the sum of all programs of a tile, True) in the last of them to come; in the others False."""
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = sums_ptr + tile.to(tl.int64) * (ROWS * COLUMNS) + place
    tl.atomic_add(sums, total, sem="relaxed")
    tl.debug_barrier()
    last = tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        total = tl.load(sums, cache_modifier=".cg")
        tl.debug_barrier()  # another thread may store a zero where this one still has to load
        tl.store(sums, tl.zeros([ROWS, COLUMNS], dtype=tl.int32))
        tl.store(counts_ptr + tile, 0)
    return total, last


class WideTile(NamedTuple):
    """The work of one program.

    Attributes:
        widths: columns that are computed at a time, powers of two; a program computes all of these.
        depth: all input channels, a power of two.
        stages: tiles whose loads are under way at a time.
    """

    rows: int
    widths: tuple[int, ...]
    depth: int
    stages: int = 2
    warps: int = 4
    programs: int = 4


def wide(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    tile: WideTile,
    multiprocessors: int,
    *,
    zero: int = 0,
) -> None:
    """Launch a product of int8 (rows, K), with room for the weight's channels, and a weight of one tap and group."""
    rows, channels = x.shape[0], weight.codes.shape[-1]
    strip = sum(tile.widths)
    strips = -(-columns // strip)
    programs = min(-(-rows // tile.rows), -(-tile.programs * multiprocessors // strips))
    _wide_kernel[(strips, programs)](
        x,
        weight.codes,
        weight.correction,
        finish.vectors,
        outputs,
        finish.numbers,
        rows,
        channels,
        columns,
        x.stride(0),
        finish.kind,
        zero != 0,
        tile.rows,
        strip,
        tile.widths,
        tile.depth,
        tile.stages,
        num_warps=tile.warps,
    )


@triton.jit(do_not_specialize=["rows"])
def _wide_kernel(
    x_ptr,
    weight_ptr,
    correction_ptr,
    vectors,
    outputs,
    numbers,
    rows,
    channels,
    columns,
    pitch,
    KIND: tl.constexpr,
    X_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    WIDTHS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    depth = tl.arange(0, DEPTH)
    filters = ()
    factors = ()
    biases = ()
    first = tl.program_id(0) * STRIP
    for part in tl.static_range(len(WIDTHS)):
        column = first + tl.arange(0, WIDTHS[part])
        there = (depth < channels)[:, None] & (column < columns)[None, :]
        found = tl.load(weight_ptr + column[None, :] * channels + depth[:, None], mask=there, other=0)
        filters = filters + (found,)  # noqa: RUF005  (Triton knows no unpacking)
        factor = tl.load(vectors.factor + column, mask=column < columns, other=0.0)
        factors = factors + (factor[None, :],)  # noqa: RUF005
        bias = tl.load(vectors.bias + column, mask=column < columns, other=0.0)
        biases = biases + (bias[None, :],)  # noqa: RUF005
        first += WIDTHS[part]
    for tile in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = x_ptr + row.to(tl.int64)[:, None] * pitch + depth[None, :]
        pixels = tl.load(at, mask=(row < rows)[:, None] & (depth < channels)[None, :], other=0)
        _all_columns(
            pixels,
            filters,
            factors,
            biases,
            correction_ptr,
            row,
            row < rows,
            columns,
            vectors,
            outputs,
            numbers,
            KIND,
            X_ZERO,
            STRIP,
            WIDTHS,
        )


@triton.jit
def _all_columns(
    pixels,
    filters,
    factors,
    biases,
    correction_ptr,
    row,
    row_there,
    columns,
    vectors,
    outputs,
    numbers,
    KIND: tl.constexpr,
    X_ZERO: tl.constexpr,
    STRIP: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    first = tl.program_id(0) * STRIP
    for part in tl.static_range(len(WIDTHS)):
        column = first + tl.arange(0, WIDTHS[part])
        inside = column < columns
        there = row_there[:, None] & inside[None, :]
        total = tl.dot(pixels, filters[part], out_dtype=tl.int32)
        if X_ZERO:
            total += tl.load(correction_ptr + column, mask=inside, other=0)[None, :]
        pixel = row.to(tl.int64)
        added = residual_of(total, pixel, column[None, :], there, outputs, KIND)
        y, steps = finished(total, added, factors[part], biases[part], vectors, column, inside, numbers, KIND)
        write_tile(y, steps, pixel, column[None, :], there, outputs, numbers, KIND)
        first += WIDTHS[part]
