"""A network and a seed of the study: its data, its training, and the results of its methods.

Images are drawn once and stay on the device as 8-bit numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

import compress
from analysis.common.study import Row
from analysis.shapes_accuracy.setting import Network, Setting
from compress import TrainSpec
from compress.data import BatchPlan
from compress.data.base import DataSet, Split
from compress.data.memory import in_memory
from compress.data.shapes import MOVEMENT
from compress.graph.layers import layers as layer_table
from compress.graph.trace import trace
from compress.training import evaluate, fit

FEW = 256  # images of the evaluation at the end of `fit`; the study evaluates on the whole split afterwards
Methods = Mapping[str, Callable[["Unit"], "Made"]]


@dataclass(frozen=True)
class Made:
    """A finished network, the facts of its row, and the paths of its masked layers."""

    model: nn.Module
    facts: Row = field(default_factory=dict)
    masked: tuple[str, ...] = ()


class Unit:
    """A network and a seed; each method runs once, when its result is first used."""

    def __init__(self, network: Network, seed: int, setting: Setting, device: str, methods: Methods) -> None:
        self.network, self.seed, self.setting, self.device = network, seed, setting, torch.device(device)
        self.methods = methods
        self.made: dict[str, Made] = {}

    @cached_property
    def data(self) -> DataSet:
        """Images of full size, on the device."""
        return self.drawn(self.setting.data.height_width[0])

    @cached_property
    def tune_data(self) -> DataSet:
        """Images of an epoch of fine-tuning: the first of the training images."""
        return DataSet(train=first(self.data.train, self.setting.tune_images), val=first(self.data.val, FEW))

    def drawn(self, size: int) -> DataSet:
        """Return images of a size, drawn into the device's memory."""
        drawn = compress.load_data(replace(self.setting.data, image_size=size, seed=self.seed))
        return DataSet(
            train=in_memory(drawn.train, self.device, movement=MOVEMENT),
            val=validation(self.setting, self.device, size),
        )

    @cached_property
    def example(self) -> Tensor:
        """Two images."""
        return next(iter(self.data.val.batches(BatchPlan(batch_size=2), device=self.device)))[0]

    @cached_property
    def macs(self) -> int:
        """Multiply-accumulates of an image in the float network."""
        return macs(self.get("float").model, self.example)

    @cached_property
    def calibration(self) -> list[Tensor]:
        """Batches of the training split."""
        plan = BatchPlan(batch_size=64, limit=self.setting.calibration_images)
        return [images for images, _ in self.data.train.batches(plan, device=self.device)]

    def get(self, method: str) -> Made:
        """Return the result of a method."""
        if method not in self.made:
            self.made[method] = self.methods[method](self)
        return self.made[method]

    def start(self) -> nn.Module:
        """Return a copy of the float network."""
        return copy.deepcopy(self.get("float").model)

    def top1(self, model: nn.Module) -> float:
        """Return the top-1 accuracy, in percent, of the network in torch on the whole evaluation split."""
        return 100 * evaluate(model, self.data.val, batch_size=250, device=self.device).top1

    def train_on(self, model: nn.Module, spec: TrainSpec) -> Row:
        """Train for one epoch with the float network as the teacher, and return the images a second."""
        spec = replace(spec, seed=self.seed, epochs=1, optimizer="adamw", precision=self.setting.precision)
        size, teacher = self.setting.tune_batch_size, self.get("float").model
        done = fit(
            model.train(), self.tune_data, spec, batch_size=size, folder=None, teacher=teacher, device=self.device
        )
        model.eval()
        return {"images_per_s": done.images_per_s}


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Compute convolutions in float32 instead of TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def first(split: Split, count: int) -> Split:
    """Return the first images of a split that is in memory; the memory is shared."""
    part: Any = copy.copy(split)
    part.images, part.targets = part.images[:count], part.targets[:count]
    return cast(Split, part)


def validation(setting: Setting, device: torch.device | str, size: int | None = None) -> Split:
    """Return the evaluation split, the same for every seed, on the device."""
    spec = replace(setting.data, image_size=size or setting.data.image_size, seed=0)
    return in_memory(compress.load_data(spec).val, device)


def macs(model: nn.Module, example: Tensor, only: Iterable[str] | None = None) -> int:
    """Return the multiply-accumulates of an image, of the layers in `only` if it is given."""
    names = None if only is None else set(only)
    found = layer_table(trace(model, example[:1]))
    return sum(layer.macs or 0 for layer in found if names is None or layer.path in names)
