"""A classifier of the motion of a shape in a short clip (recipes/video.yaml), with 3-D convolutions.

A clip is an image whose channels are its eight grey frames. Motion alone tells its class: shape, size, angle, place
and colours are drawn alike for all classes, so that a single frame says nothing. Data of one's own: clips
(frames, H, W), or (3 x frames, H, W) with `unflatten` in the network, and the number of their class.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from examples.drawn import Pairs, splits

FRAMES, SIDE = 8, 48
CLASSES = ("left", "right", "up", "down", "grows", "shrinks", "turns left", "turns right", "rests")


def clips(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return clips (count, 8, 48, 48) uint8 of rectangles in noise, and their classes (count,)."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator)

    def of(*names: str) -> Tensor:
        return sum((kinds == CLASSES.index(name)).float() for name in names).view(-1, 1, 1, 1)  # type: ignore[union-attr]

    kinds = torch.randint(len(CLASSES), (count,), generator=generator)
    time = torch.linspace(-1, 1, FRAMES).view(-1, 1, 1)
    at = torch.arange(float(SIDE))
    speed = drawn(2, 6) * time
    x = at - drawn(16, 32) - speed * (of("right") - of("left"))
    y = at[:, None] - drawn(16, 32) - speed * (of("down") - of("up"))
    angle = drawn(0, 6.3) + drawn(0.4, 1.2) * time * (of("turns right") - of("turns left"))
    scale = (drawn(0.15, 0.4) * time * (of("grows") - of("shrinks"))).exp()
    along, across = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    cover = torch.minimum(
        drawn(6, 10) * scale - along.abs(),
        drawn(3, 5) * scale - across.abs() * (1 + drawn(0, 0.05) * along),
    ).clamp(0, 1)
    ground, light = drawn(60, 195), drawn(40, 120) * drawn(-1, 1).sign()
    clip = ground + light * cover + drawn(5, 30) * torch.randn(cover.shape, generator=generator)
    return clip.clamp(0, 255).byte(), kinds


def data(spec: Any) -> tuple[Pairs, Pairs]:
    """Return training and evaluation examples; `spec` is the recipe's section `data`."""
    return splits(clips, spec.train_images or 2048, spec.val_images or 512)


class Video(nn.Module):
    """Convolutions over time and space, the first of each stage with stride (Tran et al., arXiv 1412.0767).

    Args:
        num_classes: number of classes.
        width: channels of the first stage.
    """

    def __init__(self, num_classes: int = len(CLASSES), width: int = 8) -> None:
        super().__init__()
        sides, layers = [1, width, 2 * width, 4 * width, 8 * width], list[nn.Module]()
        for stage, (inputs, outputs) in enumerate(pairwise(sides)):
            stride = (1 if stage < 2 else 2, 2, 2)
            layers += [nn.Conv3d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm3d(outputs), nn.ReLU()]
            layers += [nn.Conv3d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm3d(outputs), nn.ReLU()]
        self.features, self.classes = nn.Sequential(*layers), nn.Linear(8 * width, num_classes)

    def forward(self, clips: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        return self.classes(self.features(clips.unsqueeze(1)).mean((2, 3, 4)))
