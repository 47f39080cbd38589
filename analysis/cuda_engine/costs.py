"""Lower bounds of a step: bytes that it moves, and products that it computes."""

from dataclasses import dataclass

import torch

from compress.engines.cuda.plan.layout import Copy, Layout
from compress.engines.cuda.plan.steps import Attention, Convolution, Linear, Step


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Work of a step.

    Attributes:
        read_bytes, written_bytes: activations; each tensor once.
        weight_bytes: of constants.
        int8_macs: products of codes, multiplied and added.
    """

    read_bytes: int
    written_bytes: int
    weight_bytes: int
    int8_macs: int

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes + self.weight_bytes


def cost_of(step: Step, layout: Layout) -> Cost:
    weight = step.weight.numel() if isinstance(step, (Convolution, Linear)) else 0
    packs = type(step).__name__ == "PackImage"
    written = (step.target,) if isinstance(step, Copy) else step.writes[:1] if packs else step.writes
    return Cost(
        read_bytes=sum(_bytes(name, layout) for name in step.reads),
        written_bytes=sum(_bytes(name, layout) for name in written),
        weight_bytes=weight,
        int8_macs=_macs(step, layout),
    )


def _bytes(name: str, layout: Layout) -> int:
    place, tensor = layout.places.get(name), layout.plan.tensors.get(name)
    shape, dtype = (
        (place.shape, place.dtype) if place is not None else (tensor.shape, tensor.dtype) if tensor else ((), None)
    )
    if dtype is None:
        return 0
    size = dtype.itemsize
    for n in shape:
        size *= n
    whole = layout.buffer_bytes.get(place.buffer, size) if place is not None else size
    return min(size, whole)


def _macs(step: Step, layout: Layout) -> int:
    if isinstance(step, (Convolution, Linear)):
        out = layout.plan.tensors[step.epilogue.out.names[0]].shape
        return torch.Size(out).numel() // step.weight.shape[0] * step.weight.numel()
    if isinstance(step, Attention):
        *heads, length, depth = layout.plan.tensors[step.x.name].shape
        size, width = layout.plan.tensors[step.v.name].shape[-2:]
        each = length * size * (depth + width)
        for n in heads:
            each *= n
        return each
    return 0
