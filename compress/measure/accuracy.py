"""Measures accuracy, and the metric of any task, on an engine; intervals by a paired bootstrap over images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv
from torch import Tensor

from compress.data.base import Preprocessing
from compress.engines.base import Engine, check_engine
from compress.errors import DataError, EngineError
from compress.export.names import PREPROCESSING_KEY, logits_output
from compress.graph.inputs import as_array, flat_tensors, split_batch
from compress.measure.parity import Parity, compare_batches
from compress.support.meters import Figures, TaskMetric, task_metric
from compress.support.progress import NoProgress, Progress
from compress.tasks.base import Evidence, Hits, everything


def preprocessing_notes(engine: Engine, preprocessing: Preprocessing | None) -> list[str]:
    check_engine(engine)
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


# What takes the input arrays and the targets out of a batch.
Read = Callable[[Any], tuple[list[NDArray[np.generic]], Any]]


def limited(batches: Iterable[Any], limit: int | None, read: Read) -> Iterator[tuple[list[NDArray[np.generic]], Any]]:
    """Yield the input arrays and the targets that `read` takes out of each batch, `limit` images in all."""
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
    """Run at most `size` images (-1 = any number), filled up with zeros; return their outputs `names` (() = all)."""
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
    """Pieces of at most `size` images; one piece if `size` is -1."""
    step = len(images) if size == -1 else size
    return (images[i : i + step] for i in range(0, len(images), step))


Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_QUIET = NoProgress()
_TOP = 5


@dataclass(frozen=True, kw_only=True)
class EngineAccuracy:
    """Accuracy of a model on an engine; shares of images whose target is the highest logit, or among 5, 0 to 1.

    Attributes:
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
    logits_name = _logits_output(engine)
    ranks: list[Ints] = []
    kept: list[Floats] = []
    classes = 0
    for first, found, targets in _results(engine, batches, limit, _pair, [logits_name], "top-1", progress):
        logits = found[logits_name].numpy()
        _check(logits, targets, engine.info.label, logits_name, first=first)
        logits = logits.astype(np.float32, copy=False)
        ranks.append(target_ranks(logits, targets))
        kept += [logits] if keep_logits else []
        classes = logits.shape[1]
    rank = np.concatenate(ranks)
    if classes < _TOP:
        notes.append(f"there are {classes} classes, so top-5 is 100 %")
    return EngineAccuracy(
        label=engine.info.label,
        top1=float(np.mean(rank < 1)),
        top5=float(np.mean(rank < _TOP)),
        images=len(rank),
        logits=np.concatenate(kept) if keep_logits else None,
        notes=tuple(notes),
    )


def _results(
    engine: Engine,
    batches: Iterable[Any],
    limit: int | None,
    read: Read,
    names: Sequence[str],
    title: str,
    progress: Progress,
) -> Iterator[tuple[int, dict[str, Tensor], Any]]:
    """Yield (number of the first image, outputs `names` (() = all), targets) of each batch; refuse none at all."""
    task, count = f"{title}: {engine.info.label}", 0
    progress.start(task, length_hint(batches))
    for arrays, targets in limited(batches, limit, read):
        yield count, _run(engine, arrays, first=count, names=names), targets
        count += len(targets)
        progress.advance(task, 1, images=count)
    progress.finish(task)
    if not count:
        raise DataError(f"{engine.info.label}: there is no image to evaluate: the batches are empty, or the limit is 0")


def target_ranks(logits: Floats, targets: Ints) -> Ints:
    """The classes ranked before each image's target, (N,); equal logits rank in the order of their classes."""
    own = np.take_along_axis(logits, targets[:, None], axis=1)
    before = np.arange(logits.shape[1]) < targets[:, None]
    return ((logits > own) | ((logits == own) & before)).sum(axis=1)


def _logits_output(engine: Engine) -> str:
    """The name of the output of a classifier: of a model of one input."""
    if len(engine.inputs) != 1:
        inputs = ", ".join(tensor.name for tensor in engine.inputs) or "none"
        raise EngineError(f"{engine.info.label}: accuracy needs a model of one input, this one has {inputs}")
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


def _check(logits: NDArray[np.generic], targets: Ints, label: str, output: str, *, first: int) -> None:
    if logits.ndim != 2:
        raise EngineError(
            f"{label}: output {output!r} has shape {logits.shape} for {len(targets)} images; "
            f"it must be ({len(targets)}, classes)"
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
    chosen = task_metric(metric, select=lambda outputs: next(iter(outputs.values())) if len(outputs) == 1 else outputs)
    notes = preprocessing_notes(engine, preprocessing)
    meter, kept, count = chosen.make(), [], 0
    for first, found, targets in _results(engine, batches, limit, _parts, (), chosen.title, progress):
        outputs = chosen.select(found)
        meter.update(outputs, targets)
        if first < keep:
            kept.append(outputs)
        count += len(targets)
    return EngineFigures(
        label=engine.info.label,
        values=chosen.figures(meter),
        images=count,
        outputs=tuple(kept),
        notes=tuple(notes),
    )


def compare_figures(reference: EngineFigures, seen: EngineFigures, metric: TaskMetric) -> Parity:
    return compare_batches(reference.outputs, seen.outputs, classes=metric.classes)


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


def _run(
    engine: Engine, arrays: list[NDArray[np.generic]], *, first: int, names: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The outputs `names` (() = all) of a batch; `first` is the number of its first image."""
    if len(arrays) != len(engine.inputs):
        wanted = ", ".join(tensor.name for tensor in engine.inputs) or "none"
        raise EngineError(f"{engine.info.label} takes the inputs {wanted}, and a batch has {len(arrays)}")
    size = engine.inputs[0].shape[0]
    runs = [
        padded_run(engine, list(part), size, names) for part in zip(*(chunks(a, size) for a in arrays), strict=True)
    ]
    outputs = {name: torch.from_numpy(as_array(np.concatenate([run[name] for run in runs]))) for name in runs[0]}
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


RESAMPLES = 1000
LEVEL = 0.95
_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A metric and its difference from a reference, as shares with the ends of their intervals."""

    value: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float
    images: int

    @property
    def measurable(self) -> bool:
        """True if the interval of the difference leaves out zero."""
        return self.difference_low > 0 or self.difference_high < 0


def compare_evidence(
    reference: Evidence, seen: Evidence, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Comparison:
    """Compare a network with a reference on the same images.

    Percentile bootstrap (Efron and Tibshirani, 1993, chapters 6 and 13), with replacement; `level` is the share of the
    resamples inside an interval. Shares of right answers use exact bounds where few images differ (Clopper and Pearson,
    1934; the sign test).
    """
    images = len(seen)
    if not images or len(reference) != images:
        raise DataError(f"{len(reference)} and {images} images cannot be compared in pairs")
    generator = np.random.default_rng(seed)
    draws = []
    for first in range(0, resamples, _AT_ONCE):
        count = min(_AT_ONCE, resamples - first)
        weights = generator.multinomial(images, np.full(images, 1 / images), size=count)
        draws.append((seen.values(weights), reference.values(weights)))
    values, references = (np.concatenate(part) for part in zip(*draws, strict=True))
    percents = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.percentile(values, percents)
    difference_low, difference_high = np.percentile(values - references, percents)
    value, before = (float(one.values(everything(one))[0]) for one in (seen, reference))
    ends, difference_ends = (float(low), float(high)), (float(difference_low), float(difference_high))
    if isinstance(seen, Hits) and isinstance(reference, Hits):
        ends = share_interval(int(seen.right().sum()), images, level=level)
        difference_ends = _difference_of_hits(reference, seen, difference_ends, level)
    else:  # where no resample differs, an image which does is not among them
        unseen = share_interval(0, images, level=level)[1]
        if 0 <= value <= 1 and difference_ends[0] == difference_ends[1]:  # of shares alone is a bound known
            difference_ends = (difference_ends[0] - unseen, difference_ends[1] + unseen)
        if 0 <= value <= 1 and ends[0] == ends[1]:
            ends = max(value - unseen, 0.0), min(value + unseen, 1.0)
    return Comparison(
        value=value,
        low=ends[0],
        high=ends[1],
        difference=value - before,
        difference_low=difference_ends[0],
        difference_high=difference_ends[1],
        images=images,
    )


def share_interval(found: int, images: int, *, level: float = LEVEL) -> tuple[float, float]:
    """The exact ends of the interval of a share of which `found` of `images` were seen (Clopper and Pearson).

    >>> low, high = share_interval(0, 45)
    >>> f"{low:.4f} to {high:.4f}"
    '0.0000 to 0.0787'
    """
    tail = (1 - level) / 2
    low = float(betaincinv(found, images - found + 1, tail)) if found else 0.0
    high = float(betaincinv(found + 1, images - found, 1 - tail)) if found < images else 1.0
    return low, high


def _difference_of_hits(reference: Hits, seen: Hits, drawn: tuple[float, float], level: float) -> tuple[float, float]:
    """The interval of a difference of two shares of right answers; `drawn` is the bootstrap's."""
    right, before = seen.right(), reference.right()
    gained, lost, images = int((right & ~before).sum()), int((before & ~right).sum()), len(right)
    differ = gained + lost
    if 2 * 0.5**differ > 1 - level:  # the sign test could not tell them apart, were all of these on one side
        return -share_interval(lost, images, level=level)[1], share_interval(gained, images, level=level)[1]
    signs = [(2 * end - 1) * differ / images for end in share_interval(gained, differ, level=level)]
    return min(drawn[0], signs[0]), max(drawn[1], signs[1])
