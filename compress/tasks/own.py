"""A task whose loss and metric are the user's, over outputs of any form: depth, keypoints, several labels an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from compress.support.meters import TaskMetric
from compress.tasks.base import Loss, Task, squared_distance
from compress.tasks.detection import check_rows, output_tuple


def own(*, loss: Loss, metric: TaskMetric, check: Callable[[Any, Tensor], None] | None = None) -> Task:
    """Return the task of a loss and a metric.

    A teacher is followed by the squared difference of all outputs; no pictures are drawn, and two networks agree by
    class only where the metric says what the class is.

    Args:
        loss: (outputs, targets) -> mean loss of a batch.
        metric: by which networks are judged.
        check: raises ModelError if the outputs (outputs, images) do not fit; None = a row of each is asked for.
    """
    return Task(name="own", metric=metric, loss=loss, distance=squared_distance, check=check or _check)


def one_or_all(outputs: Any) -> Any:
    """Return the only tensor of a model's or an engine's outputs, or a tuple of all of them in order."""
    tensors = output_tuple(outputs)
    return tensors[0] if len(tensors) == 1 else tensors


def _check(outputs: Any, images: Tensor) -> None:
    check_rows(output_tuple(outputs), images)
