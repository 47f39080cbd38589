"""The task of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.detection import DetectorHead, TwoStageHead, is_detector, is_two_stage
from compress.errors import DataError, RecipeError, near_misses
from compress.models import ModelSpec
from compress.models.by_name import build_whole
from compress.support.imports import imported, is_import_path
from compress.support.meters import TaskMetric, task_metric
from compress.tasks import LOSSES_OF, TASKS, allowed_names, lacking_parts
from compress.tasks.base import Loss, Task, squared_distance
from compress.tasks.classification import classification
from compress.tasks.detection import check_rows, detection, output_tuple
from compress.tasks.restoration import restoration
from compress.tasks.segmentation import segmentation


def make_task(
    name: str,
    labels: Sequence[str],
    *,
    loss: Any = None,
    metric: Any = None,
    decode: Any = None,
    detector: DetectorHead | None = None,
) -> Task:
    """Return a task.

    Args:
        name: of `TASKS`.
        labels: of classes.
        loss: a name that the task knows, `package.module:function`, or a function; None = the task's.
        metric: `package.module:name`, or as of `task_metric`; None = the task's.
        decode: for detection, a path or a function; None = the detector's.
        detector: see `detector_head`.
    """
    if name not in TASKS:
        raise RecipeError(f"task is {name!r}{near_misses(name, TASKS)} (one of: {', '.join(TASKS)})")
    if name == "own":
        return _own(loss, metric)
    known = loss if loss in LOSSES_OF[name] else LOSSES_OF[name][0]
    if len(labels) == 1 and name in ("classification", "segmentation") and loss in (None, known):
        raise DataError(
            f"the data have one class, {labels[0]!r}: {name} needs two or more to learn what tells them apart; put the "
            "images of each class into a folder of its own (train/CLASS/*.jpg), name all classes in data.classes, or "
            "give a loss and a metric of your own"
        )
    if name == "detection":
        task = _detection(labels, loss, _resolved(decode, "decode", ()), detector)
    elif name == "restoration":
        task = restoration(loss=known)
    else:
        task = classification(len(labels)) if name == "classification" else segmentation(labels, loss=known)
    if loss is not None and loss != known:
        task = replace(task, loss=own_loss(_resolved(loss, "loss", LOSSES_OF[name])))
    if metric is not None:
        found = task_metric(_resolved(metric, "metric", (task.metric.name,)), select=task.metric.select)
        decided = task.metric.classes if len(labels) > 1 else None  # one channel has one argmax, whatever it holds
        classes = decided if found.classes is None else found.classes
        task = replace(task, metric=replace(found, classes=classes), evidence=_evidence(found))
    return task


def _own(loss: Any, metric: Any) -> Task:
    lacking = lacking_parts(loss, metric)
    if lacking:
        raise RecipeError(lacking)
    judged = task_metric(_resolved(metric, "metric", ()), select=one_or_all)
    return replace(own(loss=own_loss(_resolved(loss, "loss", ())), metric=judged), evidence=_evidence(judged))


def _evidence(metric: TaskMetric) -> Callable[[], Any] | None:
    return metric.make if all(hasattr(metric.make(), name) for name in ("values", "__len__")) else None


def _detection(labels: Sequence[str], loss: Any, decode: Any, detector: DetectorHead | None) -> Task:
    if detector is not None:
        own_decode = detector.decode if decode is None else decode
        return detection(labels, loss=detector.loss, decode=own_decode, check=detector.check)
    if loss is None or loss in LOSSES_OF["detection"] or decode is None:
        lacking = "decode" if decode is None else "loss"
        raise RecipeError(
            f"{lacking} is not set, and the model is no detector of torchvision, which has its own: "
            "give loss and decode, package.module:function each"
        )
    return detection(labels, loss=own_loss(_resolved(loss, "loss", LOSSES_OF["detection"])), decode=decode)


def detector_head(model: ModelSpec, *, num_classes: int, image_size: tuple[int, int]) -> DetectorHead | None:
    with torch.random.fork_rng(devices=[]):
        built = build_whole(replace(model, weights=None), num_classes=num_classes, task="detection").model
        if is_two_stage(built):
            whole = build_whole(model, num_classes=num_classes, task="detection").model
            return TwoStageHead(whole, image_size, num_classes)
    return DetectorHead(built, image_size, num_classes) if is_detector(built) else None


def _resolved(given: Any, key: str, known: Sequence[str]) -> Any:
    if not isinstance(given, str):
        return given
    if not is_import_path(given):
        raise RecipeError(f"{key} is {given!r}{near_misses(given, known)} ({allowed_names(known)})")
    return imported(given, key=key, error=RecipeError)


def own_loss(function: Callable[[Any, Any], Tensor]) -> Loss:
    """A user's loss, which smooths its own labels."""

    def loss(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> Tensor:
        value = function(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RecipeError(f"loss returned {got}: it must return one tensor with the mean loss of the batch")
        return value.reshape(())

    return loss


def own(*, loss: Loss, metric: TaskMetric, check: Callable[[Any, Tensor], None] | None = None) -> Task:
    """The task of a loss and a metric: teachers are followed by squared difference, and nothing is drawn."""
    return Task(name="own", metric=metric, loss=loss, distance=squared_distance, check=check or _check)


def one_or_all(outputs: Any) -> Tensor | tuple[Tensor, ...]:
    tensors = output_tuple(outputs)
    return tensors[0] if len(tensors) == 1 else tensors


def _check(outputs: Any, images: Tensor) -> None:
    check_rows(output_tuple(outputs), images)
