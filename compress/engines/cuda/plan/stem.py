"""First convolutions of few channels, rearranged to use tensor cores fully (`kernels.triton.int8_input`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.plan.steps import (
    NO_PADDING,
    Computed,
    Convolution,
    Elementwise,
    Output,
    Plan,
    PlanTensor,
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
        """See `Step`."""
        return (self.out.codes, self.view)


def pack_stems(plan: Plan) -> Plan:
    """Rearrange every convolution that reads a few quantized channels of the network's input and nothing else does."""
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
    """True if a convolution can be rearranged."""
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
