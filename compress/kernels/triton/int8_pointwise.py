"""Matrix products of codes limited by memory: persistent programs that load by tensor descriptors."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_descriptors import describe_operands, describe_results
from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, to_codes
from compress.kernels.triton.int8_product import Weight

LEAST_CAPABILITY = (9, 0)
"""GPUs that have the copy engine; on others Triton would compute every address."""


class PointwiseTile(NamedTuple):
    """The work of one program.

    Attributes:
        stages: tiles whose loads are under way at a time.
    """

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
    """Launch the product of `x` and the weight.

    - `x`: int8 (rows, K), channels dense, rows at multiples of 16 bytes.
    - `weight`: of one tap and one group.
    - `outputs`: codes, in rows at multiples of 16 bytes; no values.
    - `columns`: a multiple of 16: the copy engine writes whole 16 bytes.
    - `zero`: the input's code of 0.
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
