"""Images and boxes in the layout of COCO: a JSON file for each split, and a folder of images.

Three layouts, where {split} is a name such as train or train2017; boxes of crowds are neither learned nor counted:

    root/annotations/instances_{split}.json   root/{split}/
    root/annotations/instances_{split}.json   root/images/{split}/
    root/train/_annotations.coco.json, root/valid/_annotations.coco.json, each beside its images
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.data.base import DataSet
from compress.data.boxes import AS_BACKGROUND, Annotation, BoxSplit, annotation
from compress.data.spec import DataSpec
from compress.errors import DataError, first_few, near_misses
from compress.files import read_json


def coco_data(spec: DataSpec) -> DataSet:
    """Images and boxes under `spec.root`.

    Raises:
        DataError: a missing or damaged file, or an unlearnable box.
    """
    root = Path(str(spec.root)).expanduser()
    found: tuple[str, ...] | None = None if spec.classes is None else tuple(spec.classes)

    def split(name: str, limit: int | None, augment: bool) -> BoxSplit:
        nonlocal found
        file, images = coco_files(root, name)
        content = coco_content(file)
        labels = classes_in(content, file)
        found = found or tuple(labels.values())
        _check_named(found, tuple(labels.values()), file, spec)
        skipped: list[str] = []
        part = BoxSplit(
            list(_annotations(content, file, images, found, spec, skipped, limit)), found, spec, augment=augment
        )
        part.skipped += skipped
        return part

    return DataSet(train=split("train", spec.train_images, spec.augment), val=split("val", spec.val_images, False))


def _check_named(named: tuple[str, ...], known: tuple[str, ...], file: Path, spec: DataSpec) -> None:
    """Refuse a class without category where others become background: it may be misspelt."""
    strange = [name for name in named if name not in known]
    if strange and spec.other_classes == "background":
        raise DataError(
            f"data.classes names {first_few(strange)}{near_misses(strange[0], known)}, which is no category of {file} "
            f"({first_few(known)})"
        )


def _annotations(
    content: dict[str, Any],
    file: Path,
    folder: Path,
    classes: tuple[str, ...],
    spec: DataSpec,
    skipped: list[str],
    limit: int | None,
) -> Iterator[Annotation]:
    """Yield annotations; skipped ones are added to `skipped`."""
    names = classes_in(content, file)
    by_image: dict[Any, list[Any]] = {}
    for item in content["annotations"]:
        by_image.setdefault(item.get("image_id") if isinstance(item, dict) else None, []).append(item)
    known = {image.get("id") for image in content["images"] if isinstance(image, dict)}
    if strays := [str(key) for key in by_image if key not in known]:
        raise DataError(f"{file} has annotations of images that it does not list: image_id {first_few(strays)}")
    for image in content["images"][:limit]:
        where = f"{file}, image {_name(image)}"
        try:
            path = folder / str(image["file_name"])
            if not path.is_file():
                raise DataError(f"{where}: there is no file {path}")
            size = int(image.get("width") or 0), int(image.get("height") or 0)
            found = (_row(item, names, classes, spec) for item in by_image.get(image["id"], ()))
            rows = [row for row in found if row is not None]
            yield annotation(path, where, size if min(size) > 0 else None, rows)
        except (DataError, KeyError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, DataError) else f"{where}: {type(error).__name__}: {error}"
            text = text if text.startswith(str(file)) else f"{where}: {text}"
            if spec.on_error == "raise":
                raise DataError(f"{text}; data.on_error: skip leaves the image out") from None
            skipped.append(where)


def _row(
    item: dict[str, Any], names: dict[int, str], classes: tuple[str, ...], spec: DataSpec
) -> tuple[list[float], int, bool] | None:
    """Box, class, and whether it is a crowd; None if it is background."""
    category = int(item["category_id"])
    if category in names and names[category] not in classes and spec.other_classes == "background":
        return None
    if category not in names or names[category] not in classes:
        named = f" ({names[category]})" if category in names else ""
        raise DataError(
            f"annotation {item.get('id')} has category_id {category}{named}, which is none of the classes "
            f"({first_few(classes)}){AS_BACKGROUND if named else ''}"
        )
    left, top, width, height = (float(value) for value in item["bbox"])
    return [left, top, left + width, top + height], classes.index(names[category]), bool(item.get("iscrowd", 0))


def _name(image: Any) -> str:
    return str(image.get("file_name", image.get("id")) if isinstance(image, dict) else image)


_BESIDE = {"train": ("train",), "val": ("valid", "val")}


def coco_classes(spec: DataSpec) -> tuple[str, ...]:
    """Categories of the training split by id.

    Raises:
        DataError: the file is missing or damaged.
    """
    file, _ = coco_files(Path(str(spec.root)).expanduser(), "train")
    return tuple(classes_in(coco_content(file), file).values())


def coco_files(root: Path, split: str) -> tuple[Path, Path]:
    """JSON file and image folder of a split."""
    for name in _BESIDE[split]:
        if (file := root / name / "_annotations.coco.json").is_file():
            return file, file.parent
    files = sorted((root / "annotations").glob(f"instances_{split}*.json"))
    if len(files) != 1:
        raise DataError(
            f"data.root: {root.absolute()} holds {len(files)} files annotations/instances_{split}*.json"
            f"{' (' + first_few([f.name for f in files]) + ')' if files else ''}; it must hold one, or "
            f"{_BESIDE[split][0]}/_annotations.coco.json beside the images"
        )
    name = files[0].stem.removeprefix("instances_")
    for folder in (root / name, root / "images" / name):
        if folder.is_dir():
            return files[0], folder
    raise DataError(f"data.root: there is no folder {(root / name).absolute()} with the images of {files[0]}")


def coco_content(file: Path) -> dict[str, Any]:
    """Read a COCO file.

    Raises:
        DataError: no JSON, or without images, annotations or categories.
    """
    try:
        content = read_json(file)
    except (ValueError, OSError) as error:
        raise DataError(f"{file} is not readable JSON ({error})") from None
    parts = ("images", "annotations", "categories")
    lacking = [p for p in parts if not isinstance(content, dict) or not isinstance(content.get(p), list)]
    if lacking:
        raise DataError(f"{file} has no list of {first_few(lacking)}; COCO's files have {', '.join(parts)}")
    empty = [part for part in parts if not content[part]]
    if empty:
        raise DataError(f"{file} has no {first_few(empty)}: nothing to detect")
    return dict(content)


def classes_in(content: dict[str, Any], file: Path) -> dict[int, str]:
    """Categories by id, sorted.

    Raises:
        DataError: a category without id or name, or a repeated id.
    """
    try:
        found = {int(item["id"]): str(item["name"]) for item in content["categories"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: a category has no id or name ({type(error).__name__}: {error})") from None
    if len(found) != len(content["categories"]):
        raise DataError(f"{file}: two categories have the same id; each needs its own")
    return dict(sorted(found.items()))
