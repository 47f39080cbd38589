"""What quantization a recipe asks for: its `quantization` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from compress.errors import QuantizationError, near_misses

Target = Literal["tensorrt", "openvino", "onnxruntime"]
Residual = Literal["identity", "both", "none"]
CalibratorName = Literal["max", "percentile", "entropy", "mse"]
Kind = Literal["int", "e4m3"]

TARGETS: tuple[Target, ...] = ("tensorrt", "openvino", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """How weights are quantized.

    Attributes:
        num_bits: 2 to 8; fewer than 8 are written as 8-bit integers of a narrower range, and 4 as ONNX INT4 where the
            opset has it (21).
        axis: 0 = a scale for every output channel (transposed convolutions use the axis that holds theirs),
            None = one scale per tensor.
        calibrator: how `amax` is chosen.
        percentile: share of magnitudes kept, in percent, for calibrator `percentile`.
        kind: `int`, or `e4m3` for FP8 (with num_bits 8, calibrator `max` or `percentile`, weights and activations
            alike).
    """

    num_bits: int = 8
    axis: Literal[0] | None = 0
    calibrator: CalibratorName = "max"
    percentile: float = 99.99
    kind: Kind = "int"


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """How activations are quantized: always per tensor; signedness follows the target's table.

    Attributes:
        num_bits: 2 to 8; fewer than 8 are written as 8-bit integers behind a Clip.
        calibrator: how `amax` is chosen; the network's input, which is bounded, always keeps its whole range (`max`).
            `entropy` is the best by a little on natural images, and the worst by far where values crowd at a few
            places (drawings, ReLU6): 98.4 to 21 % on MobileNetV2 of digits. `mse` is safe on both.
        percentile: share of magnitudes kept, in percent, for calibrator `percentile`.
        kind: `int`, or `e4m3` for FP8 (with num_bits 8, calibrator `max` or `percentile`, weights and activations
            alike).
    """

    num_bits: int = 8
    calibrator: CalibratorName = "mse"
    percentile: float = 99.99
    kind: Kind = "int"


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
class AdaRoundSpec:
    """How AdaRound learns which way to round each weight (Nagel et al., arXiv 2004.10568, section 3).

    Attributes:
        steps: of Adam, for each layer.
        images: calibration images it learns from, at most; their activations at one layer are held in memory.
        batch_size: images of one step.
        lr: of Adam.
        regularization: weight of the term that drives every rounding to 0 or 1.
        beta_start, beta_end: its exponent, from soft to hard.
        warm_start: share of the steps without that term.
        seed: of the images that each step draws.
    """

    steps: int = 1000
    images: int = 256
    batch_size: int = 32
    lr: float = 0.01
    regularization: float = 0.01
    beta_start: float = 20.0
    beta_end: float = 2.0
    warm_start: float = 0.2
    seed: int = 0


BiasCorrection = Literal["analytic", "empirical"]


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Quantization of a network.

    Attributes:
        target: whose placement rules are followed.
        calibration_images: images of the training split that ranges are measured on.
        weights, activations: the defaults for all layers.
        rules: exceptions, in order, the last match wins; one that matches nothing is an error.
        residual: which inputs of a residual sum are quantized: `identity`, `both` or `none`; None = as the target's
            table says.
        batchnorm: `fold` into the weights before quantizing, or `keep` until export. Folded networks train faster, yet
            only at low rates: nothing normalizes what they compute any more.
        equalize: cross-layer equalization: channels that a ReLU joins trade scale until the weights on both sides
            have equal ranges.
        relu6: `relu` replaces every ReLU6 by ReLU, without which `equalize` cannot pass it (arXiv 1906.04721 does
            so); it changes the network wherever an activation exceeds 6.
        smooth: SmoothQuant: share (0 to 1) of the ranges' difficulty that moves from what a LayerNorm returns into
            the weights that read it; 0.5 is usual.
        adaround: learn how to round weights, layer by layer, instead of rounding to nearest.
        bias_correction: correct what quantizing weights does to the mean of each layer's output: `analytic`, from the
            BatchNorm statistics, or `empirical`, from the calibration images.
    """

    target: Target = "tensorrt"
    calibration_images: int = 512
    weights: WeightSpec = field(default_factory=WeightSpec)
    activations: ActivationSpec = field(default_factory=ActivationSpec)
    rules: tuple[Rule, ...] = ()
    residual: Residual | None = None
    batchnorm: Literal["fold", "keep"] = "fold"
    equalize: bool = False
    relu6: Literal["keep", "relu"] = "keep"
    smooth: float | None = None
    adaround: AdaRoundSpec | None = None
    bias_correction: BiasCorrection | None = None


def check_quant_spec(spec: QuantSpec) -> None:
    """Refuse values that nothing can be quantized with.

    Raises:
        QuantizationError: names the key, what was got and what is allowed.
    """
    if not isinstance(spec, QuantSpec):
        raise QuantizationError(
            f"spec is {spec!r}: it must be a compress.QuantSpec, such as QuantSpec(target='tensorrt')"
        )
    if spec.target not in TARGETS:
        hint = near_misses(str(spec.target), TARGETS)
        raise QuantizationError(f"quantization.target is {spec.target!r}{hint} (one of: {', '.join(TARGETS)})")
    if spec.residual not in {None, *get_args(Residual)}:
        allowed = ", ".join(get_args(Residual))
        raise QuantizationError(f"quantization.residual is {spec.residual!r} (one of: {allowed}, or null)")
    if spec.calibration_images < 1:
        raise QuantizationError(f"quantization.calibration_images is {spec.calibration_images}: it must be 1 or more")
    _check_improvements(spec)
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
        _check_kind(where, part)
    for name, weights, activations in [
        ("quantization", spec.weights, spec.activations),
        *(
            (f"quantization.rules.{i}", rule.weights or spec.weights, rule.activations or spec.activations)
            for i, rule in enumerate(spec.rules)
        ),
    ]:
        if weights.kind != activations.kind:
            raise QuantizationError(
                f"{name}: weights.kind is {weights.kind} and activations.kind {activations.kind}; a product of FP8 "
                "takes both in FP8: give both the same kind"
            )


def _check_kind(where: str, part: WeightSpec | ActivationSpec) -> None:
    """Refuse a kind of number that does not go with the rest."""
    if part.kind not in get_args(Kind):
        raise QuantizationError(f"{where}.kind is {part.kind!r}: it must be int or e4m3")
    if part.kind == "int":
        return
    if part.num_bits != 8:
        raise QuantizationError(f"{where}.num_bits is {part.num_bits} with kind e4m3: FP8 has 8")
    if part.calibrator not in ("max", "percentile"):
        raise QuantizationError(
            f"{where}.calibrator is {part.calibrator} with kind e4m3: it weighs evenly spaced steps, which FP8 does "
            "not have; set calibrator max, or percentile"
        )


def _check_improvements(spec: QuantSpec) -> None:
    """Refuse what cannot improve post-training quantization, or cannot go together."""
    allowed = (None, *get_args(BiasCorrection))
    if spec.bias_correction not in allowed:
        raise QuantizationError(
            f"quantization.bias_correction is {spec.bias_correction!r}: it must be analytic, empirical or null"
        )
    if spec.relu6 not in ("keep", "relu"):
        raise QuantizationError(f"quantization.relu6 is {spec.relu6!r}: it must be keep or relu")
    if spec.smooth is not None and not 0 <= spec.smooth <= 1:
        raise QuantizationError(f"quantization.smooth is {spec.smooth}: it must be from 0 to 1, or null")
    folded = {"equalize": spec.equalize, "adaround": spec.adaround, "bias_correction": spec.bias_correction}
    asked = [name for name, value in folded.items() if value]
    if asked and spec.batchnorm == "keep":
        raise QuantizationError(
            f"quantization.{asked[0]} works on weights that hold their BatchNorm, and quantization.batchnorm is keep; "
            f"set batchnorm: fold, or take {asked[0]} out"
        )
    rounding = spec.adaround
    if rounding is None:
        return
    ranges = (
        ("steps", rounding.steps >= 1, "1 or more"),
        ("images", rounding.images >= 1, "1 or more"),
        ("batch_size", rounding.batch_size >= 1, "1 or more"),
        ("lr", rounding.lr > 0, "above 0"),
        ("regularization", rounding.regularization >= 0, "0 or more"),
        ("beta_end", 0 < rounding.beta_end <= rounding.beta_start, "above 0 and at most beta_start"),
        ("warm_start", 0 <= rounding.warm_start < 1, "at least 0 and below 1"),
    )
    for name, good, words in ranges:
        if not good:
            raise QuantizationError(f"quantization.adaround.{name} is {getattr(rounding, name)}: it must be {words}")
