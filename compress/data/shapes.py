"""Shapes among clutter, drawn on the device; an image depends on (seed, index) alone."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.data.base import Batch, DataSet, hash_seed
from compress.data.counter import random_bits, uniform
from compress.data.drawn import DRAWS, Drawn, DrawnSplit, Movement, affine_grid
from compress.data.memory import to_device
from compress.data.preprocessing import Preprocessing
from compress.data.shapes_banks import outline_bank, pattern_bank
from compress.data.shapes_scene import LAYERS, Scenes, class_names, make_scenes, with_clutter
from compress.data.spec import DataSpec

DEFAULT_SHAPES = 20
"""Default number of classes."""
TRAIN_IMAGES, VAL_IMAGES = 20_000, 2_000
"""Default numbers of images."""
MEAN, STD = (0.5,) * 3, (0.25,) * 3
MOVEMENT = Movement(shift=0.1, degrees=15.0, zoom=0.15, flip=True)

_FIRST_VAL = 1 << 40
_NOISE_BITS = 21
_FULL_NOISE_SIZE = 128  # a smaller picture has fewer pixels to average over, and gets less noise in proportion


def shapes_data(spec: DataSpec) -> DataSet:
    """Return the training and the evaluation images."""
    num_classes = DEFAULT_SHAPES if spec.num_classes is None else spec.num_classes
    train_images = TRAIN_IMAGES if spec.train_images is None else spec.train_images
    val_images = VAL_IMAGES if spec.val_images is None else spec.val_images
    movement = MOVEMENT if spec.augment else None
    return DataSet(
        train=ShapesSplit(spec, num_classes=num_classes, count=train_images, first=0, movement=movement),
        val=ShapesSplit(spec, num_classes=num_classes, count=val_images, first=_FIRST_VAL, movement=None),
    )


class ShapesSplit(DrawnSplit):
    """Images numbered from `first`; the class is the number modulo `num_classes`.

    Args:
        movement: of the camera, or None.
    """

    def __init__(self, spec: DataSpec, *, num_classes: int, count: int, first: int, movement: Movement | None) -> None:
        super().__init__(
            labels=class_names(num_classes), preprocessing=Preprocessing.of(spec, mean=MEAN, std=STD), seed=spec.seed
        )
        self._count, self._first, self._movement, self._clutter = count, first, movement, spec.clutter

    def __len__(self) -> int:
        return self._count

    def content(self) -> tuple[str, ...]:
        """Return all that the images follow from."""
        return (type(self).__qualname__, *map(str, (self.seed, self.num_classes, self._first, self._clutter)))

    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        """Numbers, classes and fields of `Scenes`."""
        positions = to_device(indices, device)
        numbers, targets = positions + self._first, positions % self.num_classes
        size, camera = self.preprocessing.height_width[0], None
        if epoch is not None and self._movement is not None:
            camera = self._movement.matrices(uniform(self._noise_seed(epoch), numbers, DRAWS), size)
        scenes = make_scenes(self.seed, numbers, targets, num_classes=self.num_classes, camera=camera)
        return numbers, targets, *with_clutter(scenes, self._clutter).tensors()

    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, S, S) and targets (n,)."""
        numbers, targets, *fields = drawn
        scenes, size = Scenes(*fields), self.preprocessing.height_width[0]
        images = paint(scenes, size)
        strength = scenes.noise[:, None, None, None] * min(1.0, size / _FULL_NOISE_SIZE)
        images += noise(self._noise_seed(epoch), numbers, size) * strength
        return self.preprocessing.normalize(images.clamp_(0, 1)), targets

    def _noise_seed(self, epoch: int | None) -> int:
        return hash_seed(self.seed) if epoch is None or self._movement is None else hash_seed(self.seed, epoch)


def paint(scenes: Scenes, size: int) -> Tensor:
    """Scenes without noise: (N, 3, size, size) float32, mostly 0 to 1."""
    outlines, patterns = _banks(scenes.base.device)
    canvas = F.interpolate(scenes.base, size=(size, size), mode="bilinear", align_corners=True)
    for layer in range(LAYERS):
        bank = torch.stack((outlines[scenes.outlines[:, layer]], patterns[scenes.patterns[:, layer]]), dim=1)
        grid = affine_grid(scenes.matrices[:, layer], size)
        distance, pattern = F.grid_sample(bank, grid, padding_mode="border", align_corners=False).split(1, dim=1)
        pixels = scenes.sizes[:, layer, None, None, None] * (size / 2)  # in one unit of distance
        cover = (0.5 - distance * pixels).clamp_(0, 1) * scenes.opacity[:, layer, None, None, None]
        dark, light = scenes.colours[:, layer, :, :, None, None].unbind(1)
        canvas = torch.lerp(canvas, torch.lerp(dark, light, pattern), cover)
    return canvas


def noise(seed: int, numbers: Tensor, size: int) -> Tensor:
    """Uniform from -1 to 1, (N, 3, size, size) float32, for images `numbers` (N,) int64."""
    bits = random_bits(seed, numbers, size * size).view(-1, 1, size, size)
    shifts = torch.arange(3, device=bits.device).view(1, 3, 1, 1) * _NOISE_BITS
    return ((bits >> shifts) & (1 << _NOISE_BITS) - 1).float() * 2.0 ** (1 - _NOISE_BITS) - 1


@functools.lru_cache(maxsize=8)
def _banks(device: torch.device) -> tuple[Tensor, Tensor]:
    return outline_bank().to(device), pattern_bank().to(device)
