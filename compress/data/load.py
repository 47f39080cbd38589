"""The two splits of a recipe's `data` section, and the number of its classes."""

from __future__ import annotations

from collections.abc import Callable

from compress.data import DataSpec, check_data_spec
from compress.data.base import DataSet
from compress.data.boxes import coco_classes, coco_data, voc_data
from compress.data.degraded import degraded_data
from compress.data.folder import class_folders, folder_data, images_data
from compress.data.masks import mask_data
from compress.data.memory import cifar_data, digits_data
from compress.data.own import own_data
from compress.data.shapes import DEFAULT_SHAPES, shapes_data
from compress.errors import DataError
from compress.files import expand_user
from compress.support.imports import is_import_path

_MAKERS: dict[str, Callable[[DataSpec], DataSet]] = {
    "digits": digits_data,
    "shapes": shapes_data,
    "folder": folder_data,
    "images": images_data,
    "cifar10": cifar_data,
    "cifar100": cifar_data,
    "masks": mask_data,
    "voc": voc_data,
    "coco": coco_data,
    "degraded": degraded_data,
}


def load_data(spec: DataSpec) -> DataSet:
    """The training and the evaluation split; nothing is ever downloaded.

    Returns:
        Splits whose batches are images (N, C, H, W) float32, normalized, and targets: (N,) int64 for classification,
        (N, H, W) int64 for segmentation, a list of N mappings for detection (see `boxes`), images (N, 3, H, W)
        float32 from 0 to 1 for restoration.

    Raises:
        DataError: a value out of range, missing or unreadable files, or another number of classes than `spec` names.

    Examples:
        >>> data = compress.load_data(compress.DataSpec(name="shapes", train_images=20, val_images=10, image_size=32))
        >>> len(data.train), len(data.val), data.val.num_classes
        (20, 10, 20)
    """
    check_data_spec(spec)
    data = own_data(spec) if is_import_path(spec.name) else _MAKERS[spec.name](spec)
    agreed_count(spec, data.train.num_classes)
    return data


FIXED_COUNTS = {"digits": 10, "cifar10": 10, "cifar100": 100}


def class_count(spec: DataSpec) -> int:
    if spec.classes is not None:
        return len(spec.classes)
    if spec.name == "shapes":
        return DEFAULT_SHAPES if spec.num_classes is None else spec.num_classes
    if spec.name == "folder":
        train = expand_user(str(spec.root)) / "train"
        if train.is_dir():
            return agreed_count(spec, len(class_folders(train)))
        if spec.num_classes is None:
            raise DataError(
                f"the classes of data.name folder cannot be counted, because there is no folder {train.absolute()}: "
                "set data.root to the folder that holds train/ and val/, or data.num_classes to their number"
            )
        return spec.num_classes
    if spec.name in ("images", "degraded"):
        return spec.num_classes or 0
    if spec.name == "coco":
        return agreed_count(spec, len(coco_classes(spec)))
    if spec.name in FIXED_COUNTS:
        return agreed_count(spec, FIXED_COUNTS[spec.name])
    if spec.num_classes is None:
        raise DataError(f"data.name {spec.name} has no fixed classes: set data.num_classes or data.classes")
    return spec.num_classes


def agreed_count(spec: DataSpec, found: int) -> int:
    if spec.num_classes not in (None, found):
        raise DataError(
            f"data.num_classes is {spec.num_classes}, but {spec.name} has {found}; leave the key out, or set it to null"
        )
    return found
