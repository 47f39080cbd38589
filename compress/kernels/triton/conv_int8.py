"""Convolution on INT8 tensor cores with its epilogue in the same Triton kernel: codes in, codes out.

A code is the integer that a quantizer rounds to. A convolution of codes is summed in INT32, so it is exact; the
kernel turns the sum into steps of the output's scale (one multiplication and addition per channel), adds bias and
residual, applies the activation, rounds and saturates. It reads one byte an element and writes one: the next
convolution reads the codes again. For the backward pass it writes one bit an element (`fused_ops`), and, where asked,
the quantized value in half precision: that costs two bytes more, but the weight gradient reads it as it is.

The convolution is a matrix product of (pixels, taps x channels) and (taps x channels, output channels) whose first
factor is never stored: each tap is a shifted view of the image (implicit GEMM). In channels_last the channels of a
pixel lie together, as tensor cores want both factors of 8 bits.

The result is that of the plain path up to rounding: a float32 product in place of a float32 sum of rounded products and
of a division, so a value within float32's precision of a tie may round to the other neighbour. Codes hold no NaN: a
training that diverges shows it in `value`, in the gradients and in the layers that stay in floating point.
"""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.epilogue import Epilogue, empty_last, least_kept
from compress.kernels.triton.launch import Kept, Launch
from compress.kernels.triton.rounding import step_of

_ALIGNED = 16  # bytes of one memory access; channels divide by it
_LARGEST = 2**31  # elements that 32 bits count


class Codes(NamedTuple):
    """A tensor as integers.

    Attributes:
        integers: int8; activations (N, C, H, W) channels_last, weights (O, C, R, S) channels_last.
        amax: () for activations, (O,) for weights; one step is amax / high.
        high: the integer that stands for amax.
    """

    integers: Tensor
    amax: Tensor
    high: int = 127


class Geometry(NamedTuple):
    """How the filter moves: each (vertical, horizontal), as in `torch.nn.Conv2d`."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


class Tile(NamedTuple):
    """What one program computes, and how.

    Attributes:
        rows: output pixels.
        columns: output channels.
        depth: input channels of one step.
        stages: steps whose loads are on their way at a time.
        warps: of a program.
        part: columns that the epilogue holds in registers at a time.
        registers: most registers of a thread; None = as many as the compiler likes.
    """

    rows: int
    columns: int
    depth: int
    stages: int = 3
    warps: int = 8
    part: int = 64
    registers: int | None = None


class ConvResult(NamedTuple):
    """What the kernel writes.

    Attributes:
        codes: (N, O, OH, OW) int8, channels_last; None unless asked for.
        bits: where the gradient passes, as `fused_ops.pack`; None unless asked for.
        value: the quantized values, shape and layout of `codes`; None unless asked for.
    """

    codes: Tensor | None
    bits: Tensor | None
    value: Tensor | None


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel computes the convolution of codes of these shapes: (N, C, H, W) and (O, C, R, S)."""
    channels, outputs = x.shape[1], weight.shape[0]
    whole = channels % _ALIGNED == 0 and outputs % _ALIGNED == 0 and weight.shape[1] == channels
    return whole and x.numel() < _LARGEST and min(x.shape) > 0


def default_tile(pixels: int, channels: int, outputs: int, taps: int = 1, *, limited: bool = True) -> Tile:
    """A tile for a convolution of `channels` to `outputs` channels at `pixels` output pixels.

    Within 5 % of the best of seven for most of ResNet-50's shapes at batch 128 on an H200, within 13 % for all
    (analysis/int8_forward.py).

    Args:
        pixels: of the result, of all images.
        channels: of the input.
        outputs: channels of the result.
        taps: of the filter.
        limited: a limit of registers can be set; without one, a large tile is as fast only where its sum is long.
    """
    depth = 64 if channels > 32 else 32
    narrow = Tile(128, 64, depth, 4, 4, 32, 168)
    if min(channels, outputs) <= 64 or (not limited and channels * taps < 512):
        return narrow
    depth = 128 if channels % 128 == 0 else depth
    if pixels * outputs < 256 * 128 * 128:  # fewer programs than would fill the multiprocessors twice
        return Tile(64, 128, depth, 3, 4, 32, 168)
    return Tile(128, 128, depth, 3, 8, 64 if limited else 32, 128)


def conv_codes(
    x: Codes,
    weight: Codes,
    amax: Tensor,
    epilogue: Epilogue,
    geometry: Geometry,
    *,
    bias: Tensor | None = None,
    residual: Codes | Tensor | None = None,
    codes: bool = True,
    bits: bool = True,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> ConvResult:
    """quantize(activation(conv(x, weight) + bias + residual)), read as codes and written as codes.

    Args:
        x: activations for which `fits`.
        weight: of the convolution; one group.
        amax: (), the range of the result.
        epilogue: what follows the convolution; one range, integers of at most 8 bits and a sign.
        geometry: stride, padding (with zeros), dilation.
        bias: (O,), floating point.
        residual: codes or floating point, (N, O, OH, OW), channels_last.
        codes: write the codes.
        bits: write the bits of the backward pass.
        dtype: of the quantized values, if they are to be written too.
        tile: None = `default_tile`.

    Returns:
        Codes, bits and values.
    """
    q, w = x.integers, weight.integers
    added, added_amax, added_high = residual if isinstance(residual, Codes) else (residual, amax, 127)
    types = tuple(t if t is None else t.dtype for t in (bias, added, x.amax, weight.amax, added_amax, amax))
    kind = ((x.high, weight.high, added_high), epilogue, geometry, isinstance(residual, Codes), tile)
    compiling = torch.compiler.is_compiling()
    plan: _Plan | None = None
    if not compiling:
        key = (q.shape, q.stride(), w.shape, q.get_device(), types, kind, codes, bits, dtype)
        plan = _PLANS.get(key)
        if plan is None:
            plan = _PLANS[key] = _Plan(_call_of(q, w, *kind), q.get_device())
    call = plan.call if plan is not None else _call_of(q, w, *kind)
    packed = torch.empty(call.bytes, dtype=torch.uint8, device=q.device) if bits else None
    to_codes, written = empty_last(call.shape, torch.int8, q.device) if codes else (None, None)
    to_value, value = empty_last(call.shape, dtype, q.device) if dtype else (None, None)
    tensors = (q, w, bias, added, x.amax, weight.amax, added_amax, amax, to_codes, packed, to_value)
    if plan is not None:
        plan.launch(plan.device, *tensors)
    else:  # launched by the compiler's own code, which knows no limit of registers
        t = call.tile
        _conv_kernel[call.grid](*tensors, *call.constants, num_warps=t.warps, num_stages=t.stages)
    return ConvResult(written, packed, value)


class _Call(NamedTuple):
    """What shapes alone tell of a launch.

    Attributes:
        shape: of the result.
        bytes: of its bits.
        grid, constants, tile: of the kernel.
    """

    shape: tuple[int, int, int, int]
    bytes: int
    grid: tuple[int]
    constants: tuple[Any, ...]
    tile: Tile


def _call_of(
    q: Tensor,
    w: Tensor,
    highs: tuple[int, int, int],
    epilogue: Epilogue,
    geometry: Geometry,
    added_codes: bool,
    tile: Tile | None,
) -> _Call:
    images, channels, height, width = q.shape
    outputs, _, taps_y, taps_x = w.shape
    out_height, out_width = output_size((height, width), (taps_y, taps_x), geometry)
    rows = images * out_height * out_width
    limited = not torch.compiler.is_compiling()
    t = tile or default_tile(rows, channels, outputs, taps_y * taps_x, limited=limited)
    image_step, _, row_step, pixel_step = q.stride()
    padded = geometry.padding != (0, 0)
    dense = q.is_contiguous(memory_format=torch.channels_last)
    flat = taps_y * taps_x == 1 and geometry.stride == (1, 1) and not padded and dense
    e = epilogue
    constants = (
        rows, channels, outputs, image_step, row_step, channels if flat else pixel_step,
        height, width, out_height, out_width, *geometry.stride, *geometry.padding, *geometry.dilation,
        *map(float, highs), least_kept(e.low), float(e.low), float(e.high), e.lower, e.upper,
        taps_y, taps_x, flat, padded, channels % t.depth == 0, added_codes, t.rows, t.columns, t.depth, t.part,
    )  # fmt: skip
    shape = (images, outputs, out_height, out_width)
    grid = (-(-rows // t.rows) * -(-outputs // t.columns),)
    return _Call(shape, rows * outputs // 8, grid, constants, t)


class _Plan:
    """A call that is made again and again.

    Attributes:
        call: what is launched.
        launch: of the kernel, on the GPU of index `device`.
    """

    def __init__(self, call: _Call, device: int) -> None:
        t = call.tile
        self.call, self.device = call, device
        self.launch = Launch(
            _conv_kernel, call.grid, *call.constants, num_stages=t.stages, num_warps=t.warps, maxnreg=t.registers
        )


_PLANS = Kept()


def output_size(size: tuple[int, int], taps: tuple[int, int], geometry: Geometry) -> tuple[int, int]:
    """(OH, OW) of a convolution of an image of (H, W) with a filter of (R, S)."""
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, taps, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    ]
    return sizes[0], sizes[1]


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width"])
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
    codes_ptr, bits_ptr, value_ptr,
    rows, channels, columns, image_step, row_step, pixel_step,
    height, width, out_height, out_width, stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x,
    x_high, weight_high, residual_high, least, low, high, lower, upper,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, FLAT: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
    ADDED_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(columns, COLUMNS)  # neighbours in time share pixels: those come out of the cache
    first_row = (tl.program_id(0) // strips) * ROWS
    first_column = (tl.program_id(0) % strips) * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = column < columns
    pixel = tl.where(row < rows, row, rows - 1)  # read something that is there; it is not stored
    depth = tl.arange(0, DEPTH)
    if FLAT:
        x_ptr += first_row.to(tl.int64) * pixel_step
        at = (pixel - first_row) * pixel_step
        y = pixel
        x = pixel
    else:
        image = pixel // (out_height * out_width)
        within = pixel % (out_height * out_width)
        y = (within // out_width) * stride_y - pad_y
        x = (within % out_width) * stride_x - pad_x
        at = image * image_step + y * row_step + x * pixel_step
    x_at = at[:, None] + depth[None, :]
    weight_at = tl.where(inside, column, 0)[None, :] * (TAPS_Y * TAPS_X * channels) + depth[:, None]

    total = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    tap_y = 0
    tap_x = 0
    channel = 0
    for _ in range(TAPS_Y * TAPS_X * tl.cdiv(channels, DEPTH)):
        shift = tap_y * dilation_y * row_step + tap_x * dilation_x * pixel_step + channel
        weight_shift = (tap_y * TAPS_X + tap_x) * channels + channel
        if PADDED:
            there = (y + tap_y * dilation_y).to(tl.uint32, bitcast=True) < tl.cast(height, tl.uint32)
            there = there & ((x + tap_x * dilation_x).to(tl.uint32, bitcast=True) < tl.cast(width, tl.uint32))
            if EVEN:
                pixels = tl.load(x_ptr + x_at + shift, mask=there[:, None], other=0)
            else:
                pixels = tl.load(
                    x_ptr + x_at + shift, mask=there[:, None] & (depth < channels - channel)[None, :], other=0
                )
        else:
            if EVEN:
                pixels = tl.load(x_ptr + x_at + shift)
            else:
                pixels = tl.load(x_ptr + x_at + shift, mask=(depth < channels - channel)[None, :], other=0)
        if EVEN:
            filters = tl.load(weight_ptr + weight_at + weight_shift)
        else:
            filters = tl.load(
                weight_ptr + weight_at + weight_shift, mask=(depth < channels - channel)[:, None], other=0
            )
        total = tl.dot(pixels, filters, total, out_dtype=tl.int32)
        channel += DEPTH
        if TAPS_Y * TAPS_X > 1:  # by selection, not by branches: loads behind a branch would not be made ahead of time
            done = channel >= channels
            channel = tl.where(done, 0, channel)
            tap_x = tl.where(done, tap_x + 1, tap_x)
            done = tap_x == TAPS_X
            tap_x = tl.where(done, 0, tap_x)
            tap_y = tl.where(done, tap_y + 1, tap_y)
    _epilogue(
        total, first_row, first_column,
        bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
        codes_ptr, bits_ptr, value_ptr, rows, columns,
        x_high, weight_high, residual_high, least, low, high, lower, upper,
        ADDED_CODES, ROWS, COLUMNS, PART,
    )  # fmt: skip


@triton.jit
def _epilogue(
    total, first_row, first_column,
    bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
    codes_ptr, bits_ptr, value_ptr, rows, columns,
    x_high, weight_high, residual_high, least, low, high, lower, upper,
    ADDED_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    if COLUMNS > PART:  # the epilogue of one half after the other: half the registers
        left, right = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))
        _epilogue(
            left, first_row, first_column,
            bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
            codes_ptr, bits_ptr, value_ptr, rows, columns,
            x_high, weight_high, residual_high, least, low, high, lower, upper,
            ADDED_CODES, ROWS, COLUMNS // 2, PART,
        )  # fmt: skip
        _epilogue(
            right, first_row, first_column + COLUMNS // 2,
            bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
            codes_ptr, bits_ptr, value_ptr, rows, columns,
            x_high, weight_high, residual_high, least, low, high, lower, upper,
            ADDED_CODES, ROWS, COLUMNS // 2, PART,
        )  # fmt: skip
    else:
        x_high = tl.cast(x_high, tl.float32)  # torch.compile hands Python's numbers over in float64
        weight_high = tl.cast(weight_high, tl.float32)
        residual_high = tl.cast(residual_high, tl.float32)
        least = tl.cast(least, tl.float32)
        low = tl.cast(low, tl.float32)
        high = tl.cast(high, tl.float32)
        lower = tl.cast(lower, tl.float32)
        upper = tl.cast(upper, tl.float32)
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        inside = column < columns
        scale, to_steps = step_of(tl.load(amax_ptr), high)
        x_scale = tl.div_rn(tl.load(x_amax_ptr).to(tl.float32), x_high)
        weight_amax = tl.load(weight_amax_ptr + column, mask=inside, other=1.0).to(tl.float32)
        factor = weight_amax / weight_high * (x_scale * to_steps)
        steps = total.to(tl.float32) * factor[None, :]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
            steps += (bias * to_steps)[None, :]
        out_at = tl.arange(0, ROWS)[:, None] * columns + column[None, :]
        base = first_row.to(tl.int64) * columns
        there = (row < rows)[:, None] & inside[None, :]
        if residual_ptr is not None:
            added = tl.load(residual_ptr + base + out_at, mask=there, other=0).to(tl.float32)
            if ADDED_CODES:
                to_steps *= tl.div_rn(tl.load(residual_amax_ptr).to(tl.float32), residual_high)
            steps += added * to_steps
            to_steps = tl.div_rn(1.0, scale)
        least_passed = tl.maximum(lower * to_steps, least)
        most_passed = tl.minimum(upper * to_steps, high + 0.5)
        if bits_ptr is not None:
            passes = ((steps > least_passed) & (steps < most_passed)).to(tl.int32)
            lane = tl.arange(0, 8)
            bits = tl.sum(tl.reshape(passes, [ROWS, COLUMNS // 8, 8]) << lane[None, None, :], axis=2)
            group = first_column // 8 + tl.arange(0, COLUMNS // 8)
            bits_at = tl.arange(0, ROWS)[:, None] * (columns // 8) + group[None, :]
            stored = (row < rows)[:, None] & (group < columns // 8)[None, :]
            tl.store(bits_ptr + first_row.to(tl.int64) * (columns // 8) + bits_at, bits.to(tl.uint8), mask=stored)
        steps = tl.minimum(steps, tl.minimum(upper * to_steps, high), propagate_nan=tl.PropagateNan.ALL)
        steps = tl.maximum(steps, tl.maximum(lower * to_steps, low), propagate_nan=tl.PropagateNan.ALL)
        shifted = steps + 12582912.0  # 1.5 * 2^23: rounds half to even, and the integer stands in the lowest bits
        codes = shifted.to(tl.int32, bitcast=True).to(tl.int8)
        if codes_ptr is not None:
            tl.store(codes_ptr + base + out_at, codes, mask=there)
        if value_ptr is not None:
            value = (shifted - 12582912.0) * scale
            tl.store(value_ptr + base + out_at, value.to(value_ptr.dtype.element_ty), mask=there)
