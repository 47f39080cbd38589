"""Results of a run that no measuring package has a type for: rows about layers, files and engines.

Epochs, decisions of a placement, metrics and end-to-end times are rows too; their types are declared where they are
measured (`EpochRow`, `Decision`, `Metric`, `EndToEnd`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from compress.audit.engine import EngineAudit
from compress.audit.findings import Finding
from compress.audit.layer import AuditedLayer
from compress.errors import RunError
from compress.measure.end_to_end import EndToEnd


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A layer of the float network, and what quantization does to it.

    Attributes:
        name: module path, or node name of a function.
        macs: multiply-accumulates of one image; None = unknown.
        float_weight_bytes: bytes of the weight in the float file.
        quantized_weight_bytes: bytes of the weight and its scales in the quantized file; None = float there.
        weight_sqnr_db: signal to quantization noise of the weight; None = not quantized or not measured.
        activation_sqnr_db: the same of the layer's output, quantized network against float; None = not measured.
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
    """The metric of a network on an engine and its difference from float there, with 95 % intervals.

    Attributes:
        unit: of all values, such as `%`.
        measurable: whether the interval of the difference leaves out zero.
        value, low, high: the metric and the ends of its interval.
        difference, difference_low, difference_high: the same of its difference from float, in pairs of images.
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
    """A picture of the evaluation split with what a network found in it.

    Attributes:
        image: index of the picture in the split.
        file: of the picture, in the run folder.
        text: prediction in words, for tasks without a drawing.
    """

    image: int
    variant: str
    engine: str = ""
    file: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """The values of one tensor as calibration counted them.

    Attributes:
        bin_edges: one more than counts, ascending; or just the first and the last of equal bins. Magnitudes when
            the first is 0 or above, signed values otherwise.
        amax: largest magnitude that is not clipped.
        signed: True for signed integers; unsigned ones have twice the steps below amax.

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
    """A weighted operation of a variant's exported file, and whether it is INT8 there.

    Attributes:
        int8: True if its input and its weight are integers of 8 bits or fewer.
        reason: why it is not INT8; "" when it is.
    """

    variant: str
    name: str
    op_type: str
    int8: bool
    weight_elements: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Time of a layer, with what follows it up to the next, on an engine that times its layers itself.

    Attributes:
        float_ms, quantized_ms: median time of a run in either file.
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
    """A network that leaves layers in float which an engine runs slower in INT8, as it was built and measured.

    Attributes:
        layers: left in float beyond what the recipe leaves.
        p50_ms, float_p50_ms: median time of a run, in turn.
        score: the metric on the engine, in words.
        recipe: file of the run folder that makes it.
        unquiet: why its time is not to be compared with float's, nor with those of other choices; "" = it is.
    """

    layers: tuple[str, ...]
    p50_ms: float
    float_p50_ms: float
    score: str = ""
    recipe: str = ""
    unquiet: str = ""


@dataclass(frozen=True, kw_only=True)
class SlowRow:
    """A quantized network that is not faster than float on an engine, and which of its layers are to blame.

    Attributes:
        engine, float_engine: label of the engine at its fastest for either network.
        target: whose placement rules the engine's file follows; "" where it follows no engine's.
        layers: those that take longer than in float, the costliest first.
        rest_ms, float_rest_ms: time of conversions and of all else that follows no layer.
        mixed: the fastest network without the costliest of these layers; None = none was built.
        unquiet: why the layers' times are not to be compared, so that none is named; "" = they are.
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
    """An engine file that a run built, or the reason why there is none.

    Attributes:
        reason: why it was not built; "" when it was.
        version: of the library that built it.
        sms: compute capabilities that it runs on.
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
        variant, engine: network, and label of the engine.
        source: what the layers were read from; "" for an engine of which only the requirement was checked.
        kernels: layers that run on the GPU.
        unknown_sizes: activations whose bytes are unknown and not among these.
        fp16_bytes: estimate of the activation bytes of the same network in fp16.
        int8_share: share of the macs that are computed in 8 bits, 0 to 1.
        sparse_kernels: how many layers with 2:4 weights run a sparse kernel, in words; "" without such layers.
        advice: what to change; "" = nothing.
        findings: what is wrong, the largest first.
        layers: those that run on the GPU.
        unmet: what `export.require` asks and the engine is not, in words.
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
    """Times from pictures to classes.

    Attributes:
        results: by batch size, then variant and engine.
        unavailable: reason why an engine is not among them, by name.
    """

    results: tuple[EndToEnd, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the sum of the stages."""
        rows = [{**asdict(row), "stage_ms": dict(row.stage_ms), "total_ms": row.total_ms} for row in self.results]
        return {"results": rows, "unavailable": dict(self.unavailable)}
