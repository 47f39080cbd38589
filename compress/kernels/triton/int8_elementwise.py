"""Elementwise steps for inference: sums, products, activations, and what quantizes, dequantizes or requantizes."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, to_codes

COMBINATIONS = ("none", "add", "sub", "mul")
"""Names of combinations, in the order of the kernel's numbers."""

_ELEMENTS = 2048  # of a program


class Operand(NamedTuple):
    """A tensor of at most four axes that a step reads.

    Attributes:
        tensor: codes or values, of the shape of the result; strides of 0 where it broadcasts.
        scale: real value of one code; 1 for values.
        zero: code of 0.
    """

    tensor: Tensor
    scale: float = 1.0
    zero: int = 0


def elementwise(
    x: Operand, y: Operand | None, combination: str, finish: Finish, codes: Tensor | None, value: Tensor | None
) -> None:
    """Launch activation(x combined with y).

    - `x`: its shape is that of the result.
    - `y`: None = none.
    - `combination`: one of `COMBINATIONS`.
    - `finish`: its factor and bias are single numbers, or one for each index of the last axis in memory.
    - `codes`, `value`: what is written; None = not.
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
    """Launch out = table[x + 128] for codes; both lie alike.

    Args:
        x: int8, any strides without overlap.
        table: int8 (256,).
        out: int8, of the shape of `x`.
    """
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
