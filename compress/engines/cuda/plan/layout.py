"""The memory layout of a plan: place of every tensor; images of few channels in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.onnx_ops import apply, pads_of
from compress.engines.cuda.plan.steps import (
    NO_PADDING,
    Attention,
    AveragePool,
    Computed,
    Convolution,
    Elementwise,
    Linear,
    MaxPool,
    Move,
    Output,
    Plan,
    PlanTensor,
    Product,
    SampledSum,
    Source,
    Step,
)

_MOST_CHANNELS = 8
_MOST_BLOCK = 32  # pixels a side
_ALIGNED = 16  # bytes
_LARGEST_VECTOR = 32  # codes of a whole filter: one step of a tensor core


@dataclass(frozen=True, kw_only=True, eq=False)
class PackImage(Computed):
    """An image as codes in blocks: `out` is (N, rows, columns, V).

    Attributes:
        move: pixels from one block to the next; fewer than `block` where blocks overlap.
        before: pixels of padding above and on the left.
        view: the tensor as the convolution reads it, (N, K, rows, OW).
    """

    block: int
    move: int
    before: tuple[int, int]
    view: str

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out.codes, self.view)


def pack_stems(plan: Plan) -> Plan:
    """Rearrange every convolution that alone reads a few quantized channels of the network's input."""
    writers = {name: step for step in plan.steps for name in step.writes}
    readers: dict[str, int] = {}
    for step in plan.steps:
        for name in step.reads:
            readers[name] = readers.get(name, 0) + 1
    replaced: dict[int, Step] = {}
    tensors = dict(plan.tensors)
    for step in plan.steps:
        if not isinstance(step, Convolution) or not fits(step, plan):
            continue
        quantize = writers.get(step.x.name)
        if not isinstance(quantize, Elementwise) or quantize.combination != "none" or quantize.out.value:
            continue
        if quantize.x.name not in plan.inputs or quantize.activation.kind != "none" or readers[step.x.name] != 1:
            continue
        packed, convolution = _packed(step, quantize, tensors)
        replaced[id(quantize)], replaced[id(step)] = packed, convolution
    return replace(plan, steps=tuple(replaced.get(id(step), step) for step in plan.steps), tensors=tensors)


def fits(step: Convolution, plan: Plan) -> bool:
    square = step.stride[0] == step.stride[1] <= _MOST_BLOCK and step.dilation == (1, 1)
    return step.groups == 1 and step.weight.shape[1] <= _MOST_CHANNELS and square and step.stride[0] > 0


def _packed(step: Convolution, quantize: Elementwise, tensors: dict[str, PlanTensor]) -> tuple[PackImage, Convolution]:
    """The two steps that take the place of a quantizer and a convolution; adds their tensors."""
    _, channels, taps_y, taps_x = step.weight.shape
    move = step.stride[0]
    block = taps_y if _holds_whole_filter(step) else move
    out = tensors[step.epilogue.out.names[0]].shape
    blocks_y, blocks_x = -(-taps_y // block), -(-taps_x // block)
    vector = -(-block * block * channels // _ALIGNED) * _ALIGNED
    rows, columns = out[2] - 1 + blocks_y, out[3] - 1 + blocks_x
    images = tensors[step.x.name].shape[0]
    packed, view = f"{step.x.name}/packed", f"{step.x.name}/rows"
    tensors[packed] = PlanTensor(shape=(images, rows, columns, vector), dtype=torch.int8)
    tensors[view] = PlanTensor(shape=(images, blocks_x * vector, rows, out[3]), dtype=torch.int8)
    (above, _), (left, _) = step.padding
    pack = PackImage(
        name=quantize.name,
        origins=quantize.origins,
        x=quantize.x,
        out=Output(packed, quantize.out.grid),
        block=block,
        move=move,
        before=(above, left),
        view=view,
    )
    weight = packed_filter(step.weight, block, vector)
    convolution = replace(step, x=Source(view, step.x.grid), weight=weight, stride=(1, 1), padding=NO_PADDING)
    return pack, convolution


def _holds_whole_filter(step: Convolution) -> bool:
    """True if a vector holds all that a filter reads."""
    _, channels, taps_y, taps_x = step.weight.shape
    return step.stride == (1, 1) and taps_y == taps_x and taps_y * taps_x * channels <= _LARGEST_VECTOR


def packed_filter(weight: Tensor, block: int, vector: int) -> Tensor:
    """A filter (O, C, R, S) for packed images: (O, blocks in a row * vector, blocks in a column, 1)."""
    outputs, channels, taps_y, taps_x = weight.shape
    blocks_y, blocks_x = -(-taps_y // block), -(-taps_x // block)
    weight = F.pad(weight, (0, blocks_x * block - taps_x, 0, blocks_y * block - taps_y))
    weight = weight.reshape(outputs, channels, blocks_y, block, blocks_x, block).permute(0, 2, 4, 3, 5, 1)
    weight = weight.reshape(outputs, blocks_y, blocks_x, block * block * channels)
    weight = F.pad(weight, (0, vector - weight.shape[-1]))
    return weight.reshape(outputs, blocks_y, 1, blocks_x * vector).permute(0, 3, 1, 2).contiguous()


def packed_image(codes: Tensor, step: PackImage, shape: tuple[int, ...], zero: int) -> Tensor:
    """Codes (N, C, H, W) in blocks, of `shape`, by torch operations."""
    images, rows, columns, vector = shape
    _, channels, height, width = codes.shape
    (above, left), block = step.before, step.block
    below, right = (rows - 1) * step.move + block - height - above, (columns - 1) * step.move + block - width - left
    padded = F.pad(codes, (left, right, above, below), value=zero)  # what lies beyond the last filter is cut off
    blocks = padded.unfold(2, block, step.move).unfold(3, block, step.move).permute(0, 2, 3, 4, 5, 1)
    blocks = blocks.reshape(images, rows, columns, block * block * channels)
    return F.pad(blocks, (0, vector - blocks.shape[-1]), value=zero)


def overlapping_rows(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The view (N, K, rows, OW) of a packed image (N, rows, columns, V)."""
    _, row, column, _ = packed.stride()
    return packed.as_strided(shape, (packed.stride(0), 1, row, column), packed.storage_offset())


# Bytes; what CUDA's own allocator gives, and more than any kernel needs.
ALIGNMENT = 256


@dataclass(frozen=True)
class Lifetime:
    """The steps, both included, from which and to which a buffer of `size` bytes is needed."""

    size: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


def assign_offsets(lifetimes: Mapping[str, Lifetime]) -> tuple[dict[str, int], int]:
    """Offsets of buffers in an arena, and its size, in bytes."""
    offsets: dict[str, int] = {}
    total = 0
    for name in sorted(lifetimes, key=lambda n: (-lifetimes[n].size, lifetimes[n].first)):
        life = lifetimes[name]
        size = -(-life.size // ALIGNMENT) * ALIGNMENT
        taken = sorted(
            (offsets[other], offsets[other] + -(-lifetimes[other].size // ALIGNMENT) * ALIGNMENT)
            for other in offsets
            if life.overlaps(lifetimes[other])
        )
        best, best_gap, end = None, None, 0
        for start, stop in taken:
            gap = start - end
            if gap >= size and (best_gap is None or gap < best_gap):
                best, best_gap = end, gap
            end = max(end, stop)
        offsets[name] = end if best is None else best
        total = max(total, offsets[name] + size)
    return offsets, total


_CHANNELS_LAST = (0, 2, 3, 1)
_ROW_BYTES = 16  # rows of channels begin at multiples of this


@dataclass(frozen=True)
class Place:
    """The place of a tensor in memory, in elements."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def meta(self) -> Tensor:
        size = 1 + self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        base = torch.empty(size, dtype=self.dtype, device="meta")
        return base.as_strided(self.shape, self.strides, self.offset)

    @property
    def order(self) -> list[int]:
        """Axes by stride, descending."""
        return sorted(range(len(self.shape)), key=lambda axis: (-self.strides[axis], axis))

    def like(self, view: Tensor) -> Place:
        offset = int(view.storage_offset())
        return replace(self, shape=tuple(view.shape), strides=tuple(view.stride()), offset=offset)


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy(Step):
    """Elements copied from one place to another of the same shape.

    Attributes:
        fill: what `whole` is set to before; None = it is not.
        whole: the tensor that the target is a part of; "" without `fill`.
    """

    source: str | Tensor
    target: str
    fill: int | None = None
    whole: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else ()

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.whole, self.target) if self.whole else (self.target,)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A plan with a place for everything.

    Attributes:
        steps: of the plan, without the moves that are views; copies in place of the others.
        places: of all tensors but those that torch allocates.
        offsets: of the buffers in the arena, bytes.
    """

    plan: Plan
    steps: tuple[Step, ...]
    places: dict[str, Place]
    offsets: dict[str, int]
    arena_bytes: int
    buffer_bytes: dict[str, int]

    def views(self, arena: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, place in self.places.items():
            if place.buffer in self.offsets:
                start = self.offsets[place.buffer]
                flat = arena[start : start + self.buffer_bytes[place.buffer]].view(place.dtype)
                found[name] = flat.as_strided(place.shape, place.strides, flat.storage_offset() + place.offset)
        return found


def lay_out(plan: Plan) -> Layout:
    """Place all tensors of a plan; first convolutions of few channels are rearranged."""
    return _Layouter(pack_stems(plan)).run()


@dataclass
class _Layouter:
    plan: Plan
    places: dict[str, Place] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    # A part of a concatenation: (the whole, axis, where it begins).
    inside: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def run(self) -> Layout:
        self._join_parts()
        for step in self.plan.steps:
            if isinstance(step, PackImage):
                packed = self._dense(step.out.codes, range(4))
                self.places[step.out.codes] = packed
                self.places[step.view] = packed.like(
                    overlapping_rows(packed.meta(), self.plan.tensors[step.view].shape)
                )
                self.steps.append(step)
            elif isinstance(step, (Product, Computed)):
                for name in step.writes:
                    self._place(name, step)
                self.steps.append(step)
            elif isinstance(step, Move) and all(name in self.places for name in step.reads) and step.reads:
                self._move(step)
            else:
                self.steps.append(step)
        offsets, total = assign_offsets(self._lifetimes())
        return Layout(
            plan=self.plan,
            steps=tuple(self.steps),
            places=self.places,
            offsets=offsets,
            arena_bytes=total,
            buffer_bytes=self.sizes,
        )

    # Allocation

    def _place(self, name: str, step: Step) -> Place:
        if name in self.inside:
            whole, axis, start = self.inside[name]
            parent = self.places.get(whole) or self._place(whole, step)
            part = parent.meta().narrow(axis, start, self.plan.tensors[name].shape[axis])
            self.places[name] = parent.like(part)
        elif name not in self.places:
            self.places[name] = self._dense(name, self._order(name, step))
        return self.places[name]

    def _dense(self, name: str, order: Sequence[int]) -> Place:
        tensor = self.plan.tensors[name]
        size, strides = 1, [1] * len(tensor.shape)
        step = max(1, _ROW_BYTES // tensor.dtype.itemsize)
        for i, axis in enumerate(reversed(order)):
            strides[axis] = size
            count = tensor.shape[axis]
            padded = i == 0 and len(order) > 1 and self._pads_rows(name, order)
            size *= -(-count // step) * step if padded else count
        self.sizes[name] = max(1, size) * tensor.dtype.itemsize
        return Place(name, tensor.shape, tuple(strides), 0, tensor.dtype)

    def _pads_rows(self, name: str, order: Sequence[int]) -> bool:
        image = len(order) == 4 and tuple(order) == (0, 2, 3, 1)
        rows = len(order) in (2, 3) and list(order) == sorted(order)
        same = len(order) == 4 and list(order) == sorted(order) and name in self._followers
        return (image or rows or same) and name not in self.plan.outputs.values()

    @property
    def _followers(self) -> set[str]:
        """Tensors of four axes that a normalization writes, channels last."""
        kinds = (Attention, PackImage)
        return {n for s in self.plan.steps if isinstance(s, Computed) and not isinstance(s, kinds) for n in s.writes}

    def _order(self, name: str, step: Step) -> list[int]:
        rank = len(self.plan.tensors[name].shape)
        last = list(_CHANNELS_LAST)
        image = isinstance(step, (Convolution, MaxPool, AveragePool)) or (isinstance(step, Linear) and step.axis == 1)
        if rank == 4 and (image or (isinstance(step, Move) and self._feeds_image(name))):
            return last
        turned = self._only_transpose(name)
        if turned is not None:
            return turned
        source = self.places.get(step.reads[0]) if isinstance(step, Computed) else None
        if source is not None and len(source.shape) == rank and not isinstance(step, Attention):
            return source.order
        if rank == 4 and isinstance(step, Computed) and self._feeds_image(name):
            return last
        return list(range(rank))

    def _only_transpose(self, name: str) -> list[int] | None:
        readers = [s for s in self.plan.steps if name in s.reads]
        if len(readers) == 1 and isinstance(readers[0], Move) and readers[0].op == "Transpose":
            turned = list(readers[0].attributes.get("perm", ()))
            image = len(turned) == 4 and self._feeds_image(readers[0].outputs[0])
            return [turned[axis] for axis in _CHANNELS_LAST] if image else turned or None
        return None

    def _feeds_image(self, name: str) -> bool:
        for step in self.plan.steps:
            if name not in step.reads:
                continue
            after = [n for n in step.writes if len(self.plan.tensors[n].shape) == 4]
            moves = isinstance(step, Move) and step.op != "Transpose"
            if isinstance(step, (Convolution, MaxPool, AveragePool)) or (moves and any(map(self._feeds_image, after))):
                return True
        return False

    def _is_sampled(self, name: str) -> bool:
        return any(
            (isinstance(step, SampledSum) and name in step.images)
            or (isinstance(step, Move) and any(map(self._is_sampled, step.writes)))
            for step in self.plan.steps
            if name in step.reads
        )

    # Moves

    def _move(self, step: Move) -> None:
        if step.op == "Concat":
            self._concat(step)
            return
        source = self.places[step.reads[0]]
        moved = source.meta()
        results = apply(step.op, step.attributes, [moved if isinstance(x, str) else x for x in step.inputs])
        for name, result in zip(step.outputs, results, strict=False):
            if result._base is moved._base and 0 not in result.stride():  # some copies are views too: of a new tensor
                self.places[name] = source.like(result)
            else:
                self._copied(step, name, source)

    def _copied(self, step: Move, name: str, source: Place) -> None:
        shape = self.plan.tensors[name].shape
        order: Sequence[int] = range(len(shape))
        if step.op == "Resize":
            order = source.order
        elif len(shape) == 4 and self._feeds_image(name):
            order = _CHANNELS_LAST
        elif len(shape) > 2 and self._is_sampled(name):
            order = (0, *range(2, len(shape)), 1)
        place = self._place(name, step) if name in self.inside else self._dense(name, order)
        self.places[name] = place
        if step.op == "Pad" and all(n <= m for n, m in zip(source.shape, shape, strict=True)):
            self._copy(step, step.reads[0], place.like(_inner(step, place.meta(), source.shape)), whole=name)
            return
        if step.op in {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"}:
            whole = place.meta()
            back = whole.reshape(source.shape)
            if back._base is whole._base:
                self._copy(step, step.reads[0], place.like(back))
                return
        self.steps.append(step)

    def _copy(self, step: Move, source: str | Tensor, target: Place, whole: str = "") -> None:
        name = f"{step.name}/target_{len(self.places)}"
        self.places[name] = target
        fill = step.fill if whole else None
        self.steps.append(
            Copy(name=step.name, origins=step.origins, source=source, target=name, fill=fill, whole=whole)
        )

    def _concat(self, step: Move) -> None:
        name = step.outputs[0]
        axis = int(step.attributes["axis"]) % len(self.plan.tensors[name].shape)
        if name not in self.places:
            if name in self.inside:
                self._place(name, step)
            else:
                rank = len(self.plan.tensors[name].shape)
                order = self.places[step.reads[0]].order
                image = rank == 4 and axis == 1 and self._feeds_image(name)
                self.places[name] = self._dense(name, list(_CHANNELS_LAST) if image else order)
        whole, start = self.places[name], 0
        for part in (part for part in step.inputs if part is not None):
            size = part.shape[axis] if isinstance(part, Tensor) else self.plan.tensors[part].shape[axis]
            target = whole.like(whole.meta().narrow(axis, start, size))
            if isinstance(part, Tensor) or self.places[part] != target:
                self._copy(step, part, target)
            start += size

    def _join_parts(self) -> None:
        made = {n for s in self.plan.steps if isinstance(s, (Product, Computed)) for n in s.writes}
        made |= {n for s in self.plan.steps if isinstance(s, Move) and s.op == "Resize" for n in s.writes}
        concats = [s for s in self.plan.steps if isinstance(s, Move) and s.op == "Concat"]
        border = set(self.plan.outputs.values())
        for i in reversed(range(len(concats))):
            step = concats[i]
            name, parts = step.outputs[0], step.reads
            if len(parts) < len(step.inputs):
                continue
            axis = int(step.attributes["axis"]) % len(self.plan.tensors[name].shape)
            for shorter in concats[:i]:  # one whose parts are the first of these (DenseNet) lies at the beginning
                if shorter.inputs == parts[: len(shorter.inputs)] and shorter.outputs[0] not in self.inside:
                    self.inside[shorter.outputs[0]] = (name, axis, 0)
            start = 0
            for part in parts:
                if part in made and part not in self.inside and part not in border and self._fits(name, axis, start):
                    self.inside[part] = (name, axis, start)
                start += self.plan.tensors[part].shape[axis]

    def _fits(self, name: str, axis: int, start: int) -> bool:
        """True if a part that begins at `start` begins where a wide access may."""
        tensor = self.plan.tensors[name]
        return axis == 1 and len(tensor.shape) == 4 and start * tensor.dtype.itemsize % _ROW_BYTES == 0

    # Lifetimes

    def _lifetimes(self) -> dict[str, Lifetime]:
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for i, step in enumerate(self.steps):
            for name in (*step.reads, *step.writes):
                if name in self.places:
                    buffer = self.places[name].buffer
                    first.setdefault(buffer, i)
                    last[buffer] = i
        for name in self.plan.outputs.values():
            if name in self.places:
                last[self.places[name].buffer] = len(self.steps)
        return {buffer: Lifetime(self.sizes[buffer], first[buffer], last[buffer]) for buffer in first}


def _inner(step: Move, whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    inputs = tuple(None if isinstance(x, str) else x for x in step.inputs)
    for axis, (before, _) in enumerate(pads_of(step.attributes, inputs, whole.dim())):
        whole = whole.narrow(axis, before, shape[axis])
    return whole
