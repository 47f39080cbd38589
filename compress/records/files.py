"""The content of a run folder: rows, each file with its name, type, reading and writing, and all of them together.

A missing part is None or empty with a reason in `RunData.absent`; a wrong file is refused. Unknown keys and columns, of
later versions, are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from compress.audit.engine import AuditedLayer, EngineAudit, Finding
from compress.errors import RunError
from compress.files import parse_json, read_regular, write_json
from compress.measure.latency import EndToEnd
from compress.measure.metric import Metric
from compress.quantization.block_graph import BlockGraph
from compress.quantization.placement.decisions import Decision
from compress.support.limits import JSON_BYTES
from compress.training.log import EpochRow


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A layer, and what quantization does to it.

    Attributes:
        macs: of one image; None = unknown.
        quantized_weight_bytes: with scales; None = float.
        weight_sqnr_db: None = not quantized or not measured.
        activation_sqnr_db: of the output against float; None = not measured.
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
class IntervalRow:
    """The metric on an engine and its difference from float, with 95 % intervals.

    Attributes:
        measurable: the interval of the difference leaves out zero.
        difference, difference_low, difference_high: in pairs of images.
    """

    variant: str
    engine: str
    metric: str
    unit: str
    images: int
    measurable: bool
    value: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """Precision of a detector by recall, of a class at an overlap of 0.5.

    Attributes:
        precision: at the recalls 0, 0.01, ..., 1.
    """

    variant: str
    engine: str
    label: str
    precision: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class PredictionRow:
    """An evaluation image with what a network found.

    Attributes:
        image: index in the split.
        text: of tasks without a drawing.
    """

    image: int
    variant: str
    engine: str = ""
    file: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The values of a tensor as calibration counted them.

    Attributes:
        bin_edges: ascending, one more than counts, or the first and last of equal bins; magnitudes from 0, else signed.
        amax: largest unclipped magnitude.
        signed: unsigned integers have twice the steps below amax.
    """

    name: str
    counts: tuple[float, ...]
    bin_edges: tuple[float, ...]
    amax: float
    signed: bool = True

    def __post_init__(self) -> None:
        if not self.counts or len(self.bin_edges) not in (2, len(self.counts) + 1):
            raise RunError(
                f"{self.name!r} has {len(self.counts)} counts and {len(self.bin_edges)} bin edges: "
                "one more than the counts, or just the first and the last"
            )


@dataclass(frozen=True, kw_only=True)
class OperationRow:
    """A weighted operation of a file, and whether it is INT8.

    Attributes:
        int8: input and weight have 8 bits or fewer.
    """

    variant: str
    name: str
    op_type: str
    int8: bool
    weight_elements: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Time of a layer with what follows it up to the next.

    Attributes:
        float_ms, quantized_ms: median.
    """

    layer: str
    float_ms: float
    quantized_ms: float

    @property
    def lost_ms(self) -> float:
        return self.quantized_ms - self.float_ms


@dataclass(frozen=True, kw_only=True)
class SlowRow:
    """A quantized network that is not faster than float, and the layers to blame.

    Attributes:
        engine, float_engine: label at its fastest.
        target: of the file's placement; "" = of no engine.
        layers: slower than in float, the costliest first.
        rest_ms, float_rest_ms: what follows no layer, conversions included.
    """

    variant: str
    engine: str
    float_engine: str
    batch_size: int
    p50_ms: float
    float_p50_ms: float
    target: str = ""
    layers: tuple[LayerCost, ...] = ()
    rest_ms: float = 0.0
    float_rest_ms: float = 0.0
    unquiet: str = ""


@dataclass(frozen=True, kw_only=True)
class BuiltRow:
    """An engine file that a run built, or why not.

    Attributes:
        sms: compute capabilities.
    """

    variant: str
    engine: str
    status: str
    reason: str = ""
    file: str = ""
    version: str = ""
    sms: tuple[int, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """An audited engine; bytes are of one image.

    Attributes:
        fp16_bytes: estimate of activation bytes in fp16.
        int8_share: of macs, 0 to 1.
        sparse_kernels: 2:4 layers with a sparse kernel, in words; "" without such layers.
        unmet: parts of `export.require`, in words.
    """

    variant: str
    engine: str
    source: str = ""
    kernels: int = 0
    activation_bytes: float = 0.0
    unknown_sizes: int = 0
    weight_bytes: float = 0.0
    fp16_bytes: float = 0.0
    int8_share: float = 0.0
    sparse_kernels: str = ""
    advice: str = ""
    findings: tuple[Finding, ...] = ()
    layers: tuple[AuditedLayer, ...] = ()
    unmet: tuple[str, ...] = ()

    @classmethod
    def of(cls, audit: EngineAudit, *, variant: str, engine: str, unmet: Sequence[str] = ()) -> EngineRow:
        return cls(
            variant=variant,
            engine=engine,
            source=audit.source,
            kernels=audit.kernels,
            activation_bytes=audit.activation_bytes,
            unknown_sizes=audit.unknown_sizes,
            weight_bytes=audit.weight_bytes,
            fp16_bytes=audit.fp16_bytes,
            int8_share=audit.share("int8", "uint8"),
            sparse_kernels=audit.sparse_kernels() if audit.masked else "",
            advice=audit.advice,
            findings=audit.findings,
            layers=tuple(layer for layer in audit.layers if layer.role != "host"),
            unmet=tuple(unmet),
        )


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Times from images to classes.

    Attributes:
        results: by batch size, variant, engine.
        unavailable: reason by engine.
    """

    results: tuple[EndToEnd, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "stage_ms": dict(row.stage_ms), "total_ms": row.total_ms} for row in self.results]
        return {"results": rows, "unavailable": dict(self.unavailable)}


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
        path = folder / self.name
        try:
            return self.parse(read_regular(path, JSON_BYTES).decode("utf-8"), path)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RunError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class JsonFile(RecordFile[T]):
    """A JSON file that a step of a run writes.

    Attributes:
        plain: makes JSON values.
    """

    plain: Callable[[T], Any]

    def write(self, folder: Path, content: T) -> Path:
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


def _table(
    name: str, kind: type[T], own: Callable[[Mapping[str, str | None]], dict[str, Any]] = lambda cells: {}
) -> RecordFile[Sequence[T]]:
    def parse(text: str, path: Path) -> tuple[T, ...]:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = ({k: v or None for k, v in row.items() if k is not None} for row in reader)
        return _typed(({**cells, **own(cells)} for cells in rows), path, kind)

    return RecordFile(name=name, parse=parse)


_OF_AN_EPOCH = {field.name for field in fields(EpochRow)}


def _figures(cells: Mapping[str, str | None]) -> dict[str, Any]:
    """Columns `val_<name>` without a field are figures of the task's metric."""
    own = {k: v for k, v in cells.items() if k.startswith("val_") and k not in _OF_AN_EPOCH and v is not None}
    return {"val": {k.removeprefix("val_"): v for k, v in own.items()}}


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


def _block(text: str, path: Path) -> BlockGraph:
    (graph,) = _typed([_json(text, path, dict, "an object with `boxes` and `edges`")], path, BlockGraph)
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
TRAIN, QAT, SPARSE, SPARSE_QAT = (
    _table(f"{name}.csv", EpochRow, _figures) for name in ("train", "qat", "sparse", "sparse-qat")
)
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
END_TO_END: JsonFile[Breakdown] = JsonFile(
    name="end_to_end.json",
    parse=lambda text, path: _typed([_json(text, path, dict, "an object with a list `results`")], path, Breakdown)[0],
    plain=Breakdown.to_dict,
)
NOTES: JsonFile[Sequence[str]] = JsonFile(
    name="notes.json", parse=lambda text, path: tuple(_listed(text, path, str, "texts")), plain=list
)


FILE_RESULT = "quantization.json"  # the report that `ptq --onnx` writes beside the file

_PARTS: dict[str, RecordFile[Any]] = {
    "recipe": RECIPE,
    "environment": ENVIRONMENT,
    "metrics": METRICS,
    "placement": PLACEMENT,
    "train": TRAIN,
    "qat": QAT,
    "sparse": SPARSE,
    "sparse_qat": SPARSE_QAT,
    "intervals": INTERVALS,
    "precision": PRECISION,
    "predictions": PREDICTIONS,
    "layers": LAYERS,
    "histograms": HISTOGRAMS,
    "block": BLOCK,
    "operations": OPERATIONS,
    "engines": ENGINES,
    "slower": SLOWER,
    "end_to_end": END_TO_END,
    "notes": NOTES,
}
# Files that only some recipes ask for; nothing is said where they are absent.
_OPTIONAL = {
    file.name
    for file in (
        BLOCK,
        ENGINES,
        END_TO_END,
        SPARSE,
        SPARSE_QAT,
        INTERVALS,
        PRECISION,
        PREDICTIONS,
        SLOWER,
    )
}


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All that a run folder holds for a report.

    Attributes:
        recipe: resolved YAML.
        sparse, sparse_qat: epochs of fine-tuning and of its QAT.
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
    try:
        return yaml.safe_load(run.recipe or "")
    except yaml.YAMLError:
        return None


def recipe_value(run: RunData, *path: str) -> object:
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
    if (folder / FILE_RESULT).is_file() and not (folder / METRICS.name).is_file():
        made = next(iter(sorted(folder.glob("*.int8.onnx"))), folder / "FILE.int8.onnx")
        raise RunError(
            f"{folder} holds a file that ptq --onnx made, and is no run: `bench FLOAT.onnx {made}` times it beside its "
            f"float file, and `inspect onnx {made} --rows` lists its layers"
        )


def read_run(folder: Path | str) -> RunData:
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
