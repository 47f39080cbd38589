"""A task of the user's loss and metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from compress.support.meters import TaskMetric
from compress.tasks.base import Loss, Task, squared_distance
from compress.tasks.detection import check_rows, output_tuple


def own(*, loss: Loss, metric: TaskMetric, check: Callable[[Any, Tensor], None] | None = None) -> Task:
    """Return the task of a loss and a metric.

    Teachers are followed by squared difference; nothing is drawn; networks agree where the metric says the class.

    Args:
        loss: mean of a batch.
        metric: judges.
        check: raises ModelError; None = a row of each is asked for.
    """
    return Task(name="own", metric=metric, loss=loss, distance=squared_distance, check=check or _check)


def one_or_all(outputs: Any) -> Any:
    """The only output tensor, or all in order."""
    tensors = output_tuple(outputs)
    return tensors[0] if len(tensors) == 1 else tensors


def _check(outputs: Any, images: Tensor) -> None:
    check_rows(output_tuple(outputs), images)
