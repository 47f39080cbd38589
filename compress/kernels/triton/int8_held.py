"""Matrix products of codes that write more than they read: persistent programs that hold pixels and pass over columns.

An expanding 1 x 1 convolution writes two to four times as many channels as it reads, and adds a residual of as many. A
program that computes one tile of columns at a time loads its pixels anew for each of them out of the second cache,
whose bandwidth is then the roof. Here a program loads all channels of a tile of pixels once, and computes one tile of
columns after the other, whose filters and residual are loaded ahead.
"""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_descriptors import describe_operands, describe_results
from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, to_codes
from compress.kernels.triton.int8_product import Weight


class HeldTile(NamedTuple):
    """The tile that one program holds, and the tiles that it passes over.

    Attributes:
        rows: output pixels, whose channels are held.
        columns: output channels that are computed at a time.
        depth: input channels of one product; a program holds a few times as many.
        strips: parts of the columns that different programs pass over.
        stages: tiles of columns whose loads are under way at a time.
        warps: of a program.
        programs: on one multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    strips: int = 1
    stages: int = 3
    warps: int = 4
    programs: int = 2


def held(
    x: Tensor,
    weight: Weight,
    finish: Finish,
    outputs: Outputs,
    columns: int,
    tile: HeldTile,
    multiprocessors: int,
    *,
    zero: int = 0,
) -> None:
    """Launch the product of `x` and the weight.

    Args:
        x: int8 (rows, K) with neighbouring channels and rows at multiples of 16 bytes.
        weight: of `pack_weight`, of one tap and one group.
        finish: of `finish_of`, on the device.
        outputs: codes that are added and written, in rows at multiples of 16 bytes; no values.
        columns: output channels, a multiple of 16: the copy engine writes whole 16 bytes, past the last column too.
        tile: of a program.
        multiprocessors: of the GPU.
        zero: code of 0 of the input.
    """
    rows, channels = x.shape[0], weight.codes.shape[-1]
    pixels, filters = describe_operands(x, weight, columns, tile)
    residual, codes = describe_results(finish, outputs, rows, columns, tile)
    passes = -(-columns // (tile.columns * tile.strips))
    units = -(-rows // tile.rows) * tile.strips
    _held_kernel[(min(units, tile.programs * multiprocessors),)](
        pixels, filters, residual, codes, weight.correction, finish.vectors, finish.numbers, units,
        columns, finish.kind, zero != 0, -(-channels // tile.depth), passes, *tile[:5], num_warps=tile.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["units"])
def _held_kernel(
    x, weight, residual, codes, correction_ptr, vectors, numbers, units, columns,
    KIND: tl.constexpr, X_ZERO: tl.constexpr, STEPS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), num_stages=1):
        first_row = unit // STRIPS * ROWS
        pixels = ()
        for step in tl.static_range(STEPS):
            pixels = pixels + (x.load([first_row, step * DEPTH]),)  # noqa: RUF005  (Triton knows no unpacking)
        for part in tl.range(0, PASSES, num_stages=STAGES):
            first_column = (unit % STRIPS * PASSES + part) * COLUMNS
            column = first_column + tl.arange(0, COLUMNS)
            inside = column < columns
            total = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
            for step in tl.static_range(STEPS):
                filters = weight.load([first_column, step * DEPTH])
                total = tl.dot(pixels[step], filters.T, total, out_dtype=tl.int32)
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
