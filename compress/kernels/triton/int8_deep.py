"""Matrix products of codes of many input channels; a program computes one tile."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_descriptors import describe_operands
from compress.kernels.triton.int8_epilogue import Finish, Outputs, finish_tile
from compress.kernels.triton.int8_product import Tile, Weight, tiles_of


def deep(
    x: Tensor, weight: Weight, finish: Finish, outputs: Outputs, columns: int, tile: Tile, *, zero: int = 0
) -> None:
    """Launch the product of `x` and the weight.

    - `x`: int8 (rows, K), channels dense, rows at multiples of 16 bytes.
    - `weight`: of one tap and one group.
    - `zero`: the input's code of 0.
    """
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
