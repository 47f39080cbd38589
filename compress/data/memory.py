"""Splits whose images the device makes or keeps, moves and normalizes; and the digits of scikit-learn.

These are 1,797 handwritten ones (Alpaydin and Kaynak, UCI, 1998): 8 x 8 pixels in 17 greys.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.data.base import Batch, BatchPlan, DataSet, Split, bounded, hash_seed, stratified_order, uniform
from compress.data.preprocessing import Preprocessing
from compress.data.spec import NORMALIZATION, DataSpec
from compress.errors import DataError

CHUNK_IMAGES = 8192

Drawn = tuple[Tensor, ...]
"""Tensors that images are made from; the first dimension counts images."""


class DrawnSplit(Split):
    """A split that makes its images on the device.

    Attributes:
        chunk_images: whose random numbers are drawn together; None = `CHUNK_IMAGES` on a GPU, a batch on the CPU.
    """

    chunk_images: int | None = None

    @abstractmethod
    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        """Return what the images at `indices` (n,) int64 are made of."""

    @abstractmethod
    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, S, S) and targets (n,) of a slice of that."""

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """See `Split.load`."""
        drawn = self.draw(torch.tensor(indices, dtype=torch.int64), epoch=epoch, device=device)
        return self.make(drawn, epoch=epoch, device=device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """See `Split.batches`."""
        device = torch.device(device)
        most = self.chunk_images or (CHUNK_IMAGES if device.type == "cuda" else 1)
        for shares in _chunks([share for share in self.batch_indices(plan) if share], most):
            together = torch.tensor([index for share in shares for index in share], dtype=torch.int64)
            drawn = self.draw(together, epoch=plan.epoch, device=device)
            sizes = [len(share) for share in shares]
            for parts in zip(*(tensor.split(sizes) for tensor in drawn), strict=True):
                yield self.make(parts, epoch=plan.epoch, device=device)


def _chunks(shares: list[list[int]], most: int) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    count = 0
    for share in shares:
        group.append(share)
        count += len(share)
        if count >= most:
            yield group
            group, count = [], 0
    if group:
        yield group


DRAWS = 5
"""Random numbers for one movement."""


@dataclass(frozen=True, kw_only=True)
class Movement:
    """The largest movement of an image.

    Attributes:
        shift, zoom: as shares of the side.
        flip: mirror every second image left to right.
    """

    shift: float = 0.0
    degrees: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    def matrices(self, draws: Tensor, image_size: int) -> Tensor:
        """Return (N, 2, 3) float64 maps from output to input coordinates, -1 to 1 (x, y), from (N, 5) draws of [0, 1).

        Without rotation and zoom the shift is a whole number of pixels.
        """
        signed = draws * 2 - 1
        shift = signed[:, :2] * (2 * self.shift)
        if not self.degrees and not self.zoom:
            shift = (shift * image_size / 2).round() * 2 / image_size
        angle = signed[:, 2] * math.radians(self.degrees)
        scale = 1 / (1 + signed[:, 3] * self.zoom)
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0) if self.flip else torch.ones_like(scale)
        cos, sin = angle.cos() * scale, angle.sin() * scale
        rows = torch.stack((cos * mirror, -sin, shift[:, 0], sin * mirror, cos, shift[:, 1]), dim=1)
        return rows.view(-1, 2, 3)


def affine_grid(matrices: Tensor, image_size: int) -> Tensor:
    """Return the input position of each output pixel, (N, S, S, 2), for (N, 2, 3) float32 maps.

    As torch's `affine_grid` with align_corners=False, without its matrix product in TF32.
    """
    at = (torch.arange(image_size, device=matrices.device, dtype=torch.float32) * 2 + 1) / image_size - 1
    by_row = at[None, :, None, None] * matrices[:, None, None, :, 1] + matrices[:, None, None, :, 2]
    return by_row + at[None, None, :, None] * matrices[:, None, None, :, 0]


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Resample (N, C, S, S) images bilinearly; pixels from outside are black."""
    grid = affine_grid(matrices.float().to(images.device), images.shape[-1])
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


_FINGERPRINT_BYTES = 1 << 28  # of images, read for the fingerprint at most
_MOST_SHARE = 4  # a GPU keeps images that take at most one part in so many of its free memory


class MemorySplit(DrawnSplit):
    """A split whose images were read once.

    Args:
        images: (N, 1 or 3, H, H) uint8.
        targets: (N,) int64.
        movement: augmentation, or None.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        *,
        labels: tuple[str, ...],
        preprocessing: Preprocessing,
        seed: int,
        movement: Movement | None = None,
    ) -> None:
        super().__init__(labels=labels, preprocessing=preprocessing, seed=seed)
        self.images, self.targets, self.movement = images, targets, movement
        self._kept: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.targets)

    def content(self) -> Iterator[bytes | str]:
        """Yield targets and images; of very many, evenly spread ones."""
        step = 1 + self.images.nbytes // _FINGERPRINT_BYTES
        for tensor in (self.targets, self.images[::step]):
            yield str(tuple(tensor.shape))
            yield tensor.cpu().numpy().tobytes()

    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        """Positions, and movements (n, 2, 3) if any."""
        chosen = to_device(indices, self._stored(device)[0].device)
        if epoch is None or self.movement is None:
            return (chosen,)
        draws = uniform(hash_seed(self.seed, epoch), indices, DRAWS)
        matrices = self.movement.matrices(draws, self.preprocessing.height_width[0]).float()
        return chosen, to_device(matrices, device)

    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, S, S) and targets (n,)."""
        chosen, *matrices = drawn
        images, targets = self._stored(device)
        pixels = to_device(images[chosen], device).float().div_(255)
        pixels = resize(pixels, self.preprocessing.height_width[0])
        if matrices:
            pixels = move(pixels, matrices[0])
        return self.preprocessing.normalize(pixels), to_device(targets[chosen], device)

    def _stored(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images and targets on `device`, copied once if there is room."""
        if device not in self._kept:
            fits = self.images.device == device
            if device.type == "cuda" and not fits:
                fits = self.images.nbytes <= torch.cuda.mem_get_info(device)[0] // _MOST_SHARE
            place = device if fits else self.images.device
            self._kept[device] = self.images.to(place), self.targets.to(place)
        return self._kept[device]


def memory_data(
    spec: DataSpec,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    labels: tuple[str, ...],
    preprocessing: Preprocessing,
    movement: Movement,
) -> DataSet:
    """Return a data set of two (images, targets), as many of each as `spec` allows, every class in proportion."""

    def split(whole: tuple[Tensor, Tensor], limit: int | None, movement: Movement | None) -> MemorySplit:
        images, targets = whole
        kept = bounded(targets, limit)
        return MemorySplit(
            images[kept], targets[kept], labels=labels, preprocessing=preprocessing, seed=spec.seed, movement=movement
        )

    return DataSet(
        train=split(train, spec.train_images, movement if spec.augment else None),
        val=split(val, spec.val_images, None),
    )


def resize(images: Tensor, size: int) -> Tensor:
    """(N, C, H, W) floats bilinearly, antialiased where that shrinks."""
    if images.shape[-1] == size:
        return images
    smaller = size < images.shape[-1]
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=smaller)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for queued work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


LABELS = tuple("0123456789")
MEAN, STD = NORMALIZATION["digits"]
MOVEMENT = Movement(shift=0.08, degrees=12.0, zoom=0.12)
_VAL_SHARE = 0.25


def digits_data(spec: DataSpec) -> DataSet:
    """The digits, repeated to three channels and resized.

    Raises:
        DataError: scikit-learn is not installed.
    """
    images, targets = _read()
    order = stratified_order(targets)
    val_count = round(len(order) * _VAL_SHARE)
    val, train = (positions.sort().values for positions in (order[:val_count], order[val_count:]))
    return memory_data(
        spec,
        (images[train], targets[train]),
        (images[val], targets[val]),
        labels=LABELS,
        preprocessing=Preprocessing.of(spec, mean=MEAN, std=STD),
        movement=MOVEMENT,
    )


def _read() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) uint8 and targets (1797,) int64."""
    try:
        from sklearn.datasets import load_digits  # lazy: it takes seconds, and other data sets do not need it
    except ImportError as error:
        raise DataError(f"data.name digits needs scikit-learn, which cannot be imported: {error}") from error
    bunch = load_digits()
    greys = torch.from_numpy(bunch.images).unsqueeze(1)  # 0 to 16
    return (greys * (255 / 16)).round().to(torch.uint8), torch.from_numpy(bunch.target).long()
