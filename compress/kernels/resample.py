"""Parts of images of different sizes, resized to one size: what a GPU's JPEG decoder returns, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.dispatch import Kernels, use_triton_eager
from compress.kernels.triton import resample as triton_resample


class Window(NamedTuple):
    """The part of an image that becomes a picture, in whole pixels.

    Attributes:
        top, height: rows of the image that are resized.
        above: rows of the result above the picture, which are left out.
        mirrored: 1 = the picture is mirrored left to right, 0 = it is not.
    """

    top: int
    height: int
    resized_height: int
    above: int
    left: int
    width: int
    resized_width: int
    before: int
    mirrored: int


def resample(
    images: Sequence[Tensor], windows: Sequence[Window], size: tuple[int, int], *, kernels: Kernels | None = None
) -> Tensor:
    """Cut the windows out of images and resize them: bilinear with antialiasing, rounded once.

    - `images`: n of shape (3, H, W) uint8, contiguous, each of its own size, on one device.
    - `kernels`: None = Triton on a GPU.

    Returns:
        (n, 3, height, width) uint8. On a GPU it is computed on the current stream: keep `images` until it is done.
    """
    if use_triton_eager(images[0], kernels):
        return triton_resample.resample(images, [tuple(window) for window in windows], size)
    return torch.stack([_resample_one(image, window, size) for image, window in zip(images, windows, strict=True)])


def _resample_one(image: Tensor, w: Window, size: tuple[int, int]) -> Tensor:
    part = image[:, w.top : w.top + w.height, w.left : w.left + w.width].float()
    rows = _weights(w.height, w.resized_height, w.above, size[0], image.device)
    columns = _weights(w.width, w.resized_width, w.before, size[1], image.device)
    picture = rows @ part @ columns.T
    return (picture.flip(-1) if w.mirrored else picture).add_(0.5).floor_().clamp_(0, 255).to(torch.uint8)


def _weights(length: int, resized: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the share (count, length) of each of `length` pixels in output pixels `first`, `first` + 1, ..."""
    step = length / resized
    centres = (torch.arange(first, first + count, device=device) + 0.5) * step
    apart = torch.arange(length, device=device) + 0.5 - centres[:, None]
    shares = (1 - apart.abs() / max(step, 1.0)).clamp_(min=0)
    return shares / shares.sum(1, keepdim=True)
