"""Evaluation of a module over a split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.data.base import BatchPlan, Split
from compress.errors import DataError, ModelError, RecipeError
from compress.graph.inputs import size_remark
from compress.graph.modules import modes_restored
from compress.support.imports import any_failure
from compress.support.meters import Meter
from compress.support.progress import NoProgress, Progress
from compress.tasks.base import Task, first_tensor
from compress.tasks.classification import classification
from compress.training import Precision
from compress.training.distributed import SINGLE, Processes


class OutputsOf(nn.Module):
    """Calls `model` and selects outputs, by default the logits."""

    def __init__(self, model: nn.Module, select: Callable[[Any], Any] = first_tensor) -> None:
        super().__init__()
        self.model = model
        self.select = select

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Any:
        return self.select(self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs))


def outputs_of(forward: OutputsOf, inputs: Tensor | Mapping[str, Tensor]) -> Any:
    def refusal(error: Exception) -> ModelError:
        shapes = inputs if isinstance(inputs, Mapping) else {"images": inputs}
        got = ", ".join(f"{name} of shape {tuple(value.shape)}" for name, value in shapes.items())
        return ModelError(
            f"{type(forward.model).__name__} fails on {got}, the shape of the data's "
            f"images ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            f"{size_remark(forward.model)}"
        )

    with any_failure(refusal):
        return forward(inputs)


QUIET = NoProgress()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measurements of a network on a split; shares are 0 to 1, the loss is without smoothing."""

    values: Mapping[str, float]
    loss: float
    images: int

    @property
    def top1(self) -> float:
        """Share of images whose highest logit is the target's, 0 to 1."""
        return self.values["top1"]

    @property
    def top5(self) -> float:
        """Share of images whose target is among the 5 highest logits, 0 to 1."""
        return self.values["top5"]


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    batch_size: int,
    task: Task | None = None,
    device: torch.device | str | None = None,
    processes: Processes = SINGLE,
    precision: Precision = "fp32",
    limit: int | None = None,
    progress: Progress = QUIET,
    name: str = "evaluate",
) -> Evaluation:
    """Measure `model` on `split` in evaluation mode; every module's mode is restored afterwards.

    Args:
        model: moved to `device`; takes images (N, C, H, W).
        split: images and targets, in their stored order.
        batch_size: images of one step over all processes together.
        task: loss and metric; None = classification.
        device: None = the process's own.
        processes: each must call, and gets the same result.
        precision: `fp32`, or autocast in `bf16` or `fp16`.
        limit: number of images; None = all.
        progress: is informed of every batch.
        name: name of the progress bar.

    Raises:
        DataError: no image, fewer images a batch than processes, or a metric that is no number.
        ModelError: the model fails, or its outputs are not those of the task.
        RecipeError: fp16 on the CPU.

    Examples:
        >>> split = compress.load_data(compress.DataSpec(name="shapes", num_classes=4, val_images=32)).val
        >>> compress.evaluate(model, split, batch_size=16, device="cpu").images
        32
    """
    task = task or classification(split.num_classes)
    device = processes.on(device)
    progress = progress if processes.is_main else QUIET
    plan = BatchPlan(batch_size=batch_size, rank=processes.rank, world_size=processes.world_size, limit=limit)
    forward = OutputsOf(model.to(device), task.select)
    meter = task.metric.make()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    progress.start(name, split.steps(plan))
    with modes_restored(model), torch.no_grad(), autocast(device, precision):
        model.eval()
        for images, targets in split.batches(plan, device=device):
            outputs = outputs_of(forward, images)
            task.check(outputs, images)
            meter.update(outputs, targets)
            loss = task.loss(outputs, targets).double()
            sums += torch.stack([loss * len(targets), loss.new_full((), len(targets))])
            progress.advance(name)
    progress.finish(name)
    loss_sum, count = processes.all_reduce_sum(sums).tolist()
    if not count:
        raise _nothing_read(split)
    values = task.metric.figures(_merged(meter, processes))
    return Evaluation(values=values, loss=loss_sum / count, images=int(count))


def _nothing_read(split: Split) -> DataError:
    unread = f", or none of {len(split.skipped)} files could be read" if split.skipped else ""
    return DataError(f"there is no image to evaluate on: the split is empty, or the limit is 0{unread}")


def _merged(meter: Meter, processes: Processes) -> Meter:
    if processes.world_size == 1:
        return meter
    merge = getattr(meter, "merge_state", None)
    if merge is None:
        raise DataError(
            f"the metric {type(meter).__name__} has no merge_state(other), which adds what another process has "
            "measured: define it, or train in one process"
        )
    for rank, other in enumerate(processes.gather(meter)):
        if rank != processes.rank:
            merge(other)
    return meter


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    if precision == "fp16" and device.type == "cpu":
        raise RecipeError("precision is 'fp16' on the CPU, which computes it slowly: use 'fp32' or 'bf16', or a GPU")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")
