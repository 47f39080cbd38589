"""The reading side of a run folder: every part typed, every part optional.

A run that was stopped, or that asked for less, still has a report. A part whose file is not there is None (or
empty) and `RunData.absent` says why; a file that is there but holds something else is refused with its path, for
a report drawn from half-understood numbers would be worse than none.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from compress.errors import RunError
from compress.measure.end_to_end import EndToEnd
from compress.measure.metric import Metric
from compress.report.engine_part import EngineRow

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EpochPoint:
    """One row of train.csv or qat.csv: an epoch. Accuracies are shares, 0 to 1; None = not evaluated then."""

    epoch: int
    step: int
    lr: float
    train_loss: float
    train_top1: float
    val_top1: float | None = None
    val_top5: float | None = None
    val_loss: float | None = None
    images_per_s: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlacementRow:
    """One row of placement.csv: a tensor, `quantize` or `float`, and why. Tensors may share a `quantizer`."""

    tensor: str
    layer: str
    decision: str
    quantizer: str = ""
    num_bits: int | None = None
    axis: int | None = None
    signed: bool | None = None
    rule: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One entry of layers.json.

    Attributes:
        name: module path, or node name of a function.
        kind: `conv`, `linear`, ...
        macs: multiply-accumulates of one image; None = unknown.
        weight_elements: elements of the weight.
        float_weight_bytes: of the weight as the float file holds it.
        quantized_weight_bytes: of the weight and its scales as the quantized file holds them.
        weight_sqnr_db: signal to quantization noise of the weight; None = not quantized or not measured.
        activation_sqnr_db: of the layer's output, quantized network against float; None = not measured.
    """

    name: str
    kind: str
    macs: int | None = None
    weight_elements: int = 0
    float_weight_bytes: int = 0
    quantized_weight_bytes: int | None = None
    weight_sqnr_db: float | None = None
    activation_sqnr_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """One entry of histograms.json: what calibration saw of one tensor.

    Attributes:
        name: of the quantizer.
        counts: values in each bin.
        bin_edges: one more than counts, ascending; or just the first and the last of equal bins. Magnitudes when
            the first is 0 or above, signed values otherwise.
        amax: largest magnitude kept.
        signed: of the integers; unsigned ones have twice the steps below amax.
    """

    name: str
    counts: tuple[float, ...]
    bin_edges: tuple[float, ...]
    amax: float
    signed: bool = True


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One entry of audit.json: a weighted operation of a variant's exported file and whether it is INT8 there."""

    variant: str
    name: str
    op_type: str
    int8: bool
    weight_elements: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All that a run folder holds for a report.

    `notes` is what happened on the way that a reader might not expect; `absent` maps each missing file to a line
    saying so.
    """

    folder: Path
    recipe: str | None = None
    environment: Mapping[str, Any] | None = None
    metrics: tuple[Metric, ...] = ()
    placement: tuple[PlacementRow, ...] = ()
    train: tuple[EpochPoint, ...] = ()
    qat: tuple[EpochPoint, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    audit: tuple[AuditRow, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    end_to_end: tuple[EndToEnd, ...] = ()
    notes: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


def read_run(folder: Path | str) -> RunData:
    """Read what `folder` holds.

    Raises:
        RunError: `folder` does not exist or holds none of a run's files, or a file is not what its name says.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: give the run folder that --out named")
    texts = {name: _text(folder / name) for name in _READERS}
    if all(text is None for text in texts.values()):
        raise RunError(f"{folder} holds none of a run's files ({', '.join(_READERS)}): give the run folder")
    parts: dict[str, Any] = {}
    for name, (part, read) in _READERS.items():
        text = texts[name]
        if text is not None:
            parts[part] = read(folder / name, text)
    missing = [name for name, text in texts.items() if text is None and name not in _ONLY_WHERE_ASKED]
    absent = {name: f"{name} is not in the run folder" for name in missing}
    return RunData(folder=folder, absent=absent, **parts)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is not JSON: {error}; delete it or run the step again") from error


def _json_rows(path: Path, text: str) -> list[Mapping[str, Any]]:
    value = _json(path, text)
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise RunError(f"{path} must hold a list of objects")
    return value


def _csv_rows(path: Path, text: str) -> list[Mapping[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    return [{k: v or None for k, v in row.items() if k is not None} for row in reader]


def _typed(path: Path, rows: Iterable[Mapping[str, Any]], kind: type[T]) -> tuple[T, ...]:
    adapter = TypeAdapter(kind)
    made = []
    for number, row in enumerate(rows, start=1):
        try:
            made.append(adapter.validate_python({k: v for k, v in row.items() if v is not None}))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise RunError(
                f"{path}, row {number}: {where}: {first['msg']} (got {first.get('input')!r:.200})"
            ) from error
    return tuple(made)


def _metrics(path: Path, text: str) -> tuple[Metric, ...]:
    try:
        return tuple(Metric.from_dict(row) for row in _json_rows(path, text))
    except RunError as error:
        raise RunError(f"{path}: {error}") from error


def _environment(path: Path, text: str) -> Mapping[str, Any]:
    value = _json(path, text)
    if not isinstance(value, dict):
        raise RunError(f"{path} must hold one object")
    return value


def _notes(path: Path, text: str) -> tuple[str, ...]:
    value = _json(path, text)
    if not isinstance(value, list) or not all(isinstance(note, str) for note in value):
        raise RunError(f"{path} must hold a list of texts")
    return tuple(value)


def _end_to_end(path: Path, text: str) -> tuple[EndToEnd, ...]:
    value = _json(path, text)
    if not isinstance(value, dict) or not isinstance(value.get("results"), list):
        raise RunError(f"{path} must hold an object with a list `results`")
    return _typed(path, value["results"], EndToEnd)


def _histograms(path: Path, text: str) -> tuple[Histogram, ...]:
    items = _typed(path, _json_rows(path, text), Histogram)
    for item in items:
        if len(item.bin_edges) not in (2, len(item.counts) + 1) or not item.counts:
            raise RunError(
                f"{path}: {item.name!r} has {len(item.counts)} counts and {len(item.bin_edges)} bin edges: "
                "one more than the counts, or just the first and the last"
            )
    return items


def _csv_reader(kind: type[T]) -> Callable[[Path, str], tuple[T, ...]]:
    return lambda path, text: _typed(path, _csv_rows(path, text), kind)


def _json_reader(kind: type[T]) -> Callable[[Path, str], tuple[T, ...]]:
    return lambda path, text: _typed(path, _json_rows(path, text), kind)


_READERS: dict[str, tuple[str, Callable[[Path, str], Any]]] = {
    "recipe.yaml": ("recipe", lambda path, text: text),
    "environment.json": ("environment", _environment),
    "metrics.json": ("metrics", _metrics),
    "placement.csv": ("placement", _csv_reader(PlacementRow)),
    "train.csv": ("train", _csv_reader(EpochPoint)),
    "qat.csv": ("qat", _csv_reader(EpochPoint)),
    "layers.json": ("layers", _json_reader(LayerRow)),
    "histograms.json": ("histograms", _histograms),
    "audit.json": ("audit", _json_reader(AuditRow)),
    "engine_audit.json": ("engines", _json_reader(EngineRow)),
    "end_to_end.json": ("end_to_end", _end_to_end),
    "notes.json": ("notes", _notes),
}

_ONLY_WHERE_ASKED = frozenset({"engine_audit.json", "end_to_end.json"})
"""Files that only some recipes ask for: it is no news that they are not there."""
