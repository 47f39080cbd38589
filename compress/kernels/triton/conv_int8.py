"""Convolution on INT8 tensor cores with its epilogue in the same kernel, and as a layer of training."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.epilogue import Epilogue, Window, rounding_threshold
from compress.kernels.fake_quantize import in_type, masked_gradients
from compress.kernels.memory_format import empty_channels_last
from compress.kernels.triton.fake_quantize import plan_of, step_of
from compress.kernels.triton.launch import BoundedCache, Launch, launch, tl, triton
from compress.kernels.triton.pool import pool, unpool


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width"])
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    x_amax_ptr,
    weight_amax_ptr,
    residual_amax_ptr,
    amax_ptr,
    codes_ptr,
    bits_ptr,
    value_ptr,
    rows,
    channels,
    columns,
    image_step,
    row_step,
    pixel_step,
    height,
    width,
    out_height,
    out_width,
    stride_y,
    stride_x,
    pad_y,
    pad_x,
    dilation_y,
    dilation_x,
    x_high,
    weight_high,
    residual_high,
    least,
    low,
    high,
    lower,
    upper,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    FLAT: tl.constexpr,
    PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    ADDED_CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
):
    """Compute a tile of the result. FLAT: 1 x 1 without stride; PADDED, EVEN: as in `_load_pixels`."""
    strips = tl.cdiv(columns, COLUMNS)  # neighbours in time share pixels, which are then read from the cache
    first_row = (tl.program_id(0) // strips) * ROWS
    first_column = (tl.program_id(0) % strips) * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = column < columns
    pixel = tl.where(row < rows, row, rows - 1)  # past the last row, read the last; it is not stored
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
        known = depth < channels - channel
        pixels = _load_pixels(
            x_ptr + x_at + shift, y + tap_y * dilation_y, x + tap_x * dilation_x, height, width, known, PADDED, EVEN
        )
        if EVEN:
            filters = tl.load(weight_ptr + weight_at + weight_shift)
        else:
            filters = tl.load(weight_ptr + weight_at + weight_shift, mask=known[:, None], other=0)
        total = tl.dot(pixels, filters, total, out_dtype=tl.int32)
        channel += DEPTH
        if TAPS_Y * TAPS_X > 1:
            tap_y, tap_x, channel = _next_tap(tap_y, tap_x, channel, channels, TAPS_X)
    _epilogue(
        total,
        first_row,
        first_column,
        bias_ptr,
        residual_ptr,
        x_amax_ptr,
        weight_amax_ptr,
        residual_amax_ptr,
        amax_ptr,
        codes_ptr,
        bits_ptr,
        value_ptr,
        rows,
        columns,
        x_high,
        weight_high,
        residual_high,
        least,
        low,
        high,
        lower,
        upper,
        ADDED_CODES,
        ROWS,
        COLUMNS,
        PART,
    )


@triton.jit
def _load_pixels(ptr, y, x, height, width, known, PADDED: tl.constexpr, EVEN: tl.constexpr):
    """Load channels of a tap's pixels, 0 outside of the image. EVEN: every channel of the step is `known`."""
    if PADDED:
        there = y.to(tl.uint32, bitcast=True) < tl.cast(height, tl.uint32)
        there = there & (x.to(tl.uint32, bitcast=True) < tl.cast(width, tl.uint32))
        pixels = tl.load(ptr, mask=there[:, None] if EVEN else there[:, None] & known[None, :], other=0)
    else:
        pixels = tl.load(ptr) if EVEN else tl.load(ptr, mask=known[None, :], other=0)
    return pixels


@triton.jit
def _next_tap(tap_y, tap_x, channel, channels, TAPS_X: tl.constexpr):
    """Go to the next tap after the last channel, by selection: loads after a branch would not be prefetched."""
    done = channel >= channels
    channel = tl.where(done, 0, channel)
    tap_x = tl.where(done, tap_x + 1, tap_x)
    done = tap_x == TAPS_X
    return tl.where(done, tap_y + 1, tap_y), tl.where(done, 0, tap_x), channel


@triton.jit
def _epilogue(
    total,
    first_row,
    first_column,
    bias_ptr,
    residual_ptr,
    x_amax_ptr,
    weight_amax_ptr,
    residual_amax_ptr,
    amax_ptr,
    codes_ptr,
    bits_ptr,
    value_ptr,
    rows,
    columns,
    x_high,
    weight_high,
    residual_high,
    least,
    low,
    high,
    lower,
    upper,
    ADDED_CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):
    if COLUMNS > PART:
        left, right = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))
        _epilogue(
            left,
            first_row,
            first_column,
            bias_ptr,
            residual_ptr,
            x_amax_ptr,
            weight_amax_ptr,
            residual_amax_ptr,
            amax_ptr,
            codes_ptr,
            bits_ptr,
            value_ptr,
            rows,
            columns,
            x_high,
            weight_high,
            residual_high,
            least,
            low,
            high,
            lower,
            upper,
            ADDED_CODES,
            ROWS,
            COLUMNS // 2,
            PART,
        )
        _epilogue(
            right,
            first_row,
            first_column + COLUMNS // 2,
            bias_ptr,
            residual_ptr,
            x_amax_ptr,
            weight_amax_ptr,
            residual_amax_ptr,
            amax_ptr,
            codes_ptr,
            bits_ptr,
            value_ptr,
            rows,
            columns,
            x_high,
            weight_high,
            residual_high,
            least,
            low,
            high,
            lower,
            upper,
            ADDED_CODES,
            ROWS,
            COLUMNS // 2,
            PART,
        )
    else:
        _finish(
            total,
            first_row,
            first_column,
            bias_ptr,
            residual_ptr,
            x_amax_ptr,
            weight_amax_ptr,
            residual_amax_ptr,
            amax_ptr,
            codes_ptr,
            bits_ptr,
            value_ptr,
            rows,
            columns,
            x_high,
            weight_high,
            residual_high,
            least,
            low,
            high,
            lower,
            upper,
            ADDED_CODES,
            ROWS,
            COLUMNS,
        )


@triton.jit
def _finish(
    total,
    first_row,
    first_column,
    bias_ptr,
    residual_ptr,
    x_amax_ptr,
    weight_amax_ptr,
    residual_amax_ptr,
    amax_ptr,
    codes_ptr,
    bits_ptr,
    value_ptr,
    rows,
    columns,
    x_high,
    weight_high,
    residual_high,
    least,
    low,
    high,
    lower,
    upper,
    ADDED_CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    x_high = tl.cast(x_high, tl.float32)  # torch.compile passes Python's numbers in float64
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
    if bits_ptr is not None:
        least_passed = tl.maximum(lower * to_steps, least)
        most_passed = tl.minimum(upper * to_steps, high + 0.5)
        passes = (steps > least_passed) & (steps < most_passed)
        _store_bits(bits_ptr, passes, first_row, first_column, rows, columns, ROWS, COLUMNS)
    steps = tl.minimum(steps, tl.minimum(upper * to_steps, high), propagate_nan=tl.PropagateNan.ALL)
    steps = tl.maximum(steps, tl.maximum(lower * to_steps, low), propagate_nan=tl.PropagateNan.ALL)
    shifted = steps + 12582912.0  # 1.5 * 2^23: rounds half to even, and the integer is in the lowest bits
    if codes_ptr is not None:
        tl.store(codes_ptr + base + out_at, shifted.to(tl.int32, bitcast=True).to(tl.int8), mask=there)
    if value_ptr is not None:
        value = (shifted - 12582912.0) * scale
        tl.store(value_ptr + base + out_at, value.to(value_ptr.dtype.element_ty), mask=there)


@triton.jit
def _store_bits(bits_ptr, passes, first_row, first_column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pack a tile of booleans along its columns and store it; the number of all columns is a multiple of eight."""
    lane = tl.arange(0, 8)
    bits = tl.sum(tl.reshape(passes.to(tl.int32), [ROWS, COLUMNS // 8, 8]) << lane[None, None, :], axis=2)
    row = tl.arange(0, ROWS)
    group = first_column // 8 + tl.arange(0, COLUMNS // 8)
    at = row[:, None] * (columns // 8) + group[None, :]
    there = (first_row + row < rows)[:, None] & (group < columns // 8)[None, :]
    tl.store(bits_ptr + first_row.to(tl.int64) * (columns // 8) + at, bits.to(tl.uint8), mask=there)


class Codes(NamedTuple):
    """A tensor as int8, (N, C, H, W) or (O, C, R, S) channels_last; one step of `amax`, () or (O,), is amax / high."""

    integers: Tensor
    amax: Tensor
    high: int = 127


class Geometry(NamedTuple):
    """Stride, padding and dilation; each (vertical, horizontal), as in `torch.nn.Conv2d`."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


class ConvTile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        rows: output pixels.
        columns: output channels.
        depth: input channels of one step.
        stages: steps whose loads are in flight at a time.
        part: columns that the epilogue holds in registers at a time.
        registers: limit per thread; None = the compiler decides.
    """

    rows: int
    columns: int
    depth: int
    stages: int = 3
    warps: int = 8
    part: int = 64
    registers: int | None = None


class ConvResult(NamedTuple):
    """The results of the kernel; None unless asked for.

    Attributes:
        codes: (N, O, OH, OW) int8, channels_last.
        bits: where the gradient passes, packed (`compress.kernels.memory_format`).
        value: the quantized values, shape and layout of `codes`.
    """

    codes: Tensor | None
    bits: Tensor | None
    value: Tensor | None


def default_tile(pixels: int, channels: int, outputs: int, taps: int = 1, *, limited: bool = True) -> ConvTile:
    """A tile for `pixels` output pixels; `limited`: a limit of registers can be set."""
    # Within 5 % of the best of seven tiles for most of ResNet-50's shapes at batch 128 on an H200, within 13 % for all.
    depth = 64 if channels > 32 else 32
    narrow = ConvTile(128, 64, depth, 4, 4, 32, 168)
    if min(channels, outputs) <= 64 or (not limited and channels * taps < 512):
        return narrow
    depth = 128 if channels % 128 == 0 else depth
    if pixels * outputs < 256 * 128 * 128:  # fewer programs than would fill the multiprocessors twice
        return ConvTile(64, 128, depth, 3, 4, 32, 168)
    return ConvTile(128, 128, depth, 3, 8, 64 if limited else 32, 128)


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
    tile: ConvTile | None = None,
) -> ConvResult:
    """Compute quantize(activation(conv(x, weight) + bias + residual)), from codes to codes.

    - `x`: activations for which `fits`; `weight`: one group.
    - `epilogue`: one range `amax`, (); integers of at most 8 bits and a sign.
    - `residual`: codes or floating point, (N, O, OH, OW), channels_last.
    - `bits`: write the bits of the backward pass.
    - `dtype`: of the quantized values; None = they are not written.
    """
    q, w = x.integers, weight.integers
    added, added_amax, added_high = residual if isinstance(residual, Codes) else (residual, amax, 127)
    types = tuple(t if t is None else t.dtype for t in (bias, added, x.amax, weight.amax, added_amax, amax))
    kind = ((x.high, weight.high, added_high), epilogue, geometry, isinstance(residual, Codes), tile)
    compiling = torch.compiler.is_compiling()
    plan: tuple[_Call, Launch] | None = None
    if not compiling:
        key = (q.shape, q.stride(), w.shape, q.get_device(), types, kind, codes, bits, dtype)
        plan = _PLANS.get(key)
        if plan is None:
            plan = _PLANS[key] = _planned(_call_of(q, w, *kind))
    call = plan[0] if plan is not None else _call_of(q, w, *kind)
    packed = torch.empty(call.bytes, dtype=torch.uint8, device=q.device) if bits else None
    to_codes, written = empty_channels_last(call.shape, torch.int8, q.device) if codes else (None, None)
    to_value, value = empty_channels_last(call.shape, dtype, q.device) if dtype else (None, None)
    tensors = (q, w, bias, added, x.amax, weight.amax, added_amax, amax, to_codes, packed, to_value)
    if plan is not None:
        plan[1](q.get_device(), *tensors)
    else:  # launched by torch's compiled code, which cannot set a limit of registers
        t = call.tile
        conv_kernel[call.grid](*tensors, *call.constants, num_warps=t.warps, num_stages=t.stages)
    return ConvResult(written, packed, value)


class _Call(NamedTuple):
    shape: tuple[int, int, int, int]
    bytes: int
    grid: tuple[int]
    constants: tuple[Any, ...]
    tile: ConvTile


def _call_of(
    q: Tensor,
    w: Tensor,
    highs: tuple[int, int, int],
    epilogue: Epilogue,
    geometry: Geometry,
    added_codes: bool,
    tile: ConvTile | None,
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
        rows,
        channels,
        outputs,
        image_step,
        row_step,
        channels if flat else pixel_step,
        height,
        width,
        out_height,
        out_width,
        *geometry.stride,
        *geometry.padding,
        *geometry.dilation,
        *map(float, highs),
        rounding_threshold(e.low),
        float(e.low),
        float(e.high),
        e.lower,
        e.upper,
        taps_y,
        taps_x,
        flat,
        padded,
        channels % t.depth == 0,
        added_codes,
        t.rows,
        t.columns,
        t.depth,
        t.part,
    )
    shape = (images, outputs, out_height, out_width)
    grid = (-(-rows // t.rows) * -(-outputs // t.columns),)
    return _Call(shape, rows * outputs // 8, grid, constants, t)


def _planned(call: _Call) -> tuple[_Call, Launch]:
    options = {"num_stages": call.tile.stages, "num_warps": call.tile.warps, "maxnreg": call.tile.registers}
    return call, Launch(conv_kernel, call.grid, *call.constants, **options)


_PLANS = BoundedCache()


def output_size(size: tuple[int, int], taps: tuple[int, int], geometry: Geometry) -> tuple[int, int]:
    """(OH, OW) of a convolution of an image of (H, W) with a filter of (R, S)."""
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, taps, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    ]
    return sizes[0], sizes[1]


_CODES_TILE = 4096  # elements of a program that computes codes of values
_LAST = torch.channels_last


class Layer(NamedTuple):
    """A convolution with its epilogue, besides the tensors.

    Attributes:
        stem: whether it is rearranged first (`stem_image`).
        highs: the integers of amax, of input, weight and residual.
        window: of the max pool after it; None = there is none.
        emits: whether codes of the result are written.
    """

    geometry: Geometry
    stem: bool
    highs: tuple[int, int, int]
    epilogue: Epilogue
    window: Window | None
    emits: bool


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    codes: Tensor,
    weight_codes: Tensor,
    residual_codes: Tensor | None,
    x_amax: Tensor,
    weight_amax: Tensor,
    residual_amax: Tensor,
    amax: Tensor,
    layer: Layer,
) -> tuple[Tensor, Tensor]:
    """Compute quantize(activation(conv(x, weight) + bias + residual)), pooled, from codes; the gradient is of floats.

    `x` is (N, C, H, W) channels_last, codes are int8; a residual without codes is read itself. Returns quantized values
    in the type of `x`, and their codes, empty unless wanted; channels_last.
    """
    added = residual_codes if residual_codes is not None else residual
    # Torch's compiler takes no tensor twice: the residual may be the input, and share its range
    if torch.compiler.is_compiling():
        added = None if added is None else added.detach()
        residual = None if residual is None else residual.view_as(residual)
        residual_amax = residual_amax.detach()
    ranges = (x_amax, weight_amax, residual_amax, amax)
    numbers = (
        tuple(layer.geometry),
        *layer[1:3],
        tuple(layer.epilogue),
        layer.window and tuple(layer.window),
        layer.emits,
    )
    return _Convolve.apply(x, weight, bias, residual, codes, weight_codes, added, *ranges, numbers)


class _Convolve(torch.autograd.Function):
    """Keeps the quantized input and weight, and the packed bits or a pool's places."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        codes: Tensor,
        weight_codes: Tensor,
        added: Tensor | None,
        x_amax: Tensor,
        weight_amax: Tensor,
        residual_amax: Tensor,
        amax: Tensor,
        numbers: tuple[Any, ...],
    ) -> tuple[Tensor | None, Tensor]:
        geometry, stem, highs, epilogue, window, emits = numbers
        epilogue, dtype = Epilogue(*epilogue), x.dtype
        read: Codes | Tensor | None = added
        if added is not None and added.dtype == torch.int8:
            read = Codes(added, residual_amax, highs[2])
        pools = window is not None
        written, bits, value = _conv_codes(
            Codes(codes, x_amax, highs[0]),
            Codes(weight_codes, weight_amax, highs[1]),
            read,
            amax,
            epilogue,
            Geometry(*geometry),
            stem,
            bias,
            emits or pools,
            None if pools else dtype,
        )
        ctx.size = ctx.plan = None
        if pools and written is not None:
            ctx.size = tuple(written.shape[2:])
            pooled = pool(written, amax, epilogue, Window(*window), dtype=dtype, bits=bits, emits=emits)
            value, bits, written = pooled
        elif value is not None and not torch.compiler.is_compiling():
            ctx.plan = plan_of(value, bias, None, amax, epilogue, dtype)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        written = codes.new_empty(0) if written is None else written
        ctx.save_for_backward(x, weight, bits)
        ctx.mark_non_differentiable(written)
        ctx.geometry, ctx.window = geometry, window
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        return value, written

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        if ctx.window is not None:
            passed, bias_grad = unpool(grad, mask, Window(*ctx.window), ctx.size, x.dtype, wants_bias)
        else:
            grad = grad.contiguous(memory_format=_LAST)
            passed, bias_grad = masked_gradients(grad, mask, ctx.plan, x.dtype, 1, wants_bias)
        x_grad, weight_grad, _none = torch.ops.aten.convolution_backward(
            passed, x, weight, None, *ctx.geometry, False, (0, 0), 1, (wants_x, wants_weight, False)
        )
        return (
            x_grad if wants_x else None,
            weight_grad if wants_weight else None,
            in_type(bias_grad, ctx.bias_dtype),
            in_type(passed, ctx.residual_dtype),
            *(None,) * 8,
        )


def _conv_codes(
    codes: Codes,
    weight: Codes,
    residual: Codes | Tensor | None,
    amax: Tensor,
    epilogue: Epilogue,
    geometry: Geometry,
    stem: bool,
    bias: Tensor | None,
    emits: bool,
    dtype: torch.dtype | None,
) -> ConvResult:
    """As `conv_codes`, for tensors in any layout; a stem is rearranged first."""
    q, w = codes.integers, weight.integers
    if stem:
        q, w = stem_image(q, w.shape[2], geometry.padding[0]), stem_filter(w, geometry.padding[0])
        geometry = Geometry()
    else:
        q, w = q.contiguous(memory_format=_LAST), w.contiguous(memory_format=_LAST)
    if isinstance(residual, Codes):
        residual = Codes(residual.integers.contiguous(memory_format=_LAST), *residual[1:])
    elif residual is not None:
        residual = residual.contiguous(memory_format=_LAST)
    return conv_codes(
        Codes(q, *codes[1:]),
        Codes(w, *weight[1:]),
        amax,
        epilogue,
        geometry,
        bias=bias,
        residual=residual,
        codes=emits,
        dtype=dtype,
    )


def codes_of(value: Tensor, amax: Tensor, high: int) -> Tensor:
    """The integers of quantized values, dense and floating point, of the range `amax`: int8, laid out as `value`."""
    codes = torch.empty_like(value, dtype=torch.int8)
    n = value.numel()
    launch(_codes_kernel, (triton.cdiv(n, _CODES_TILE),), (value, amax, codes), (n, float(high), _CODES_TILE))
    return codes


@triton.jit
def _codes_kernel(value_ptr, amax_ptr, codes_ptr, n, high, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(value_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    steps = value * tl.div_rn(high, tl.load(amax_ptr).to(tl.float32))  # within a quarter of an integer
    shifted = steps + 12582912.0  # 1.5 * 2^23: rounds, and the integer is in the lowest bits
    tl.store(codes_ptr + at, shifted.to(tl.int32, bitcast=True).to(tl.int8), mask=at < n)


_BLOCK = 2  # pixels a side
_CHANNELS = 16  # of a block, padded


class StemPlan(NamedTuple):
    """Position of a square filter of stride 2 on blocks, with (even) zeros before image and filter."""

    before: int
    lead: int
    blocks: int


def stem_plan(taps: int, padding: int) -> StemPlan:
    lead = padding % _BLOCK
    return StemPlan(padding + lead, lead, -(-(taps + lead) // _BLOCK))


def stem_fits(weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]) -> bool:
    """Whether a convolution can be rearranged: at most 4 channels, a square filter, stride 2."""
    _, channels, taps_y, taps_x = weight.shape
    square = taps_y == taps_x and padding[0] == padding[1]
    blocks = stem_plan(taps_y, padding[0]).blocks
    whole = blocks * _CHANNELS % 32 == 0  # of the tensor cores' step
    return channels <= 4 and square and stride == (2, 2) and dilation == (1, 1) and whole


def stem_image(codes: Tensor, taps: int, padding: int) -> Tensor:
    """Codes (N, C <= 4, H, W) as overlapping rows of blocks (N, 16 * blocks, rows of blocks, OW), for `stem_filter`."""
    plan = stem_plan(taps, padding)
    images, channels, height, width = codes.shape
    out = [(size + 2 * padding - taps) // _BLOCK + 1 for size in (height, width)]
    rows, columns = (size - 1 + plan.blocks for size in out)
    after = [_BLOCK * n - size - plan.before for n, size in ((columns, width), (rows, height))]
    padded = F.pad(codes, (plan.before, after[0], plan.before, after[1]))  # pixels past the last filter are cut off
    blocks = padded.reshape(images, channels, rows, _BLOCK, columns, _BLOCK).permute(0, 2, 4, 3, 5, 1)
    blocks = F.pad(blocks.reshape(images, rows, columns, 4 * channels), (0, _CHANNELS - 4 * channels)).contiguous()
    row_step = columns * _CHANNELS
    return blocks.as_strided((images, plan.blocks * _CHANNELS, rows, out[1]), (rows * row_step, 1, row_step, _CHANNELS))


def stem_filter(codes: Tensor, padding: int) -> Tensor:
    """The filter of `stem_image`: (O, C, R, R) becomes (O, 16 * blocks, blocks, 1), channels_last."""
    outputs, channels, taps, _ = codes.shape
    plan = stem_plan(taps, padding)
    after = _BLOCK * plan.blocks - taps - plan.lead
    padded = F.pad(codes, (plan.lead, after, plan.lead, after))
    blocks = padded.reshape(outputs, channels, plan.blocks, _BLOCK, plan.blocks, _BLOCK).permute(0, 2, 4, 3, 5, 1)
    blocks = F.pad(blocks.reshape(outputs, plan.blocks, plan.blocks, 4 * channels), (0, _CHANNELS - 4 * channels))
    rows = blocks.reshape(outputs, plan.blocks, 1, plan.blocks * _CHANNELS)
    return rows.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
