"""What data a recipe asks for: its `data` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DATASETS = ("digits", "shapes", "folder", "cifar10", "cifar100")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A data set, and how its images reach the model.

    Attributes:
        name: `digits`, `shapes`, `folder`, `cifar10` or `cifar100`.
        root: folder of `folder` (holding train/ and val/) and of the cifar files; unused by the others.
        image_size: side of the square image that the model sees, in pixels.
        batch_size: images of one step over all processes together (the global batch).
        workers: loader processes of `folder`; None = one per core and process, 8 at most.
        on_error: what an unreadable image does: `raise` names it and stops, `skip` leaves it out and counts it.
        augment: random shifts, crops and flips of training images, as suits the data set.
        num_classes: classes of `shapes` (2 to 100); None = 20. For other data sets None = as the data say, and
            a number must agree with them.
        clutter: how opaque the clutter of `shapes` is, as a share of the usual, 0 to 1; 0 leaves the object alone.
        train_images, val_images: images of `shapes` (None = 20,000 and 2,000); of the others an upper bound, every
            class in proportion (None = all).
        seed: seed of everything random in the data: shuffling, augmentation, drawing.
        mean, std: normalization per channel in [0, 1] units; None = the data set's own.
        crop_ratio: `folder` evaluation: image_size over the side that images are resized to before the centre crop.
    """

    name: Literal["digits", "shapes", "folder", "cifar10", "cifar100"] = "digits"
    root: str | None = None
    image_size: int = 64
    batch_size: int = 64
    workers: int | None = None
    on_error: Literal["raise", "skip"] = "raise"
    augment: bool = True
    num_classes: int | None = None
    clutter: float = 1.0
    train_images: int | None = None
    val_images: int | None = None
    seed: int = 0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_ratio: float = 0.875
