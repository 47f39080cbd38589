"""Operations with a window along each axis: convolutions, pools, resizes, padding, windowed attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from compress.receptive.fields import Call, Field, NoRuleError, compact, mix, read
from compress.receptive.windows import (
    IDENTITY,
    Window,
    interpolated,
    nearest,
    proportional,
    sliding,
    transposed,
)

PERIODIC = "has a pattern that is too long to follow"


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A kernel along the last axes of a tensor; `before` is the padding before the first position of each."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]

    def windows(self, rank: int, make: Callable[..., Window] = sliding) -> dict[int, Window]:
        """The window of each axis of a tensor with `rank` axes."""
        axes = enumerate(zip(self.size, self.stride, self.dilation, self.before, strict=True), rank - len(self.size))
        return {d: make(k, stride=s, dilation=x, padding=p) for d, (k, s, x, p) in axes}


def _slide(field: Field, windows: dict[int, Window], shape: Sequence[int], name: str) -> Field:
    """The field of units that depend on `windows[dim]`; `shape` is the result's."""
    bounds = []
    for bound in field.bounds:
        for dim, window in windows.items():
            bound = read(bound, dim, window, shape[dim])
        bounds.append(bound)
    views = []
    for view, axis_dim in zip(field.views, field.dims, strict=True):
        if axis_dim is not None:
            views.append(view.through(windows.get(axis_dim, IDENTITY), f"{name} {PERIODIC}"))
        elif any(field.shape[d] > 1 and window != IDENTITY for d, window in windows.items()):
            views.append(view.forget(f"{name} depends on positions whose axis is not known"))
        else:
            views.append(view)
    return replace(field, bounds=tuple(bounds), views=tuple(views))


def _channels(field: Field, dim: int, groups: int, outputs: int, name: str) -> Field:
    if groups == 1:
        field = mix(field, [dim], name, keep=False)
    bounds = (_by_group(bound, dim, groups) for bound in field.bounds)
    return replace(field, bounds=tuple(_repeated(bound, dim, outputs // groups) for bound in bounds))


def _by_group(bound: Tensor, dim: int, groups: int) -> Tensor:
    small = compact(bound)
    shape = [groups if d == dim else s for d, s in enumerate(bound.shape)]
    return (small if small.shape[dim] == 1 else small.unflatten(dim, (groups, -1)).amin(dim + 1)).expand(shape)


def _repeated(bound: Tensor, dim: int, times: int) -> Tensor:
    small = compact(bound)
    shape = [s * times if d == dim else s for d, s in enumerate(bound.shape)]
    return (small if small.shape[dim] == 1 else small.repeat_interleave(times, dim)).expand(shape)


def _per_axis(value: Any, rank: int, name: str) -> tuple[int, ...]:
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values = values * rank
    if len(values) != rank or not all(isinstance(v, int) for v in values):
        raise NoRuleError(f"its {name} is {value}, not a number for each of {rank} axes")
    return values


def _weight_and_kernel(call: Call) -> tuple[Tensor, tuple[int, ...]]:
    weight = call.argument(1, "weight")
    if not isinstance(weight, Tensor):
        raise NoRuleError("its weight depends on the image")
    return weight, tuple(weight.shape[2:])


def _conv(call: Call) -> Field:
    field, (weight, kernel) = call.field(0), _weight_and_kernel(call)
    rank, shape = len(kernel), call.result_shape()
    stride = _per_axis(call.argument(3, "stride", 1), rank, "stride")
    dilation = _per_axis(call.argument(5, "dilation", 1), rank, "dilation")
    before = _padding(
        call, call.argument(4, "padding", 0), field.shape[-rank:], shape[-rank:], kernel, stride, dilation
    )
    mixed = _channels(field, field.bounds[0].ndim - rank - 1, call.argument(6, "groups", 1), weight.shape[0], call.name)
    whole = _Kernel(size=kernel, stride=stride, dilation=dilation, before=before)
    if getattr(call.module, "padding_mode", "zeros") != "zeros":
        return _wrapped(mixed, call, whole, shape)
    return _slide(mixed, whole.windows(len(shape)), shape, call.name)


def _padding(
    call: Call,
    padding: Any,
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """The padding before the first position, checked against the output's size."""
    spans = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same":
        return tuple(span // 2 for span in spans)  # torch pads the odd one after the last position
    if padding == "valid":
        padding = 0
    before = _per_axis(padding, len(kernel), "padding")
    expected = [(n + 2 * p - span - 1) // s + 1 for n, p, span, s in zip(inputs, before, spans, stride, strict=True)]
    if expected == list(outputs):
        return before
    if call.function.endswith("Same"):  # pads in its forward pass as TensorFlow does, the odd one last
        short = [(o - 1) * s + span + 1 - n for n, o, span, s in zip(inputs, outputs, spans, stride, strict=True)]
        return tuple(max(0, total) // 2 for total in short)
    raise NoRuleError(f"its output is {tuple(outputs)} where its kernel, stride and padding give {tuple(expected)}")


def _wrapped(field: Field, call: Call, kernel: _Kernel, shape: Sequence[int]) -> Field:
    """A convolution whose padding copies pixels: only the bounds include them."""
    mode = str(getattr(call.module, "padding_mode", "zeros"))
    axes = list(zip(kernel.size, kernel.dilation, kernel.before, strict=True))
    amounts = [p for k, d, before in reversed(axes) for p in (before, (k - 1) * d - before)]
    padded = replace(field, bounds=tuple(F.pad(b.contiguous(), amounts, mode=mode) for b in field.bounds))
    views = _slide(field, kernel.windows(len(shape)), shape, call.name).views
    plain = replace(kernel, before=(0,) * len(kernel.size))
    return replace(_slide(padded, plain.windows(len(shape)), shape, call.name), views=views)


def _conv_transpose(call: Call) -> Field:
    field, (weight, kernel) = call.field(0), _weight_and_kernel(call)
    rank, shape = len(kernel), call.result_shape()
    groups = call.argument(6, "groups", 1)
    stride = _per_axis(call.argument(3, "stride", 1), rank, "stride")
    padding = _per_axis(call.argument(4, "padding", 0), rank, "padding")
    dilation = _per_axis(call.argument(7, "dilation", 1), rank, "dilation")
    mixed = _channels(field, len(shape) - rank - 1, groups, weight.shape[1] * groups, call.name)
    whole = _Kernel(size=kernel, stride=stride, dilation=dilation, before=padding)
    return _slide(mixed, whole.windows(len(shape), transposed), shape, call.name)


def _pool(call: Call) -> Field:
    field, shape = call.field(0), call.result_shape()
    rank = _rank(call)
    kernel = _per_axis(call.argument(1, "kernel_size"), rank, "kernel_size")
    stride = call.argument(2, "stride", None)
    strides = kernel if stride is None or stride == () or stride == [] else _per_axis(stride, rank, "stride")
    padding = _per_axis(call.argument(3, "padding", 0), rank, "padding")
    dilated = call.kind == "max_pool"
    dilation = _per_axis(call.argument(4, "dilation", 1) if dilated else 1, rank, "dilation")
    whole = _Kernel(size=kernel, stride=strides, dilation=dilation, before=padding)
    return _slide(field, whole.windows(len(shape)), shape, call.name)


def _rank(call: Call) -> int:
    """Spatial dimensions of a pool, from its name (max_pool2d, AvgPool3d)."""
    digits = [c for c in call.function if c.isdigit()]
    if not digits:
        raise NoRuleError("its number of spatial dimensions is not part of its name")
    return int(digits[-1])


def _adaptive_pool(call: Call) -> Field:
    field, shape = call.field(0), call.result_shape()
    rank = _rank(call)
    dims = range(len(shape) - rank, len(shape))
    whole = [d for d in dims if shape[d] == 1]
    field = mix(field, whole, f"{call.name} pools the whole map", keep=False)
    windows = {d: proportional(field.shape[d], shape[d]) for d in dims if d not in whole}
    return _slide(field, _known(windows), shape, call.name)


def _known(windows: dict[int, Window | None]) -> dict[int, Window]:
    if any(window is None for window in windows.values()):
        raise NoRuleError(PERIODIC)
    return {dim: window for dim, window in windows.items() if window is not None}


def _resize(call: Call) -> Field:
    field, shape = call.field(0), call.result_shape()
    rank = len(shape) - 2
    mode = call.argument(3, "mode", "nearest")
    aligned = bool(call.argument(4, "align_corners", False))
    antialias = call.module is None and bool(call.argument(6, "antialias", False))
    scale = call.argument(2, "scale_factor")
    if call.argument(5, "recompute_scale_factor", False) or scale is None:
        scales: Sequence[float | None] = [None] * rank
    else:
        scales = [scale] * rank if isinstance(scale, (int, float)) else list(scale)
    windows = {
        d: _interpolation(mode, field.shape[d], shape[d], scales[d - 2], aligned, antialias)
        for d in range(2, len(shape))
        if field.shape[d] != shape[d]
    }
    return _slide(field, _known(windows), shape, call.name)


def _interpolation(
    mode: str, inputs: int, outputs: int, scale: float | None, aligned: bool, antialias: bool
) -> Window | None:
    half = Fraction(1, 2)
    ratio = Fraction(inputs, outputs) if scale is None else 1 / Fraction(scale).limit_denominator(4096)
    if mode in {"nearest", "nearest-exact"}:
        return nearest(ratio, exact=mode == "nearest-exact")
    if mode == "area":
        return proportional(inputs, outputs)
    if mode not in {"linear", "bilinear", "trilinear", "bicubic"}:
        raise NoRuleError(f"its mode is {mode!r}")
    reach = 2 if mode == "bicubic" else 1
    if aligned:
        ratio = Fraction(inputs - 1, outputs - 1) if outputs > 1 else Fraction(inputs)
        return interpolated(ratio, reach=reach, offset=Fraction(0))
    return interpolated(ratio, reach=reach, offset=ratio * half - half, antialias=antialias)


def _pad(call: Call) -> Field:
    field, shape = call.field(0), call.result_shape()
    amounts = call.argument(1, "padding" if call.module is not None else "pad")
    pairs = (amounts,) * (2 * (len(shape) - 2)) if isinstance(amounts, int) else tuple(amounts)
    modes = {"ReflectionPad2d": "reflect", "ReplicationPad2d": "replicate"}
    mode = modes.get(call.function, "constant") if call.module is not None else call.argument(2, "mode", "constant")
    windows = {
        len(shape) - 1 - i: Window((-pairs[2 * i],), (-pairs[2 * i],), 1)
        for i in range(len(pairs) // 2)
        if pairs[2 * i] or pairs[2 * i + 1]
    }
    moved = _slide(field, windows, shape, call.name)
    if mode == "constant":
        return moved
    return replace(moved, bounds=tuple(F.pad(b.contiguous(), pairs, mode=mode) for b in field.bounds))


def _local_response_norm(call: Call) -> Field:
    size = call.argument(1, "size")
    return _slide(call.field(0), {1: sliding(size, padding=size // 2)}, call.result_shape(), call.name)


def _window_attention(call: Call) -> Field:
    """Windowed attention of torchvision on (N, H, W, C): runs of `window_size`, the first from `shift_size`."""
    field = call.field(0)
    sizes, shifts = call.argument(4, "window_size"), call.argument(6, "shift_size")
    windows = {}
    for i, dim in enumerate((1, 2)):
        size = sizes[i]
        shift = 0 if size >= field.shape[dim] else shifts[i]
        first = tuple((r - shift) // size * size + shift for r in range(size))
        windows[dim] = Window(first, tuple(a + size - 1 for a in first), size)
    mixed = mix(field, [3], call.name)
    return _slide(mixed, windows, field.shape, call.name)


RULES: dict[str, Callable[[Call], Any]] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "max_pool": _pool,
    "avg_pool": _pool,
    "adaptive_avg_pool": _adaptive_pool,
    "adaptive_max_pool": _adaptive_pool,
    "resize": _resize,
    "pad": _pad,
    "local_response_norm": _local_response_norm,
    "window_attention": _window_attention,
}
