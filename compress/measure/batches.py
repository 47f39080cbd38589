"""From batches of a loader to runs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.preprocessing import Preprocessing
from compress.engines.base import Engine
from compress.errors import DataError, EngineError
from compress.export.names import PREPROCESSING_KEY


def preprocessing_notes(engine: Engine, preprocessing: Preprocessing | None) -> list[str]:
    """A remark if a model's file names no preprocessing (DataError: it names another)."""
    if preprocessing is None:
        return []
    text = engine.metadata.get(PREPROCESSING_KEY)
    if text is None:
        return ["the model's file names no preprocessing, so that could not be checked"]
    differences = Preprocessing.from_json(text).differences(preprocessing)
    if differences:
        raise DataError(
            f"{engine.info.label}: the model's preprocessing is not that of the data: {'; '.join(differences)} "
            "(here: the model, there: the data); prepare the data as the model was trained, or export it again"
        )
    return []


def as_array(part: Any) -> NDArray[np.generic]:
    """A tensor on any device, or an array, as numpy array."""
    array: NDArray[np.generic] = np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)
    return array


def limited(
    batches: Iterable[Any], limit: int | None, read: Callable[[Any], tuple[list[NDArray[np.generic]], Any]]
) -> Iterator[tuple[list[NDArray[np.generic]], Any]]:
    """Yield the input arrays and the targets that `read` takes out of each batch, `limit` images in all.

    Raises:
        DataError: a batch has another number of targets than of images.
    """
    left = limit
    for batch in batches:
        if left is not None and left <= 0:
            return
        inputs, targets = read(batch)
        arrays, targets = [array[:left] for array in inputs], targets[:left]
        if len(arrays[0]) != len(targets):
            raise DataError(f"a batch has {len(arrays[0])} images and {len(targets)} targets")
        left = None if left is None else left - len(targets)
        if len(targets):
            yield arrays, targets


def padded_run(
    engine: Engine, arrays: list[NDArray[np.generic]], size: int, names: Sequence[str] = ()
) -> dict[str, NDArray[np.generic]]:
    """Run at most `size` images (-1 = any number), filled up with zeros; return the outputs `names` (() = all) of them.

    Raises:
        EngineError: the first dimension of an output is not that of the images.
    """
    count = len(arrays[0])
    if size != -1 and count < size:
        arrays = [np.concatenate([a, np.zeros((size - count, *a.shape[1:]), a.dtype)]) for a in arrays]
    results = engine.run({tensor.name: array for tensor, array in zip(engine.inputs, arrays, strict=True)})
    chosen = {name: results[name] for name in names or results}
    for name, array in chosen.items():
        if array.ndim == 0 or len(array) != len(arrays[0]):
            raise EngineError(
                f"{engine.info.label}: output {name!r} has shape {array.shape} for {len(arrays[0])} images; its first "
                "dimension must be that of the images"
            )
    return {name: array[:count] for name, array in chosen.items()}


def chunks(images: NDArray[np.generic], size: int) -> Iterator[NDArray[np.generic]]:
    """Yield pieces of at most `size` images; one piece if `size` is -1."""
    step = len(images) if size == -1 else size
    return (images[i : i + step] for i in range(0, len(images), step))
