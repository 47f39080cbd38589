"""A folder of images: by class, root/train/CLASS/*.jpg and root/val/CLASS/*.jpg, or without classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress.data import DataSpec
from compress.data.base import (
    Batch,
    BatchPlan,
    DataSet,
    bounded,
    file_parts,
    seed_of_changes,
)
from compress.data.decode import Decoder, Reader, check_decoder, decode_packed, pack, prepare
from compress.data.memory import to_device
from compress.data.workers import ItemSplit, ahead
from compress.errors import DataError, first_few
from compress.files import expand_user

_EACH = 4  # one of this many images without labels is for evaluation; the others are for calibration and training
_NAMED_AT_ONCE = 32  # images of one batch when the float network names their classes
EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def folder_data(spec: DataSpec) -> DataSet:
    root = expand_user(str(spec.root))
    for folder in (root, root / "train", root / "val"):
        if not folder.is_dir():
            raise DataError(
                f"data.root: there is no folder {folder.absolute()} (expected {root}/train/CLASS and {root}/val/CLASS)"
            )
    labels, val_labels = class_folders(root / "train"), class_folders(root / "val")
    if labels != val_labels:
        only_train, only_val = sorted(set(labels) - set(val_labels)), sorted(set(val_labels) - set(labels))
        raise DataError(
            f"the classes of {root / 'train'} and {root / 'val'} differ: only in train {first_few(only_train)}, "
            f"only in val {first_few(only_val)}; both must hold the same class folders"
        )

    def split(name: str, limit: int | None, *, augment: bool) -> FolderSplit:
        found = _scan(root / name, labels)
        return FolderSplit(root / name, found, spec, labels=labels, limit=limit, augment=augment)

    return DataSet(
        train=split("train", spec.train_images, augment=spec.augment),
        val=split("val", spec.val_images, augment=False),
    )


def images_data(spec: DataSpec) -> DataSet:
    """Images under `spec.root`, to any depth, whose classes the float network says; every fourth is for evaluation."""
    root = expand_user(str(spec.root))
    labels = tuple(str(number) for number in range(spec.num_classes or 0))

    def split(files: list[Path], limit: int | None, *, augment: bool) -> UnlabelledSplit:
        names = np.array([os.fsencode(path.relative_to(root)) for path in files])
        found = names, torch.zeros(len(files), dtype=torch.int64)
        return UnlabelledSplit(root, found, spec, labels=labels, limit=limit, augment=augment)

    train, val = every_fourth(root)
    return DataSet(
        train=split(train, spec.train_images, augment=spec.augment),
        val=split(val, spec.val_images, augment=False),
    )


def every_fourth(root: Path) -> tuple[list[Path], list[Path]]:
    """The images under a folder, to any depth: three of four, and every fourth, which is for evaluation."""
    if not root.is_dir():
        raise DataError(f"data.root: there is no folder {root.absolute()} (expected images in it, at any depth)")
    files = pictures_in(root)
    if len(files) < _EACH:
        raise DataError(f"{root} holds {len(files)} images: {_EACH} or more are needed, of which one is for evaluation")
    return [file for number, file in enumerate(files) if number % _EACH != _EACH - 1], files[_EACH - 1 :: _EACH]


class FolderSplit(ItemSplit):
    """Image files of one folder.

    Args:
        found: files, as bytes relative to the folder, and targets (N,).
        limit: stratified; None = all.
    """

    def __init__(
        self,
        folder: Path,
        found: tuple[np.ndarray, Tensor],
        spec: DataSpec,
        *,
        labels: tuple[str, ...],
        limit: int | None,
        augment: bool,
    ) -> None:
        super().__init__(labels, spec, augment=augment, crop_ratio=spec.crop_ratio)
        files, targets = found
        chosen = bounded(targets, limit)
        self.targets = targets[chosen]
        self.decode = spec.decode
        self._on_cpu: dict[str, str] = {}
        self._folder, self._files = folder, files[chosen.numpy()]
        self._decoder = Decoder(folder, self._files, preprocessing=self.preprocessing, max_pixels=spec.max_pixels)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def files(self) -> list[Path]:
        return [self._folder / os.fsdecode(bytes(name)) for name in self._files]

    def content(self) -> Iterator[bytes | str]:
        yield self.targets.numpy().tobytes()
        yield from file_parts(self._folder, [os.fsdecode(bytes(name)) for name in self._files])

    def reader(self) -> Decoder:
        return self._decoder

    def targets_of(self, found: list[int], device: torch.device) -> Tensor:
        return to_device(self.targets[found], device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        device = torch.device(device)
        if self.decode == "gpu" and device.type == "cuda":
            check_decoder(device)
            yield from self.device_batches(plan, device)
            return
        prepare()
        yield from super().batches(plan, device=device)

    def device_batches(self, plan: BatchPlan, device: torch.device) -> Iterator[Batch]:
        seed = seed_of_changes(self.seed, plan.epoch, augment=self.augment)
        files = self.read(Reader(self._decoder), pack, plan, device)
        decoded = (decode_packed(packed, self._decoder, seed, device, self._on_cpu) for packed in files)
        yield from ahead(self.finished(decoded, device), device)

    def notes(self) -> list[str]:
        return [f"{reason}, such as {file}, are decoded on the CPU" for reason, file in self._on_cpu.items()]


class UnlabelledSplit(FolderSplit):
    """Images whose classes a network says; all are of class 0 until then."""

    def name_classes(self, logits_of: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Take the highest of a network's logits (n, classes) for each image's class."""
        count = len(self)
        self.targets, named = torch.arange(count), torch.zeros(count, dtype=torch.int64)
        for images, places in self.batches(BatchPlan(batch_size=_NAMED_AT_ONCE), device=device):
            logits = logits_of(images)
            if logits.ndim != 2 or logits.shape[1] != self.num_classes:
                raise DataError(
                    f"data.num_classes is {self.num_classes}, and the network returns {tuple(logits.shape)} for "
                    f"{len(images)} images: it must be one logit for each class; set data.num_classes to their number"
                )
            named[places.cpu()] = logits.argmax(1).cpu()
        self.targets = named


def _scan(folder: Path, labels: tuple[str, ...]) -> tuple[np.ndarray, Tensor]:
    files: list[bytes] = []
    counts: list[int] = []
    above = {_identity(folder), *(_identity(folder / label) for label in labels)}
    for label in labels:
        found = _files_of(folder / label, above)
        if not found:
            raise DataError(f"the class folder {folder / label} holds no images ({', '.join(EXTENSIONS)})")
        files += [os.fsencode(os.path.join(label, name)) for name in found]  # noqa: PTH118 (as in _files_of)
        counts.append(len(found))
    return np.array(files), torch.repeat_interleave(torch.arange(len(labels)), torch.tensor(counts))


def pictures_in(folder: Path) -> list[Path]:
    """The image files of a folder, to any depth, sorted; links are followed."""
    found = [folder / name for name in _files_of(folder, set())] if folder.is_dir() else []
    if not found:
        raise DataError(f"{folder} holds no images ({', '.join(EXTENSIONS)})")
    return found


def _files_of(folder: Path, above: set[tuple[int, int]]) -> list[str]:
    """The image files of a folder relative to it, sorted; links to folders `above` it are not followed."""
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder)  # noqa: PTH118 (a Path for each is ten times slower)
        for parent, names in _walk(folder, above)
        for name in names
        if name.lower().endswith(EXTENSIONS) and name[0] != "."
    )


def _walk(folder: Path, above: set[tuple[int, int]]) -> Iterator[tuple[str, list[str]]]:
    """Yield folders with files, links followed, each once."""
    seen = above - {_identity(folder)}
    for parent, inner, names in os.walk(folder, followlinks=True):
        identity = _identity(parent)
        inner.sort()
        if identity in seen:
            inner.clear()
            continue
        seen.add(identity)
        yield parent, names


def _identity(folder: Path | str) -> tuple[int, int]:
    status = os.stat(folder)  # noqa: PTH116 (as in the walk)
    return status.st_dev, status.st_ino


def class_folders(folder: Path) -> tuple[str, ...]:
    labels = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))
    if not labels:
        raise DataError(f"{folder} holds no class folders; expected {folder}/CLASS/IMAGE.jpg")
    for label in labels:
        if label.encode(errors="surrogateescape").decode(errors="replace") != label:
            raise DataError(f"the name of the class folder {label!r} in {folder} is no text in UTF-8; rename it")
    return labels
