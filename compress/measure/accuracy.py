"""Measures the accuracy of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.data.preprocessing import Preprocessing
from compress.engines.base import Engine, TensorInfo
from compress.errors import DataError, EngineError
from compress.export.names import logits_output
from compress.measure.batches import as_array, chunks, limited, padded_run, preprocessing_notes
from compress.support.progress import NoProgress, Progress

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
    classes, count, task = 0, 0, f"accuracy: {engine.info.label}"
    progress.start(task, length_hint(batches))
    for (images,), targets in limited(batches, limit, _pair):
        parts = [_run(engine, logits_name, chunk) for chunk in chunks(images, image.shape[0])]
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


def _run(engine: Engine, output: str, images: NDArray[np.generic]) -> NDArray[np.generic]:
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
