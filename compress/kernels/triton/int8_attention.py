"""Attention for inference in one kernel: softmax(scale q k) on a grid, times v; or sums over sampled places."""

# ruff: noqa: ANN001, ANN202, N803  (kernels: Triton types parameters, and constants are in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.triton.int8_epilogue import Finish, Outputs, finished, on_integers, to_codes

_LOG2_E = 1.4426950408889634


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    factor: float,
    probability: float,
    limits: tuple[int, int],
    finish: Finish,
    codes: Tensor | None,
    value: Tensor | None,
    *,
    queries: int = 64,
    keys: int = 64,
    warps: int = 4,
) -> None:
    """Launch the attention of all heads.

    - `q`, `k`, `v`: codes (B, H, L, D), (B, H, D, S), (B, H, S, E); queries and keys may be values.
    - `mask`: float32 (M, H, L, S), strides of 0 where it broadcasts; M is B or divides it (then it repeats).
    - `factor`: of a product of codes, in the scores.
    - `probability`, `limits`: scale, lowest and highest integer of the probabilities' grid.
    - `finish`: its factor is that of a sum of products of codes.
    - `codes`, `value`: (B, H, L, E), what is written; None = not.
    - `queries`, `keys`: of one program, of one step.
    """
    batch, heads, length, depth = q.shape
    size, width = v.shape[2], v.shape[3]
    steps = [(0, 0, 0, 0) if t is None else t.stride() for t in (q, k, v, mask, codes, value)]
    masks = batch if mask is None else mask.shape[0]
    _attention_kernel[(triton.cdiv(length, queries), batch * heads)](
        q,
        k,
        v,
        mask,
        finish.vectors,
        Outputs(None, codes, value),
        finish.numbers,
        heads,
        length,
        size,
        depth,
        width,
        masks,
        *steps,
        factor * _LOG2_E,
        _LOG2_E,
        1.0 / probability,
        *map(float, limits),
        finish.kind,
        queries,
        keys,
        *(max(16, triton.next_power_of_2(count)) for count in (depth, width)),
        size <= keys,
        num_warps=warps,
    )


@triton.jit
def _scores(q, k_ptr, key, depth_at, k_step, depth, size, mask_ptr, mask_step, factor, mask_factor):
    """Scores of a block of keys in base 2; minus infinity where there is no key."""
    there = (depth_at < depth)[:, None] & (key < size)[None, :]
    k = tl.load(k_ptr + depth_at[:, None] * k_step[2] + key[None, :] * k_step[3], mask=there, other=0)
    if q.dtype == tl.int8:
        scores = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32) * factor
    else:
        scores = tl.dot(q, k.to(q.dtype), out_dtype=tl.float32, input_precision="ieee") * factor
    if mask_ptr is not None:
        scores += tl.load(mask_ptr + key[None, :] * mask_step[3], mask=(key < size)[None, :], other=0.0) * mask_factor
    return tl.where((key < size)[None, :], scores, float("-inf"))


@triton.jit
def _mixed(p, v_ptr, key, column, v_step, size, inside, sums):
    there = (key < size)[:, None] & inside[None, :]
    v = tl.load(v_ptr + key[:, None] * v_step[2] + column[None, :] * v_step[3], mask=there, other=0)
    return tl.dot(p.to(tl.float16), v.to(tl.float16), sums, out_dtype=tl.float32)


@triton.jit
def _write(sums, codes_at, value_at, there, column, inside, vectors, outputs, numbers, KIND: tl.constexpr):
    y, steps = finished(
        sums, sums, tl.load(vectors.factor), tl.load(vectors.bias), vectors, column, inside, numbers, KIND
    )
    if KIND.writes_codes:
        codes = to_codes(steps, numbers.low, numbers.high, numbers.zero, KIND.has_zero)
        tl.store(outputs.codes + codes_at, codes, mask=there)
    if KIND.writes_value:
        tl.store(outputs.value + value_at, y.to(outputs.value.dtype.element_ty), mask=there)


@triton.jit
def _in_two_passes(
    q,
    k_ptr,
    v_ptr,
    depth_at,
    column,
    k_step,
    v_step,
    depth,
    size,
    inside,
    rows_ptr,
    mask_step,
    score,
    mask_score,
    to_probability,
    p_low,
    p_high,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    for start in range(0, size, KEYS):
        key = start + tl.arange(0, KEYS)
        scores = _scores(q, k_ptr, key, depth_at, k_step, depth, size, rows_ptr, mask_step, score, mask_score)
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(scores - higher[:, None]), axis=1)
        largest = higher
    shift = largest + tl.log2(total)  # exp2(score - shift) is the probability
    sums = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    for start in range(0, size, KEYS):
        key = start + tl.arange(0, KEYS)
        scores = _scores(q, k_ptr, key, depth_at, k_step, depth, size, rows_ptr, mask_step, score, mask_score)
        p = on_integers(tl.exp2(scores - shift[:, None]) * to_probability, p_low, p_high)
        sums = _mixed(p, v_ptr, key, column, v_step, size, inside, sums)
    return sums


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    vectors,
    outputs,
    numbers,
    heads,
    length,
    size,
    depth,
    width,
    masks,
    q_step,
    k_step,
    v_step,
    mask_step,
    codes_step,
    value_step,
    score,
    mask_score,
    to_probability,
    p_low,
    p_high,
    KIND: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    image = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    depth_at = tl.arange(0, DEPTH)
    there = (query < length)[:, None] & (depth_at < depth)[None, :]
    q_ptr += image * q_step[0] + head * q_step[1]
    q = tl.load(q_ptr + query[:, None] * q_step[2] + depth_at[None, :] * q_step[3], mask=there, other=0)
    if q_ptr.dtype.element_ty == tl.int8 and DEPTH < 32:  # too few for the products of integers
        q = q.to(tl.float16)
    k_ptr += image * k_step[0] + head * k_step[1]
    v_ptr += image * v_step[0] + head * v_step[1]
    rows_ptr = mask_ptr
    if mask_ptr is not None:
        last = tl.minimum(query, length - 1)
        rows_ptr = mask_ptr + (image % masks) * mask_step[0] + head * mask_step[1] + last[:, None] * mask_step[2]
    column = tl.arange(0, WIDTH)
    inside = column < width
    if WHOLE:
        key = tl.arange(0, KEYS)
        scores = _scores(q, k_ptr, key, depth_at, k_step, depth, size, rows_ptr, mask_step, score, mask_score)
        scores = tl.exp2(scores - tl.maximum(tl.max(scores, axis=1), -1e30)[:, None])
        p = on_integers(scores * (to_probability / tl.sum(scores, axis=1))[:, None], p_low, p_high)
        sums = _mixed(p, v_ptr, key, column, v_step, size, inside, tl.zeros([QUERIES, WIDTH], dtype=tl.float32))
    else:
        sums = _in_two_passes(
            q,
            k_ptr,
            v_ptr,
            depth_at,
            column,
            k_step,
            v_step,
            depth,
            size,
            inside,
            rows_ptr,
            mask_step,
            score,
            mask_score,
            to_probability,
            p_low,
            p_high,
            QUERIES,
            KEYS,
            WIDTH,
        )
    codes_at = image * codes_step[0] + head * codes_step[1]
    codes_at += query[:, None] * codes_step[2] + column[None, :] * codes_step[3]
    value_at = image * value_step[0] + head * value_step[1]
    value_at += query[:, None] * value_step[2] + column[None, :] * value_step[3]
    there = (query < length)[:, None] & inside[None, :]
    _write(sums, codes_at, value_at, there, column, inside, vectors, outputs, numbers, KIND)


def sampled_sum(
    images: Sequence[Tensor],
    grids: Sequence[Tensor],
    weights: Tensor,
    finish: Finish,
    codes: Tensor | None,
    value: Tensor | None,
    *,
    aligned: bool = False,
    queries: int = 8,
    warps: int = 2,
) -> None:
    """Launch the weighted sum over all points of what grids sample between the pixels of images.

    - `images`, `grids`: values (N, C, H, W), and places (N, L, points, 2) in each in -1 to 1; beyond are zeros.
    - `weights`: (N, 1, L, points of all grids).
    - `aligned`: -1 and 1 are the middles of the outermost pixels, not their edges.
    - `codes`, `value`: (N, C, L), what is written; None = not.
    - `queries`: of one program.
    """
    count, channels = images[0].shape[:2]
    length = weights.shape[2]
    outputs = [t for t in (codes, value) if t is not None]
    _sampled_kernel[(triton.cdiv(length, queries), count)](
        tuple(images),
        tuple(tuple(x.stride()) for x in images),
        tuple(tuple(x.shape[2:]) for x in images),
        tuple(grids),
        tuple(tuple(x.stride()) for x in grids),
        weights,
        weights.stride(0),
        weights.stride(2),
        weights.stride(3),
        finish.vectors,
        Outputs(None, codes, value),
        finish.numbers,
        length,
        channels,
        outputs[0].stride() if codes is not None else (0, 0, 0),
        outputs[-1].stride() if value is not None else (0, 0, 0),
        tuple(x.shape[2] for x in grids),
        aligned,
        finish.kind,
        queries,
        triton.next_power_of_2(channels),
        num_warps=warps,
    )


@triton.jit
def _corner(image_ptr, step, y, x, size, there):
    """The pixels at whole places (queries), all channels; zeros beyond the image."""
    inside = (y >= 0) & (y < size[0]) & (x >= 0) & (x < size[1])
    at = tl.where(inside, y, 0.0).to(tl.int32) * step[2] + tl.where(inside, x, 0.0).to(tl.int32) * step[3]
    return tl.load(image_ptr + at[:, None], mask=inside[:, None] & there, other=0.0).to(tl.float32)


@triton.jit
def _sampled_kernel(
    images,
    image_steps,
    sizes,
    grids,
    grid_steps,
    weights_ptr,
    weight_image_step,
    weight_query_step,
    weight_point_step,
    vectors,
    outputs,
    numbers,
    length,
    channels,
    codes_step,
    value_step,
    POINTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    QUERIES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, CHANNELS)
    real, inside = query < length, column < channels
    there = real[:, None] & inside[None, :]
    weights_ptr += image * weight_image_step + query * weight_query_step
    sums = tl.zeros([QUERIES, CHANNELS], dtype=tl.float32)
    for level in tl.static_range(len(POINTS)):
        step, size, grid_step = image_steps[level], sizes[level], grid_steps[level]
        pixels = images[level] + image * step[0] + column[None, :] * step[1]
        places = grids[level] + image * grid_step[0] + query * grid_step[1]
        for point in range(POINTS[level]):
            x = tl.load(places + point * grid_step[2], mask=real, other=0.0).to(tl.float32)
            y = tl.load(places + point * grid_step[2] + grid_step[3], mask=real, other=0.0).to(tl.float32)
            if ALIGNED:
                x = (x + 1.0) * 0.5 * (size[1] - 1)
                y = (y + 1.0) * 0.5 * (size[0] - 1)
            else:
                x = ((x + 1.0) * size[1] - 1.0) * 0.5
                y = ((y + 1.0) * size[0] - 1.0) * 0.5
            # Coordinates that are far outside, infinite or NaN are moved just outside the image, where all is zero.
            x = tl.minimum(tl.maximum(x, -2.0), size[1] + 1.0)
            y = tl.minimum(tl.maximum(y, -2.0), size[0] + 1.0)
            weight = tl.load(weights_ptr + point * weight_point_step, mask=real, other=0.0).to(tl.float32)
            left, above = tl.floor(x), tl.floor(y)
            right, below = (x - left)[:, None], (y - above)[:, None]
            upper = _corner(pixels, step, above, left, size, there) * (1.0 - right)
            upper += _corner(pixels, step, above, left + 1.0, size, there) * right
            lower = _corner(pixels, step, above + 1.0, left, size, there) * (1.0 - right)
            lower += _corner(pixels, step, above + 1.0, left + 1.0, size, there) * right
            sums += (upper * (1.0 - below) + lower * below) * weight[:, None]
        weights_ptr += POINTS[level] * weight_point_step
    codes_at = image * codes_step[0] + column[None, :] * codes_step[1] + query[:, None] * codes_step[2]
    value_at = image * value_step[0] + column[None, :] * value_step[1] + query[:, None] * value_step[2]
    _write(sums, codes_at, value_at, there, column, inside, vectors, outputs, numbers, KIND)
