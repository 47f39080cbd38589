"""A layer as a matrix product over sampled output positions, on which its rounding is learned.

An image gives a convolution thousands of output positions that say much the same about its weights. A few thousand over
all images make a step of learning a small product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.graph.ops import module_kind

_IMAGES = 16
"""Images that are gathered from at a time."""


@dataclass(frozen=True)
class Rows:
    """Sampled positions of a layer.

    Attributes:
        inputs: (groups, rows, inputs of an output).
        targets: (rows, outputs), before the activation.
        bias: (outputs,) or None.
    """

    inputs: Tensor
    targets: Tensor
    bias: Tensor | None

    def outputs(self, weight: Tensor, chosen: Tensor) -> Tensor:
        """The layer's outputs with `weight` at chosen rows, (chosen, outputs)."""
        groups, _, size = self.inputs.shape
        products = self.inputs[:, chosen] @ weight.reshape(groups, -1, size).mT
        flat = products.transpose(0, 1).flatten(1)
        return flat if self.bias is None else flat + self.bias


def sampled_rows(
    layer: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, count: int, generator: torch.Generator
) -> Rows | None:
    """Sample `count` output positions of a linear layer or a convolution of images, evenly over the images.

    None for another kind of layer, or padding that is not of zeros by numbers. All positions are taken where there are
    no more. `generator` is on the CPU.
    """
    found: Any = layer
    bias = None if found.bias is None else found.bias.detach()
    if module_kind(layer) == "linear":
        x, y = (torch.cat([part.flatten(0, -2) for part in parts]) for parts in (inputs, targets))
        if len(x) > count:
            chosen = torch.randperm(len(x), generator=generator)[:count].to(x.device)
            x, y = x[chosen], y[chosen]
        return Rows(x[None], y, bias)
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    channels, height, width = targets[0].shape[1:]
    each = min(height * width, -(-count // sum(len(part) for part in inputs)))
    windows, outputs = [], []
    for few, expected in zip(_split(inputs), _split(targets), strict=True):
        orders = [torch.randperm(height * width, generator=generator)[:each] for _ in few]
        places = torch.stack(orders).to(few.device)
        windows.append(_gathered(layer, few, places, width))
        flat = expected.flatten(2).gather(2, places[:, None].expand(-1, channels, -1))  # (N, outputs, each)
        outputs.append(flat.transpose(1, 2).flatten(0, 1))
    grouped = torch.cat(windows).unflatten(1, (layer.groups, -1)).flatten(2)  # (rows, groups, inputs of an output)
    return Rows(grouped.transpose(0, 1).contiguous(), torch.cat(outputs), bias)


def _split(parts: Sequence[Tensor]) -> list[Tensor]:
    return [few for part in parts for few in part.split(_IMAGES)]


def _gathered(layer: nn.Conv2d, x: Tensor, places: Tensor, width: int) -> Tensor:
    """The windows of a convolution at output places (N, each): (N * each, channels, kernel height, width)."""
    down, right = (int(side) for side in layer.padding)  # no text: refused before
    padded = nn.functional.pad(x, (right, right, down, down))
    starts = (places // width * layer.stride[0], places % width * layer.stride[1])
    rows, columns = (
        start[:, :, None] + torch.arange(size, device=x.device) * dilation
        for start, size, dilation in zip(starts, layer.kernel_size, layer.dilation, strict=True)
    )
    image = torch.arange(len(x), device=x.device)[:, None, None, None]
    windows = padded[image, :, rows[:, :, :, None], columns[:, :, None, :]]  # (N, each, height, width, channels)
    return windows.flatten(0, 1).permute(0, 3, 1, 2)
