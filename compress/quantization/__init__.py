"""From float to integers: numerics, calibrators, the quantizer, placement and insertion.

Here: the `quantization` section of a recipe, which is also the argument of `compress.quantize`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar, cast, get_args

from pydantic import Field

from compress.errors import QuantizationError
from compress.support.process import sums_bytes_in_16_bits
from compress.support.validation import (
    AtLeastOne,
    BatchSize,
    NotNegative,
    Positive,
    Seed,
    Share,
    ShareBelowOne,
    validate,
)

Target = Literal["tensorrt", "openvino", "onnxruntime", "litert", "dla", "qnn", "xnnpack", "any"]
Residual = Literal["identity", "both", "none"]
CalibratorName = Literal["max", "percentile", "entropy", "mse", "lsq"]
ActivationCalibrator = Literal["auto", "max", "percentile", "entropy", "mse", "lsq"]
Kind = Literal["int", "e4m3"]
BiasCorrection = Literal["auto", "analytic", "empirical"]
Head = Literal["auto", "float", "quantize"]

# Widths of integers that quantizers, calibrators and exports know; activations alone have up to `WIDEST`.
LEAST_BITS, MOST_BITS, WIDEST = 2, 8, 16
Bits = Annotated[int, Field(ge=LEAST_BITS, le=MOST_BITS)]
ActivationBits = Annotated[int, Field(ge=LEAST_BITS, le=WIDEST)]
Percentile = Annotated[float, Field(gt=0, le=100)]
# `any` follows no engine: inputs and weights of products alone, as papers on low bits do.
TARGETS: tuple[Target, ...] = get_args(Target)
T = TypeVar("T")
# Another word for a target: LiteRT's kernels are XNNPACK's, and one table serves them and ExecuTorch's.
_SAME: dict[str, Target] = {"xnnpack": "litert"}


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """Quantization of weights.

    Attributes:
        num_bits: fewer than 8 are written as 8-bit integers of a narrower range, and 4 as ONNX INT4 where the opset
            has it (21). `auto` is 8, and 7 for OpenVINO on an x86 processor without VNNI, whose sums saturate with 8.
        axis: 0 = a scale for every output channel, None = one scale per tensor.
        calibrator: method that chooses `amax`.
        percentile: share of magnitudes within `amax`, in percent, for calibrator `percentile`.
        kind: `int`, or `e4m3` for FP8 (num_bits 8, calibrator `max` or `percentile`, weights and activations alike).

    Examples:
        >>> spec = compress.QuantSpec(weights=compress.WeightSpec(num_bits=4), target="any")
        >>> compress.insert_quantizers(model, images[:1], spec).placement.weights[0].format.num_bits
        4
    """

    num_bits: Bits | Literal["auto"] = "auto"
    axis: Literal[0] | None = 0
    calibrator: CalibratorName = "max"
    percentile: Percentile = 99.99
    kind: Kind = "int"

    def bits_for(self, target: Target) -> int:
        """Bits of the weights of a network for a target, on this machine.

        >>> WeightSpec().bits_for("tensorrt"), WeightSpec(num_bits=4).bits_for("tensorrt")
        (8, 4)
        """
        if self.num_bits != "auto":
            return self.num_bits
        return 7 if target == "openvino" and self.kind == "int" and sums_bytes_in_16_bits() else 8


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """Quantization of activations: always per tensor; the target's table chooses between signed and unsigned.

    Attributes:
        num_bits: fewer than 8 are written as 8-bit integers after a Clip, and 9 to 16 as 16-bit ones (opset 21), which
            phones and accelerators compute with (A16W8); `onnxruntime` computes such layers in float.
        calibrator: method that chooses `amax`; the network's input always keeps its whole range (`max`). `auto` is
            `max` for tensors of more than 8 bits, and for those of 8 bits that only matrix products read, with
            `smooth: auto`, unless the result of a linear layer gains by `mse` on calibration images; `mse` for others.
            `entropy` is slightly the best on natural images, and by far the worst where values crowd at a few places
            (drawings, ReLU6). `lsq` is where training learned scales begins (arXiv 1902.08153, section 2.1).
        percentile: share of magnitudes within `amax`, in percent, for calibrator `percentile`.
        kind: `int`, or `e4m3` for FP8 (num_bits 8, calibrator `max` or `percentile`, weights and activations alike).

    Examples:
        >>> spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="mse"))
        >>> compress.quantize(model, images[:1], batches, spec=spec).report.calibration.images
        16
    """

    num_bits: ActivationBits = 8
    calibrator: ActivationCalibrator = "auto"
    percentile: Percentile = 99.99
    kind: Kind = "int"

    def resolved(self, *, whole: bool) -> ActivationSpec:
        """The specification with calibrator `auto` as `max`, if the whole range is kept, or as `mse`."""
        if self.calibrator != "auto":
            return self
        kept = self.num_bits > MOST_BITS or (whole and self.num_bits == MOST_BITS)
        return replace(self, calibrator="max" if kept else "mse")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An exception for some layers. Rules are ordered; the last that matches a layer wins, as a whole.

    Attributes:
        match: layer name or glob (`fc`, `layer1.*`, `*.downsample.0`), matched against module paths; for an
            operation without a module (add, matmul), against its node name.
        enable: False leaves the layer float; True quantizes it even where the target's table would not.
        weights, activations: replacement of the section's own values; None = the section's own.
        target: the rule counts in networks for this target alone, such as layers that one engine runs faster in float;
            None = in all.
        reason: why, for the table of decisions; "" = the recipe says so.
        channel_scales: a linear layer's input is multiplied by a factor for each channel, as `quantize` chose
            (`smooth: auto`); the rule says nothing else.

    Examples:
        >>> spec = compress.QuantSpec(rules=(compress.Rule(match="5", enable=False),))  # the classifier stays float
        >>> [site.path for site in compress.insert_quantizers(model, images[:1], spec).placement.weights]
        ['0']
    """

    match: str
    enable: bool = True
    weights: WeightSpec | None = None
    activations: ActivationSpec | None = None
    target: Target | None = None
    reason: str = ""
    channel_scales: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", _own_word(self.target))


def _own_word(target: T) -> T:
    return cast(T, _SAME.get(target, target)) if isinstance(target, str) else target


@dataclass(frozen=True, kw_only=True)
class AdaRoundSpec:
    """AdaRound, which learns for each weight to round it up or down (Nagel et al., arXiv 2004.10568, section 3).

    Attributes:
        steps: steps of Adam for each layer.
        images: largest number of calibration images to learn from; their activations at one layer are held in memory.
        batch_size: images of one step.
        positions: output positions of a layer, sampled over all images, that are learned from; a step takes the share
            of them that `batch_size` has of the images.
        lr: learning rate of Adam.
        regularization: weight of the term that drives every rounding to 0 or 1.
        beta_start, beta_end: exponent of that term at its first and at its last step; a lower one is harder.
        warm_start: share of the steps without that term.
        seed: seed of the choice of images for each step.

    Examples:
        >>> spec = compress.QuantSpec(adaround=compress.AdaRoundSpec(steps=20, batch_size=8))
        >>> qmodel = compress.quantize(model, images[:1], batches, spec=spec)
        >>> [row.layer for row in qmodel.report.rounding]
        ['0', '5']
    """

    steps: AtLeastOne = 1000
    images: AtLeastOne = 256
    batch_size: BatchSize = 32
    positions: AtLeastOne = 8192
    lr: Positive = 0.01
    regularization: NotNegative = 0.01
    beta_start: Positive = 20.0
    beta_end: Positive = 2.0
    warm_start: ShareBelowOne = 0.2
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class ReconstructSpec:
    """Reconstruction of blocks, for few bits: roundings of weights and ranges learned together, without labels.

    BRECQ (Li et al., arXiv 2102.05426) with QDrop (Wei et al., arXiv 2203.05740).

    Attributes:
        steps: steps of Adam for each block.
        images: largest number of calibration images to learn from.
        batch_size: images of one step.
        positions: largest number of positions of a step; blocks of larger images take fewer of them, but not below 4.
        lr: learning rate of the roundings.
        range_lr: learning rate of the logarithm of a range; it falls to zero linearly.
        learn_ranges: learn ranges of weights and activations too.
        drop: share of the activations' elements that are left unquantized while a block learns; 0 = BRECQ.
        layers: layers in a row, without a shortcut around them, that make a block.
        regularization: weight of the term that drives every rounding to 0 or 1.
        warm_start: share of the steps without that term.
        seed: seed of the choice of images and elements.

    Examples:
        >>> spec = compress.QuantSpec(target="any", reconstruct=compress.ReconstructSpec(steps=200))
        >>> [row.steps for row in compress.quantize(model, images[:1], batches, spec=spec).report.reconstruction]
        [200]
    """

    steps: AtLeastOne = 1000
    images: AtLeastOne = 1024
    batch_size: BatchSize = 32
    positions: AtLeastOne = 32768
    lr: Positive = 0.01
    range_lr: Positive = 0.002
    learn_ranges: bool = True
    drop: ShareBelowOne = 0.5
    layers: AtLeastOne = 3
    regularization: NotNegative = 0.01
    warm_start: ShareBelowOne = 0.2
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Quantization of a network.

    Attributes:
        target: engine whose placement rules are followed; `any` has no engine's limits: inputs and weights of products
            alone are quantized, unsigned where they are never negative, and weights of fewer than 8 bits use all
            2**num_bits integers. A list makes one file each in a run, and measures every engine with the file that was
            made for it; quantization-aware training follows the first.
        calibration_images: images of the training split that ranges are measured on.
        weights, activations: defaults for all layers.
        rules: exceptions, in order, the last match wins; one that matches nothing is an error.
        first_last_bits: bits of the weights and inputs of the first and the last layer, which most papers leave at 8;
            None = those of the others. A rule that matches such a layer decides instead.
        residual: inputs of a residual sum that are quantized: `identity`, `both` or `none`; None = as the target's
            table says.
        head: `auto` leaves a detection head's last convolutions, its decoding of boxes and its expectations over a
            softmax (DFL) float where the graph shows that it is one; `float` leaves the last convolutions of any graph
            float; `quantize` none. The placement's rows give the price.
        batchnorm: `fold` into the weights before quantizing, or `keep` until export. Folded networks train faster, yet
            only at low rates.
        equalize: cross-layer equalization: channels that a ReLU joins trade scale until the weights on both sides
            have equal ranges.
        relu6: `relu` replaces every ReLU6 by ReLU, which `equalize` can pass (arXiv 1906.04721); that changes the
            network wherever an activation exceeds 6.
        smooth: SmoothQuant: share of the ranges' difficulty that moves from the output of a LayerNorm into the weights
            that consume it; 0.5 is usual. `auto` looks at each layer on calibration images: inputs with outlier
            channels are scaled where the layer's result in 8 bits has less than 34 dB and gains 1 (in torch models
            where a layer or a norm before can take the scale), and a product of two activations with less than 27 dB
            stays float.
        adaround: learn how to round weights, layer by layer, instead of rounding to nearest.
        reconstruct: learn roundings and ranges block by block, for few bits; instead of `adaround`.
        bias_correction: restore the mean of each layer's output, which quantized weights shift: `analytic`, from the
            BatchNorm statistics, `empirical`, layer after layer on calibration images, or `auto`, each layer by itself
            on 16 of the images.
        insist: keep `equalize`, `relu6`, `smooth`, `adaround` and `bias_correction` also where they make the outputs on
            the calibration images worse than plain PTQ does; otherwise they are taken back, with a note.

    Examples:
        >>> spec = compress.QuantSpec(target="openvino", bias_correction="empirical")
        >>> compress.quantize(model, images[:1], batches, spec=spec).placement.target
        'openvino'
    """

    target: Target | tuple[Target, ...] = "tensorrt"
    calibration_images: AtLeastOne = 512
    weights: WeightSpec = field(default_factory=WeightSpec)
    activations: ActivationSpec = field(default_factory=ActivationSpec)
    rules: tuple[Rule, ...] = ()
    first_last_bits: Bits | None = None
    residual: Residual | None = None
    head: Head = "auto"
    batchnorm: Literal["fold", "keep"] = "fold"
    equalize: bool = False
    relu6: Literal["keep", "relu"] = "keep"
    smooth: Share | Literal["auto"] | None = "auto"
    adaround: AdaRoundSpec | None = None
    reconstruct: ReconstructSpec | None = None
    bias_correction: BiasCorrection | None = "auto"
    insist: bool = False

    def __post_init__(self) -> None:
        for name in ("target", "rules"):  # a list, which many write, could be changed later and is no key of a dict
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        target = tuple(map(_own_word, self.target)) if isinstance(self.target, tuple) else _own_word(self.target)
        object.__setattr__(self, "target", target)

    @property
    def targets(self) -> tuple[Target, ...]:
        """All targets, the one that training follows first.

        >>> QuantSpec(target="openvino").targets
        ('openvino',)
        """
        return self.target if isinstance(self.target, tuple) else (self.target,)

    @property
    def only_target(self) -> Target:
        """The target of a specification that has one.

        Raises:
            QuantizationError: it has several; a network follows the rules of one.
        """
        if len(self.targets) != 1:
            raise QuantizationError(
                f"quantization.target names {', '.join(self.targets)}, and one network follows the rules of one: call "
                "compress.quantize_targets, which makes a network for each, or spec.for_target(...)"
            )
        return self.targets[0]

    def for_target(self, target: Target | None = None) -> QuantSpec:
        """This specification for one of its targets; None = the first.

        >>> QuantSpec(target=("tensorrt", "openvino")).for_target().target
        'tensorrt'
        """
        return replace(self, target=target or self.targets[0])


def check_quant_spec(spec: QuantSpec) -> None:
    """Refuse a specification that cannot be followed."""
    validate(spec, QuantSpec, section="quantization", error=QuantizationError, rules=quant_contradictions)


def quant_contradictions(spec: QuantSpec) -> Iterator[str]:
    """Yield a line for each contradiction between values that are in range by themselves."""
    if not spec.targets or len(set(spec.targets)) < len(spec.targets):
        yield f"quantization.target is {list(spec.targets)}: name one target, or several that differ"
    yield from _kind_contradictions(spec)
    yield from _wide_contradictions(spec)
    folded = {
        "equalize": spec.equalize,
        "adaround": spec.adaround,
        "reconstruct": spec.reconstruct,
        "bias_correction": spec.bias_correction not in (None, "auto"),
    }
    asked = [name for name, value in folded.items() if value]
    if asked and spec.batchnorm == "keep":
        yield (
            f"quantization.{asked[0]} works on weights that hold their BatchNorm, and quantization.batchnorm is keep; "
            f"set batchnorm: fold, or take {asked[0]} out"
        )
    if spec.adaround is not None and spec.reconstruct is not None:
        yield "quantization.adaround and quantization.reconstruct both learn how to round the weights: take one out"
    learned = spec.adaround
    if learned is not None and learned.beta_end > learned.beta_start:
        yield (
            f"quantization.adaround.beta_end is {learned.beta_end}: it must be at most beta_start, "
            f"which is {learned.beta_start}"
        )


def _kind_contradictions(spec: QuantSpec) -> Iterator[str]:
    """Refuse FP8 with values that only integers have, or on one side of a product alone."""
    for where, weights, activations in [
        ("quantization", spec.weights, spec.activations),
        *((f"quantization.rules.{i}", rule.weights, rule.activations) for i, rule in enumerate(spec.rules)),
    ]:
        for name, part in (("weights", weights), ("activations", activations)):
            if part is None or part.kind == "int":
                continue
            if part.num_bits not in (8, "auto"):
                yield f"{where}.{name}.num_bits is {part.num_bits} with kind e4m3: FP8 has 8"
            if part.calibrator not in ("max", "percentile"):
                yield (
                    f"{where}.{name}.calibrator is {part.calibrator} with kind e4m3: it weighs evenly spaced steps, "
                    "which FP8 does not have; set calibrator max, or percentile"
                )
        kinds = ((weights or spec.weights).kind, (activations or spec.activations).kind)
        if kinds[0] != kinds[1]:
            yield (
                f"{where}: weights.kind is {kinds[0]} and activations.kind {kinds[1]}; a product of FP8 takes both in "
                "FP8: give both the same kind"
            )


_NOT_WIDE: dict[Target, str] = {
    "tensorrt": "TensorRT's Q/DQ take INT8, INT4 and FP8, and its strongly typed engines refuse others",
    "openvino": "OpenVINO (2026.4) takes pairs of 16 bits out of a network and computes in float what reads them",
    "dla": "DLA computes in INT8 and fp16",
}
HISTOGRAM_CALIBRATORS = ("entropy", "mse")


def _wide_contradictions(spec: QuantSpec) -> Iterator[str]:
    """Refuse more than 8 bits on engines without them, and with calibrators whose histograms have fewer bins."""
    every = spec.targets
    parts = [("quantization", spec.activations, every)]
    for i, rule in enumerate(spec.rules):
        if rule.activations is not None and rule.enable:
            parts.append((f"quantization.rules.{i}", rule.activations, (rule.target,) if rule.target else every))
    for where, part, targets in parts:
        if part.num_bits <= MOST_BITS:
            continue
        for target in [one for one in targets if one in _NOT_WIDE and one in every]:
            yield (
                f"{where}.activations.num_bits is {part.num_bits} for target {target}: {_NOT_WIDE[target]}; leave such "
                "layers float (enable: false), or choose target litert, qnn, onnxruntime or any"
            )
        if part.calibrator in HISTOGRAM_CALIBRATORS:
            yield (
                f"{where}.activations.calibrator is {part.calibrator} with {part.num_bits} bits: a step is narrower "
                "than a bin of its histogram, which therefore shows no error; set calibrator max, or percentile"
            )


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
