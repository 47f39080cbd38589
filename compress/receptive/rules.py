"""One rule for each kind of operation: the field of its result from those of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.attention import attention_arguments
from compress.graph.ops import kinds, out_of_place
from compress.graph.spelled import written_out
from compress.receptive.fields import (
    IDENTITY,
    Call,
    Field,
    NoRuleError,
    View,
    Window,
    compact,
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
    return replace(field, bounds=tuple(_by_group(bound, dim, groups, outputs // groups) for bound in field.bounds))


def _by_group(bound: Tensor, dim: int, groups: int, times: int) -> Tensor:
    small = compact(bound)
    shape = [groups * times if d == dim else s for d, s in enumerate(bound.shape)]
    if small.shape[dim] > 1:
        small = small.unflatten(dim, (groups, -1)).amin(dim + 1).repeat_interleave(times, dim)
    return small.expand(shape)


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
    modes = {"Reflection": "reflect", "Replication": "replicate", "Circular": "circular"}
    named = modes.get(call.function.partition("Pad")[0], "constant")
    mode = named if call.module is not None else call.argument(2, "mode", "constant")
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
        plain = str(out_of_place(call.function))  # bounds are expanded, and others read them
        method = {"view": "reshape", "view_as": "reshape_as"}.get(plain, plain)
        return lambda x: getattr(x, method)(*others, **named)
    target: Callable[..., Any] = call.node.target  # type: ignore[assignment]
    return lambda x: target(x, *others, **named)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Field):
        return value.bounds[0]
    return value.cpu() if isinstance(value, Tensor) else value


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
    along = [
        axis
        for axis in range(len(tensors[0].dims))
        if any(f.dims[axis] == dim for f in tensors)
        or (call.kind == "stack" and all(f.dims[axis] is None for f in tensors))  # as of rows taken one by one
    ]
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
    return (result, result) if call.function in {"max", "min", "median"} and second is not None else result


def _sort(call: Call) -> object:
    field, counted = call.field(0), call.function in {"topk", "kthvalue"}
    dim = call.argument(2 if counted else 1, "dim", -1) % len(field.shape)
    mixed = mix(field, [dim], f"{call.name} ({call.kind}) depends on every position")
    if call.function == "kthvalue":
        mixed = _shrunk(mixed, [dim], bool(call.argument(3, "keepdim", False)), call)
    if call.function == "topk":
        count = call.argument(1, "k")
        mixed = replace(mixed, bounds=tuple(bound.narrow(dim, 0, count) for bound in mixed.bounds))
    return mixed if call.function == "argsort" else (mixed, mixed)


def _scan(call: Call) -> object:
    field = call.field(0)
    dim = call.argument(1, "dim") % len(field.shape)
    bounds = tuple(bound.cummin(dim).values for bound in field.bounds)
    along = [axis for axis, place in enumerate(field.dims) if place == dim and field.shape[dim] > 1]
    reason = f"{call.name} depends on all positions up to each"
    views = tuple(view.forget(reason) if axis in along else view for axis, view in enumerate(field.views))
    result = settled(replace(field, bounds=bounds, views=views), reason)
    return (result, result) if call.function in {"cummax", "cummin"} else result


def _glu(call: Call) -> Field:
    field = call.field(0)
    dim = call.argument(1, "dim", -1)
    halves = move(field, lambda bound: bound.chunk(2, dim), call.name)
    return join(halves, call.result_shape(), call.name)


def _gather(call: Call) -> object:
    where = call.argument(2, "index", call.kwargs.get("indices")) if call.function == "gather" else None
    where = where if where is not None else call.argument(1, "indices")
    return _everywhere(call) if isinstance(where, Field) or len(list(call.fields())) > 1 else _moving(call)


def _everywhere(call: Call) -> Field:
    # places that follow from values: each element may depend on all
    shape, name = call.result_shape(), f"{call.name} ({call.kind}) depends on every position"
    whole = [mix(field, range(len(field.shape)), name, keep=False) for field in call.operands()]
    spread = [
        replace(f, bounds=tuple(b.reshape(()).expand(shape) for b in f.bounds), dims=(None,) * len(f.dims))
        for f in whole
    ]
    return join(spread, shape, name)


def _search(call: Call) -> Field:
    row = call.argument(0, "sorted_sequence") if call.function == "searchsorted" else call.argument(1, "boundaries")
    values = call.field(1, "input") if call.function == "searchsorted" else call.field(0)
    return _everywhere(call) if isinstance(row, Field) else values


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
    rows = [_reduced(bound, [-1]) for bound in left.bounds]
    columns = [_reduced(bound, [-2]) for bound in right.bounds]
    bounds = tuple(least(pair, shape) for pair in zip(rows, columns, strict=True))
    result = Field(
        bounds=bounds,
        views=_mixed_views(operands, call.name),
        dims=(None,) * len(left.views),
        notes=tuple(dict.fromkeys(left.notes + right.notes)),
    )
    result = settled(result, f"{call.name} (matmul) depends on every position")
    return join([added, result], shape, call.name) if added is not None else result


def _reduced(bound: Tensor, dims: Sequence[int]) -> Tensor:
    return compact(bound).amin(dim=list(dims), keepdim=True)


def _einsum(call: Call) -> Field:
    """Reduce every operand over letters missing in the result."""
    equation, operands = call.args[0], call.operands()
    written = written_out(str(equation), [len(field.shape) for field in operands])
    letters, _, result = (written or "").partition("->")
    terms = letters.split(",")
    if written is None or any(len(set(t)) < len(t) for t in terms):
        raise NoRuleError(f"its equation {equation!r} has an ellipsis of several lengths, or a diagonal")
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
    if call.node.target is F.multi_head_attention_forward:
        shape = (*operands[0].shape[:-1], attention_arguments(call.node)["out_proj_weight"].meta["shape"][0])
        return _attend(operands, shape, 0, name), None
    if call.module is None:
        return _attend(operands, call.result_shape(), -2, name)
    length = -2 if getattr(call.module, "batch_first", False) else 0
    result = _attend(operands, operands[0].shape, length, name)
    return result, None


def _attend(operands: Sequence[Field], shape: Sequence[int], length: int, name: str) -> Field:
    query, key, value = operands
    parts = zip(
        (_reduced(b, [-1]) for b in query.bounds),
        (_reduced(b, [length, -1]) for b in key.bounds),
        (_reduced(b, [length, -1]) for b in value.bounds),
        strict=True,
    )
    field = Field(
        bounds=tuple(least(part, shape) for part in parts),
        views=_mixed_views(operands, name),
        dims=(None,) * len(query.views),
        notes=query.notes,
    )
    return settled(field, name)


# For each kind of operation, from its operands' fields to its result's.
RULES: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(kinds(lambda t: t.elementwise and t.data_inputs == 1), lambda call: call.field(0)),
    **dict.fromkeys(
        kinds(lambda t: t.elementwise and t.data_inputs != 1),
        lambda call: join(call.operands(), call.result_shape(), call.name),
    ),
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
    **dict.fromkeys(("pixel_unshuffle", "unfold", "patch_merging"), partial(_moving, folds=True)),
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
    **dict.fromkeys(("mean", "sum", "max", "min", "var", "reduce"), _reduce),
    **dict.fromkeys(("scatter", "count", "sample"), _everywhere),
    "search": _search,
    "gather": _gather,
    "sort": _sort,
    "scan": _scan,
    "glu": _glu,
    "zeros": lambda call: torch.zeros(call.result_shape()),
    **dict.fromkeys(("matmul", "addmm"), _product),
    "einsum": _einsum,
    "attention": _attention,
}
