"""The table of theoretical receptive fields: a row for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import ReceptiveFieldError, near_misses
from compress.receptive.fields import ORIGIN, Field, compact
from compress.receptive.windows import Window

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
        """Number of units along each axis, or None."""
        shape = self.shape or ()
        return tuple(shape[d] if d is not None else None for d in self.dims)

    @property
    def located(self) -> bool:
        """True if a dimension runs along every axis."""
        return bool(self.dims) and None not in self.dims

    def interval(self, unit: Sequence[int]) -> tuple[tuple[int, int] | None, ...]:
        """The first and last pixel of this image that a unit sees along each axis; None if it sees none.

        The unit is a position if the node is `located`, otherwise an index.

        Raises:
            ReceptiveFieldError: the field is unknown, or there is no such unit.
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
        """The first unknown row, or None."""
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
