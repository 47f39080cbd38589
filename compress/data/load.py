"""The two splits of a recipe's `data` section."""

from __future__ import annotations

from collections.abc import Callable

from compress.data.base import DataSet
from compress.data.cifar import cifar_data
from compress.data.classes import agreed_count
from compress.data.coco import coco_data
from compress.data.digits import digits_data
from compress.data.folder import folder_data
from compress.data.masks import mask_data
from compress.data.own import own_data
from compress.data.shapes import shapes_data
from compress.data.spec import DataSpec, check_data_spec
from compress.data.voc import voc_data
from compress.support.imports import is_import_path

_MAKERS: dict[str, Callable[[DataSpec], DataSet]] = {
    "digits": digits_data,
    "shapes": shapes_data,
    "folder": folder_data,
    "cifar10": cifar_data,
    "cifar100": cifar_data,
    "masks": mask_data,
    "voc": voc_data,
    "coco": coco_data,
}


def load_data(spec: DataSpec) -> DataSet:
    """The training and the evaluation split; nothing is ever downloaded.

    Returns:
        Splits whose batches are images (N, C, H, W) float32, normalized, and targets: (N,) int64 for classification,
        (N, H, W) int64 for segmentation, a list of N mappings for detection (see `boxes`).

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
