"""Images with boxes, for detection, in the layouts of COCO and PASCAL VOC.

Training images are scaled by 0.7 to 1.4, moved and mirrored; of a cut box, 30 % must be left. COCO has three layouts,
where {split} is a name such as train or train2017; boxes of crowds are neither learned nor counted, and a box ends at
the border of its image:

    root/annotations/instances_{split}.json   root/{split}/
    root/annotations/instances_{split}.json   root/images/{split}/
    root/train/_annotations.coco.json, root/valid/_annotations.coco.json, each beside its images

VOC: root/JPEGImages/, root/Annotations/NAME.xml, root/ImageSets/Main/train.txt and val.txt.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from compress.data import DataSpec
from compress.data.base import DataSet, file_parts, uniform
from compress.data.decode import pixels_of, read_image
from compress.data.folder import EXTENSIONS
from compress.data.memory import to_device
from compress.data.workers import Item, ItemSplit, Place
from compress.errors import CompressWarning, DataError, first_few, near_misses
from compress.files import read_json, read_regular

_SCALES = (0.7, 1.4)
_DRAWS = 4
_LEAST_VISIBLE = 0.3
_TOLERANCE = 1.0  # pixels by which a rounded box may exceed its image, which is not said

# Advice for a class that a recipe does not name.
AS_BACKGROUND = "; data.other_classes: background learns objects of other classes as background"

Boxes = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """An image and its boxes.

    Attributes:
        size: (width, height), if said.
        boxes: (n, 4) edges in pixels of the file.
        ignored: (n,) boxes that count neither as found nor as missed.
        cut: boxes cut at the border.
        empty: boxes left out, outside.
    """

    image: Path
    source: str
    size: tuple[int, int] | None
    boxes: Boxes
    labels: NDArray[np.int64]
    ignored: NDArray[np.bool_]
    cut: int = 0
    empty: int = 0


def annotation(
    image: Path, source: str, size: tuple[int, int] | None, rows: Iterable[tuple[Sequence[float], int, bool]]
) -> Annotation:
    found = list(rows)
    boxes = np.array([box for box, _, _ in found], dtype=np.float32).reshape(-1, 4)
    for box in boxes:
        text = "[" + ", ".join(f"{value:g}" for value in box) + "]"
        if not np.isfinite(box).all():
            raise DataError(f"{source}: the box {text} has a coordinate that is no finite number")
        if box[2] < box[0] or box[3] < box[1]:
            raise DataError(f"{source}: the box {text} (left, top, right, bottom) ends before it begins")
    one = Annotation(
        image=image,
        source=source,
        size=size,
        boxes=boxes,
        labels=np.array([label for _, label, _ in found], dtype=np.int64),
        ignored=np.array([ignored for _, _, ignored in found], dtype=np.bool_),
    )
    return one if size is None else _within(one, size)


def _within(one: Annotation, size: tuple[int, int]) -> Annotation:
    # Boxes end at the border of the image, and those outside it are left out.
    boxes = one.boxes.clip(0, np.array(size * 2, dtype=np.float32))
    beyond, kept = (np.abs(boxes - one.boxes) > _TOLERANCE).any(1), (boxes[:, 2:] > boxes[:, :2]).all(1)
    cut, empty = int((beyond & kept).sum()), int((~kept).sum())
    labels, ignored = one.labels[kept], one.ignored[kept]
    return replace(one, boxes=boxes[kept], labels=labels, ignored=ignored, cut=cut, empty=empty)


def _warn_of_cuts(annotations: Sequence[Annotation]) -> None:
    cut, empty = sum(one.cut for one in annotations), sum(one.empty for one in annotations)
    if not cut and not empty:
        return
    total = sum(len(one.boxes) for one in annotations) + empty
    source = next(one.source for one in annotations if one.cut or one.empty)
    warnings.warn(
        f"of {total} boxes, {cut} reach beyond their images and end at the border, and {empty} have no area within "
        f"theirs and are left out; the first is in {source}. If that is more than a few, look whether boxes are in "
        "pixels of their images, and in the format that is read",
        CompressWarning,
        stacklevel=2,
    )


class BoxSplit(ItemSplit):
    """Images with boxes, resized to `image_size` without regard to their shape.

    A target is {"boxes": (n, 4) float32 edges in pixels of the model's input; "labels": (n,) int64; "ignored": (n,)
    bool}.
    """

    def __init__(
        self,
        annotations: Sequence[Annotation],
        labels: Sequence[str],
        spec: DataSpec,
        *,
        augment: bool,
        skipped: Iterable[str] = (),
    ) -> None:
        super().__init__(labels, spec, augment=augment)
        self.skipped += skipped
        if all(one.ignored.all() for one in annotations):
            where = annotations[0].source if annotations else spec.root
            boxed = any(len(one.boxes) for one in annotations)
            kind = " that counts: all are crowds, or marked as difficult" if boxed else ""
            raise DataError(
                f"none of {len(annotations)} images has a box{kind} (the first is {where}): nothing to detect"
            )
        _warn_of_cuts(annotations)
        self.annotations = list(annotations)

    def __len__(self) -> int:
        return len(self.annotations)

    def content(self) -> Iterator[bytes | str]:
        for one in self.annotations:
            yield from (one.boxes.tobytes(), one.labels.tobytes(), one.ignored.tobytes())
        yield from file_parts(Path(), [str(one.image) for one in self.annotations])

    def reader(self) -> Dataset[Item]:
        return _Reader(self.annotations, self.preprocessing.height_width, self.max_pixels)

    def targets_of(
        self, found: list[tuple[Boxes, NDArray[np.int64], NDArray[np.bool_]]], device: torch.device
    ) -> list[dict[str, Tensor]]:
        return targets_on([tuple(map(torch.from_numpy, parts)) for parts in found], device)


def targets_on(rows: Sequence[tuple[Tensor, ...]], device: torch.device) -> list[dict[str, Tensor]]:
    counts = [len(row[1]) for row in rows]
    parts = [to_device(torch.cat(part), device).split(counts) for part in zip(*rows, strict=True)]
    return [dict(zip(("boxes", "labels", "ignored"), row, strict=True)) for row in zip(*parts, strict=True)]


class _Reader(Dataset[Item]):
    def __init__(self, annotations: Sequence[Annotation], size: tuple[int, int], max_pixels: int) -> None:
        self.annotations, self.size, self.max_pixels = annotations, size, max_pixels

    def __getitem__(self, place: Place) -> Item:
        index, seed = place
        one = self.annotations[index]
        try:
            image, one = _opened(one, self.max_pixels)
        except DataError as error:
            return None, None, str(one.image), str(error)
        scale = np.array([self.size[1] / image.width, self.size[0] / image.height] * 2, dtype=np.float32)
        boxes = one.boxes * scale
        if seed is None:
            return _resized(image, self.size), (boxes, one.labels, one.ignored), str(one.image), ""
        draws = uniform(seed, torch.tensor([index]), _DRAWS)[0].tolist()
        pixels, boxes, kept = moved(image, boxes, self.size, draws)
        return pixels, (boxes[kept], one.labels[kept], one.ignored[kept]), str(one.image), ""


def _opened(one: Annotation, max_pixels: int) -> tuple[Image.Image, Annotation]:
    image = read_image(one.image, max_pixels=max_pixels)
    if one.size not in (None, image.size):
        raise DataError(f"{one.image} has {image.size} pixels (width, height), and {one.source} says {one.size}")
    if one.size is None:
        one = _within(one, image.size)
        _warn_of_cuts([one])
    return image, one


def _resized(image: Image.Image, size: tuple[int, int]) -> Tensor:
    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return pixels_of(image)


def moved(
    image: Image.Image, boxes: Boxes, size: tuple[int, int], draws: Sequence[float]
) -> tuple[Tensor, Boxes, NDArray[np.bool_]]:
    """Return an image scaled, moved and mirrored, with its boxes.

    Returns:
        Pixels (3, H, W) uint8, boxes cut at the border, and which keep at least 30 % of their area. `size` is (H, W);
            `draws` are scale, vertical and horizontal position, and mirror, of [0, 1).
    """
    height, width = size
    scale = _SCALES[0] * (_SCALES[1] / _SCALES[0]) ** draws[0]
    inner = (max(1, round(height * scale)), max(1, round(width * scale)))
    top, left = round(draws[1] * (height - inner[0])), round(draws[2] * (width - inner[1]))
    canvas = Image.new("RGB", (width, height), (128, 128, 128))
    canvas.paste(image.resize((inner[1], inner[0]), Image.Resampling.BILINEAR), (left, top))
    pixels = torch.from_numpy(np.array(canvas)).movedim(-1, 0).contiguous()
    factors = np.array([inner[1] / width, inner[0] / height] * 2, dtype=np.float32)
    whole = boxes * factors + np.array([left, top] * 2, dtype=np.float32)
    cut = whole.clip(0, np.array([width, height] * 2, dtype=np.float32))
    kept: NDArray[np.bool_] = _areas(cut) >= _LEAST_VISIBLE * _areas(whole)
    if draws[3] < 0.5:
        pixels = pixels.flip(-1)
        cut = np.stack([width - cut[:, 2], cut[:, 1], width - cut[:, 0], cut[:, 3]], axis=1)
    return pixels, cut, kept


def _areas(boxes: Boxes) -> Boxes:
    sides = (boxes[:, 2:] - boxes[:, :2]).clip(0)
    return sides[:, 0] * sides[:, 1]


_SIDES = ("xmin", "ymin", "xmax", "ymax")


def voc_data(spec: DataSpec) -> DataSet:
    root = Path(str(spec.root)).expanduser()
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        if not (root / folder).is_dir():
            raise DataError(
                f"data.root: there is no folder {(root / folder).absolute()}; VOC's layout is JPEGImages/, "
                "Annotations/ and ImageSets/Main/ with train.txt and val.txt"
            )
    images = {f.stem: f for f in sorted((root / "JPEGImages").iterdir()) if f.suffix.lower() in EXTENSIONS}
    classes = tuple(spec.classes or ())

    def split(name: str, limit: int | None, augment: bool) -> BoxSplit:
        skipped: list[str] = []
        found = list(_annotations(root, _names(root, name)[:limit], images, spec, skipped))
        return BoxSplit(found, classes, spec, augment=augment, skipped=skipped)

    return DataSet(train=split("train", spec.train_images, spec.augment), val=split("val", spec.val_images, False))


def _names(root: Path, split: str) -> list[str]:
    file = root / "ImageSets" / "Main" / f"{split}.txt"
    if not file.is_file():
        raise DataError(f"data.root: there is no file {file.absolute()}, which lists the images of {split}")
    names = [line.split()[0] for line in read_regular(file).decode("utf-8-sig", "replace").splitlines() if line.strip()]
    if not names:
        raise DataError(f"{file} names no image")
    _check_once(names, file, "images")
    return names


def _annotations(
    root: Path, names: list[str], images: Mapping[str, Path], spec: DataSpec, skipped: list[str]
) -> Iterator[Annotation]:
    lost = [name for name in names if name not in images]
    if lost and spec.on_error == "raise":
        raise DataError(f"{len(lost)} images are not in {root / 'JPEGImages'}: {first_few(lost)}")
    for name in names:
        file = root / "Annotations" / f"{name}.xml"
        try:
            if name not in images:
                raise DataError(f"{root / 'JPEGImages' / name} is missing")
            yield read_voc(file, images[name], spec)
        except DataError as error:
            if spec.on_error == "raise":
                raise DataError(f"{error}; data.on_error: skip leaves the image out") from None
            skipped.append(str(file))


def read_voc(file: Path, image: Path, spec: DataSpec) -> Annotation:
    classes = tuple(spec.classes or ())
    try:
        tree = ElementTree.fromstring(read_regular(file))
    except FileNotFoundError:
        raise DataError(f"there is no annotation {file}") from None
    except (ElementTree.ParseError, LookupError, OSError, ValueError) as error:  # LookupError: of its encoding
        raise DataError(f"{file} is not readable XML ({error})") from None
    sides = tuple(int(_number(tree, f"size/{side}", file)) for side in ("width", "height"))
    rows = []
    for item in tree.iterfind("object"):
        label = (item.findtext("name") or "").strip()
        if label not in classes and label and spec.other_classes == "background":
            continue
        if label not in classes:
            raise DataError(
                f"{file} names the class {label!r}{near_misses(label, classes)}; data.classes has {', '.join(classes)}"
                f"{AS_BACKGROUND if label else ''}"
            )
        difficult = (item.findtext("difficult") or "").strip() == "1"
        box = [_number(item, f"bndbox/{side}", file) for side in _SIDES]
        rows.append((box, classes.index(label), difficult))
    return annotation(image, str(file), (sides[0], sides[1]) if min(sides) > 0 else None, rows)


def _number(tree: ElementTree.Element, path: str, file: Path) -> float:
    text = tree.findtext(path)
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{file}: {path} is {text!r:.80}; it must be a finite number")
    return number


def coco_data(spec: DataSpec) -> DataSet:
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
        boxed = list(_coco_annotations(content, file, images, found, spec, skipped, limit))
        return BoxSplit(boxed, found, spec, augment=augment, skipped=skipped)

    return DataSet(train=split("train", spec.train_images, spec.augment), val=split("val", spec.val_images, False))


def _check_named(named: tuple[str, ...], known: tuple[str, ...], file: Path, spec: DataSpec) -> None:
    """Refuse a class without category where others become background: it may be misspelt."""
    strange = [name for name in named if name not in known]
    if strange and spec.other_classes == "background":
        raise DataError(
            f"data.classes names {first_few(strange)}{near_misses(strange[0], known)}, which is no category of {file} "
            f"({first_few(known)})"
        )


def _coco_annotations(
    content: dict[str, Any],
    file: Path,
    folder: Path,
    classes: tuple[str, ...],
    spec: DataSpec,
    skipped: list[str],
    limit: int | None,
) -> Iterator[Annotation]:
    names = classes_in(content, file)
    _check_once((_key(image, "id") for image in content["images"]), file, "image ids")
    _check_once((_key(image, "file_name") for image in content["images"]), file, "images")
    by_image: dict[Any, list[Any]] = {}
    for item in content["annotations"]:
        by_image.setdefault(_key(item, "image_id"), []).append(item)
    known = {_key(image, "id") for image in content["images"]}
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
        except (DataError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, DataError) else f"{where}: {type(error).__name__}: {error!s:.200}"
            text = text if text.startswith(str(file)) else f"{where}: {text}"
            if spec.on_error == "raise":
                raise DataError(f"{text}; data.on_error: skip leaves the image out") from None
            skipped.append(where)


def _row(
    item: dict[str, Any], names: dict[int, str], classes: tuple[str, ...], spec: DataSpec
) -> tuple[list[float], int, bool] | None:
    category = int(item["category_id"])
    if category in names and names[category] not in classes and spec.other_classes == "background":
        return None
    if category not in names or names[category] not in classes:
        named = f" ({names[category]})" if category in names else ""
        raise DataError(
            f"annotation {item.get('id')} has category_id {category}{named}, which is none of the classes "
            f"({first_few(classes)}){AS_BACKGROUND if named else ''}"
        )
    if not isinstance(item["bbox"], list):  # of a text, each letter would count
        raise DataError(f"annotation {item.get('id')} has bbox {item['bbox']!r:.80}: give left, top, width, height")
    left, top, width, height = (float(value) for value in item["bbox"])
    return [left, top, left + width, top + height], classes.index(names[category]), bool(item.get("iscrowd", 0))


def _check_once(found: Iterable[object], file: Path, what: str) -> None:
    # An image that is listed twice would count twice in every metric.
    twice = [str(one) for one, count in Counter(found).items() if count > 1 and one is not None]
    if twice:
        raise DataError(f"{file} lists {len(twice)} {what} more than once: {first_few(twice)}; remove the copies")


def _name(image: Any) -> str:
    return f"{image.get('file_name', image.get('id')) if isinstance(image, dict) else image!s:.200}"


def _key(item: Any, name: str) -> float | str | None:
    value = item.get(name) if isinstance(item, dict) else None
    return value if isinstance(value, (int, float, str)) else None  # a list cannot be looked up


_BESIDE = {"train": ("train",), "val": ("valid", "val")}


def coco_classes(spec: DataSpec) -> tuple[str, ...]:
    file, _ = coco_files(Path(str(spec.root)).expanduser(), "train")
    return tuple(classes_in(coco_content(file), file).values())


def coco_files(root: Path, split: str) -> tuple[Path, Path]:
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
    """Categories by id, sorted."""
    # A name that occurs twice (Roboflow's root, homonyms) gets its supercategory.
    try:
        names = [str(item["name"]) for item in content["categories"]]
        count = Counter(names)
        found = {
            int(item["id"]): name if count[name] == 1 else f"{item.get('supercategory')}/{name}"
            for item, name in zip(content["categories"], names, strict=True)
        }
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"{file}: a category has no id or name ({type(error).__name__}: {error})") from None
    if len(found) != len(content["categories"]):
        raise DataError(f"{file}: two categories have the same id; each needs its own")
    _check_once(found.values(), file, "categories")
    return dict(sorted(found.items()))
