"""The 1,797 handwritten digits of scikit-learn (Alpaydin and Kaynak, UCI, 1998): 8 x 8 pixels in 17 greys."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.data.base import DataSet, stratified_order
from compress.data.memory import Movement, memory_data
from compress.data.preprocessing import Preprocessing
from compress.data.spec import DataSpec
from compress.errors import DataError

LABELS = tuple("0123456789")
MEAN, STD = (0.305,) * 3, (0.376,) * 3
"""Of all pixels at 8 x 8, in units of pixel / 255."""
MOVEMENT = Movement(shift=0.08, degrees=12.0, zoom=0.12)
_VAL_SHARE = 0.25


def digits_data(spec: DataSpec) -> DataSet:
    """The digits, repeated to three channels and resized.

    Raises:
        DataError: scikit-learn is not installed.
    """
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
    """Images (1797, 1, 8, 8) uint8 and targets (1797,) int64."""
    try:
        from sklearn.datasets import load_digits  # lazy: it takes seconds, and other data sets do not need it
    except ImportError as error:
        raise DataError(f"data.name digits needs scikit-learn, which cannot be imported: {error}") from error
    bunch = load_digits()
    greys = torch.from_numpy(bunch.images).unsqueeze(1)  # 0 to 16
    return (greys * (255 / 16)).round().to(torch.uint8), torch.from_numpy(bunch.target).long()
