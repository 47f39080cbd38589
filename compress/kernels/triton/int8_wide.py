"""Matrix products of codes of few input channels, by persistent programs that compute whole rows."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, residual_of, write_tile
from compress.kernels.triton.int8_product import Weight


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
    """Launch the product of `x` and the weight.

    - `x`: int8 (rows, K) with neighbouring channels and room for the weight's.
    - `weight`: of one tap and one group.
    - `finish`: of `finish_of`, on the device; its grid has one scale.
    - `zero`: the input's code of 0.
    """
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
