"""Each file of a run folder: name, type, reading and writing.

Unknown keys and columns, of later versions, are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from compress.errors import RunError
from compress.files import parse_json, write_json
from compress.measure.metric import Metric
from compress.quantization.block_graph import BlockGraph
from compress.quantization.placement.decisions import Decision
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
from compress.training.log import EpochRow

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
