"""From a recipe's `data` section to its two splits."""

from __future__ import annotations

import math
from collections.abc import Callable

from compress.data.base import DataSet
from compress.data.cifar import cifar_data
from compress.data.digits import digits_data
from compress.data.shapes import shapes_data
from compress.data.spec import DATASETS, DataSpec
from compress.errors import DataError, near_misses

MIN_IMAGE_SIZE = 8


def _folder_data(spec: DataSpec) -> DataSet:
    """`folder_data`; imported here because it brings torchvision, which takes seconds that most commands can save."""
    from compress.data.folder import folder_data

    return folder_data(spec)


_MAKERS: dict[str, Callable[[DataSpec], DataSet]] = {
    "digits": digits_data,
    "shapes": shapes_data,
    "folder": _folder_data,
    "cifar10": cifar_data,
    "cifar100": cifar_data,
}


def load_data(spec: DataSpec) -> DataSet:
    """The training and the evaluation split of what `spec` names; nothing is ever downloaded.

    Args:
        spec: a recipe's `data` section.

    Returns:
        Splits whose batches are images (N, C, H, W) float32, normalized, and targets (N,) int64.

    Raises:
        DataError: a value out of range, missing or unreadable files, or classes that are not as many as `spec` says.
    """
    check_data_spec(spec)
    data = _MAKERS[spec.name](spec)
    if spec.num_classes not in (None, data.train.num_classes):
        raise DataError(
            f"data.num_classes is {spec.num_classes}, but {spec.name} has {data.train.num_classes}; leave the key out"
        )
    return data


def check_data_spec(spec: DataSpec) -> None:
    """Refuse values that no data set can have.

    Raises:
        DataError: names the key, what was got and what is allowed.
    """
    if spec.name not in _MAKERS:
        raise DataError(f"data.name is {spec.name!r}{near_misses(str(spec.name), DATASETS)} ({', '.join(DATASETS)})")
    if spec.name in ("folder", "cifar10", "cifar100") and not spec.root:
        raise DataError(
            f"data.root is missing: {spec.name} needs the folder of its files; compress never downloads data"
        )
    at_least = {
        "image_size": MIN_IMAGE_SIZE,
        "batch_size": 1,
        "workers": 0,
        "train_images": 1,
        "val_images": 1,
    }
    for key, least in at_least.items():
        value = getattr(spec, key)
        if value is not None and value < least:
            raise DataError(f"data.{key} is {value}; it must be at least {least}")
    if spec.on_error not in ("raise", "skip"):
        raise DataError(f"data.on_error is {spec.on_error!r}; allowed: raise, skip")
    if not 0 <= spec.clutter <= 1:
        raise DataError(f"data.clutter is {spec.clutter}; it must be from 0 (the object alone) to 1")
    if not 0 < spec.crop_ratio <= 1:
        raise DataError(f"data.crop_ratio is {spec.crop_ratio}; it must be above 0 and at most 1")
    for key in ("mean", "std"):
        _check_channels(key, getattr(spec, key))


def _check_channels(key: str, values: tuple[float, ...] | None) -> None:
    """Refuse a mean or deviation that is not three usable numbers."""
    if values is None:
        return
    if len(values) != 3:
        raise DataError(f"data.{key} has {len(values)} values; it needs one for each of R, G and B")
    if not all(math.isfinite(value) for value in values) or (key == "std" and min(values) <= 0):
        raise DataError(f"data.{key} is {values}; allowed are finite numbers{' above 0' if key == 'std' else ''}")
