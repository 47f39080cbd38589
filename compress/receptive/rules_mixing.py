"""Operations that mix along a dimension: products, attention, sums, norms, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compress.receptive.fields import Call, Field, NoRuleError, View, compact, join, least, meet, mix, move, settled


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


RULES: dict[str, Callable[[Call], Any]] = {
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
