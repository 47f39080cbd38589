"""Unlabelled images and arrays on disk, in batches, for calibration."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from compress.data.base import Preprocessing
from compress.data.decode import preprocessed, read_image
from compress.data.folder import pictures_in
from compress.errors import CompressWarning, DataError, first_few
from compress.files import read_regular
from compress.support.imports import any_failure, imported, is_import_path
from compress.support.limits import ARRAYS_BYTES

T = TypeVar("T")


def read_input(path: Path, form: Preprocessing) -> Tensor:
    """An image as one input of a file, without the batch; `form.channels` may be BGR, `form.layout` NHWC."""
    pixels = preprocessed(read_image(path), form)
    if form.channels == "BGR":
        pixels = pixels.flip(0)
    x = form.normalize(pixels[None].float() / 255)[0]
    return x.permute(1, 2, 0).contiguous() if form.layout == "NHWC" else x


def readable(paths: Sequence[Path], read: Callable[[Path], T]) -> Iterator[tuple[Path, T]]:
    """Read files one at a time; a warning names those that cannot be read (DataError: none can)."""
    failed, found = list[DataError](), 0
    try:
        for path in paths:
            try:
                value = read(path)
            except DataError as error:
                failed.append(error)
                continue
            found += 1
            yield path, value
        if failed and not found:
            raise failed[0]
    finally:  # also where no more are asked for
        if failed and found:
            text = f"{len(failed)} of {len(failed) + found} images are left out: {first_few(map(str, failed))}"
            warnings.warn(CompressWarning(text), stacklevel=2)


class ImageFolder:
    """The images of a folder, to any depth, in batches, read when asked for; see `readable`.

    Args:
        limit: at most so many, evenly spaced by name.
    """

    def __init__(self, folder: Path, form: Preprocessing, *, limit: int, batch_size: int) -> None:
        if not folder.is_dir():
            raise DataError(
                f"{folder} does not exist; give a folder of images, an .npz file or package.module:function"
            )
        found = pictures_in(folder)
        places = np.linspace(0, len(found) - 1, min(limit, len(found))).round().astype(int)
        self.paths = [found[i] for i in dict.fromkeys(places.tolist())]
        self.form, self.batch_size = form, batch_size

    def __len__(self) -> int:
        return -(-len(self.paths) // self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        found = readable(self.paths, partial(read_input, form=self.form))
        while batch := [image for _, image in itertools.islice(found, self.batch_size)]:
            yield torch.stack(batch)


def unlabelled(source: str, form: Preprocessing, *, limit: int, batch_size: int) -> Iterable[Any]:
    """Batches of a folder, an .npz file or a function.

    `source`: a folder, a path that ends in .npz, or `package.module:function`; `form` and `limit` are for files.
    """
    path = Path(source)
    if path.suffix == ".npz":
        return _arrays(path, limit, batch_size)
    if not path.exists() and is_import_path(source):
        batches: Iterable[Any] = imported(source, key="--data", error=DataError, what="a function")()
        return batches
    return ImageFolder(path, form, limit=limit, batch_size=batch_size)


def _arrays(path: Path, limit: int, batch_size: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    with (
        any_failure(lambda error: DataError(f"{path} cannot be read as an .npz file of arrays ({error})")),
        np.load(io.BytesIO(read_regular(path, ARRAYS_BYTES)), allow_pickle=False) as file,
    ):
        arrays = {name: file[name][:limit] for name in file.files}
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        text = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise DataError(f"{path} holds {text}; each array is an input, with the images along its first axis")
    steps = range(0, next(iter(lengths.values())), batch_size)
    return [{name: array[start : start + batch_size] for name, array in arrays.items()} for start in steps]
