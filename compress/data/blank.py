"""A split of black images in place of one that is not on this machine."""

from __future__ import annotations

import torch

from compress.data.base import Batch, Split
from compress.data.preprocessing import Preprocessing


class BlankSplit(Split):
    """Two black images of the input's shape, to trace a network with."""

    def __init__(self, *, labels: tuple[str, ...], preprocessing: Preprocessing) -> None:
        super().__init__(labels=labels, preprocessing=preprocessing, seed=0)

    def __len__(self) -> int:
        return 2

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Return zeros (n, channels, height, width) and targets of class 0."""
        count = len(indices)
        images = torch.zeros(count, *self.preprocessing.input_shape, device=device)
        return images, torch.zeros(count, dtype=torch.int64, device=device)
