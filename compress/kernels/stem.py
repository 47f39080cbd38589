"""The first convolution of a network on INT8 tensor cores: space to depth, without a kernel of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 2  # pixels a side
_CHANNELS = 16  # of a block, padded


class StemPlan(NamedTuple):
    """Position of a square filter of stride 2 on blocks.

    Attributes:
        before: zeros above and left of the image; even.
        lead: zeros above and left of the filter; even.
        blocks: height and width of the filter in blocks.
    """

    before: int
    lead: int
    blocks: int


def stem_plan(taps: int, padding: int) -> StemPlan:
    """The plan for a filter of `taps` x `taps`, stride 2, `padding` zeros around the image."""
    lead = padding % _BLOCK
    return StemPlan(padding + lead, lead, -(-(taps + lead) // _BLOCK))


def stem_fits(weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]) -> bool:
    """Whether a convolution can be rearranged: at most 4 channels, a square filter, stride 2."""
    _, channels, taps_y, taps_x = weight.shape
    square = taps_y == taps_x and padding[0] == padding[1]
    blocks = stem_plan(taps_y, padding[0]).blocks
    whole = blocks * _CHANNELS % 32 == 0  # of the tensor cores' step
    return channels <= 4 and square and stride == (2, 2) and dilation == (1, 1) and whole


def stem_image(codes: Tensor, taps: int, padding: int) -> Tensor:
    """Return the image as overlapping rows of blocks.

    - `codes`: (N, C, H, W) int8, C at most 4.

    Returns:
        (N, 16 * blocks, rows of blocks, OW), to be convolved with `stem_filter`, stride 1, no padding.
    """
    plan = stem_plan(taps, padding)
    images, channels, height, width = codes.shape
    out = [(size + 2 * padding - taps) // _BLOCK + 1 for size in (height, width)]
    rows, columns = (size - 1 + plan.blocks for size in out)
    after = [_BLOCK * n - size - plan.before for n, size in ((columns, width), (rows, height))]
    padded = F.pad(codes, (plan.before, after[0], plan.before, after[1]))  # pixels past the last filter are cut off
    blocks = padded.reshape(images, channels, rows, _BLOCK, columns, _BLOCK).permute(0, 2, 4, 3, 5, 1)
    blocks = F.pad(blocks.reshape(images, rows, columns, 4 * channels), (0, _CHANNELS - 4 * channels)).contiguous()
    row_step = columns * _CHANNELS
    return blocks.as_strided((images, plan.blocks * _CHANNELS, rows, out[1]), (rows * row_step, 1, row_step, _CHANNELS))


def stem_filter(codes: Tensor, padding: int) -> Tensor:
    """The filter of `stem_image`: (O, C, R, R) becomes (O, 16 * blocks, blocks, 1), channels_last."""
    outputs, channels, taps, _ = codes.shape
    plan = stem_plan(taps, padding)
    after = _BLOCK * plan.blocks - taps - plan.lead
    padded = F.pad(codes, (plan.lead, after, plan.lead, after))
    blocks = padded.reshape(outputs, channels, plan.blocks, _BLOCK, plan.blocks, _BLOCK).permute(0, 2, 4, 3, 5, 1)
    blocks = F.pad(blocks.reshape(outputs, plan.blocks, plan.blocks, 4 * channels), (0, _CHANNELS - 4 * channels))
    rows = blocks.reshape(outputs, plan.blocks, 1, plan.blocks * _CHANNELS)
    return rows.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
