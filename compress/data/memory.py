"""Splits whose images the device makes or keeps, moves and normalizes: the digits of scikit-learn, and CIFAR.

The digits are 1,797 handwritten ones (Alpaydin and Kaynak, UCI, 1998): 8 x 8 pixels in 17 greys. The pickles of
CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) are read without running code.
"""

from __future__ import annotations

import io
import math
import pickle
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from compress.data import NORMALIZATION, DataSpec
from compress.data.base import (
    Batch,
    BatchPlan,
    DataSet,
    Preprocessing,
    Split,
    bounded,
    hash_seed,
    stratified_order,
    uniform,
)
from compress.errors import DataError
from compress.files import expand_user, read_regular

CHUNK_IMAGES = 8192

Drawn = tuple[Tensor, ...]  # tensors that images are made from; the first dimension counts images


class DrawnSplit(Split):
    """A split that makes its images on the device.

    Attributes:
        chunk_images: whose random numbers are drawn together; None = `CHUNK_IMAGES` on a GPU, a batch on the CPU.
    """

    chunk_images: int | None = None

    @abstractmethod
    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        """Return what the images at `indices` (n,) int64 are made of."""

    @abstractmethod
    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        """Images (n, 3, S, S) and targets (n,) of a slice of that."""

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        drawn = self.draw(torch.tensor(indices, dtype=torch.int64), epoch=epoch, device=device)
        return self.make(drawn, epoch=epoch, device=device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        device = torch.device(device)
        most = self.chunk_images or (CHUNK_IMAGES if device.type == "cuda" else 1)
        for shares in _chunks([share for share in self.batch_indices(plan) if share], most):
            together = torch.tensor([index for share in shares for index in share], dtype=torch.int64)
            drawn = self.draw(together, epoch=plan.epoch, device=device)
            sizes = [len(share) for share in shares]
            for parts in zip(*(tensor.split(sizes) for tensor in drawn), strict=True):
                yield self.make(parts, epoch=plan.epoch, device=device)


def _chunks(shares: list[list[int]], most: int) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    count = 0
    for share in shares:
        group.append(share)
        count += len(share)
        if count >= most:
            yield group
            group, count = [], 0
    if group:
        yield group


DRAWS = 5  # random numbers for one movement


@dataclass(frozen=True, kw_only=True)
class Movement:
    """The largest movement of an image.

    Attributes:
        shift, zoom: as shares of the side.
        flip: mirror every second image left to right.
    """

    shift: float = 0.0
    degrees: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    def matrices(self, draws: Tensor, image_size: int) -> Tensor:
        """Return (N, 2, 3) float64 maps from output to input coordinates, -1 to 1 (x, y), from (N, 5) draws of [0, 1).

        Without rotation and zoom the shift is a whole number of pixels.
        """
        signed = draws * 2 - 1
        shift = signed[:, :2] * (2 * self.shift)
        if not self.degrees and not self.zoom:
            shift = (shift * image_size / 2).round() * 2 / image_size
        angle = signed[:, 2] * math.radians(self.degrees)
        scale = 1 / (1 + signed[:, 3] * self.zoom)
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0) if self.flip else torch.ones_like(scale)
        cos, sin = angle.cos() * scale, angle.sin() * scale
        rows = torch.stack((cos * mirror, -sin, shift[:, 0], sin * mirror, cos, shift[:, 1]), dim=1)
        return rows.view(-1, 2, 3)


def affine_grid(matrices: Tensor, image_size: int) -> Tensor:
    """Return the input position of each output pixel, (N, S, S, 2), for (N, 2, 3) float32 maps.

    As torch's `affine_grid` with align_corners=False, without its matrix product in TF32.
    """
    at = (torch.arange(image_size, device=matrices.device, dtype=torch.float32) * 2 + 1) / image_size - 1
    by_row = at[None, :, None, None] * matrices[:, None, None, :, 1] + matrices[:, None, None, :, 2]
    return by_row + at[None, None, :, None] * matrices[:, None, None, :, 0]


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Resample (N, C, S, S) images bilinearly; pixels from outside are black."""
    grid = affine_grid(matrices.float().to(images.device), images.shape[-1])
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


_FINGERPRINT_BYTES = 1 << 28  # of images, read for the fingerprint at most
_MOST_SHARE = 4  # a GPU keeps images that take at most one part in so many of its free memory


class MemorySplit(DrawnSplit):
    """A split whose images were read once.

    Args:
        images: (N, 1 or 3, H, H) uint8.
        targets: (N,) int64.
        movement: augmentation, or None.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        *,
        labels: tuple[str, ...],
        preprocessing: Preprocessing,
        seed: int,
        movement: Movement | None = None,
    ) -> None:
        super().__init__(labels=labels, preprocessing=preprocessing, seed=seed)
        self.images, self.targets, self.movement = images, targets, movement
        self._kept: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.targets)

    def content(self) -> Iterator[bytes | str]:
        step = 1 + self.images.nbytes // _FINGERPRINT_BYTES
        for tensor in (self.targets, self.images[::step]):
            yield str(tuple(tensor.shape))
            yield tensor.cpu().numpy().tobytes()

    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        chosen = to_device(indices, self._stored(device)[0].device)
        if epoch is None or self.movement is None:
            return (chosen,)
        draws = uniform(hash_seed(self.seed, epoch), indices, DRAWS)
        matrices = self.movement.matrices(draws, self.preprocessing.height_width[0]).float()
        return chosen, to_device(matrices, device)

    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        chosen, *matrices = drawn
        images, targets = self._stored(device)
        pixels = to_device(images[chosen], device).float().div_(255)
        pixels = resize(pixels, self.preprocessing.height_width[0])
        if matrices:
            pixels = move(pixels, matrices[0])
        return self.preprocessing.normalize(pixels), to_device(targets[chosen], device)

    def _stored(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images and targets on `device`, copied once if there is room."""
        if device not in self._kept:
            fits = self.images.device == device
            if device.type == "cuda" and not fits:
                fits = self.images.nbytes <= torch.cuda.mem_get_info(device)[0] // _MOST_SHARE
            place = device if fits else self.images.device
            self._kept[device] = self.images.to(place), self.targets.to(place)
        return self._kept[device]


def memory_data(
    spec: DataSpec,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    labels: tuple[str, ...],
    preprocessing: Preprocessing,
    movement: Movement,
) -> DataSet:
    def split(whole: tuple[Tensor, Tensor], limit: int | None, movement: Movement | None) -> MemorySplit:
        images, targets = whole
        kept = bounded(targets, limit)
        return MemorySplit(
            images[kept], targets[kept], labels=labels, preprocessing=preprocessing, seed=spec.seed, movement=movement
        )

    return DataSet(
        train=split(train, spec.train_images, movement if spec.augment else None),
        val=split(val, spec.val_images, None),
    )


def resize(images: Tensor, size: int) -> Tensor:
    """(N, C, H, W) floats bilinearly, antialiased where that shrinks."""
    if images.shape[-1] == size:
        return images
    smaller = size < images.shape[-1]
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=smaller)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for queued work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


LABELS = tuple("0123456789")
MEAN, STD = NORMALIZATION["digits"]
MOVEMENT = Movement(shift=0.08, degrees=12.0, zoom=0.12)
_VAL_SHARE = 0.25


def digits_data(spec: DataSpec) -> DataSet:
    images, targets = _read()
    order = stratified_order(targets)
    val_count = round(len(order) * _VAL_SHARE)
    val, train = (positions.sort().values for positions in (order[:val_count], order[val_count:]))
    return memory_data(
        spec,
        (images[train], targets[train]),
        (images[val], targets[val]),
        labels=LABELS,
        preprocessing=Preprocessing.of(spec, mean=MEAN, std=STD),
        movement=MOVEMENT,
    )


def _read() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits  # lazy: it takes seconds, and other data sets do not need it
    except ImportError as error:
        raise DataError(f"data.name digits needs scikit-learn, which cannot be imported: {error}") from error
    bunch = load_digits()
    greys = torch.from_numpy(bunch.images).unsqueeze(1)  # 0 to 16
    return (greys * (255 / 16)).round().to(torch.uint8), torch.from_numpy(bunch.target).long()


_CIFAR_MOVEMENT = Movement(shift=1 / 8, flip=True)


@dataclass(frozen=True, kw_only=True)
class _Files:
    folder: str
    train: tuple[str, ...]
    val: tuple[str, ...]
    meta: str
    targets_key: str
    labels_key: str


_FILES = {
    "cifar10": _Files(
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        val=("test_batch",),
        meta="batches.meta",
        targets_key="labels",
        labels_key="label_names",
    ),
    "cifar100": _Files(
        folder="cifar-100-python",
        train=("train",),
        val=("test",),
        meta="meta",
        targets_key="fine_labels",
        labels_key="fine_label_names",
    ),
}


def cifar_data(spec: DataSpec) -> DataSet:
    files = _FILES[spec.name]
    folder = _find(spec, files)
    labels = _labels(folder / files.meta, files)

    def whole(names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        images, targets = zip(
            *(_read_batch(folder / name, files, num_classes=len(labels)) for name in names), strict=True
        )
        return torch.cat(images), torch.cat(targets)

    mean, std = NORMALIZATION[spec.name]
    return memory_data(
        spec,
        whole(files.train),
        whole(files.val),
        labels=labels,
        preprocessing=Preprocessing.of(spec, mean=mean, std=std),
        movement=_CIFAR_MOVEMENT,
    )


def _find(spec: DataSpec, files: _Files) -> Path:
    root = expand_user(str(spec.root))
    expected = (*files.train, *files.val, files.meta)
    folder = root if (root / files.meta).is_file() else root / files.folder
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{spec.name} is not at data.root {root}: {', '.join(missing)} missing in {folder}. Expected there: "
            f"{', '.join(expected)} (the Python version of the data set, unpacked). compress never downloads data"
        )
    return folder


def _labels(path: Path, files: _Files) -> tuple[str, ...]:
    names = _read_pickle(path).get(files.labels_key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} has no {files.labels_key}: it is not the file of {files.folder}")
    return tuple(names)


def _read_batch(path: Path, files: _Files, *, num_classes: int) -> tuple[Tensor, Tensor]:
    content = _read_pickle(path)
    data, targets = content.get("data"), content.get(files.targets_key)
    if not isinstance(data, _Array) or not isinstance(targets, list) or not all(type(t) is int for t in targets):
        raise DataError(f"{path} has no data and {files.targets_key}: it is not a file of {files.folder}")
    pixels = data.array(path)
    if pixels.shape != (len(targets), 3072):
        raise DataError(f"{path} holds data of shape {pixels.shape} for {len(targets)} targets, not (N, 3072)")
    if targets and not 0 <= min(targets) <= max(targets) < num_classes:
        raise DataError(f"{path} holds targets from {min(targets)} to {max(targets)}, but {num_classes} classes")
    return torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.tensor(targets, dtype=torch.int64)


def _read_pickle(path: Path) -> dict[str, Any]:
    try:
        content = _Reader(io.BytesIO(read_regular(path)), encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{path} is truncated or not a CIFAR file ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not the dictionary of a CIFAR file")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}


class _Array:
    """Stands for a numpy array while a pickle is read."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes, all parts checked."""
        if len(self.state) != 5 or not isinstance(self.state[2], _Dtype):
            raise DataError(f"{path} holds an array that cannot be read: write it with numpy's own pickling")
        _, shape, dtype, fortran, raw = self.state
        if isinstance(raw, str):  # Python 2 wrote bytes as text
            raw = raw.encode("latin1")
        plain = isinstance(shape, tuple) and all(type(side) is int and side >= 0 for side in shape)
        if dtype.name not in ("u1", "|u1") or not isinstance(raw, bytes) or not plain or len(raw) != math.prod(shape):
            raise DataError(f"{path} holds an array that is not whole 8-bit images (dtype {dtype.name}, shape {shape})")
        return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C").copy()


class _Dtype:
    """Stands for a numpy dtype while a pickle is read."""

    def __init__(self, name: str = "", *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        pass


def _encode(text: str, encoding: str) -> bytes:
    """Undo Python 3's encoding of bytes in protocol 2."""
    if encoding != "latin1":
        raise DataError(f"text in encoding {encoding!r}, which a CIFAR file does not hold")
    return text.encode("latin1")


class _Reader(pickle.Unpickler):
    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> object:
        known = self._KNOWN.get((module, name))
        if known is None:
            raise DataError(f"it asks for {module}.{name}, which a CIFAR file does not hold; nothing of it was run")
        return known
