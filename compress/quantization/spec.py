"""What quantization a recipe asks for: its `quantization` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
        calibrator: how `amax` is chosen.
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
