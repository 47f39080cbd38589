"""What the steps of a run share: the recipe, the folder, the data, and who listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from compress.data.base import BatchPlan, DataSet
from compress.pipeline.folder import RunFolder
from compress.progress import NoProgress, Progress
from compress.recipe import Recipe
from compress.training import SINGLE, Processes


@dataclass
class Run:
    """One run under way.

    Attributes:
        recipe: what is asked.
        folder: where results go.
        data: both splits.
        device: where torch computes.
        processes: of torchrun; the lone one otherwise.
        progress: hears of long work.
        resume: whether steps may go on from what the folder holds.
        notes: what happened on the way that the user might not expect.
    """

    recipe: Recipe
    folder: RunFolder
    data: DataSet
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    processes: Processes = SINGLE
    progress: Progress = field(default_factory=NoProgress)
    resume: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def example(self) -> Tensor:
        """Two images of the training split on the CPU: what models are traced and exported with."""
        return self.batches("train", 2, limit=2)[0]

    def batches(self, split: str, batch_size: int, *, limit: int | None = None, share: bool = False) -> list[Tensor]:
        """Images of a split, unaugmented, on the CPU; with `share`, only those of this process."""
        part = self.data.train if split == "train" else self.data.val
        rank, world = (self.processes.rank, self.processes.world_size) if share else (0, 1)
        plan = BatchPlan(batch_size=batch_size, limit=limit, rank=rank, world_size=world)
        return [images for images, _ in part.batches(plan)]

    def path(self, name: str) -> Path:
        """A file of the run folder."""
        return self.folder / name
