"""Receptive fields of units, as symbolic windows where they exist and as exact spans; and operations on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any

import torch
from torch import Tensor, fx, nn

# Limit of a period; a resize between two large sizes without a common divisor exceeds it and has no window.
LONGEST_PERIOD = 4096

LONGEST_FIT = 32  # longest period that `fit` tries: shuffles and repeats have small factors


@dataclass(frozen=True)
class Window:
    """Unit m * period + r depends on positions first[r] + m * advance to last[r] + m * advance, in steps of `step`.

    Attributes:
        first, last: one position for each phase; last < first if a phase depends on nothing.
        advance: positions from one period to the next.
        step: distance of neighbouring positions (a dilation).

    >>> conv = sliding(3, stride=2, padding=1)
    >>> conv.at(0), conv.at(5), conv.size, conv.stride, conv.padding
    ((-1, 1), (9, 11), 3, Fraction(2, 1), Fraction(1, 1))
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    advance: int
    step: int = 1

    @property
    def period(self) -> int:
        return len(self.first)

    @property
    def size(self) -> int:
        return max(0, *(b - a + 1 for a, b in zip(self.first, self.last, strict=True)))

    @property
    def smallest(self) -> int:
        """Smallest size of all phases; 0 if some depend on nothing."""
        return max(0, min(b - a + 1 for a, b in zip(self.first, self.last, strict=True)))

    @property
    def stride(self) -> Fraction:
        """Positions from one unit to the next; below 1 after upsampling."""
        return Fraction(self.advance, self.period)

    @property
    def padding(self) -> Fraction:
        """The largest padding of all phases: `start(u) = u * stride - padding`."""
        return max(r * self.stride - a for r, a in enumerate(self.first))

    def at(self, unit: int) -> tuple[int, int]:
        """A unit's first and last position, without borders."""
        m, r = divmod(unit, self.period)
        return self.first[r] + m * self.advance, self.last[r] + m * self.advance

    def centre(self, unit: int) -> Fraction:
        return Fraction(sum(self.at(unit)), 2)


IDENTITY = Window((0,), (0,), 1)


def sliding(kernel: int, *, stride: int = 1, dilation: int = 1, padding: int = 0) -> Window:
    """The window of a convolution or pool with `padding` in front."""
    return Window((-padding,), (-padding + (kernel - 1) * dilation,), stride, dilation if kernel > 1 else 1)


def transposed(kernel: int, *, stride: int = 1, dilation: int = 1, padding: int = 0) -> Window:
    """The window of a transposed convolution.

    Unit u depends on the whole numbers (u + padding - j * dilation) / stride, 0 <= j < kernel.
    """
    first, last = [], []
    for u in range(stride):
        reached = [
            (u + padding - j * dilation) // stride for j in range(kernel) if (u + padding - j * dilation) % stride == 0
        ]
        first.append(min(reached, default=0))
        last.append(max(reached, default=-1))
    return Window(tuple(first), tuple(last), 1, dilation // gcd(stride, dilation))


def rational(ratio: Fraction, reads: Callable[[int], tuple[int, int]]) -> Window | None:
    """The window of units that depend on `reads(u)` and advance by `ratio`; None beyond `LONGEST_PERIOD`."""
    period = ratio.denominator
    if period > LONGEST_PERIOD:
        return None
    pairs = [reads(u) for u in range(period)]
    return reduced(Window(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), ratio.numerator))


def proportional(inputs: int, outputs: int) -> Window | None:
    """The window of adaptive pooling: unit u depends on floor(u * in / out) to ceil((u + 1) * in / out) - 1."""
    ratio = Fraction(inputs, outputs)
    return rational(ratio, lambda u: (floor(u * ratio), ceil((u + 1) * ratio) - 1))


def interpolated(ratio: Fraction, *, reach: int, offset: Fraction, antialias: bool = False) -> Window | None:
    """The window of linear (`reach` 1) or cubic (`reach` 2) interpolation at source = u * ratio + offset.

    With antialias all positions nearer than `reach * max(ratio, 1)` have weight.
    """

    def reads(u: int) -> tuple[int, int]:
        source = u * ratio + offset
        if antialias:
            wide = reach * max(ratio, Fraction(1))
            return floor(source - wide) + 1, ceil(source + wide) - 1
        if source.denominator == 1:
            return int(source), int(source)
        return floor(source) - reach + 1, floor(source) + reach

    return rational(ratio, reads)


def nearest(ratio: Fraction, *, exact: bool = False) -> Window | None:
    """The window of nearest resizing: floor(u * ratio), or floor((u + 1/2) * ratio) if `exact`."""

    def reads(u: int) -> tuple[int, int]:
        position = floor((u + Fraction(1, 2)) * ratio) if exact else floor(u * ratio)
        return position, position

    return rational(ratio, reads)


def through(field: Window, reads: Window) -> Window | None:
    """The field of an operation's units from that of its inputs and its own window; None beyond `LONGEST_PERIOD`.

    >>> through(sliding(3), sliding(3, stride=2, padding=1)).size
    5
    """
    phases = reads.period * field.period // gcd(field.period, reads.advance)
    if phases > LONGEST_PERIOD:
        return None
    spans = [_span(field, reads, u) for u in range(phases)]
    advance = reads.advance * phases // reads.period * field.advance // field.period
    return reduced(Window(tuple(a for a, _ in spans), tuple(b for _, b in spans), advance))


def _span(field: Window, reads: Window, unit: int) -> tuple[int, int]:
    first, last = reads.at(unit)
    spans = [field.at(v) for v in range(first, last + 1, reads.step)]
    spans = [(a, b) for a, b in spans if a <= b]
    return (min(a for a, _ in spans), max(b for _, b in spans)) if spans else (0, -1)


def unite(left: Window, right: Window) -> Window | None:
    """The window of the same unit of two branches; None if their strides differ."""
    if left.stride != right.stride:
        return None
    period = lcm(left.period, right.period)
    if period > LONGEST_PERIOD:
        return None
    spans = [_hull(left.at(u), right.at(u)) for u in range(period)]
    advance = left.advance * period // left.period
    return reduced(Window(tuple(a for a, _ in spans), tuple(b for _, b in spans), advance))


def _hull(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    if left[0] > left[1] or right[0] > right[1]:
        return right if left[0] > left[1] else left
    return min(left[0], right[0]), max(left[1], right[1])


def centre_distance(left: Window, right: Window) -> Fraction:
    period = lcm(left.period, right.period)
    return abs(sum((left.centre(u) - right.centre(u) for u in range(period)), Fraction(0))) / period


def reduced(window: Window) -> Window:
    for period in range(1, window.period):
        if window.period % period or window.advance * period % window.period:
            continue
        advance = window.advance * period // window.period
        shifted = [(window.at(r + period), window.at(r)) for r in range(window.period)]
        if all(_same(a, (b[0] + advance, b[1] + advance)) for a, b in shifted):
            return Window(window.first[:period], window.last[:period], advance, window.step)
    return window


def _same(left: tuple[int, int], right: tuple[int, int]) -> bool:
    return left == right or (left[0] > left[1] and right[0] > right[1])


def fit(first: Sequence[int], last: Sequence[int], size: int) -> Window | None:
    """The window with the shortest period that gives the spans of units 0, 1, ... in `size` positions, or None.

    At the borders, spans lack the positions outside (last < first: the span is empty).

    >>> fit([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], 3).stride
    Fraction(1, 2)
    """
    count = len(first)
    for period in range(1, min(count // 2, LONGEST_FIT) + 1):
        middle = (count - period - 1) // 2
        advance = first[middle + period] - first[middle]
        if advance <= 0:
            continue
        spans = {
            u % period: (first[u] - u // period * advance, last[u] - u // period * advance)
            for u in range(middle, middle + period)
        }
        window = Window(tuple(spans[r][0] for r in range(period)), tuple(spans[r][1] for r in range(period)), advance)
        clipped = ((max(a, 0), min(b, size - 1)) for a, b in map(window.at, range(count)))
        if all(_same(got, found) for got, found in zip(clipped, zip(first, last, strict=True), strict=True)):
            return window
    return None


ORIGIN = 2.0**22  # offset of positions, so that 0 can mean "no pixel"; float32 represents the sums exactly


@dataclass(frozen=True, kw_only=True)
class View:
    """The fields of units along one axis of the image, without borders, for paths without a global operation.

    Attributes:
        wide: union of all such paths; None without one, or if it has no window (`lost`).
        narrow: the path with the smallest field.
        whole: operation that made units depend on the whole axis; "" without one.
        lost: why there is no window.
    """

    wide: Window | None = None
    narrow: Window | None = None
    whole: str = ""
    lost: str = ""

    def through(self, reads: Window, reason: str) -> View:
        """The view of units that depend on these units; lost for `reason` without a window."""
        if self.wide is None or self.narrow is None:
            return self
        wide, narrow = through(self.wide, reads), through(self.narrow, reads)
        return replace(self, wide=wide, narrow=narrow) if wide and narrow else self.forget(reason)

    def forget(self, reason: str) -> View:
        return replace(self, wide=None, narrow=None, lost=self.lost or reason) if self.wide or self.lost else self

    def everything(self, reason: str) -> View:
        seen = self.wide or self.whole or self.lost
        return View(whole=self.whole or reason) if seen else self


@dataclass(frozen=True, kw_only=True)
class Field:
    """The receptive fields of the elements of one tensor.

    Attributes:
        bounds: for each axis two tensors of the tensor's shape: the first and last pixel as first - 2^22 and -last -
            2^22, so that a union is a minimum and zero means no pixel. Equal dimensions are expanded.
        dims: for each axis the tensor's dimension that runs along it, or None.
        notes: a note for each pair of branches that are not aligned.
    """

    bounds: tuple[Tensor, ...]
    views: tuple[View, ...]
    dims: tuple[int | None, ...]
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bounds[0].shape)


def image_field(shape: Sequence[int]) -> Field:
    axes = range(len(shape) - 2)
    bounds = tuple(bound for axis in axes for bound in carriers(shape, axis + 2))
    view = View(wide=IDENTITY, narrow=IDENTITY)
    return Field(bounds=bounds, views=(view,) * len(axes), dims=tuple(axis + 2 for axis in axes))


def constant_field(shape: Sequence[int], like: Field) -> Field:
    nothing = torch.zeros(()).expand(tuple(shape))
    return Field(bounds=(nothing,) * len(like.bounds), views=(View(),) * len(like.views), dims=(None,) * len(like.dims))


def carriers(shape: Sequence[int], dim: int) -> tuple[Tensor, Tensor]:
    """Bounds whose elements depend on their own index along `dim`."""
    index = torch.arange(shape[dim], dtype=torch.float32).view([-1 if d == dim else 1 for d in range(len(shape))])
    return (index - ORIGIN).expand(tuple(shape)), (-index - ORIGIN).expand(tuple(shape))


def compact(bound: Tensor, *, keep: int | None = None) -> Tensor:
    """Cut expanded dimensions to size 1, except `keep`."""
    for dim, (size, stride) in enumerate(zip(bound.shape, bound.stride(), strict=True)):
        if stride == 0 and size > 1 and dim != keep:
            bound = bound.narrow(dim, 0, 1)
    return bound


def least(bounds: Iterable[Tensor], shape: Sequence[int]) -> Tensor:
    parts = [compact(bound) for bound in bounds]
    result = parts[0]
    for part in parts[1:]:
        result = torch.minimum(result, part)
    return result.expand(tuple(shape))


def join(fields: Sequence[Field], shape: Sequence[int], name: str) -> Field:
    """The union of operands' fields, with broadcasting."""
    bounds = tuple(least(parts, shape) for parts in zip(*(f.bounds for f in fields), strict=True))
    views, dims, notes = [], [], dict.fromkeys(note for f in fields for note in f.notes)
    for axis in range(len(fields[0].views)):
        placed = {f.dims[axis] + len(shape) - len(f.shape) for f in fields if f.dims[axis] is not None}  # type: ignore[operator]
        dim = placed.pop() if len(placed) == 1 else None
        reason = f"{name} joins tensors whose axes lie in different dimensions"
        branches = [f.views[axis].forget(reason) if placed else _spread(f, axis, dim, shape, name) for f in fields]
        view, found = meet(branches, name)
        views.append(view)
        dims.append(dim)
        notes.update(dict.fromkeys(found))
    return Field(bounds=bounds, views=tuple(views), dims=tuple(dims), notes=tuple(notes))


def _spread(field: Field, axis: int, dim: int | None, shape: Sequence[int], name: str) -> View:
    own = field.dims[axis]
    units = 1 if own is None else field.shape[own]
    if dim is not None and units == 1 and shape[dim] > 1:
        return field.views[axis].forget(f"{name} broadcasts one unit along the axis")
    return field.views[axis]


def meet(branches: Sequence[View], name: str) -> tuple[View, list[str]]:
    """The union of branches on one axis, and notes on their alignment."""
    view, notes = View(), []
    for branch in branches:
        view, note = _meet(view, branch, name)
        notes += [note] if note else []
    return view, notes


def _meet(left: View, right: View, name: str) -> tuple[View, str]:
    whole, lost = left.whole or right.whole, left.lost or right.lost
    if lost:
        return View(whole=whole, lost=lost), ""
    if left.wide is None or right.wide is None:
        one = left if right.wide is None else right
        return replace(one, whole=whole), ""
    wide = unite(left.wide, right.wide)
    if wide is None:
        note = f"{name} joins branches of effective strides {left.wide.stride} and {right.wide.stride}: misaligned"
        return View(whole=whole, lost=note), note
    branches = [v.narrow for v in (left, right) if v.narrow]
    gap = centre_distance(*branches)  # of the narrow paths, so that windows of attention do not add up
    note = f"{name} joins branches whose centres lie {float(gap):g} px apart: misaligned" if gap else ""
    narrow = min(branches, key=lambda window: window.size)
    return View(wide=wide, narrow=narrow, whole=whole), note


def mix(field: Field, dims: Iterable[int], name: str, *, keep: bool = True) -> Field:
    """The field after an operation that mixes all elements along `dims`, which have size 1 unless `keep`."""
    rank = len(field.shape)
    mixed = {dim % rank for dim in dims}
    shape = [size if keep or d not in mixed else 1 for d, size in enumerate(field.shape)]
    bounds = tuple(_amin(bound, mixed).expand(shape) for bound in field.bounds)
    wide = [d for d in mixed if field.shape[d] > 1]
    views = tuple(
        view.everything(name) if dim in wide else view for view, dim in zip(field.views, field.dims, strict=True)
    )
    return settled(replace(field, bounds=bounds, views=views), name)


def settled(field: Field, name: str) -> Field:
    """Mark an axis without a window as whole if all elements depend on the same part of it."""
    views = tuple(
        view.everything(name) if view.lost and all(_uniform(b) for b in field.bounds[2 * axis : 2 * axis + 2]) else view
        for axis, view in enumerate(field.views)
    )
    return replace(field, views=views)


def _amin(bound: Tensor, dims: Iterable[int]) -> Tensor:
    bound = compact(bound)
    real = [d for d in dims if bound.shape[d] > 1]
    return bound.amin(dim=real, keepdim=True) if real else bound


def _uniform(bound: Tensor) -> bool:
    small = compact(bound)
    return bool(small.amin() == small.amax())


def read(bound: Tensor, dim: int, window: Window, count: int) -> Tensor:
    """The bound of `count` units along `dim` that depend on `window`, clipped at the borders."""
    dim %= bound.ndim
    size, small = bound.shape[dim], compact(bound, keep=dim)
    phases, units = torch.arange(count) % window.period, torch.arange(count) // window.period
    first = torch.tensor(window.first)[phases] + units * window.advance
    last = torch.tensor(window.last)[phases] + units * window.advance
    result = torch.zeros([count if d == dim else s for d, s in enumerate(small.shape)])
    for tap in range(int((last - first).max()) // window.step + 1):
        index = first + tap * window.step
        inside = ((index >= 0) & (index < size) & (index <= last)).view(
            [-1 if d == dim else 1 for d in range(bound.ndim)]
        )
        result = torch.minimum(result, small.index_select(dim, index.clamp(0, size - 1)) * inside)
    return result.expand([count if d == dim else s for d, s in enumerate(bound.shape)])


def move(field: Field, operation: Callable[[Tensor], Any], name: str, *, folds: bool = False) -> Any:
    """The field, or fields, after an operation that only moves elements.

    It is run on the bounds, and on the indices along each axis, which show where the axis went. With `folds`,
    neighbouring positions become channels (space to depth), and a unit has the union over them.
    """
    moved = [operation(bound) for bound in field.bounds]
    places = [_places(field, axis, operation) for axis in range(len(field.views))]
    if isinstance(moved[0], Tensor):
        return _moved(field, moved, places, name, folds)
    parts = range(len(moved[0]))
    return tuple(
        _moved(field, [m[i] for m in moved], [p and (p[0][i], p[1][i]) for p in places], name, folds) for i in parts
    )


def _places(field: Field, axis: int, operation: Callable[[Tensor], Any]) -> tuple[Any, Any] | None:
    """The operation's result on the indices of an axis."""
    dim = field.dims[axis]
    if dim is None:
        return None
    shape = list(field.shape)
    if shape[dim] > 1:
        first, last = carriers(shape, dim)
        return operation(first), operation(last)
    shape[dim] = 2
    first, last = carriers(shape, dim)
    try:
        return operation(first), operation(last)
    except (RuntimeError, IndexError):  # the operation holds sizes as constants
        return None


def _moved(field: Field, bounds: list[Tensor], places: list[Any], name: str, folds: bool) -> Field:
    views: list[View] = []
    dims: list[int | None] = []
    for axis, view in enumerate(field.views):
        dim = field.dims[axis]
        if places[axis] is None or dim is None:
            views.append(view)
            dims.append(None)
            continue
        size = max(2, field.shape[dim])
        first, last = places[axis]
        found, window = _locate(first, last, size, folds)
        if field.shape[dim] == 1:  # a single unit has no order that could be lost
            single = found is not None and bounds[0].shape[found] == 1
            views.append(view)
            dims.append(found if single else None)
            continue
        views.append(
            view.through(window, name) if window else view.forget(f"{name} moves positions out of their order")
        )
        dims.append(found)
    return replace(field, bounds=tuple(bounds), views=tuple(views), dims=tuple(dims))


def _locate(first: Tensor, last: Tensor, size: int, folds: bool) -> tuple[int | None, Window | None]:
    """The dimension along which an axis runs afterwards, and the window onto the axis before."""
    low, high = compact(first), compact(last)
    if bool(low.amin() == -high.amin() - 2 * ORIGIN):  # a single position is left
        position = int(low.amin() + ORIGIN)
        return None, Window((position,), (position,), 1)
    for dim, units in enumerate(low.shape):
        others = [d for d in range(low.ndim) if d != dim]
        firsts, lasts = _positions(low, high, others)
        spread = max(b - a for a, b in zip(firsts, lasts, strict=True))
        if units > 1 and (spread <= 0 or folds):
            window = fit(firsts, lasts, size)
            if window is not None:
                return dim, window
    return None, None


def _positions(low: Tensor, high: Tensor, others: list[int]) -> tuple[list[int], list[int]]:
    first = low.amin(dim=others) if others else low
    last = high.amin(dim=others) if others else high
    seen = first < 0
    empty_first, empty_last = torch.zeros_like(first), torch.full_like(last, -1)
    return (
        torch.where(seen, first + ORIGIN, empty_first).int().tolist(),
        torch.where(seen, -last - ORIGIN, empty_last).int().tolist(),
    )


class NoRuleError(Exception):
    """A rule cannot determine an operation's inputs; the field becomes unknown."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation with its arguments; a tensor that depends on the image is a Field, any other a real tensor."""

    node: fx.Node
    kind: str
    module: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    @property
    def function(self) -> str:
        if self.module is not None:
            return type(self.module).__name__
        return str(getattr(self.node.target, "__name__", self.node.target))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position, else by name; of a module, its attribute."""
        if self.module is not None:
            return getattr(self.module, name, default)
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def field(self, position: int, name: str = "input") -> Field:
        """An operand, by position or by name, as a Field (NoRuleError: it is missing or no tensor)."""
        value = self.args[position] if len(self.args) > position else self.kwargs.get(name)
        if isinstance(value, Field):
            return value
        if isinstance(value, Tensor):
            return constant_field(value.shape, next(self.fields()))
        raise NoRuleError(f"its argument {position} is {type(value).__name__} and no tensor")

    def operands(self) -> list[Field]:
        like = next(self.fields())
        parts = (v for v in flat([self.args, self.kwargs]) if isinstance(v, (Field, Tensor)))
        return [v if isinstance(v, Field) else constant_field(v.shape, like) for v in parts]

    def fields(self) -> Iterator[Field]:
        return (v for v in flat([self.args, self.kwargs]) if isinstance(v, Field))

    def result_shape(self) -> tuple[int, ...]:
        shape = self.node.meta.get("shape")
        if shape is None:
            raise NoRuleError("its result is no tensor")
        return tuple(shape)


def flat(value: Any) -> Iterator[Any]:
    """The parts of an argument: of sequences, mappings and slices."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    elif isinstance(value, slice):
        yield from flat([value.start, value.stop, value.step])
    else:
        yield value
