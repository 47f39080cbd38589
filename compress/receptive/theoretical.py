"""Exact theoretical receptive fields of any model that torch.fx can trace: its graph is evaluated on fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from compress.errors import ReceptiveFieldError, near_misses
from compress.graph.inputs import Inputs, as_inputs, first_of
from compress.graph.layers import layers
from compress.graph.ops import attribute_of, layer_name, node_kind, node_module, run_node
from compress.graph.report import leaves_of
from compress.graph.trace import trace
from compress.receptive.fields import ORIGIN, Call, Field, NoRuleError, Window, compact, flat, image_field
from compress.receptive.rules import RULES

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
    if not sizes.numel():
        return 0  # of what an image has none of, such as the tokens of an expert
    return int(torch.where(compact(low) < 0, sizes, torch.zeros(())).amax())


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
    image = inputs[0]
    if image.ndim < 3 or 0 in image.shape:
        raise ReceptiveFieldError(
            f"a receptive field needs a batch of images (N, C, height, width), got a tensor of shape "
            f"{tuple(image.shape)}"
        )
    return graph_receptive_field(trace(model, inputs), inputs, name=type(model).__name__)


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
            if call.kind not in RULES:
                raise NoRuleError("there is no rule for this kind of operation")
            value = RULES[call.kind](call)  # a Field, a tuple of them, or a plain value (a shape)
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
