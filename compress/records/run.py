"""The content of a run folder, every part typed and optional.

A missing part is None or empty with a reason in `RunData.absent`; a wrong file is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from compress.engines.registry import suits, target_of
from compress.errors import RunError
from compress.measure.metric import Metric
from compress.quantization.block_graph import BlockGraph
from compress.quantization.placement.decisions import Decision
from compress.records import files
from compress.records.rows import (
    Breakdown,
    EngineRow,
    Histogram,
    IntervalRow,
    LayerRow,
    OperationRow,
    PrecisionRow,
    PredictionRow,
    SlowRow,
)
from compress.records.summary import family
from compress.support.text import display
from compress.training.log import EpochRow
from compress.variants import QUANTIZED

FILE_RESULT = "quantization.json"
"""The report that `ptq --onnx` writes beside the file."""

_PARTS: dict[str, files.RecordFile[Any]] = {
    "recipe": files.RECIPE,
    "environment": files.ENVIRONMENT,
    "metrics": files.METRICS,
    "placement": files.PLACEMENT,
    "train": files.TRAIN,
    "qat": files.QAT,
    "sparse": files.SPARSE,
    "sparse_qat": files.SPARSE_QAT,
    "intervals": files.INTERVALS,
    "precision": files.PRECISION,
    "predictions": files.PREDICTIONS,
    "layers": files.LAYERS,
    "histograms": files.HISTOGRAMS,
    "block": files.BLOCK,
    "operations": files.OPERATIONS,
    "engines": files.ENGINES,
    "slower": files.SLOWER,
    "end_to_end": files.END_TO_END,
    "notes": files.NOTES,
}
_OPTIONAL = {
    file.name
    for file in (
        files.BLOCK,
        files.ENGINES,
        files.END_TO_END,
        files.SPARSE,
        files.SPARSE_QAT,
        files.INTERVALS,
        files.PRECISION,
        files.PREDICTIONS,
        files.SLOWER,
    )
}
"""Files that only some recipes ask for; nothing is said where they are absent."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All that a run folder holds for a report.

    Attributes:
        recipe: resolved YAML.
        train, qat: epochs.
        sparse, sparse_qat: epochs of fine-tuning and of its QAT.
        slower: quantized networks that are not faster than float on an engine.
        absent: a sentence for each missing file.
    """

    folder: Path
    recipe: str | None = None
    environment: Mapping[str, Any] | None = None
    metrics: Sequence[Metric] = ()
    placement: Sequence[Decision] = ()
    train: Sequence[EpochRow] = ()
    qat: Sequence[EpochRow] = ()
    sparse: Sequence[EpochRow] = ()
    sparse_qat: Sequence[EpochRow] = ()
    intervals: Sequence[IntervalRow] = ()
    precision: Sequence[PrecisionRow] = ()
    predictions: Sequence[PredictionRow] = ()
    layers: Sequence[LayerRow] = ()
    histograms: Sequence[Histogram] = ()
    block: BlockGraph | None = None
    operations: Sequence[OperationRow] = ()
    engines: Sequence[EngineRow] = ()
    slower: Sequence[SlowRow] = ()
    end_to_end: Breakdown | None = None
    notes: Sequence[str] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


def recipe_tree(run: RunData) -> object:
    """The tree of the recipe; None if it cannot be read."""
    try:
        return yaml.safe_load(run.recipe or "")
    except yaml.YAMLError:
        return None


def recipe_value(run: RunData, *path: str) -> object:
    """A recipe's value under nested keys, or None."""
    value = recipe_tree(run)
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def is_untrained(run: RunData) -> bool:
    """True if the float network has random weights.

    Functions and ONNX files may bring weights: False.
    """
    name, weights = recipe_value(run, "model", "name"), recipe_value(run, "model", "weights")
    source, colon, _ = str(name).partition(":")
    built_in = name is not None and (not colon or source in ("torchvision", "timm")) and not source.endswith(".onnx")
    return built_in and weights is None and recipe_value(run, "train", "epochs") == 0


def refuse_file_folder(folder: Path) -> None:
    """Refuse what `ptq --onnx` wrote, which is no run.

    Raises:
        RunError: says which commands take its file.
    """
    if (folder / FILE_RESULT).is_file() and not (folder / files.METRICS.name).is_file():
        made = next(iter(sorted(folder.glob("*.int8.onnx"))), folder / "FILE.int8.onnx")
        raise RunError(
            f"{folder} holds a file that ptq --onnx made, and is no run: `bench FLOAT.onnx {made}` times it beside its "
            f"float file, and `inspect onnx {made} --rows` lists its layers"
        )


def read_run(folder: Path | str) -> RunData:
    """Read the files of a run.

    Raises:
        RunError: no run folder, or a file is not what its name says.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: give the run folder that --out named")
    refuse_file_folder(folder)
    read = {part: file.read(folder) for part, file in _PARTS.items()}
    parts = {part: content for part, content in read.items() if content is not None}
    if not parts:
        names = ", ".join(file.name for file in _PARTS.values())
        raise RunError(f"{folder} holds none of a run's files ({names}): give the run folder")
    missing = [file.name for part, file in _PARTS.items() if part not in parts and file.name not in _OPTIONAL]
    return RunData(folder=folder, absent={name: f"{name} is not in the run folder" for name in missing}, **parts)


def foreign_files(run: RunData) -> tuple[str, ...]:
    """A sentence for each of them: it computes the same, but not all in integers."""
    return tuple(_sentences(run))


def _sentences(run: RunData) -> Iterator[str]:
    targets = _targets(recipe_tree(run))
    if not targets:
        return
    measured = (family(m.engine) for m in run.metrics if m.engine and m.variant in QUANTIZED and m.value is not None)
    for engine in dict.fromkeys(measured):
        if not suits(engine, targets):
            placed = ", ".join(display(name) for name in targets)
            yield (
                f"{display(engine)} was given files whose quantizers are placed for {placed}, and runs fewer of their "
                "layers in integers than of its own: it may be slower than float. quantization.target: "
                f"[{', '.join([*targets, str(target_of(engine))])}] makes both"
            )


def _targets(tree: Any) -> list[str]:
    """Targets named by a recipe's tree; none where it quantizes nothing."""
    section = tree.get("quantization") if isinstance(tree, dict) else None
    found = section.get("target") if isinstance(section, dict) else None
    return [str(name) for name in found] if isinstance(found, list) else [found] if isinstance(found, str) else []
