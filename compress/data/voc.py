"""A folder in the layout of PASCAL VOC: JPEGImages/, Annotations/NAME.xml and ImageSets/Main/train.txt and val.txt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from compress.data.base import DataSet
from compress.data.boxes import AS_BACKGROUND, Annotation, BoxSplit, annotation
from compress.data.folder import EXTENSIONS
from compress.data.spec import DataSpec
from compress.errors import DataError, first_few, near_misses
from compress.files import read_regular

_SIDES = ("xmin", "ymin", "xmax", "ymax")


def voc_data(spec: DataSpec) -> DataSet:
    """Images and boxes under `spec.root`; difficult objects are ignored.

    Raises:
        DataError: a missing or damaged file, or an unlearnable box.
    """
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
        part = BoxSplit(found, classes, spec, augment=augment)
        part.skipped += skipped
        return part

    return DataSet(train=split("train", spec.train_images, spec.augment), val=split("val", spec.val_images, False))


def _names(root: Path, split: str) -> list[str]:
    file = root / "ImageSets" / "Main" / f"{split}.txt"
    if not file.is_file():
        raise DataError(f"data.root: there is no file {file.absolute()}, which lists the images of {split}")
    names = [line.split()[0] for line in read_regular(file).decode("utf-8", "replace").splitlines() if line.strip()]
    if not names:
        raise DataError(f"{file} names no image")
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
    """Read one XML file of VOC.

    Raises:
        DataError: a missing or damaged file, an unknown class, or a bad box.
    """
    classes = tuple(spec.classes or ())
    try:
        tree = ElementTree.fromstring(read_regular(file))
    except FileNotFoundError:
        raise DataError(f"there is no annotation {file}") from None
    except (ElementTree.ParseError, OSError, ValueError) as error:
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
        return float(text or "")
    except ValueError:
        raise DataError(f"{file}: {path} is {text!r}; it must be a number") from None
