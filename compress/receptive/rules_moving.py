"""Operations that only move elements; they are run on the bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from compress.graph.traits import kinds
from compress.receptive.fields import Call, Field, NoRuleError, join, least, meet, move


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
    """Space to depth, in which neighbouring positions become channels."""
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
    """Concatenate branches; a unit's view is the union of theirs."""
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


RULES: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(kinds(lambda t: t.category == "movement"), _moving),
    **dict.fromkeys(("pixel_unshuffle", "unfold", "patch_merging"), _folding),
    "getitem": _getitem,
    "shape": _shape,
    "getattr": _attribute,
    "concat": _concat,
    "stack": _stack,
}
