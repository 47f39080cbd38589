"""`fit` for users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from compress.data.base import DataSet
from compress.data.own import loader_data
from compress.errors import DataError, RecipeError
from compress.support.meters import MeanOf, TaskMetric, task_metric
from compress.tasks.base import Task
from compress.tasks.classification import classification
from compress.tasks.load import own, own_loss
from compress.training import loop
from compress.training.log import TrainReport
from compress.training.spec import TrainSpec


def fit(
    model: nn.Module,
    data: DataSet | DataLoader[Any],
    spec: TrainSpec | None = None,
    *,
    val: DataLoader[Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    metric: Any = None,
    batch_size: int | None = None,
    folder: Path | None = None,
    task: Task | None = None,
    **options: Any,
) -> TrainReport:
    """Train `model`, float or quantized, in place.

    Args:
        model: any module from images to outputs.
        data: a data set of two splits, or a DataLoader of (images, targets) or of mappings such as {"pixel_values":
            images, "labels": targets}.
        spec: None = `TrainSpec()`.
        val: a loader to evaluate on, for a DataLoader; None = the training images.
        loss: (outputs, targets) -> a batch's mean loss; None = the task's, cross entropy without a task.
        metric: what `meters.task_metric` takes; None = top-1, with an own loss the loss.
        batch_size: images of a step; None = the loader's.
        folder: takes checkpoints and the log; None = no files.
        task: loss and metric of a recipe; not with `loss` or `metric`.
        **options: further arguments of `compress.training.loop.fit`: teacher, device, resume, progress, ...

    Raises:
        RecipeError: no batch size, or a task with a loss; and as `compress.training.loop.fit`.
        DataError: a loader that cannot be trained on; and as `compress.training.loop.fit`.
        ModelError, CheckpointError, CompressError: as `compress.training.loop.fit`.

    Examples:
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, targets), batch_size=8)
        >>> report = compress.fit(model, loader, compress.TrainSpec(epochs=1, warmup_epochs=0.0), device="cpu")
        >>> report.steps, 0.0 <= report.final.top1 <= 1.0
        (2, True)
    """
    spec = spec or TrainSpec()
    if isinstance(data, DataLoader):
        batch_size = batch_size or data.batch_size
    elif val is not None:
        raise DataError("val is a loader beside a DataSet, which has its own val")
    if batch_size is None:
        raise RecipeError("batch_size is not set: give the number of images of a step")
    if isinstance(data, DataLoader):
        data = loader_data(data, val, seed=spec.seed)
    if task is not None and (loss is not None or metric is not None):
        raise RecipeError("give a task, or a loss and a metric of your own")
    if loss is not None or metric is not None:
        task = own_task(loss, metric)
    return loop.fit(model, data, spec, batch_size=batch_size, folder=folder, task=task, **options)


def own_task(loss: Callable[[Any, Any], Tensor] | None, metric: Any = None) -> Task:
    """A task of the user's.

    Args:
        loss: None = cross entropy of logits.
        metric: None = the loss, lower is better.
    """
    plain = classification(0)
    if loss is None:
        found = task_metric(metric, select=plain.metric.select)
        return Task(name="classification", metric=found, loss=plain.loss, distance=plain.distance, check=plain.check)
    mean = TaskMetric(name="loss", make=lambda: MeanOf(loss), unit="", direction="lower")
    judged = mean if metric is None else task_metric(metric)
    return own(loss=own_loss(loss), metric=judged, check=lambda outputs, images: None)
