"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009); their pickles are read without running code."""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from compress.data.base import DataSet
from compress.data.memory import Movement, memory_data
from compress.data.preprocessing import Preprocessing
from compress.data.spec import NORMALIZATION, DataSpec
from compress.errors import DataError
from compress.files import expand_user, read_regular

MOVEMENT = Movement(shift=1 / 8, flip=True)


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
    """CIFAR-10 or CIFAR-100 of the folder `spec.root` or the one in it.

    Raises:
        DataError: files are missing, truncated, or foreign.
    """
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
        movement=MOVEMENT,
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
    content = _read_pickle(path)
    names = content.get(files.labels_key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} has no {files.labels_key}: it is not the file of {files.folder}")
    return tuple(names)


def _read_batch(path: Path, files: _Files, *, num_classes: int) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) uint8 and targets (N,) int64."""
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
