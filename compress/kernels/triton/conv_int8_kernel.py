"""The kernel of `conv_int8`: an implicit matrix product of codes on INT8 tensor cores, and its epilogue."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives their parameters types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from compress.kernels.triton.fake_quantize import step_of
from compress.kernels.triton.language import tl, triton


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width"])
def conv_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
    codes_ptr, bits_ptr, value_ptr,
    rows, channels, columns, image_step, row_step, pixel_step,
    height, width, out_height, out_width, stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x,
    x_high, weight_high, residual_high, least, low, high, lower, upper,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, FLAT: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
    ADDED_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
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
        total, first_row, first_column,
        bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
        codes_ptr, bits_ptr, value_ptr, rows, columns,
        x_high, weight_high, residual_high, least, low, high, lower, upper,
        ADDED_CODES, ROWS, COLUMNS, PART,
    )  # fmt: skip


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
    total, first_row, first_column,
    bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
    codes_ptr, bits_ptr, value_ptr, rows, columns,
    x_high, weight_high, residual_high, least, low, high, lower, upper,
    ADDED_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    if COLUMNS > PART:
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
        _finish(
            total, first_row, first_column,
            bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
            codes_ptr, bits_ptr, value_ptr, rows, columns,
            x_high, weight_high, residual_high, least, low, high, lower, upper,
            ADDED_CODES, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _finish(
    total, first_row, first_column,
    bias_ptr, residual_ptr, x_amax_ptr, weight_amax_ptr, residual_amax_ptr, amax_ptr,
    codes_ptr, bits_ptr, value_ptr, rows, columns,
    x_high, weight_high, residual_high, least, low, high, lower, upper,
    ADDED_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
