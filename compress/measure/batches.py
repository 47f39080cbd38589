"""From batches of a loader to runs of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.preprocessing import Preprocessing
from compress.engines.base import Engine
from compress.errors import DataError
from compress.export.names import PREPROCESSING_KEY


def preprocessing_notes(engine: Engine, preprocessing: Preprocessing | None) -> list[str]:
    """Return a remark if a model's file names no preprocessing.

    Raises:
        DataError: it names another than `preprocessing`.
    """
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
    """Return a tensor on any device, or an array, as numpy array."""
    array: NDArray[np.generic] = np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)
    return array


def chunks(images: NDArray[np.generic], size: int) -> Iterator[NDArray[np.generic]]:
    """Yield pieces of at most `size` images; one piece if `size` is -1."""
    step = len(images) if size == -1 else size
    return (images[i : i + step] for i in range(0, len(images), step))
