"""The task's metric of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from compress.data.base import Batch, BatchPlan
from compress.data.preprocessing import Preprocessing
from compress.engines import Engine
from compress.measure.accuracy import EngineFigures, kept_images, measure_accuracy, measure_metric
from compress.pipeline.run import Run
from compress.pipeline.steps.answers import Answers
from compress.support.meters import Meter
from compress.tasks.classification import TOP1

_CLASSIFICATION_BATCH = 32


def evaluation_batch(run: Run) -> int:
    """Return the images of one evaluated run; large outputs take the recipe's batch."""
    return _CLASSIFICATION_BATCH if run.task.name == "classification" else run.recipe.data.batch_size


def judge(
    run: Run,
    engine: Engine,
    *,
    preprocessing: Preprocessing | None = None,
    limit: int | None = None,
    answers: Answers | None = None,
) -> EngineFigures:
    """Measure the task's metric on an engine.

    `preprocessing` is compared with the file's; `limit` None = all; `answers` keeps outputs for the report.
    """
    batches = _Evaluation(run, limit)
    metric = run.task.metric
    if metric is TOP1:
        seen = measure_accuracy(engine, batches, preprocessing=preprocessing, keep_logits=True, progress=run.progress)
        logits = torch.from_numpy(seen.logits)
        if answers is not None:
            answers.update(logits, torch.cat(batches.targets))
        values = {"top1": seen.top1, "top5": seen.top5}
        return EngineFigures(label=seen.label, values=values, images=seen.images, outputs=(logits,), notes=seen.notes)
    probe = {tensor.name: torch.zeros(1, *tensor.shape[1:]) for tensor in engine.outputs}
    if answers is not None:
        metric = replace(metric, make=lambda: _Both(run.task.metric.make(), answers))
    return measure_metric(
        engine,
        batches,
        metric,
        preprocessing=preprocessing,
        keep=kept_images(probe),
        progress=run.progress,
    )


class _Both:
    def __init__(self, meter: Meter, answers: Answers) -> None:
        self.meter, self.answers = meter, answers

    def update(self, outputs: Any, targets: Any) -> None:
        self.meter.update(outputs, targets)
        self.answers.update(outputs, targets)

    def compute(self) -> object:
        return self.meter.compute()


class _Evaluation:
    """The evaluation split in batches, iterable repeatedly."""

    def __init__(self, run: Run, limit: int | None) -> None:
        self.split = run.data.val
        self.plan = BatchPlan(batch_size=evaluation_batch(run), limit=limit)
        self.targets: list[Any] = []

    def __len__(self) -> int:
        return self.split.steps(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        self.targets.clear()
        for images, targets in self.split.batches(self.plan):
            self.targets.append(targets)
            yield images, targets
