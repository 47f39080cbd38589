"""The JSON files of COCO's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.data.spec import DataSpec
from compress.errors import DataError, first_few
from compress.files import read_json

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
