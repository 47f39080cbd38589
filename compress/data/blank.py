"""A split in the place of one that is not on this machine: the shapes and the classes, and black images."""

from __future__ import annotations

import torch

from compress.data.base import Batch, Split
from compress.data.preprocessing import Preprocessing


class BlankSplit(Split):
    """Two black images of the input's shape, with which a network is traced.

    Args:
        labels: name of each class.
        preprocessing: of the images that the network was made for.
    """

    def __init__(self, *, labels: tuple[str, ...], preprocessing: Preprocessing) -> None:
        super().__init__(labels=labels, preprocessing=preprocessing, seed=0)

    def __len__(self) -> int:
        return 2

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """Return zeros (n, channels, height, width) and targets of class 0."""
        count = len(indices)
        images = torch.zeros(count, *self.preprocessing.input_shape, device=device)
        return images, torch.zeros(count, dtype=torch.int64, device=device)
