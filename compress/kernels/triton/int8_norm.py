"""Layer normalization for inference that reads codes or values and writes codes, values, or both."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, write_tile


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
    """Launch a normalization of rows.

    - `x`: codes or values (rows, channels), neighbouring channels.
    - `finish`: its factor and bias are those of the normalization.
    - `scale`, `zero`: of the codes that are read; scale 1 for values.
    - `elements`: of a program, at least those of a row.
    """
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
