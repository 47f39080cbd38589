"""What quantization a recipe asks for: its `quantization` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from compress.errors import QuantizationError, near_misses

Target = Literal["tensorrt", "openvino", "onnxruntime"]
CalibratorName = Literal["max", "percentile", "entropy", "mse"]

TARGETS: tuple[Target, ...] = ("tensorrt", "openvino", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """How weights are quantized.

    Attributes:
        num_bits: 2 to 8.
        axis: 0 = a scale for every output channel (transposed convolutions use the axis that holds theirs),
            None = one scale per tensor.
        calibrator: how `amax` is chosen.
        percentile: share of magnitudes kept, in percent, for calibrator `percentile`.
    """

    num_bits: int = 8
    axis: Literal[0] | None = 0
    calibrator: CalibratorName = "max"
    percentile: float = 99.99


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """How activations are quantized: always per tensor; signedness follows the target's table.

    Attributes:
        num_bits: 2 to 8.
        calibrator: how `amax` is chosen; the network's input, which is bounded, always keeps its whole range (`max`).
        percentile: share of magnitudes kept, in percent, for calibrator `percentile`.
    """

    num_bits: int = 8
    calibrator: CalibratorName = "entropy"
    percentile: float = 99.99


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Changes what `match` names. Rules are ordered; the last that matches a layer wins, as a whole.

    Attributes:
        match: layer name or glob (`fc`, `layer1.*`, `*.downsample.0`), matched against module paths; for an
            operation without a module (add, matmul), against its node name.
        enable: False leaves the layer float; True quantizes it even where the target's table would not.
        weights, activations: what replaces the section's own; None = as the section says.
    """

    match: str
    enable: bool = True
    weights: WeightSpec | None = None
    activations: ActivationSpec | None = None


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Quantization of a network.

    Attributes:
        target: whose placement rules are followed.
        calibration_images: images of the training split that ranges are measured on.
        weights, activations: the defaults for all layers.
        rules: exceptions, in order, the last match wins; one that matches nothing is an error.
        batchnorm: `fold` into the weights before quantizing, or `keep` until export.
    """

    target: Target = "tensorrt"
    calibration_images: int = 512
    weights: WeightSpec = field(default_factory=WeightSpec)
    activations: ActivationSpec = field(default_factory=ActivationSpec)
    rules: tuple[Rule, ...] = ()
    batchnorm: Literal["fold", "keep"] = "fold"


def check_quant_spec(spec: QuantSpec) -> None:
    """Refuse values that nothing can be quantized with.

    Raises:
        QuantizationError: names the key, what was got and what is allowed.
    """
    if spec.target not in TARGETS:
        hint = near_misses(str(spec.target), TARGETS)
        raise QuantizationError(f"quantization.target is {spec.target!r}{hint} (one of: {', '.join(TARGETS)})")
    if spec.calibration_images < 1:
        raise QuantizationError(f"quantization.calibration_images is {spec.calibration_images}: it must be 1 or more")
    parts: list[tuple[str, WeightSpec | ActivationSpec | None]]
    parts = [("weights", spec.weights), ("activations", spec.activations)]
    for i, rule in enumerate(spec.rules):
        parts += [(f"rules.{i}.weights", rule.weights), (f"rules.{i}.activations", rule.activations)]
    for name, part in parts:
        if part is None:
            continue
        where = f"quantization.{name}"
        if not 2 <= part.num_bits <= 8:
            raise QuantizationError(f"{where}.num_bits is {part.num_bits}: it must be 2 to 8")
        if not 0 < part.percentile <= 100:
            raise QuantizationError(f"{where}.percentile is {part.percentile}: it must be over 0 and at most 100")
        if part.calibrator not in get_args(CalibratorName):
            names = get_args(CalibratorName)
            hint = near_misses(str(part.calibrator), names)
            raise QuantizationError(f"{where}.calibrator is {part.calibrator!r}{hint} (one of: {', '.join(names)})")
