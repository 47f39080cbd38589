"""The `data` section of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from compress.errors import DataError
from compress.validation import AtLeastOne, NotNegativeInt, Positive, Share, validate

DataName = Literal["digits", "shapes", "folder", "cifar10", "cifar100"]

DATASETS: tuple[DataName, ...] = get_args(DataName)
SHAPES_CLASSES = (2, 100)
"""Fewest and most classes that the cues of `shapes` can make."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A data set, and how its images become the model's input.

    Attributes:
        name: data set; none is ever downloaded.
        root: folder of `folder` (holding train/ and val/) and of the cifar files; unused by the others.
        image_size: side of the model's square input, in pixels.
        batch_size: images of one step over all processes together (the global batch).
        workers: loader processes of `folder`; None = one per core and process, 8 at most.
        on_error: `raise` names an unreadable image and stops, `skip` leaves it out and counts it.
        augment: random shifts, crops and flips of training images, as suits the data set.
        num_classes: classes of `shapes` (2 to 100); None = 20. For other data sets None = as the data say, and
            a number must agree with them.
        clutter: opacity of the clutter of `shapes`, as a share of the usual; 0 leaves the object alone.
        train_images, val_images: images of `shapes` (None = 20,000 and 2,000); of the others an upper bound, every
            class in proportion (None = all).
        seed: seed of everything random in the data: shuffling, augmentation, drawing.
        mean, std: normalization per channel in [0, 1] units; None = the data set's own.
        crop_ratio: `folder` evaluation: image_size over the side that images are resized to before the centre crop.
    """

    name: DataName = "digits"
    root: str | None = None
    image_size: Annotated[int, Field(ge=8)] = 64
    batch_size: AtLeastOne = 64
    workers: NotNegativeInt | None = None
    on_error: Literal["raise", "skip"] = "raise"
    augment: bool = True
    num_classes: AtLeastOne | None = None
    clutter: Share = 1.0
    train_images: AtLeastOne | None = None
    val_images: AtLeastOne | None = None
    seed: int = 0
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.875


def check_data_spec(spec: DataSpec) -> None:
    """Refuse a specification that no data set can have.

    Raises:
        DataError: names each key, what was got and what is allowed.
    """
    validate(spec, DataSpec, section="data", error=DataError, rules=data_contradictions)


def data_contradictions(spec: DataSpec) -> Iterator[str]:
    """Yield a line for each contradiction between values that are in range by themselves."""
    if spec.name in ("folder", "cifar10", "cifar100") and not spec.root:
        yield f"data.root is missing: {spec.name} needs the folder of its files; compress never downloads data"
    low, high = SHAPES_CLASSES
    if spec.name == "shapes" and spec.num_classes is not None and not low <= spec.num_classes <= high:
        yield f"data.num_classes is {spec.num_classes}: shapes has from {low} to {high}"
    for key in ("mean", "std"):
        values = getattr(spec, key)
        if values is not None and len(values) != 3:
            yield f"data.{key} has {len(values)} values: it must have one for each of R, G and B"
