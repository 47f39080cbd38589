"""Parts of images of different sizes, resized to one size: what a GPU's JPEG decoder returns, as one batch."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  (kernels: Triton gives types, and constants stand in capitals)
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.triton.launch import Kernels, launch, tl, triton, use_triton_eager

_BLOCK = 256  # pixels of a program
_NUMBERS = tl.constexpr(11)  # of an image: a window's nine, its rows and its columns


@triton.jit
def resample_kernel(addresses_ptr, numbers_ptr, out_ptr, out_height, out_width, BLOCK: tl.constexpr):
    """Compute BLOCK pixels of one image."""
    picture = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < out_height * out_width
    numbers = numbers_ptr + picture * _NUMBERS
    rows = tl.load(numbers + 9)
    columns = tl.load(numbers + 10)
    source = tl.load(addresses_ptr + picture).to(tl.pointer_type(tl.uint8))
    x = pixel % out_width
    x = tl.where(tl.load(numbers + 8) != 0, out_width - 1 - x, x)
    centre_y, first_y, last_y, wide_y = _taps(numbers, pixel // out_width)
    centre_x, first_x, last_x, wide_x = _taps(numbers + 4, x)
    top = tl.load(numbers)
    left = tl.load(numbers + 4)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    red = tl.zeros([BLOCK], dtype=tl.float32)
    green = tl.zeros([BLOCK], dtype=tl.float32)
    blue = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(0, (2 * wide_y).to(tl.int32) + 2):
        row = first_y + i
        weight_y = tl.where(row < last_y, tl.maximum(1 - tl.abs((row - centre_y + 0.5) / wide_y), 0.0), 0.0)
        for j in range(0, (2 * wide_x).to(tl.int32) + 2):
            column = first_x + j
            weight_x = tl.where(column < last_x, tl.maximum(1 - tl.abs((column - centre_x + 0.5) / wide_x), 0.0), 0.0)
            weight = weight_y * weight_x
            at = source + (top + row) * columns + left + column
            there = inside & (weight > 0)
            total += weight
            red += weight * tl.load(at, mask=there, other=0).to(tl.float32)
            green += weight * tl.load(at + rows * columns, mask=there, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2 * rows * columns, mask=there, other=0).to(tl.float32)
    plane = out_height * out_width
    out = out_ptr + picture.to(tl.int64) * 3 * plane + pixel
    tl.store(out, _grey(red / total), mask=inside)
    tl.store(out + plane, _grey(green / total), mask=inside)
    tl.store(out + 2 * plane, _grey(blue / total), mask=inside)


@triton.jit
def _taps(numbers, at):
    """(centre of each output pixel, first and last + 1 input pixel that it may take, half of the triangle's base)."""
    length = tl.load(numbers + 1)
    step = length.to(tl.float32) / tl.load(numbers + 2).to(tl.float32)
    wide = tl.maximum(step, 1.0)
    centre = step * ((at + tl.load(numbers + 3)).to(tl.float32) + 0.5)
    first = tl.maximum((centre - wide + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + wide + 0.5).to(tl.int32), length)
    return centre, first, last, wide


@triton.jit
def _grey(value):
    return (value + 0.5).to(tl.int32).to(tl.uint8)


def _by_triton(images: Sequence[Tensor], windows: Sequence[tuple[int, ...]], size: tuple[int, int]) -> Tensor:
    device = images[0].device
    addresses = torch.tensor([image.data_ptr() for image in images], dtype=torch.int64)
    numbers = torch.tensor([(*w, *i.shape[1:]) for w, i in zip(windows, images, strict=True)], dtype=torch.int32)
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    out = torch.empty((len(images), 3, *size), dtype=torch.uint8, device=device)
    grid = (-(-size[0] * size[1] // _BLOCK), len(images))
    launch(resample_kernel, grid, (addresses, numbers, out), (*size, _BLOCK))
    return out


class Window(NamedTuple):
    """The part of an image that becomes a resized one, in whole pixels.

    Attributes:
        top, height: rows of the image that are resized.
        above: rows of the result above, which are left out.
        mirrored: 1 = the result is mirrored left to right.
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
    """Cut the windows out of images (3, H, W) uint8 and resize them, bilinear with antialiasing: (n, 3, height, width).

    On a GPU it is computed on the current stream: keep `images` until it is done.
    """
    if use_triton_eager(images[0], kernels):
        return _by_triton(images, [tuple(window) for window in windows], size)
    return torch.stack([_resample_one(image, window, size) for image, window in zip(images, windows, strict=True)])


def _resample_one(image: Tensor, w: Window, size: tuple[int, int]) -> Tensor:
    part = image[:, w.top : w.top + w.height, w.left : w.left + w.width].float()
    rows = _weights(w.height, w.resized_height, w.above, size[0], image.device)
    columns = _weights(w.width, w.resized_width, w.before, size[1], image.device)
    picture = rows @ part @ columns.T
    return (picture.flip(-1) if w.mirrored else picture).add_(0.5).floor_().clamp_(0, 255).to(torch.uint8)


def _weights(length: int, resized: int, first: int, count: int, device: torch.device) -> Tensor:
    """The share (count, length) of each of `length` pixels in output pixels `first`, `first` + 1, ..."""
    step = length / resized
    centres = (torch.arange(first, first + count, device=device) + 0.5) * step
    apart = torch.arange(length, device=device) + 0.5 - centres[:, None]
    shares = (1 - apart.abs() / max(step, 1.0)).clamp_(min=0)
    return shares / shares.sum(1, keepdim=True)
