"""Kept outputs of a network on an engine, for reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from compress.errors import CompressError, DataError
from compress.files import replacing
from compress.measure.bootstrap import compare_evidence
from compress.pipeline.run import Run
from compress.records.files import INTERVALS, PRECISION, PREDICTIONS
from compress.records.rows import IntervalRow, PrecisionRow, PredictionRow
from compress.tasks.base import Evidence
from compress.tasks.detection import Detections
from compress.variants import Variant

IMAGES = 4
_LONGEST_SIDE = 480
_QUALITY = 85
_FOLDER = "predictions"
TRUTH = "truth"


@dataclass
class Answers:
    """The kept answers of one network on one engine.

    Attributes:
        evidence: each image's part of the metric, or None.
        wanted: indices of kept images.
        outputs: batches of one.
    """

    evidence: Evidence | None
    wanted: tuple[int, ...] = ()
    outputs: list[Any] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    count: int = 0

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch of selected outputs and its targets."""
        if self.evidence is not None:
            self.evidence.update(outputs, targets)
        for i in range(len(targets)):
            if self.count + i in self.wanted:
                self.outputs.append(_row(outputs, i))
                self.targets.append(targets[i : i + 1])
        self.count += len(targets)


def answers_of(run: Run) -> Answers:
    """Return an empty record that keeps some images spread over the split."""
    count = len(run.data.val)
    wanted = sorted({round(i * (count - 1) / max(1, IMAGES - 1)) for i in range(min(IMAGES, count))})
    return Answers(evidence=None if run.task.evidence is None else run.task.evidence(), wanted=tuple(wanted))


def _row(outputs: Any, index: int) -> object:
    if isinstance(outputs, Mapping):
        return {name: value[index : index + 1] for name, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return tuple(value[index : index + 1] for value in outputs)
    return outputs[index : index + 1]


def keep_comparisons(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    """Write intervals.json, precision.json and images; failures become notes."""
    for work in (_keep_intervals, _keep_precision, _keep_images):
        try:
            work(run, seen)
        except (CompressError, ValueError, TypeError, RuntimeError, IndexError) as error:  # of a user's own decoding
            what = work.__name__.removeprefix("_keep_")
            run.notes.append(f"the report has no {what} ({type(error).__name__}: {error})")


def _keep_intervals(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    metric, rows = run.task.metric, []
    for (variant, label), one in seen.items():
        float_label = "torch" if label.startswith("torch") else label
        reference = seen.get((Variant.FLOAT, float_label))
        if one.evidence is None or reference is None or reference.evidence is None:
            continue
        found = compare_evidence(reference.evidence, one.evidence)
        shown = {
            name: metric.shown(getattr(found, name))
            for name in ("value", "low", "high", "difference", "difference_low", "difference_high")
        }
        rows.append(
            IntervalRow(
                variant=variant,
                engine=label,
                metric=metric.name,
                unit=metric.unit,
                images=found.images,
                measurable=found.measurable,
                **shown,
            )
        )
    if rows:
        INTERVALS.write(run.folder.path, rows)


def _keep_precision(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    rows = [
        PrecisionRow(variant=variant, engine=label, label=name, precision=precision)
        for (variant, label), one in _first_engines(seen).items()
        if isinstance(one.evidence, Detections)
        for name, precision in one.evidence.curves()
    ]
    if rows:
        PRECISION.write(run.folder.path, rows)


def _first_engines(seen: Mapping[tuple[Variant, str], Answers]) -> dict[tuple[Variant, str], Answers]:
    chosen: dict[Variant, str] = {}
    for variant, label in seen:
        if variant not in chosen or (chosen[variant].startswith("torch") and not label.startswith("torch")):
            chosen[variant] = label
    return {(variant, label): seen[variant, label] for variant, label in chosen.items()}


def _keep_images(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    chosen = _first_engines(seen)
    if not chosen:
        return
    first = next(iter(chosen.values()))
    if first.count != len(run.data.val):  # images that cannot be read shift those after them
        raise DataError(f"{first.count} of {len(run.data.val)} images could be read")
    draw = _classified(run, first.targets[0]) if run.task.draw is None else run.task.draw
    if draw is None:
        return
    rows: list[PredictionRow] = []
    for place, index in enumerate(first.wanted):
        images = run.data.val.load([index], epoch=None, device=torch.device("cpu"))[0]
        pixels = run.data.val.preprocessing.pixels(images)
        if pixels.shape[1] not in (1, 3):
            return
        shown: list[tuple[str, str, Any]] = [(TRUTH, "", None)]
        shown += [(variant, label, one.outputs[place]) for (variant, label), one in chosen.items()]
        for variant, label, outputs in shown:
            drawn = draw(pixels, outputs, first.targets[place] if outputs is None else None)
            picture, text = drawn if isinstance(drawn, tuple) else (drawn, "")
            name = f"{_FOLDER}/{place}-{variant}.jpg"
            _save(picture[0], run.folder / name)
            rows.append(PredictionRow(image=index, variant=variant, engine=label, file=name, text=text))
    PREDICTIONS.write(run.folder.path, rows)


def _classified(run: Run, target: Any) -> Callable[[Tensor, Any, Any], tuple[Tensor, str]] | None:
    """Return a drawing of classes as text; None without one class for each image."""
    if run.task.name != "classification" or torch.as_tensor(target).numel() != 1:
        return None
    labels: Sequence[str] = run.data.val.labels

    def draw(pixels: Tensor, outputs: Any, targets: Any) -> tuple[Tensor, str]:
        if outputs is None:
            return pixels, str(labels[int(targets[0])])
        share, label = torch.as_tensor(outputs)[0].float().softmax(0).max(0)
        name = labels[int(label)] if int(label) < len(labels) else str(int(label))
        return pixels, f"{name} {100 * share.item():.0f} %"

    return draw


def _save(pixels: Tensor, path: Path) -> None:
    """Write an image (C, H, W) uint8 as JPEG, longer side at most 480 pixels."""
    image = Image.fromarray(pixels.expand(3, -1, -1).movedim(0, -1).contiguous().cpu().numpy())
    scale = _LONGEST_SIDE / max(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    with replacing(path) as temporary:
        image.save(temporary, format="JPEG", quality=_QUALITY)
