"""Images for effective receptive fields without a data set."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compress.errors import ReceptiveFieldError, near_misses

SOURCES = ("photographs", "noise")
_MEAN = (0.485, 0.456, 0.406)  # of ImageNet, on which torchvision's and most of timm's models were trained
_STD = (0.229, 0.224, 0.225)


def probe_images(source: str, count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Images, (count, 3, height, width) float32, normalized with ImageNet's mean and standard deviation.

    `source` is `photographs` (crops of scikit-learn's two) or `noise` (standard normal); the seed is of either.

    Raises:
        ReceptiveFieldError: the source is unknown, or a count or size is below 1.
    """
    if count < 1 or min(size) < 1:
        raise ReceptiveFieldError(f"{count} images of {size[0]} x {size[1]} pixels were asked for")
    if source == "photographs":
        return photograph_crops(count, size, seed=seed)
    if source == "noise":
        return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    raise ReceptiveFieldError(f"image source {source!r}{near_misses(source, SOURCES)} ({', '.join(SOURCES)})")


def photograph_crops(count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Random crops, half mirrored, of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images  # lazy: it takes seconds, and only photographs need it

    photographs = [torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    mean, std = torch.tensor(_MEAN).view(3, 1, 1), torch.tensor(_STD).view(3, 1, 1)
    crops = [_crop(photographs[i % len(photographs)], size, generator) for i in range(count)]
    return torch.stack([(crop - mean) / std for crop in crops])


def _crop(photograph: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A resized crop with the proportions of `size`, at least half of the largest."""
    _, height, width = photograph.shape
    largest = min(height / size[0], width / size[1])
    scale = largest * (0.5 + 0.5 * float(torch.rand((), generator=generator)))
    rows, columns = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    top = int(torch.randint(0, height - rows + 1, (), generator=generator))
    left = int(torch.randint(0, width - columns + 1, (), generator=generator))
    crop = photograph[:, top : top + rows, left : left + columns]
    if bool(torch.rand((), generator=generator) < 0.5):
        crop = crop.flip(-1)
    return torch.nn.functional.interpolate(crop[None], size, mode="bilinear", antialias=True)[0]
