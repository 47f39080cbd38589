"""Channels of a network that belong together: its graph is run once, with channel numbers beside the values.

Classes say which channels of which tensors move together, and which nothing distinguishes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.cluster.hierarchy import DisjointSet
from torch import Tensor, fx, nn

from compress.graph.ops import PASSING, SHAPES, kinds, layer_name, node_kind, node_module


@dataclass(frozen=True, kw_only=True)
class Use:
    """An axis of a parameter or buffer that runs along channels.

    Attributes:
        rows: (first, end) on axis 0 for which this holds, as in grouped convolutions; None = all rows.
        role: `in` = columns of a consumer, `out` = rows of a producer, `vector` = one value for each channel.
        numbers: (length of the axis,) int64, the channel's number at each position.
    """

    path: str
    axis: int
    rows: tuple[int, int] | None
    role: str
    numbers: Tensor


@dataclass(kw_only=True)
class Channels:
    """All channel numbers of a network.

    Attributes:
        tied: the numbers as a disjoint set; a subset is a class.
        names: name of each class by the representative of its subset.
        reasons: why a number may not move.
        uses: axes of tensors, by the tensor's id, axis and rows.
        tensors: of the uses, by their ids.
        marks: numbers that occur together in one place.
        parts: (parts, size) numbers of parts of one size, which must stay of one size.
    """

    tied: DisjointSet = field(default_factory=DisjointSet)
    names: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    uses: dict[tuple[int, int, tuple[int, int] | None], Use] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    marks: list[Tensor] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)

    def fresh(self, count: int, *, reason: str | None = None) -> Tensor:
        """Return new numbers, each a class of its own; with a reason they may not move."""
        first = len(self.names)
        numbers = torch.arange(first, first + count)
        for number in range(first, first + count):
            self.tied.add(number)
            self.names[number] = number
        if reason is not None:
            self.pin(numbers, reason)
        return numbers

    def pin(self, numbers: Tensor, reason: str) -> None:
        for number in numbers.unique().tolist():
            self.reasons.setdefault(number, reason)

    def find(self, number: int) -> int:
        return self.names[self.tied[number]]

    def classes(self, numbers: Tensor) -> Tensor:
        unique, inverse = numbers.unique(return_inverse=True)
        return torch.tensor([self.find(x) for x in unique.tolist()], dtype=torch.int64)[inverse]

    def tie(self, left: Tensor, right: Tensor) -> None:
        for a, b in torch.stack([left.flatten(), right.flatten()], dim=1).unique(dim=0).tolist():
            name = min(self.find(a), self.find(b))
            self.tied.merge(a, b)
            self.names[self.tied[a]] = name

    def mark(self, numbers: Tensor) -> None:
        """Distinguish these channels, which occur together, from all others."""
        self.marks.append(numbers.flatten())

    def tie_parts(self) -> None:
        """Tie the channels at the same place of parts."""
        for parts in self.parts:
            self.tie(*torch.broadcast_tensors(parts[:1], parts))

    def use(
        self, tensor: Tensor, path: str, axis: int, numbers: Tensor, *, role: str, rows: tuple[int, int] | None = None
    ) -> None:
        """Note that the axis runs along these channels; two uses of a tensor are tied."""
        key = (id(tensor), axis, rows)
        self.tensors[key[0]] = tensor
        if key in self.uses:
            self.tie(self.uses[key].numbers, numbers)
        else:
            self.uses[key] = Use(path=path, axis=axis, rows=rows, role=role, numbers=numbers)

    def pinned(self) -> dict[int, str]:
        pinned: dict[int, str] = {}
        for number, reason in self.reasons.items():
            pinned.setdefault(self.find(number), reason)
        return pinned

    def interchangeable(self) -> list[list[int]]:
        """Groups of classes with the same tensors, equally often, in the same blocks of the same weights."""
        signatures: dict[int, list[tuple[int, int]]] = {}
        for place, numbers in enumerate(self._places()):
            unique, counts = self.classes(numbers).unique(return_counts=True)
            for number, count in zip(unique.tolist(), counts.tolist(), strict=True):
                signatures.setdefault(number, []).append((place, count))
        groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number in sorted(signatures):
            groups.setdefault(tuple(signatures[number]), []).append(number)
        return list(groups.values())

    def _places(self) -> Iterable[Tensor]:
        yield from self.marks
        yield from (use.numbers for use in self.uses.values())


def permute_index(classes: Tensor, moves: dict[int, int]) -> Tensor:
    """Index that moves channels along an axis: position p takes its value from index[p].

    `classes` are at each position; one at several positions receives them in order. `moves` maps classes to those whose
    content they receive, a bijection.
    """
    places: dict[int, list[int]] = {}
    for position, number in enumerate(classes.tolist()):
        places.setdefault(number, []).append(position)
    index = list(range(len(classes)))
    for target, positions in places.items():
        source = moves.get(target, target)
        for position, taken in zip(positions, places[source], strict=True):
            index[position] = taken
    return torch.tensor(index)


_ELEMENTWISE = kinds(lambda t: t.elementwise and t.category in {"activation", "arithmetic", "passing"})
_POOLS = kinds(lambda t: t.category in {"pool", "resampling"})
_REDUCTIONS = kinds(lambda t: t.category == "reduction") - {"reduce"}
# Operations that are run on the numbers; those taken out may pad with zeros, and 0 is a channel's number.
_MOVES = kinds(lambda t: t.category in {"movement", "join"}) - {"unfold", "patch_merging"}

# Channel numbers of a value, or of each of several; None if there are no channels to follow.
Numbers = Tensor | tuple[Any, ...] | None


def channels_of(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...], *, owner: nn.Module) -> Channels:
    """Follow the channels of a traced graph, in evaluation mode; the values of the inputs do not matter.

    Channels stay that meet a constant of the graph, or a tensor that its `owner` does not hold or computes.
    """
    follower = _Follower(graph_module)
    with torch.no_grad():
        follower.run(*inputs)
    channels = follower.channels
    own = dict((*owner.named_parameters(remove_duplicate=False), *owner.named_buffers(remove_duplicate=False)))
    for key, use in list(channels.uses.items()):
        if use.path not in own or not torch.equal(own[use.path], channels.tensors[key[0]]):
            channels.pin(use.numbers, f"meet {use.path}, which is computed or a constant")
            del channels.uses[key]
    return channels


class _Follower(fx.Interpreter):
    """Finds the channel numbers of every node, or why it has none."""

    # Numbers have as many axes as the value, of size 1 where they do not vary.

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.channels = Channels()
        self.numbers: dict[fx.Node, Numbers] = {}
        self.why: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        self.numbers[n] = numbers = self._follow(n, node_kind(n), result)
        if numbers is None and n not in self.why:
            self._inherit(n)
        for tensor in _flat(numbers):
            self.channels.mark(tensor)
        return result

    def _follow(self, node: fx.Node, kind: str, result: Any) -> Numbers:
        if kind in SHAPES:
            return None
        if kind == "input":
            return self._fresh(result, 1, "are the input") if isinstance(result, Tensor) else None
        if kind == "constant":
            return self._constant(node, result)
        if kind in _MOVES:
            return self._move(node)
        if kind in _REDUCTIONS:
            return self._reduce(node, kind, result)
        if kind in _ELEMENTWISE:
            return self._elementwise(node, result)
        numbers: Numbers = None
        if kind in _POOLS or kind in {"softmax", "log_softmax"}:
            numbers = self._kept(node, kind, result)
        elif kind in _MODULE_RULES and node.op == "call_module":
            numbers = _MODULE_RULES[kind](self, node, result)
        elif kind in {"layer_norm", "group_norm"}:
            numbers = self._functional_norm(node, kind)
        return self._lost(node, kind) if numbers is None else numbers

    # Arguments of a node.

    def _first(self, node: fx.Node) -> Tensor | None:
        argument = node.args[0] if node.args else node.kwargs.get("input")
        numbers = self.numbers.get(argument) if isinstance(argument, fx.Node) else None
        return numbers if isinstance(numbers, Tensor) else None

    def _vector(self, node: fx.Node, axis: int) -> Tensor | None:
        """Numbers of the first argument along an axis; those that vary along others are tied along them."""
        numbers = self._first(node)
        if numbers is None or numbers.ndim <= axis or (_varies(numbers) and numbers.shape[axis] == 1):
            return None
        rows = numbers.movedim(axis, 0).flatten(1)
        if rows.shape[1] > 1:
            self.channels.tie(*torch.broadcast_tensors(rows[:, :1], rows))
        return rows[:, 0].view([-1 if i == axis else 1 for i in range(numbers.ndim)])

    def _full(self, value: Any, numbers: Numbers) -> Any:
        # Numbers as large as the value, in float64, which every moving operation supports.
        if isinstance(value, Tensor):
            if not isinstance(numbers, Tensor):
                numbers = self.channels.fresh(1, reason="a value that is no channel").view([1] * value.ndim)
            return numbers.double().expand(value.shape).contiguous()
        if isinstance(value, (tuple, list)):
            inner = numbers if isinstance(numbers, tuple) else (None,) * len(value)
            return type(value)(self._full(v, x) for v, x in zip(value, inner, strict=True))
        return value

    def _inherit(self, node: fx.Node, *, otherwise: str = "") -> None:
        reason = next((self.why[a] for a in node.all_input_nodes if a in self.why), otherwise)
        if reason:
            self.why[node] = reason

    def _fresh(self, value: Tensor, axis: int, reason: str | None = None) -> Tensor:
        if value.ndim <= axis:
            return self.channels.fresh(1, reason=reason).view([1] * value.ndim)
        shape = [1] * value.ndim
        shape[axis] = value.shape[axis]
        return self.channels.fresh(value.shape[axis], reason=reason).view(shape)

    def _lost(self, node: fx.Node, kind: str) -> Numbers:
        reason = f"meet {layer_name(node)} ({kind}), which cannot be followed" if kind != "output" else "are the output"
        self._inherit(node, otherwise=reason)
        for argument in node.all_input_nodes:
            for numbers in _flat(self.numbers.get(argument)):
                self.channels.pin(numbers, reason if kind == "output" else self.why[node])
        return None

    # Rules: operations without parameters.

    def _constant(self, node: fx.Node, value: Any) -> Numbers:
        # A parameter outside of a layer: one value for each channel if only one axis exceeds 1.
        axes = [axis for axis, size in enumerate(value.shape) if size > 1] if isinstance(value, Tensor) else []
        if len(axes) != 1:
            if axes:
                self.why[node] = f"meet the tensor {node.target} of {tuple(value.shape)}, which cannot be followed"
            return None
        numbers = self._fresh(value, axes[0])
        self.channels.use(value, str(node.target), axes[0], numbers.flatten(), role="vector")
        return numbers

    def _kept(self, node: fx.Node, kind: str, result: Any) -> Numbers:
        # Pools work inside a channel; a softmax treats all channels alike.
        numbers = self._vector(node, 1) if kind in _POOLS else self._first(node)
        if numbers is None or not isinstance(result, Tensor) or len(_varies(numbers)) > 1:
            return None
        return numbers if all(result.shape[axis] == numbers.shape[axis] for axis in _varies(numbers)) else None

    def _move(self, node: fx.Node) -> Numbers:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self._full(self.env[a], self.numbers.get(a)))
        if not any(_flat(self.numbers.get(a)) for a in node.all_input_nodes):
            return None
        try:
            moved = _compact(getattr(self, node.op)(node.target, args, kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return self._lost(node, node_kind(node))
        known = torch.arange(len(self.channels.names))
        if not all(bool(torch.isin(x, known).all()) and x.numel() for x in _flat(moved)):
            return self._lost(node, node_kind(node))
        for numbers in _flat(moved):
            self._note_parts(node, numbers)
        return moved

    def _reduce(self, node: fx.Node, kind: str, result: Any) -> Numbers:
        # A reduction over channels takes all alike, and its result has none.
        numbers, alone = self._first(node), len(node.all_input_nodes) == 1
        given = next(iter(node.args[2 if kind == "vector_norm" else 1 :]), None)
        given = node.kwargs.get("dim", node.kwargs.get("axis", given))
        if numbers is None:
            return None
        every = range(numbers.ndim)
        axes = [given] if type(given) is int else every if given is None else given
        if not alone or not isinstance(axes, (range, tuple, list)):
            return self._lost(node, kind)
        over = {int(axis) % numbers.ndim for axis in axes}
        indices = not isinstance(result, Tensor)  # of a maximum
        if _varies(numbers) <= over:
            inside = indices and any(user.target is not operator.getitem or user.args[1] for user in node.users)
            return self._lost(node, kind) if inside else None
        first = numbers[tuple(slice(0, 1) if axis in over else slice(None) for axis in every)]
        self.channels.tie(*torch.broadcast_tensors(first, numbers))
        value = result[0] if indices else result
        left = first if value.ndim == first.ndim else first.squeeze(tuple(over))
        return (left, None) if indices else left

    def _note_parts(self, node: fx.Node, after: Tensor) -> None:
        # Where an operation cuts a vector of channels into parts of one size.
        numbers, kind = self._first(node), node_kind(node)
        if numbers is None or len(_varies(numbers)) != 1:
            return
        vector, size = numbers.flatten(), after.numel()
        if kind == "channel_shuffle":
            groups: Any = _layer(node).groups if node.op == "call_module" else node.args[1]
            self.channels.parts.append(vector.view(groups, -1))
        elif kind in {"reshape", "flatten"} and len(_varies(after)) > 1 and size == len(vector):
            free = _free_axis(node, after)
            self.channels.parts.append(after.movedim(free, -1).reshape(-1, after.shape[free]))
        elif kind in {"split", "getitem"} and 1 < size < len(vector) and len(vector) % size == 0:
            parts = vector.view(-1, size)
            if (parts == after.flatten()).all(1).any():
                self.channels.parts.append(parts)

    def _elementwise(self, node: fx.Node, result: Any) -> Numbers:
        kind = node_kind(node)
        operands = [a for a in node.all_input_nodes if isinstance(self.env[a], Tensor)]
        operands = operands[:1] if kind in PASSING else operands  # x.type_as(y) uses no value of y
        if not isinstance(result, Tensor) or (kind == "leaky_relu" and len(operands) > 1):
            return self._lost(node, kind)
        if node.op == "call_module" and not self._module_vectors(node, ("weight",), 1):
            return self._lost(node, kind)
        shapes = [(1,) * (result.ndim - self.env[a].ndim) + tuple(self.env[a].shape) for a in operands]
        aligned = [
            x.view([1] * (result.ndim - x.ndim) + list(x.shape)) if isinstance(x, Tensor) else None
            for x in map(self.numbers.get, operands)
        ]
        joined: Tensor | None = None
        for axis in range(result.ndim):
            varying = {i for i, x in enumerate(aligned) if x is not None and x.shape[axis] > 1}
            if varying and any(shape[axis] > 1 for i, shape in enumerate(shapes) if i not in varying):
                return self._lost(node, kind)  # an operand has a value for each channel but no channels
        for numbers, shape in zip(aligned, shapes, strict=True):
            if numbers is None or (numbers.numel() == 1 and result.shape != shape):
                continue
            if joined is None:
                joined = numbers
            else:
                left, right = torch.broadcast_tensors(joined, numbers)
                self.channels.tie(left, right)
                joined = left.contiguous()
        return joined

    # Rules: layers.

    def _module_vectors(self, node: fx.Node, names: tuple[str, ...], axis: int, *, rows: bool = False) -> bool:
        # Notes vectors, or tensors with a row for each, along the input's channels; False if they do not fit.
        module = node_module(node)
        for name in names:
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor) and tensor.numel() > 1:
                numbers = self._vector(node, axis)
                if numbers is None or numbers.numel() != (len(tensor) if rows else tensor.numel()):
                    return False
                self.channels.use(tensor, f"{node.target}.{name}", 0, numbers.flatten(), role="vector")
        return True

    def _norm(self, node: fx.Node, result: Tensor) -> Numbers:
        fits = self._module_vectors(node, ("weight", "bias", "running_mean", "running_var"), 1)
        return self._vector(node, 1) if fits else None

    def _group_norm(self, node: fx.Node, result: Tensor) -> Numbers:
        numbers = self._norm(node, result)
        if isinstance(numbers, Tensor) and _layer(node).num_groups < numbers.numel():
            self._apart(numbers, _layer(node).num_groups)
        return numbers

    def _layer_norm(self, node: fx.Node, result: Tensor) -> Numbers:
        if len(_layer(node).normalized_shape) != 1:
            return None
        fits = self._module_vectors(node, ("weight", "bias"), result.ndim - 1)
        return self._vector(node, result.ndim - 1) if fits else None

    def _functional_norm(self, node: fx.Node, kind: str) -> Numbers:
        first = self._first(node)
        numbers = self._vector(node, 1 if kind == "group_norm" else first.ndim - 1) if first is not None else None
        if numbers is None:
            return None
        for argument in node.all_input_nodes[1:]:
            vector = self.numbers.get(argument)
            if not isinstance(vector, Tensor) or vector.numel() != numbers.numel():
                return None
            self.channels.tie(vector.flatten(), numbers.flatten())
        if kind == "group_norm":
            self._apart(numbers, node.args[1])
        return numbers

    def _apart(self, numbers: Tensor, groups: Any) -> None:
        parts = numbers.view(groups, -1)
        self.channels.marks += parts
        self.channels.parts.append(parts)

    def _linear(self, node: fx.Node, result: Tensor) -> Numbers:
        return self._weighted(node, result, axis=result.ndim - 1, groups=1)

    def _conv(self, node: fx.Node, result: Tensor) -> Numbers:
        module = _layer(node)
        if module.groups == module.in_channels > 1:
            return self._depthwise(node, module)
        return self._weighted(node, result, axis=1, groups=module.groups)

    def _depthwise(self, node: fx.Node, module: Any) -> Numbers:
        numbers = self._vector(node, 1)
        if numbers is None or numbers.numel() != module.in_channels:
            return None
        numbers = numbers.repeat_interleave(module.out_channels // module.in_channels, 1)
        for name in ("weight", "bias"):
            if isinstance(tensor := getattr(module, name), Tensor):
                self.channels.use(tensor, f"{node.target}.{name}", 0, numbers.flatten(), role="vector")
        return numbers

    def _conv_transpose(self, node: fx.Node, result: Tensor) -> Numbers:
        if node_module(node).groups != 1:
            return None
        return self._weighted(node, result, axis=1, groups=1, transposed=True)

    def _weighted(self, node: fx.Node, result: Tensor, *, axis: int, groups: int, transposed: bool = False) -> Numbers:
        # A layer with new channels: columns consume them, rows produce them.
        module = _layer(node)
        weight: nn.Parameter = module.weight
        read = self._vector(node, axis)
        length = weight.shape[0 if transposed else 1] * groups
        if read is None or read.numel() != length:
            self._lost(node, node_kind(node))
            read = self.channels.fresh(length, reason=self.why[node])
        made = self._fresh(result, axis)
        rows = weight.shape[0] // groups
        for group, part in enumerate(read.flatten().chunk(groups)):
            block = (group * rows, (group + 1) * rows) if groups > 1 else None
            self.channels.use(weight, f"{node.target}.weight", 0 if transposed else 1, part, role="in", rows=block)
        if groups > 1:
            self._apart(read, groups)
            self._apart(made, groups)
        self.channels.use(weight, f"{node.target}.weight", 1 if transposed else 0, made.flatten(), role="out")
        if module.bias is not None:
            self.channels.use(module.bias, f"{node.target}.bias", 0, made.flatten(), role="vector")
        return made


_MODULE_RULES: dict[str, Callable[[_Follower, fx.Node, Tensor], Numbers]] = {
    "conv": _Follower._conv,
    "conv_transpose": _Follower._conv_transpose,
    "linear": _Follower._linear,
    "batch_norm": _Follower._norm,
    "instance_norm": _Follower._norm,
    "group_norm": _Follower._group_norm,
    "layer_norm": _Follower._layer_norm,
}


def _flat(numbers: Numbers) -> list[Tensor]:
    if isinstance(numbers, Tensor):
        return [numbers]
    return [x for item in numbers or () for x in _flat(item)]


def _free_axis(node: fx.Node, after: Tensor) -> int:
    # Of a reshape, the axis of which the network computes the size; the last one that varies if none is.
    sizes = node.args[1:] if len(node.args) > 2 else node.args[-1]
    varying = sorted(_varies(after))
    if isinstance(sizes, (tuple, list)) and len(sizes) == after.ndim:
        free = [axis for axis in varying if isinstance(sizes[axis], fx.Node) or sizes[axis] == -1]
        return free[0] if len(free) == 1 else varying[-1]
    return varying[-1]


def _layer(node: fx.Node) -> Any:  # Any: rules ask for attributes of many classes
    return node_module(node)


def _varies(numbers: Tensor) -> set[int]:
    return {axis for axis, size in enumerate(numbers.shape) if size > 1}


def _compact(value: Any) -> Numbers:
    """Full numbers as small integers: axes without variation get size 1."""
    if isinstance(value, (tuple, list)):
        return tuple(_compact(item) for item in value)
    if not isinstance(value, Tensor):
        return None
    for axis in range(value.ndim):
        if value.shape[axis] > 1 and bool((value == value.narrow(axis, 0, 1)).all()):
            value = value.narrow(axis, 0, 1)
    whole = value.round().long()
    return torch.where(value == whole, whole, -1)
