"""Measures accuracy, and the metric of any task, on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.data.base import Preprocessing
from compress.engines.base import Engine, TensorInfo
from compress.errors import DataError, EngineError
from compress.export.names import PREPROCESSING_KEY, logits_output
from compress.graph.inputs import flat_tensors, split_batch
from compress.measure.parity import Parity, compare_batches
from compress.support.meters import Figures, TaskMetric, task_metric
from compress.support.progress import NoProgress, Progress


def preprocessing_notes(engine: Engine, preprocessing: Preprocessing | None) -> list[str]:
    """A remark if a model's file names no preprocessing (DataError: it names another)."""
    if preprocessing is None:
        return []
    text = engine.metadata.get(PREPROCESSING_KEY)
    if text is None:
        return ["the model's file names no preprocessing, so that could not be checked"]
    differences = Preprocessing.from_json(text).differences(preprocessing)
    if differences:
        raise DataError(
            f"{engine.info.label}: the model's preprocessing is not that of the data: {'; '.join(differences)} "
            "(here: the model, there: the data); prepare the data as the model was trained, or export it again"
        )
    return []


def as_array(part: Any) -> NDArray[np.generic]:
    """A tensor on any device, or an array, as numpy array."""
    array: NDArray[np.generic] = np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)
    return array


def limited(
    batches: Iterable[Any], limit: int | None, read: Callable[[Any], tuple[list[NDArray[np.generic]], Any]]
) -> Iterator[tuple[list[NDArray[np.generic]], Any]]:
    """Yield the input arrays and the targets that `read` takes out of each batch, `limit` images in all.

    Raises:
        DataError: a batch has another number of targets than of images.
    """
    left = limit
    for batch in batches:
        if left is not None and left <= 0:
            return
        inputs, targets = read(batch)
        arrays, targets = [array[:left] for array in inputs], targets[:left]
        if len(arrays[0]) != len(targets):
            raise DataError(f"a batch has {len(arrays[0])} images and {len(targets)} targets")
        left = None if left is None else left - len(targets)
        if len(targets):
            yield arrays, targets


def padded_run(
    engine: Engine, arrays: list[NDArray[np.generic]], size: int, names: Sequence[str] = ()
) -> dict[str, NDArray[np.generic]]:
    """Run at most `size` images (-1 = any number), filled up with zeros; return the outputs `names` (() = all) of them.

    Raises:
        EngineError: the first dimension of an output is not that of the images.
    """
    count = len(arrays[0])
    if size != -1 and count < size:
        arrays = [np.concatenate([a, np.zeros((size - count, *a.shape[1:]), a.dtype)]) for a in arrays]
    results = engine.run({tensor.name: array for tensor, array in zip(engine.inputs, arrays, strict=True)})
    chosen = {name: results[name] for name in names or results}
    for name, array in chosen.items():
        if array.ndim == 0 or len(array) != len(arrays[0]):
            raise EngineError(
                f"{engine.info.label}: output {name!r} has shape {array.shape} for {len(arrays[0])} images; its first "
                "dimension must be that of the images"
            )
    return {name: array[:count] for name, array in chosen.items()}


def chunks(images: NDArray[np.generic], size: int) -> Iterator[NDArray[np.generic]]:
    """Yield pieces of at most `size` images; one piece if `size` is -1."""
    step = len(images) if size == -1 else size
    return (images[i : i + step] for i in range(0, len(images), step))


Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_QUIET = NoProgress()
_TOP = 5


@dataclass(frozen=True, kw_only=True)
class EngineAccuracy:
    """Accuracy of a model on an engine.

    Attributes:
        top1: share of images whose highest logit (the first of equal ones) is the target's, 0 to 1.
        top5: share of images whose target is among the 5 highest logits, 0 to 1.
        logits: (images, classes) float32 in the order of the images; None unless `keep_logits`.
    """

    label: str
    top1: float
    top5: float
    images: int
    logits: Floats | None = None
    notes: tuple[str, ...] = ()


def measure_accuracy(
    engine: Engine,
    batches: Iterable[Any],
    *,
    preprocessing: Preprocessing | None = None,
    limit: int | None = None,
    keep_logits: bool = False,
    progress: Progress = _QUIET,
) -> EngineAccuracy:
    """Measure top-1 and top-5 of `engine` over labelled images.

    Args:
        engine: has one input of images, and one output of logits (or one named `logits`, `out` or `output_0`).
        batches: pairs of images (N, C, H, W) and targets (N,), tensors or arrays; cut and padded to an engine's
            fixed batch size.
        preprocessing: of these images; compared with the one in the model's metadata.
        limit: number of images at most, from the first on; None = all.
        keep_logits: return all logits too.
        progress: advanced by every batch.

    Raises:
        DataError: the model's preprocessing is another, there is no image, or the logits lack a target.
        EngineError: an input or output is not as above, or a result is not finite.

    Examples:
        >>> with compress.TorchEngine(model, (3, 16, 16)) as engine:
        ...     found = compress.measure_accuracy(engine, batches)
        >>> found.images, 0.0 <= found.top1 <= found.top5 <= 1.0
        (16, True)
    """
    notes = preprocessing_notes(engine, preprocessing)
    image, logits_name = _image_input(engine), _logits_output(engine)
    ranks: list[Ints] = []
    kept: list[Floats] = []
    classes, count, task = 0, 0, f"top-1: {engine.info.label}"
    progress.start(task, length_hint(batches))
    for (images,), targets in limited(batches, limit, _pair):
        parts = [_run_logits(engine, logits_name, chunk) for chunk in chunks(images, image.shape[0])]
        logits = np.concatenate(parts).astype(np.float32, copy=False)
        _check(logits, targets, engine.info.label, first=count)
        ranks.append(target_ranks(logits, targets))
        kept += [logits] if keep_logits else []
        classes, count = logits.shape[1], count + len(targets)
        progress.advance(task, 1, images=count)
    progress.finish(task)
    if not count:
        raise DataError(f"{engine.info.label}: there is no image to evaluate: the batches are empty, or the limit is 0")
    rank = np.concatenate(ranks)
    if classes < _TOP:
        notes.append(f"there are {classes} classes, so top-5 is 100 %")
    return EngineAccuracy(
        label=engine.info.label,
        top1=float(np.mean(rank < 1)),
        top5=float(np.mean(rank < _TOP)),
        images=count,
        logits=np.concatenate(kept) if keep_logits else None,
        notes=tuple(notes),
    )


def target_ranks(logits: Floats, targets: Ints) -> Ints:
    """The classes ranked before each image's target, (N,); equal logits rank in the order of their classes."""
    own = np.take_along_axis(logits, targets[:, None], axis=1)
    before = np.arange(logits.shape[1]) < targets[:, None]
    counted: Ints = ((logits > own) | ((logits == own) & before)).sum(axis=1)
    return counted


def _image_input(engine: Engine) -> TensorInfo:
    if len(engine.inputs) != 1:
        names = ", ".join(tensor.name for tensor in engine.inputs) or "none"
        raise EngineError(f"{engine.info.label}: accuracy needs a model of one input, this one has {names}")
    return engine.inputs[0]


def _logits_output(engine: Engine) -> str:
    names = [tensor.name for tensor in engine.outputs]
    found = logits_output(names)
    if found is None:
        raise EngineError(
            f"{engine.info.label}: accuracy needs one output, or one named 'logits' or 'out'; there is "
            f"{', '.join(names)}"
        )
    return found


def _pair(batch: Any) -> tuple[list[NDArray[np.generic]], Ints]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError(f"a batch is a {type(batch).__name__}; accuracy needs pairs of images and targets")
    images, targets = map(as_array, batch)
    if targets.ndim != 1 or targets.dtype.kind not in "iu":
        raise DataError(f"targets are {targets.dtype} of shape {targets.shape}; give integers, one an image")
    return [images], targets.astype(np.int64, copy=False)


def _run_logits(engine: Engine, output: str, images: NDArray[np.generic]) -> NDArray[np.generic]:
    logits = padded_run(engine, [images], engine.inputs[0].shape[0], [output])[output]
    if logits.ndim != 2:
        raise EngineError(
            f"{engine.info.label}: output {output!r} has shape {logits.shape} for {len(images)} images; "
            f"it must be ({len(images)}, classes)"
        )
    return logits


def _check(logits: Floats, targets: Ints, label: str, *, first: int) -> None:
    broken = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if len(broken):
        raise EngineError(
            f"{label}: the logits of image {first + broken[0]} are not finite ({len(broken)} images of its batch); "
            "check the scales of the file, and an f16 remainder for overflow"
        )
    foreign = np.flatnonzero((targets < 0) | (targets >= logits.shape[1]))
    if len(foreign):
        raise DataError(
            f"{label}: the target of image {first + foreign[0]} is {targets[foreign[0]]}; "
            f"the model has classes 0 to {logits.shape[1] - 1}"
        )


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
