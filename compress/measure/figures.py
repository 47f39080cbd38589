"""Measures any task's metric on an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.data.preprocessing import Preprocessing
from compress.engines.base import Engine
from compress.errors import DataError, EngineError
from compress.graph.batches import split_batch
from compress.graph.inputs import flat_tensors
from compress.measure.batches import as_array, chunks, limited, padded_run, preprocessing_notes
from compress.measure.parity import Parity, compare_batches
from compress.support.meters import Figures, TaskMetric, task_metric
from compress.support.progress import NoProgress, Progress

_QUIET = NoProgress()


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """A task's metric on an engine.

    Attributes:
        values: figures by name, the metric itself first; shares are 0 to 1.
        outputs: selected outputs of the first images, batch by batch, as `keep` asked.
    """

    label: str
    values: Figures
    images: int
    outputs: Sequence[Any] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()


def measure_metric(
    engine: Engine,
    batches: Iterable[Any],
    metric: Any,
    *,
    preprocessing: Preprocessing | None = None,
    limit: int | None = None,
    keep: int = 0,
    progress: Progress = _QUIET,
) -> EngineFigures:
    """Measure a metric of `engine` over labelled images.

    Args:
        engine: has one input of images, or as many as a batch has.
        batches: an iterable of (images, targets), of (first, second, ..., targets), or of mappings with targets under
            `labels`; tensors or arrays, cut and padded to an engine's fixed batch size.
        metric: a `TaskMetric`, or what `meters.task_metric` takes. It is given the engine's only output, or a mapping
            of its outputs by name.
        preprocessing: of these images; compared with the one in the model's metadata.
        limit: number of images at most, from the first on; None = all.
        keep: return the selected outputs of so many images, at least.
        progress: advanced by every batch.

    Raises:
        DataError: the model's preprocessing is another, there is no image, or the metric returns no number.
        EngineError: a result is not finite.

    Examples:
        >>> def error(outputs, labels):
        ...     return (outputs.argmax(1) != labels).float().mean()
        >>> with compress.TorchEngine(model, (3, 16, 16)) as engine:
        ...     found = compress.measure_metric(engine, batches, error)
        >>> found.images, list(found.values)
        (16, ['error'])
    """
    chosen = task_metric(metric, select=_only)
    notes = preprocessing_notes(engine, preprocessing)
    meter, kept, count = chosen.make(), [], 0
    task = f"{chosen.title}: {engine.info.label}"
    progress.start(task, length_hint(batches))
    for arrays, targets in limited(batches, limit, _parts):
        outputs = chosen.select(_run(engine, arrays, first=count))
        meter.update(outputs, targets)
        if count < keep:
            kept.append(outputs)
        count += len(targets)
        progress.advance(task, 1, images=count)
    progress.finish(task)
    if not count:
        raise DataError(f"{engine.info.label}: there is no image to evaluate: the batches are empty, or the limit is 0")
    return EngineFigures(
        label=engine.info.label,
        values=chosen.figures(meter),
        images=count,
        outputs=tuple(kept),
        notes=tuple(notes),
    )


def compare_figures(reference: EngineFigures, seen: EngineFigures, metric: TaskMetric) -> Parity:
    """Compare the kept outputs of two measurements over the same batches (EngineError: none, or shapes differ)."""
    return compare_batches(reference.outputs, seen.outputs, classes=metric.classes)


def _only(outputs: Any) -> object:  # what the metric of the user's takes
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _parts(batch: Any) -> tuple[list[NDArray[np.generic]], Any]:
    """The input arrays and the targets, of any form, of a batch."""
    inputs, targets = split_batch(batch)
    parts = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    if isinstance(targets, Tensor):
        targets = targets.detach().cpu()
    elif isinstance(targets, np.ndarray):
        targets = torch.from_numpy(targets)
    return [as_array(part) for part in parts], targets


def _run(engine: Engine, arrays: list[NDArray[np.generic]], *, first: int) -> dict[str, Tensor]:
    """The outputs of a batch by name; results that are not finite are refused."""
    if len(arrays) != len(engine.inputs):
        names = ", ".join(tensor.name for tensor in engine.inputs) or "none"
        raise EngineError(f"{engine.info.label} takes the inputs {names}, and a batch has {len(arrays)}")
    size = engine.inputs[0].shape[0]
    runs = [padded_run(engine, list(part), size) for part in zip(*(chunks(a, size) for a in arrays), strict=True)]
    outputs = {name: torch.from_numpy(np.concatenate([run[name] for run in runs])) for name in runs[0]}
    for name, tensor in outputs.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            broken = int((~tensor.isfinite().flatten(1).all(1)).nonzero()[0]) if tensor.ndim > 1 else 0
            raise EngineError(
                f"{engine.info.label}: the output {name} of image {first + broken} is not finite; check the scales of "
                "the file, and an f16 remainder for overflow"
            )
    return outputs


def kept_images(outputs: Any, *, budget: int = 200_000_000) -> int:
    """Of how many images outputs like these (of one batch) fit into `budget` bytes; one at least."""
    tensors = flat_tensors(outputs)
    each = sum(tensor.nbytes for tensor in tensors) / max(1, len(tensors[0]))
    return max(1, int(budget / max(1.0, each)))
