"""Rows about layers, files and engines that no measuring package declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from compress.audit.engine import EngineAudit, Finding
from compress.audit.layers import AuditedLayer
from compress.errors import RunError
from compress.measure.end_to_end import EndToEnd


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A layer, and what quantization does to it.

    Attributes:
        name: module path, or node name.
        macs: of one image; None = unknown.
        float_weight_bytes: in the float file.
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
        unit: of all values.
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
        file: in the run folder.
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

    Raises:
        RunError: no counts, or another number of edges.
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
        reason: against INT8; "" if it is.
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
        """Milliseconds that quantization adds."""
        return self.quantized_ms - self.float_ms


@dataclass(frozen=True, kw_only=True)
class MixedRow:
    """A measured network that leaves slow INT8 layers in float.

    Attributes:
        layers: float beyond the recipe's.
        p50_ms, float_p50_ms: in turn.
        score: on the engine, in words.
        recipe: its file.
        unquiet: why its time is not comparable; "" = it is.
    """

    layers: tuple[str, ...]
    p50_ms: float
    float_p50_ms: float
    score: str = ""
    recipe: str = ""
    unquiet: str = ""


@dataclass(frozen=True, kw_only=True)
class SlowRow:
    """A quantized network that is not faster than float, and the layers to blame.

    Attributes:
        engine, float_engine: label at its fastest.
        target: of the file's placement; "" = of no engine.
        layers: slower than in float, the costliest first.
        rest_ms, float_rest_ms: what follows no layer, conversions included.
        mixed: the fastest network without the costliest; None = none was built.
        unquiet: why layers' times are not comparable; "" = they are.
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
    mixed: MixedRow | None = None
    unquiet: str = ""


@dataclass(frozen=True, kw_only=True)
class BuiltRow:
    """An engine file that a run built, or why not.

    Attributes:
        reason: "" when it was built.
        version: of the library.
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
        source: of the layers; "" where only the requirement was checked.
        kernels: layers on the GPU.
        unknown_sizes: activations of unknown bytes.
        fp16_bytes: estimate of activation bytes in fp16.
        int8_share: of macs, 0 to 1.
        sparse_kernels: 2:4 layers with a sparse kernel, in words; "" without such layers.
        advice: "" = nothing to change.
        findings: the largest first.
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
        """The row of an audit."""
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
        """JSON values, with the sum of the stages."""
        rows = [{**asdict(row), "stage_ms": dict(row.stage_ms), "total_ms": row.total_ms} for row in self.results]
        return {"results": rows, "unavailable": dict(self.unavailable)}
