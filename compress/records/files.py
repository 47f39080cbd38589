"""The content of a run folder: each file with its name, type, reading and writing, and all of them together.

A missing part is None or empty with a reason in `RunData.absent`; a wrong file is refused. Unknown keys and columns, of
later versions, are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from compress.engines.registry import suits, target_of
from compress.errors import RunError
from compress.files import parse_json, write_json
from compress.measure.metric import Metric
from compress.quantization.block_graph import BlockGraph
from compress.quantization.placement.decisions import Decision
from compress.records import files
from compress.records.rows import (
    Breakdown,
    BuiltRow,
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

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class RecordFile(Generic[T]):
    """A file of a run folder.

    Attributes:
        parse: of text and path; raises RunError where the text is something else.
    """

    name: str
    parse: Callable[[str, Path], T]

    def read(self, folder: Path) -> T | None:
        """The content; None without the file.

        Raises:
            RunError: it cannot be read, or is not what its name says.
        """
        path = folder / self.name
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path} cannot be read: {error}") from error
        return self.parse(text, path)


@dataclass(frozen=True, kw_only=True)
class JsonFile(RecordFile[T]):
    """A JSON file that a step of a run writes.

    Attributes:
        plain: makes JSON values.
    """

    plain: Callable[[T], Any]

    def write(self, folder: Path, content: T) -> Path:
        """Write the content, whole or not at all."""
        return write_json(folder / self.name, self.plain(content))


def _json(text: str, path: Path, kind: type[U], what: str) -> U:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}; delete it or run the step again") from error
    if not isinstance(value, kind):
        raise RunError(f"{path} must hold {what}")
    return value


def _listed(text: str, path: Path, kind: type, what: str) -> list[Any]:
    values = _json(text, path, list, f"a list of {what}")
    if not all(isinstance(value, kind) for value in values):
        raise RunError(f"{path} must hold a list of {what}")
    return list(values)


def _typed(rows: Iterable[Mapping[str, Any]], path: Path, kind: type[T]) -> tuple[T, ...]:
    """Rows as dataclasses; None takes the field's default."""
    adapter = TypeAdapter(kind)
    made = []
    for number, row in enumerate(rows, start=1):
        try:
            made.append(adapter.validate_python({k: v for k, v in row.items() if v is not None}))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            got = f"(got {first.get('input')!r:.200})"
            raise RunError(f"{path}, row {number}: {where}: {first['msg']} {got}") from error
        except RunError as error:
            raise RunError(f"{path}, row {number}: {error}") from error
    return tuple(made)


def _table(name: str, kind: type[T]) -> RecordFile[Sequence[T]]:
    def parse(text: str, path: Path) -> tuple[T, ...]:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = ({k: v or None for k, v in row.items() if k is not None} for row in reader)
        return _typed(rows, path, kind)

    return RecordFile(name=name, parse=parse)


def _epochs(name: str) -> RecordFile[Sequence[EpochRow]]:
    """Columns `val_<name>` without a field are figures of the task's metric."""
    known = {field.name for field in fields(EpochRow)}

    def parse(text: str, path: Path) -> tuple[EpochRow, ...]:
        rows = []
        for row in csv.DictReader(io.StringIO(text, newline="")):
            cells = {k: v or None for k, v in row.items() if k is not None}
            own = {k.removeprefix("val_"): v for k, v in cells.items() if k.startswith("val_") and k not in known}
            rows.append({**cells, "val": {k: v for k, v in own.items() if v is not None}})
        return _typed(rows, path, EpochRow)

    return RecordFile(name=name, parse=parse)


def _rows(name: str, kind: type[T]) -> JsonFile[Sequence[T]]:
    def parse(text: str, path: Path) -> tuple[T, ...]:
        return _typed(_listed(text, path, dict, "objects"), path, kind)

    def plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
        return [asdict(row) for row in rows]

    return JsonFile(name=name, parse=parse, plain=plain)


def _metrics(text: str, path: Path) -> tuple[Metric, ...]:
    rows = _listed(text, path, dict, "objects")
    try:
        return tuple(map(Metric.from_dict, rows))
    except RunError as error:
        raise RunError(f"{path}: {error}") from error


def _breakdown(text: str, path: Path) -> Breakdown:
    value = _json(text, path, dict, "an object with a list `results`")
    return _typed([value], path, Breakdown)[0]


def _block(text: str, path: Path) -> BlockGraph:
    value = _json(text, path, dict, "an object with `boxes` and `edges`")
    graph = _typed([value], path, BlockGraph)[0]
    place = {name: i for i, name in enumerate(graph.boxes)}
    if not place or any(not {a, b} <= set(place) or place[a] >= place[b] for a, b in graph.edges):
        raise RunError(f"{path} must hold boxes, and edges from one to a later one; delete it or run the step again")
    return graph


RECIPE: RecordFile[str] = RecordFile(name="recipe.yaml", parse=lambda text, path: text)
ENVIRONMENT: JsonFile[Mapping[str, Any]] = JsonFile(
    name="environment.json", parse=lambda text, path: _json(text, path, dict, "one object"), plain=dict
)
METRICS: JsonFile[Sequence[Metric]] = JsonFile(
    name="metrics.json", parse=_metrics, plain=lambda rows: [row.to_dict() for row in rows]
)
PLACEMENT = _table("placement.csv", Decision)
TRAIN = _epochs("train.csv")
QAT = _epochs("qat.csv")
SPARSE = _epochs("sparse.csv")
SPARSE_QAT = _epochs("sparse-qat.csv")
INTERVALS = _rows("intervals.json", IntervalRow)
PRECISION = _rows("precision.json", PrecisionRow)
PREDICTIONS = _rows("predictions.json", PredictionRow)
LAYERS = _rows("layers.json", LayerRow)
HISTOGRAMS = _rows("histograms.json", Histogram)
BLOCK: JsonFile[BlockGraph] = JsonFile(name="block.json", parse=_block, plain=asdict)
OPERATIONS = _rows("audit.json", OperationRow)
BUILT_ENGINES = _rows("engines.json", BuiltRow)
ENGINES = _rows("engine_audit.json", EngineRow)
SLOWER = _rows("slower.json", SlowRow)
END_TO_END: JsonFile[Breakdown] = JsonFile(name="end_to_end.json", parse=_breakdown, plain=Breakdown.to_dict)
NOTES: JsonFile[Sequence[str]] = JsonFile(
    name="notes.json", parse=lambda text, path: tuple(_listed(text, path, str, "texts")), plain=list
)


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
