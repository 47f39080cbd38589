"""The number of classes of a data set."""

from __future__ import annotations

from pathlib import Path

from compress.data.coco_file import coco_classes
from compress.data.spec import DataSpec
from compress.errors import DataError
from compress.files import expand_user

FIXED_COUNTS = {"digits": 10, "cifar10": 10, "cifar100": 100}
"""Data sets with fixed classes."""

DEFAULT_SHAPES = 20
"""Default number of classes of `shapes`."""


def class_count(spec: DataSpec) -> int:
    """The number of classes of a recipe's data; no image is read.

    Raises:
        DataError: `data.num_classes` contradicts the data, or nothing tells the number.
    """
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
    if spec.name == "coco":
        return agreed_count(spec, len(coco_classes(spec)))
    if spec.name in FIXED_COUNTS:
        return agreed_count(spec, FIXED_COUNTS[spec.name])
    if spec.num_classes is None:
        raise DataError(f"data.name {spec.name} has no fixed classes: set data.num_classes or data.classes")
    return spec.num_classes


def agreed_count(spec: DataSpec, found: int) -> int:
    """Check the number that was found.

    Raises:
        DataError: the recipe names another number.
    """
    if spec.num_classes not in (None, found):
        raise DataError(
            f"data.num_classes is {spec.num_classes}, but {spec.name} has {found}; leave the key out, or set it to null"
        )
    return found


def class_folders(folder: Path) -> tuple[str, ...]:
    """The class folders, sorted, without hidden ones.

    Raises:
        DataError: there are none, or a name is not valid text.
    """
    labels = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))
    if not labels:
        raise DataError(f"{folder} holds no class folders; expected {folder}/CLASS/IMAGE.jpg")
    for label in labels:
        if label.encode(errors="surrogateescape").decode(errors="replace") != label:
            raise DataError(f"the name of the class folder {label!r} in {folder} is no text in UTF-8; rename it")
    return labels
