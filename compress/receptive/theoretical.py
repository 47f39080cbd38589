"""Exact theoretical receptive fields of any model that torch.fx can trace: its graph is evaluated on fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.errors import ReceptiveFieldError, near_misses
from compress.graph.inputs import Inputs, as_inputs, first_of
from compress.graph.layers import layers
from compress.graph.ops import attribute_of, layer_name, node_kind, node_module, run_node
from compress.graph.report import leaves_of
from compress.graph.trace import trace
from compress.graph.traits import kinds
from compress.receptive.fields import (
    IDENTITY,
    ORIGIN,
    Call,
    Field,
    NoRuleError,
    View,
    Window,
    compact,
    flat,
    image_field,
    interpolated,
    join,
    least,
    meet,
    mix,
    move,
    nearest,
    proportional,
    read,
    settled,
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


def _moving(call: Call, *, folds: bool = False) -> object:
    first, *rest = call.args
    if not isinstance(first, Field):
        raise NoRuleError(f"its first argument is {type(first).__name__} and no tensor that depends on the image")
    return move(first, _replay(call, rest), call.name, folds=folds)


def _replay(call: Call, rest: Sequence[Any]) -> Callable[[Tensor], Any]:
    """The operation of its first argument; other fields become tensors of their shape."""
    others = [_shape_of(value) for value in rest]
    named = {name: _shape_of(value) for name, value in call.kwargs.items()}
    if call.module is not None:
        return call.module
    if call.node.op == "call_method":
        method = {"view": "reshape", "view_as": "reshape_as"}.get(call.function, call.function)  # bounds are expanded
        return lambda x: getattr(x, method)(*others, **named)
    target: Callable[..., Any] = call.node.target  # type: ignore[assignment]
    return lambda x: target(x, *others, **named)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Field):
        return value.bounds[0]
    return value.cpu() if isinstance(value, Tensor) else value


def _folding(call: Call) -> object:
    return _moving(call, folds=True)


def _getitem(call: Call) -> object:
    owner = call.args[0]
    return _moving(call) if isinstance(owner, Field) else owner[call.args[1]]


def _shape(call: Call) -> object:
    first, *rest = call.args
    return _replay(call, rest)(_shape_of(first))


def _attribute(call: Call) -> NoReturn:
    raise NoRuleError(f"it is the attribute {call.args[1]!r} of a tensor")


def _concat(call: Call) -> Field:
    tensors = call.operands()
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0)) % len(tensors[0].shape)
    return _concatenated(tensors, dim, call)


def _stack(call: Call) -> Field:
    tensors = call.operands()
    dim = call.argument(1, "dim", 0) % (len(tensors[0].shape) + 1)
    raised = [move(field, lambda b: b.unsqueeze(dim), call.name) for field in tensors]
    return _concatenated(raised, dim, call)


def _concatenated(tensors: Sequence[Field], dim: int, call: Call) -> Field:
    bounds = tuple(_catenate(parts, dim) for parts in zip(*(f.bounds for f in tensors), strict=True))
    along = [axis for axis in range(len(tensors[0].dims)) if any(f.dims[axis] == dim for f in tensors)]
    flat = [replace(f, bounds=tuple(b.narrow(dim, 0, 1) for b in f.bounds)) for f in tensors if f.shape[dim]]
    joined = join(flat, flat[0].shape, call.name)
    reason = f"{call.name} puts positions of several tensors in a row"
    views = tuple(
        meet([f.views[axis] for f in tensors], call.name)[0].forget(reason) if axis in along else view
        for axis, view in enumerate(joined.views)
    )
    dims = tuple(None if axis in along else d for axis, d in enumerate(joined.dims))
    return replace(joined, bounds=bounds, views=views, dims=dims)


def _catenate(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate, but keep dimensions of equal elements expanded."""
    whole = [sum(p.shape[dim] for p in parts) if d == dim else s for d, s in enumerate(parts[0].shape)]
    small = [d for d in range(len(whole)) if d != dim and all(p.stride(d) == 0 or p.shape[d] == 1 for p in parts)]
    for d in small:
        parts = [p.narrow(d, 0, 1) for p in parts]
    if all(p.stride(dim) == 0 for p in parts) and all(
        torch.equal(p.narrow(dim, 0, 1), parts[0].narrow(dim, 0, 1)) for p in parts
    ):
        return least([parts[0].narrow(dim, 0, 1)], whole)
    return torch.cat(list(parts), dim).expand(whole)


def _linear(call: Call) -> Field:
    field = mix(call.field(0), [-1], f"{call.name} depends on every position", keep=False)
    shape = call.result_shape()
    return replace(field, bounds=tuple(bound.expand(shape) for bound in field.bounds))


def _norm(call: Call) -> Field:
    field = call.field(0)
    rank = len(field.shape)
    if call.kind == "layer_norm":
        shape = call.argument(1, "normalized_shape")
        dims: Sequence[int] = range(rank - (1 if isinstance(shape, int) else len(shape)), rank)
    else:
        dims = range(2, rank) if call.kind == "instance_norm" else range(1, rank)
    if call.kind == "group_norm" and call.argument(1, "num_groups") != 1:
        return _group_norm(call, field)
    return join([field, mix(field, dims, f"{call.name} normalizes over the map")], field.shape, call.name)


def _group_norm(call: Call, field: Field) -> Field:
    groups: int = call.argument(1, "num_groups")
    split = move(field, lambda b: b.unflatten(1, (groups, -1)), call.name)
    mixed = mix(split, range(2, len(split.shape)), f"{call.name} normalizes over the map")
    return join([field, move(mixed, lambda b: b.flatten(1, 2), call.name)], field.shape, call.name)


def _normalize(call: Call) -> Field:
    field = call.field(0)
    mixed = mix(field, _dims(call.argument(2, "dim", 1), field), f"{call.name} sums over positions")
    return join([field, mixed], field.shape, call.name)


def _vector_norm(call: Call) -> Field:
    field = call.field(0)
    dims = _dims(call.argument(2, "dim"), field)
    mixed = mix(field, dims, f"{call.name} sums over positions")
    return _shrunk(mixed, dims, bool(call.argument(3, "keepdim", False)), call)


def _dims(dim: Any, field: Field) -> list[int]:
    rank = len(field.shape)
    if dim is None or dim == ():
        return list(range(rank))
    return [d % rank for d in ([dim] if isinstance(dim, int) else dim)]


def _softmax(call: Call) -> Field:
    dim = call.argument(1, "dim")
    field = call.field(0)
    if dim is None or call.function == "Softmax2d":
        dim = 1
    return mix(field, [dim], f"{call.name} normalizes over positions")


def _reduce(call: Call) -> object:
    field = call.field(0)
    second = call.argument(1, "dim")
    if isinstance(second, (Field, Tensor)):  # torch.max(a, b)
        return join(call.operands(), call.result_shape(), call.name)
    dims = _dims(second, field)
    mixed = mix(field, dims, f"{call.name} ({call.kind}) depends on every position")
    result = _shrunk(mixed, dims, bool(call.argument(2, "keepdim", False)), call)
    return (result, result) if call.function in {"max", "min"} and second is not None else result


def _shrunk(field: Field, dims: list[int], keepdim: bool, call: Call) -> Field:
    """Cut dimensions of equal elements to size 1, or remove them."""

    def cut(bound: Tensor) -> Tensor:
        for dim in sorted(dims, reverse=True):
            bound = bound.narrow(dim, 0, 1) if keepdim else bound.select(dim, 0)
        return bound

    left = {d: n for n, d in enumerate(d for d in range(len(field.shape)) if keepdim or d not in dims)}
    return replace(
        field,
        bounds=tuple(cut(bound) for bound in field.bounds),
        dims=tuple(left.get(dim) if dim is not None else None for dim in field.dims),
    )


def _mixed_views(fields: Sequence[Field], name: str) -> tuple[View, ...]:
    """Views after a product of positions, which no window describes."""
    axes = range(len(fields[0].views))
    views = (meet([f.views[a] for f in fields], name)[0] for a in axes)
    return tuple(view.forget(f"{name} depends on positions through a product") for view in views)


def _product(call: Call) -> Field:
    """An element depends on a left row and a right column."""
    operands, added = call.operands(), None
    if call.kind == "addmm":
        added, *operands = operands
    if len(operands) != 2 or any(len(f.shape) < 2 for f in operands):
        raise NoRuleError("it is no product of two matrices or stacks of them")
    left, right = operands
    shape = call.result_shape()
    rows = [_least_along(bound, [-1]) for bound in left.bounds]
    columns = [_least_along(bound, [-2]) for bound in right.bounds]
    bounds = tuple(least(pair, shape) for pair in zip(rows, columns, strict=True))
    result = Field(
        bounds=bounds,
        views=_mixed_views(operands, call.name),
        dims=(None,) * len(left.views),
        notes=tuple(dict.fromkeys(left.notes + right.notes)),
    )
    result = settled(result, f"{call.name} (matmul) depends on every position")
    return join([added, result], shape, call.name) if added is not None else result


def _least_along(bound: Tensor, dims: Sequence[int]) -> Tensor:
    return compact(bound).amin(dim=list(dims), keepdim=True)


def _einsum(call: Call) -> Field:
    """Reduce every operand over letters missing in the result."""
    equation, *_ = call.args
    operands = call.operands()
    letters, _, result = str(equation).replace(" ", "").partition("->")
    terms = letters.split(",")
    if "." in equation or not result or len(terms) != len(operands) or any(len(set(t)) < len(t) for t in terms):
        raise NoRuleError(f"its equation {equation!r} has no explicit result, an ellipsis or a diagonal")
    shape = call.result_shape()
    parts = [
        [_arranged(bound, term, result) for bound in field.bounds] for term, field in zip(terms, operands, strict=True)
    ]
    bounds = tuple(least(group, shape) for group in zip(*parts, strict=True))
    field = Field(bounds=bounds, views=_mixed_views(operands, call.name), dims=(None,) * len(operands[0].views))
    return settled(field, f"{call.name} (einsum) depends on every position")


def _arranged(bound: Tensor, term: str, result: str) -> Tensor:
    """Reduce and permute dimensions `term` to `result`; missing ones get size 1."""
    gone = [d for d, letter in enumerate(term) if letter not in result]
    small = bound.amin(dim=gone) if gone else bound
    left = [letter for letter in term if letter in result]
    small = small.permute([left.index(letter) for letter in result if letter in left])
    for position, letter in enumerate(result):
        if letter not in left:
            small = small.unsqueeze(position)
    return small


def _attention(call: Call) -> object:
    """A query depends on itself and all keys and values, also masked ones."""
    operands = [call.field(i, n) for i, n in enumerate(("query", "key", "value"))]
    name = f"{call.name} (attention) depends on every position"
    if call.module is None:
        return _attend(operands, call.result_shape(), -2, name)
    length = -2 if getattr(call.module, "batch_first", False) else 0
    result = _attend(operands, operands[0].shape, length, name)
    return result, None


def _attend(operands: Sequence[Field], shape: Sequence[int], length: int, name: str) -> Field:
    query, key, value = operands
    parts = zip(
        (_least_along(b, [-1]) for b in query.bounds),
        (_least_along(b, [length, -1]) for b in key.bounds),
        (_least_along(b, [length, -1]) for b in value.bounds),
        strict=True,
    )
    field = Field(
        bounds=tuple(least(part, shape) for part in parts),
        views=_mixed_views(operands, name),
        dims=(None,) * len(query.views),
        notes=query.notes,
    )
    return settled(field, name)


def _elementwise(call: Call) -> Field:
    return call.field(0)


def _broadcasting(call: Call) -> Field:
    return join(call.operands(), call.result_shape(), call.name)


# For each kind of operation, from its operands' fields to its result's.
RULES: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(kinds(lambda t: t.elementwise and t.data_inputs == 1), _elementwise),
    **dict.fromkeys(kinds(lambda t: t.elementwise and t.data_inputs > 1), _broadcasting),
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
    **dict.fromkeys(kinds(lambda t: t.category == "movement"), _moving),
    **dict.fromkeys(("pixel_unshuffle", "unfold", "patch_merging"), _folding),
    "getitem": _getitem,
    "shape": _shape,
    "getattr": _attribute,
    "concat": _concat,
    "stack": _stack,
    "linear": _linear,
    "layer_norm": _norm,
    "group_norm": _norm,
    "instance_norm": _norm,
    "normalize": _normalize,
    "vector_norm": _vector_norm,
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("mean", "sum", "max", "min"), _reduce),
    **dict.fromkeys(("matmul", "addmm"), _product),
    "einsum": _einsum,
    "attention": _attention,
}


Status = Literal["exact", "global", "unknown"]
Sizes = tuple[int | None, ...]
Ratios = tuple[Fraction | None, ...]


@dataclass(frozen=True, kw_only=True)
class ReceptiveField:
    """The receptive field of one node. Tuples have an entry for each axis of the image (height, width).

    Attributes:
        path: of the module; "" for a function or a method.
        shape: for batch 1; None for an unknown node that returns no tensor.
        status: `exact`; `global` if units depend on the whole image; `unknown` after an operation without a rule.
        reason: operation that made it global or unknown, or why `size` is valid for this image size only; else "".
        size: pixels on which a unit depends, without borders; where global or with a reason, the largest part of this
            image. None = unknown.
        effective_stride: pixels from a unit's field to the next one's; None if units do not lie on a line.
        effective_padding: start(u) = u * stride - padding.
        local_size: `size` along paths without a global operation; None without one.
        smallest: `local_size` of the path with the smallest field.
        seen: largest part of this image that a unit sees, clipped at the borders; None = unknown.
        input_size, input_smallest: `local_size` and `smallest` of the inputs.
        macs: at this image size, batch 1; None = unknown.
        notes: branches on the way that are not aligned.
        dims: dimension along each axis; None if there is none.
    """

    name: str
    path: str
    kind: str
    type: str
    shape: tuple[int, ...] | None
    status: Status
    reason: str
    size: Sizes
    effective_stride: Ratios
    effective_padding: Ratios
    local_size: Sizes
    smallest: Sizes
    seen: Sizes
    input_size: Sizes
    input_smallest: Sizes
    macs: int | None
    notes: tuple[str, ...] = ()
    dims: tuple[int | None, ...] = ()
    scopes: tuple[str, ...] = ()
    _bounds: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    _windows: tuple[Window | None, ...] = field(default=(), repr=False, compare=False)
    _narrow: tuple[Window | None, ...] = field(default=(), repr=False, compare=False)

    @property
    def units(self) -> Sizes:
        shape = self.shape or ()
        return tuple(shape[d] if d is not None else None for d in self.dims)

    @property
    def located(self) -> bool:
        return bool(self.dims) and None not in self.dims

    def interval(self, unit: Sequence[int]) -> tuple[tuple[int, int] | None, ...]:
        """The first and last pixel of this image that a unit sees along each axis; None if it sees none.

        The unit is a position if the node is `located`, otherwise an index.
        """
        if not self._bounds:
            raise ReceptiveFieldError(f"the field of {self.name} is unknown: {self.reason}")
        extent = self.units if self.located else self.shape or ()
        if len(unit) != len(extent) or any(not 0 <= u < (n or 0) for u, n in zip(unit, extent, strict=True)):
            raise ReceptiveFieldError(f"{self.name} has no unit {tuple(unit)}: there are {extent} units")
        index: list[Any] = [slice(None)] * len(self.shape or ())
        for dim, u in zip(self.dims if self.located else range(len(unit)), unit, strict=True):
            index[dim] = u  # type: ignore[index]
        found = [float(bound[tuple(index)].amin()) for bound in self._bounds]
        return tuple(
            (int(low + ORIGIN), int(-high - ORIGIN)) if low < 0 else None
            for low, high in zip(found[::2], found[1::2], strict=True)
        )

    def window(self, unit: Sequence[int], axis: int) -> tuple[int, int] | None:
        """A unit's local field along one axis, not clipped; None without one."""
        window = self._windows[axis] if self._windows else None
        return window.at(unit[axis]) if window is not None else None

    def centre(self, unit: Sequence[int], axis: int) -> float | None:
        """The centre of a unit's narrowest path along one axis; None without one."""
        window = self._narrow[axis] if self._narrow else None
        return float(window.centre(unit[axis])) if window is not None else None


@dataclass(frozen=True, kw_only=True)
class ReceptiveFieldTable:
    """Receptive fields of a model's nodes that return a tensor, in the order in which they run."""

    model: str
    image_size: tuple[int, ...]
    rows: tuple[ReceptiveField, ...]

    def __iter__(self) -> Iterator[ReceptiveField]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, name: str) -> ReceptiveField:
        """The row of a module (its last call), a node, or a block (its last node); near misses are listed."""
        for matches in (
            [r for r in self.rows if r.path == name],
            [r for r in self.rows if r.name == name],
            [r for r in self.rows if name in r.scopes],
        ):
            if matches:
                return matches[-1]
        known = dict.fromkeys(label for r in self.rows for label in (r.path, *r.scopes, r.name) if label)
        raise ReceptiveFieldError(
            f"the model has no layer {name!r}{near_misses(name, known)} (names are those of modules or fx nodes, such "
            f"as {', '.join(list(known)[-3:])})"
        )

    @property
    def unknown(self) -> ReceptiveField | None:
        return next((r for r in self.rows if r.status == "unknown"), None)

    def records(self) -> list[dict[str, Any]]:
        """Plain values for JSON and CSV, fractions as numbers."""
        return [_record(row) for row in self.rows]


_PLAIN = ("name", "path", "kind", "type", "shape", "status", "reason", "size", "local_size", "smallest", "seen", "macs")


def _record(row: ReceptiveField) -> dict[str, Any]:
    plain = {key: getattr(row, key) for key in _PLAIN}
    for key in ("effective_stride", "effective_padding"):
        plain[key] = [None if v is None else float(v) for v in getattr(row, key)]
    plain["notes"] = row.notes
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def make_row(
    *,
    labels: dict[str, Any],
    found: Field | None,
    inputs: Sequence[Field],
    reason: str,
    axes: int,
    macs: int | None,
) -> ReceptiveField:
    """The row of a node; without a field, unknown for `reason`."""
    nothing = (None,) * axes
    reads: dict[str, Any] = {
        "input_size": tuple(_most([f.views[a].wide for f in inputs], "size") for a in range(axes)),
        "input_smallest": tuple(_most([f.views[a].narrow for f in inputs], "size", least=True) for a in range(axes)),
    }
    if found is None:
        return ReceptiveField(
            **labels,
            **reads,
            status="unknown",
            reason=reason,
            size=nothing,
            effective_stride=nothing,
            effective_padding=nothing,
            local_size=nothing,
            smallest=nothing,
            seen=nothing,
            macs=macs,
            dims=nothing,
        )
    views, bounds = found.views, _reduced(found)
    seen = tuple(_widest(*bounds[2 * a : 2 * a + 2]) for a in range(axes))
    whole = tuple(dict.fromkeys(v.whole for v in views if v.whole))
    lost = tuple(dict.fromkeys(f"{v.lost}; the size is that at this image size" for v in views if v.lost))
    local = tuple(v.wide.size if v.wide else None for v in views)
    return ReceptiveField(
        **labels,
        **reads,
        status="global" if whole else "exact",
        reason="; ".join(whole or lost),
        size=tuple(v.wide.size if v.wide and not v.whole else s for v, s in zip(views, seen, strict=True)),
        effective_stride=tuple(v.wide.stride if v.wide else None for v in views),
        effective_padding=tuple(v.wide.padding if v.wide else None for v in views),
        local_size=local,
        smallest=tuple(v.narrow.size if v.narrow else None for v in views),
        seen=seen,
        macs=macs,
        notes=found.notes,
        dims=found.dims,
        _bounds=bounds,
        _windows=tuple(v.wide for v in views),
        _narrow=tuple(v.narrow for v in views),
    )


def _most(windows: Sequence[Any], name: str, *, least: bool = False) -> int | None:
    sizes = [getattr(window, name) for window in windows if window is not None]
    return (min if least else max)(sizes) if sizes else None


def _reduced(found: Field) -> tuple[Tensor, ...]:
    """Bounds of positions, united over batch and channels; else of elements."""
    if None in found.dims:
        return tuple(found.bounds)
    others = [d for d in range(len(found.shape)) if d not in found.dims]
    return tuple(compact(b).amin(dim=others, keepdim=True).expand(b.shape) if others else b for b in found.bounds)


def _widest(low: Tensor, high: Tensor) -> int:
    sizes = -compact(high) - compact(low) - 2 * ORIGIN + 1
    return int(torch.where(compact(low) < 0, sizes, torch.zeros(())).amax())


def _apply_rule(call: Call) -> object:
    """A Field, a tuple of them, or a plain value (a shape); NoRuleError: no rule covers these arguments."""
    rule = RULES.get(call.kind)
    if rule is None:
        raise NoRuleError("there is no rule for this kind of operation")
    return rule(call)


@dataclass(frozen=True, kw_only=True)
class _Unknown:
    reason: str
    shape: tuple[int, ...] | None


def receptive_field(model: nn.Module, example_inputs: Inputs) -> ReceptiveFieldTable:
    """The theoretical receptive field of every node with respect to the model's first input.

    Definitions: arXiv 1603.07285 (Dumoulin and Visin), and Araujo et al., "Computing Receptive Fields of Convolutional
    Neural Networks" (Distill, 2019). The image is (N, C, spatial...); sizes without borders depend on its size only
    after adaptive pooling.

    Examples:
        >>> convs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2))
        >>> [row.size for row in compress.receptive_field(convs, images[:1])]
        [(1, 1), (3, 3), (5, 5)]
    """
    inputs = first_of(as_inputs(example_inputs), 1)
    check_image(inputs[0])
    return graph_receptive_field(trace(model, inputs), inputs, name=type(model).__name__)


def check_image(image: Tensor) -> None:
    if image.ndim < 3 or 0 in image.shape:
        raise ReceptiveFieldError(
            f"a receptive field needs a batch of images (N, C, height, width), got a tensor of shape "
            f"{tuple(image.shape)}"
        )


def graph_receptive_field(
    graph_module: fx.GraphModule, inputs: Sequence[Tensor], *, name: str = ""
) -> ReceptiveFieldTable:
    """The fields of a traced graph, with inputs of batch 1."""
    walker = _Walker(graph_module, inputs)
    return ReceptiveFieldTable(
        model=name or type(graph_module).__name__, image_size=tuple(inputs[0].shape[2:]), rows=tuple(walker.walk())
    )


class _Walker:
    """Evaluates a graph on fields; `walk` returns a row for each tensor."""

    def __init__(self, graph_module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        self.graph_module = graph_module
        self.inputs = list(inputs)
        self.axes = inputs[0].ndim - 2
        self.values: dict[fx.Node, Any] = {}
        self.leaves = {leaf.path: leaf.reason for leaf in leaves_of(graph_module)}
        self.macs = {layer.name: layer.macs for layer in layers(graph_module)}

    def walk(self) -> list[ReceptiveField]:
        rows = []
        users = Counter({node: len(node.users) for node in self.graph_module.graph.nodes})
        for node in self.graph_module.graph.nodes:
            if node.op == "output":
                continue
            value = self.values[node] = self._run(node)
            if isinstance(value, (Field, _Unknown)):
                rows.append(self._row(node, value))
            for operand in node.all_input_nodes:
                users[operand] -= 1
                if not users[operand]:
                    del self.values[operand]  # the bounds of a deep network would fill the memory
        return rows

    def _run(self, node: fx.Node) -> object:
        if node.op == "placeholder":
            value = self.inputs.pop(0) if self.inputs else node.args[0] if node.args else None
            first = not any(n.op == "placeholder" for n in self.values)
            return image_field((1, *value.shape[1:])) if first and isinstance(value, Tensor) else value
        if node.op == "get_attr":
            return attribute_of(self.graph_module, str(node.target))
        args = fx.node.map_arg(node.args, lambda n: self.values.get(n))
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self.values.get(n))
        parts = list(flat([args, kwargs]))
        unknown = next((v for v in parts if isinstance(v, _Unknown)), None)
        kind = node_kind(node)
        if unknown is not None and kind != "shape":
            return _Unknown(reason=unknown.reason, shape=node.meta.get("shape"))
        if kind == "assert":
            return None
        module = node_module(node) if node.op == "call_module" else None
        if unknown is not None:
            args = tuple(torch.zeros(()).expand(v.shape or ()) if isinstance(v, _Unknown) else v for v in args)
        if unknown is not None or not any(isinstance(v, Field) for v in parts):
            return run_node(self.graph_module, node, args, kwargs)  # it does not depend on the image
        call = Call(node=node, kind=kind, module=module, args=args, kwargs=kwargs, name=layer_name(node))
        return self._apply(call)

    def _apply(self, call: Call) -> object:
        shape = call.node.meta.get("shape")
        try:
            value = _apply_rule(call)
            if isinstance(value, Field) and shape is not None and value.shape != tuple(shape):
                raise NoRuleError(f"its rule gives shape {value.shape} where the model gives {tuple(shape)}")
        except (NoRuleError, RuntimeError, IndexError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            if call.module is not None and call.name in self.leaves:
                reason = f"torch.fx cannot trace it ({self.leaves[call.name]})"
            return _Unknown(reason=f"unknown from {call.name} ({call.function}) on: {reason}", shape=shape)
        return value

    def _row(self, node: fx.Node, value: Field | _Unknown) -> ReceptiveField:
        module = node_module(node) if node.op == "call_module" else None
        stack = node.meta.get("nn_module_stack") or {}
        path = str(node.target) if module is not None else ""
        parents = [path[:i] for i, c in enumerate(path) if c == "."]
        owner = node.args[0] if node_kind(node) == "getitem" else None
        if isinstance(owner, fx.Node) and owner.op == "call_module":  # a module that returns a tuple
            parents.append(str(owner.target))
        labels = {
            "name": node.name,
            "path": path,
            "kind": node_kind(node),
            "type": type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target)),
            "shape": value.shape,
            "scopes": tuple(dict.fromkeys([*(str(s).partition("@")[0] for s in stack), *parents])),  # @: a later call
        }
        operands = [self.values.get(n) for n in node.all_input_nodes]
        return make_row(
            labels=labels,
            found=value if isinstance(value, Field) else None,
            inputs=[f for f in operands if isinstance(f, Field)],
            reason=value.reason if isinstance(value, _Unknown) else "",
            axes=self.axes,
            macs=self.macs.get(node.name, 0),
        )
