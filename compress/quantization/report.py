"""The typed report of a quantized network, at `qmodel.report`; it imports none of the steps that return it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.report import GraphReport, report_of
from compress.quantization import ActivationSpec
from compress.quantization.placement.decisions import Placement

DEFAULT_CALIBRATOR = ActivationSpec().calibrator

# Signal to noise, in dB, of outputs that are zeros.
_RETURNS_ZEROS = 0.5

# Mean and standard deviation of each channel, (C,) each.
Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two layers between which cross-layer equalization moves scale.

    `repeat`: inputs of `second` that come from one channel of `first`: the pixels, where a flatten lies between.
    """

    first: str
    second: str
    repeat: int = 1


@dataclass(frozen=True, kw_only=True)
class Equalization:
    """Result of cross-layer equalization.

    Attributes:
        refused: reason why the outputs of a layer could not be rescaled, by path, layers before the output left out.
        divided: factor by which each output channel of a pair's first layer was divided in the end, (out,), by path.
        rounds: passes over all pairs until nothing moved.
    """

    pairs: tuple[Pair, ...]
    refused: dict[str, str]
    divided: dict[str, Tensor]
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalization and the paths of the linear layers that consume its output.

    Attributes:
        path: module path, also where the graph calls a function with that module's parameters (timm's norms).
        parameters: paths of its weight and, where it has one, bias.
    """

    path: str
    node: str
    parameters: tuple[str, ...]
    consumers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """Result of SmoothQuant.

    Attributes:
        refused: reason why a normalization could not be smoothed, by name.
        divided: factor by which each channel of a normalization's output was divided, (C,), by path.
    """

    norms: tuple[Norm, ...]
    refused: dict[str, str]
    divided: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Changes to the float graph before quantizers are inserted.

    Attributes:
        relu6: names of the ReLU6 nodes that became ReLU.
        moments: mean and deviation of each layer's result by path, from BatchNorm, for analytic bias correction.
    """

    relu6: tuple[str, ...] = ()
    equalization: Equalization | None = None
    moments: dict[str, Moments] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Result of calibration.

    Attributes:
        amax: range by quantizer path: a float, or one for each channel.
        histograms: (counts, edges) of activation magnitudes, by quantizer path, where the calibrator counts them.
        dead: quantizers whose tensor is zero for every image; they have a range of 1 until calibrated again.
        compared: the ranges of entropy or percentiles beside those of the default calibrator; None for others.

    Examples:
        >>> report = compress.calibrate(compress.insert_quantizers(model, images[:1]), batches)
        >>> report.images, report.dead
        (16, ())
    """

    images: int
    amax: dict[str, Tensor]
    histograms: dict[str, tuple[Tensor, Tensor]]
    dead: tuple[str, ...] = ()
    compared: Comparison | None = None

    @property
    def clipped(self) -> dict[str, float]:
        """Share of the nonzero values beyond the range, by path of each quantizer that has a histogram."""
        return {name: _share_beyond(*self.histograms[name], self.amax[name]) for name in self.histograms}


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Result of AdaRound for one layer.

    Attributes:
        error_nearest, error_learned: mean squared error of its outputs, after its activation, against float,
            rounded to nearest and as chosen.
        changed: share of the weights that were not rounded to nearest.
        reason: why nothing was learned; "" when it was.
    """

    layer: str
    error_nearest: float
    error_learned: float
    changed: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Result of reconstruction for one block: mean squared errors of its output against float."""

    block: str
    error_before: float
    error_after: float
    steps: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Result of bias correction for one layer.

    Attributes:
        shift: largest change of a channel's bias; `added`, (out,), is what was added.
        reason: why it was left as it is; "" when it was corrected.
    """

    layer: str
    shift: float
    reason: str = ""
    added: Tensor | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Quantization with the methods beyond calibration beside plain PTQ, on calibration images.

    Attributes:
        methods: names of the keys that ask for them; `taken_back` were not kept, because they made the network worse.
        sqnr_db, plain_sqnr_db: signal to noise of the outputs with them, and without them, against the float network.
        margin_db: loss that does not count as worse; the choice of images may move half a decibel.
    """

    methods: tuple[str, ...]
    sqnr_db: float
    plain_sqnr_db: float
    taken_back: tuple[str, ...] = ()
    margin_db: float = 0.5

    @property
    def worse(self) -> bool:
        """True if the methods made the network worse, by more than the margin.

        A network that returns zeros has 0 dB, and counts as worse in any case.
        """
        return self._lost or self.sqnr_db < _RETURNS_ZEROS

    @property
    def _lost(self) -> bool:
        return self.sqnr_db < self.plain_sqnr_db - self.margin_db


@dataclass(frozen=True, kw_only=True)
class QuantizationReport(GraphReport):
    """Report of a quantized network; `report_of` and `placement_of` read it, `attach_report` replaces it.

    Attributes:
        prepared: changes to the float graph; None if another library placed the quantizers (`pytorch_quantization`).
        calibration: ranges and histograms; None before `calibrate`.
        scaling: what `smooth: auto` did; () if nothing.
        comparison: what the methods beyond calibration gained or lost; None where none was asked for.
    """

    placement: Placement
    prepared: Prepared | None = None
    calibration: CalibrationReport | None = field(default=None, compare=False)  # tensors have no single truth value
    smoothing: Smoothing | None = None
    scaling: tuple[str, ...] = ()
    rounding: tuple[Rounding, ...] = ()
    reconstruction: tuple[Reconstruction, ...] = ()
    corrections: tuple[Correction, ...] = ()
    comparison: Comparison | None = None

    def notes(self) -> list[str]:
        prepared = self.prepared or Prepared()
        found = [text for text in (self.training, self.bound) if text]
        if prepared.relu6:
            found.append(f"{len(prepared.relu6)} ReLU6 became ReLU, which changes activations above 6")
        if (done := prepared.equalization) is not None:
            found.append(f"equalized {len(done.pairs)} pairs of layers{_left(len(done.refused))}")
        if self.smoothing is not None:
            found.append(f"smoothed {len(self.smoothing.norms)} norms{_left(len(self.smoothing.refused))}")
        found += self.scaling
        for rows, text in (
            (self.rounding, "AdaRound learned {} layers"),
            (self.reconstruction, "reconstructed {} blocks"),
            (self.corrections, "corrected {} biases"),
        ):
            if rows:
                refused = sum(bool(row.reason) for row in rows)
                found.append(text.format(len(rows) - refused) + _left(refused))
        ranges = None if self.calibration is None else self.calibration.compared
        if ranges is not None and ranges.worse:
            found.append(
                f"with activations' calibrator {ranges.methods[0]} the outputs on the calibration images have "
                f"{ranges.sqnr_db:.1f} dB against the float network, with {DEFAULT_CALIBRATOR} "
                f"{ranges.plain_sqnr_db:.1f} dB: the network is {_why(ranges)}; leave "
                "quantization.activations.calibrator out, unless its accuracy on an engine says otherwise"
            )
        if (seen := self.comparison) is not None and seen.worse:
            keys = " and ".join(f"quantization.{name}" for name in seen.methods)
            back = " and ".join(f"quantization.{name}" for name in seen.taken_back)
            found.append(
                f"with {keys} the outputs on the calibration images have {seen.sqnr_db:.1f} dB against the float "
                f"network, without {seen.plain_sqnr_db:.1f} dB: the network is {_why(seen)}; "
                + (f"{back} taken back (quantization.insist: true keeps all)" if back else "take it out")
            )
        return found


class _HasReport(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, fx.GraphModule) and isinstance(
            getattr(instance, "report", None), QuantizationReport
        )


class QuantizedModule(fx.GraphModule, metaclass=_HasReport):
    """A quantized network: a plain GraphModule, as torch.fx makes it, that can be trained.

    Attributes:
        placement: the table of decisions.
        report: results of all methods.

    Examples:
        >>> isinstance(compress.insert_quantizers(model, images[:1]), compress.QuantizedModule)
        True
        >>> isinstance(compress.trace(model, images[:1]), compress.QuantizedModule)
        False
    """

    placement: Placement
    report: QuantizationReport


def _why(seen: Comparison) -> str:
    return "worse than plain PTQ" if seen._lost else "no better than one that returns zeros, which has 0 dB"


def quantization_report_of(qmodel: nn.Module) -> QuantizationReport:
    report = report_of(qmodel)
    if not isinstance(report, QuantizationReport):
        raise QuantizationError(
            f"{type(qmodel).__name__} holds no placement: it is not a model that compress quantized; call "
            "compress.quantize or compress.insert_quantizers first"
        )
    return report


def quantized_graph(qmodel: nn.Module) -> fx.GraphModule:
    quantization_report_of(qmodel)
    assert isinstance(qmodel, fx.GraphModule)  # reports of quantized networks are attached to graphs
    return qmodel


def calibration_of(qmodel: nn.Module) -> CalibrationReport:
    found = quantization_report_of(qmodel).calibration
    if found is None:
        raise QuantizationError("the model is not calibrated: run compress.calibrate(qmodel, batches)")
    return found


def placement_of(qmodel: nn.Module) -> Placement:
    return quantization_report_of(qmodel).placement


def _share_beyond(counts: Tensor, edges: Tensor, amax: Tensor) -> float:
    """Share of a histogram's counts, its first bin left out, in bins that begin at `amax` or above."""
    seen = counts[1:].double().cpu()
    beyond = seen[edges[1:-1].double().cpu() >= amax.max().double().cpu()].sum()
    return float(beyond / seen.sum().clamp_min(1))


def _left(count: int) -> str:
    return f" ({count} left, each with its reason)" if count else ""
