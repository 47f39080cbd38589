"""Scales and offsets that are trained with the weights: LSQ (arXiv 1902.08153) and LSQ+ (arXiv 2004.09576).

LSQ gives the step s of v -> clip(round(v / s), -Qn, Qp) s the gradient (equation 3)

    d/ds = round(v / s) - v / s     inside the range,     -Qn or Qp     where it saturates,

scaled by g = 1 / sqrt(N Qp), N the elements that share a scale (section 2.2). The parameter here is `amax` = s Qp, the
same tensor under the same name as that of a quantizer with a fixed range: a trained state loads into either. Its
gradient is g Qp d/ds, under which a step of SGD changes s exactly as LSQ's own does.

Weights of few bits may be normalized before they are rounded (arXiv 1909.13144, section 2.3): a layer quantizes (w -
mean(w)) / std(w) * gain, with the first standard deviation as the gain.

A signed tensor that is rarely far below zero (SiLU, GELU) uses few of its negative integers. LSQ+ quantizes v ->
clip(round((v - beta) / s), 0, Q) s + beta and trains both (equations 2 to 5): s has LSQ's gradient, at v - beta, and

    d/dbeta = 0     inside the range,     1     where it saturates.

Here the forward pass takes beta to the nearest multiple of s, straight through: 0.0 is an integer, which padding and
ONNX's zero point need, and what is exported is what was trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import QuantizationError
from compress.graph.compare import alone
from compress.graph.inputs import model_inputs
from compress.graph.modules import bake, register_picklable
from compress.kernels.epilogue import Epilogue
from compress.kernels.fake_quantize import learned_quantize
from compress.kernels.triton.fake_quantize import LEAST_RANGE
from compress.kernels.triton.launch import Kernels
from compress.quantization import MOST_BITS
from compress.quantization.calibration.calibrate import calibrating
from compress.quantization.numerics import QuantFormat, scale_from_amax
from compress.quantization.quantizer import Quantizer, _QuantWeight, _unrounded, quantizers
from compress.quantization.report import placement_of


def learned_fake_quantize(x: Tensor, amax: Tensor, quant_format: QuantFormat, *, elements: int) -> Tensor:
    """Quantize and dequantize, with LSQ's gradients for `x` and, as described above, for `amax`.

    The result is that of `fake_quantize`; `amax` is () or (C,), above 0. `elements` is N: those of a weight, or of one
    image's activations, that share a scale. Half precision is computed in float32.
    """
    epilogue = Epilogue(quant_format.low, quant_format.high, axis=quant_format.axis)
    return learned_quantize(x, amax, epilogue, gradient_factor(quant_format, elements))


def gradient_factor(quant_format: QuantFormat, elements: int) -> float:
    return math.sqrt(quant_format.high / max(1, elements))


class LearnedQuantizer(Quantizer):
    """A quantizer whose `amax` is a parameter; made by `learn_scales`.

    `of_weight`: all elements (of a channel) share the scale; of activations, those of one image.
    """

    of_weight: bool

    def __init__(self, source: Quantizer, *, of_weight: bool) -> None:
        super().__init__(replace(source.format, lowest=0.0), channels=source.amax.numel(), name=source.name)
        del self._buffers["amax"]
        first = source.scale * self.format.high if source.format.lowest else source.amax  # symmetric, of the same steps
        self.register_parameter("amax", nn.Parameter(first.detach().clone()))
        self.enabled, self._ready, self.of_weight = source.enabled, source.ready, of_weight
        self.training = source.training

    @property
    def positive_amax(self) -> Tensor:
        """`amax`, above zero also where training has overshot."""
        return self.amax.detach().clamp_min(LEAST_RANGE)

    @property
    def scale(self) -> Tensor:
        return scale_from_amax(self.positive_amax, self.format)

    def frozen(self) -> Quantizer:
        fixed = Quantizer(self.format, channels=self.amax.numel(), name=self.name).to(self.amax.device)
        fixed.set_amax(self.positive_amax)
        return fixed

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._ready = bool(torch.isfinite(self.amax).all())

    def _quantized(self, x: Tensor) -> Tensor:
        f = self.format
        grid, factor = Epilogue(f.low, f.high, axis=f.axis), self.gradient_factor(x)
        kernels: Kernels | None = "torch" if f.wide else None  # Triton's hold integers of a byte
        return learned_quantize(_unrounded(x, f), self.amax, grid, factor, kernels=kernels)

    def gradient_factor(self, x: Tensor) -> float:
        shared = x.numel() if self.of_weight else x.numel() // max(1, len(x) if x.dim() else 1)
        return gradient_factor(self.format, shared // (1 if self.format.axis is None else x.shape[self.format.axis]))


@alone
def learn_scales(qmodel: nn.Module) -> tuple[str, ...]:
    """Make the ranges of a quantized model parameters, beginning at what they are; in place, before the optimizer.

    FP8 has no step to learn and stays fixed, as do quantizers that learn already.

    Returns:
        Paths of the quantizers that learn now.

    Raises:
        QuantizationError: no quantizer with integers, or one without ranges.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches)
        >>> len(compress.learn_scales(qmodel))
        5
    """
    found = [(n, q) for n, q in quantizers(qmodel) if q.format.kind == "int" and not isinstance(q, LearnedQuantizer)]
    bare = [name for name, quantizer in found if not quantizer.ready]
    if not found or bare:
        raise QuantizationError(
            f"{bare[0]} has no range to begin at; run compress.calibrate(qmodel, batches) before learn_scales"
            if bare
            else "there is no quantizer whose scale could be learned: quantize the model first (compress.quantize)"
        )
    for name, quantizer in found:
        qmodel.set_submodule(name, LearnedQuantizer(quantizer, of_weight=name.endswith(".weight_quantizer")))
    return tuple(name for name, _ in found)


def freeze_scales(qmodel: nn.Module) -> None:
    for name, quantizer in list(quantizers(qmodel)):
        if isinstance(quantizer, LearnedQuantizer):
            fixed = quantizer.frozen()
            fixed.enabled, fixed.training = quantizer.enabled, quantizer.training
            qmodel.set_submodule(name, fixed)


class NormalizedWeight(nn.Module):
    """Parametrization of a weight: mean 0 and the standard deviation that it had at first (buffer `gain`, ())."""

    gain: Tensor

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.register_buffer("gain", gain.detach().clone())

    def forward(self, weight: Tensor) -> Tensor:
        centered = weight - weight.mean()
        return centered * (self.gain * torch.rsqrt(centered.square().mean()))


def normalize_weights(qmodel: nn.Module) -> tuple[str, ...]:
    """Normalize weights of fewer than 8 bits before they are rounded; in place, before the optimizer is made.

    Constant weights, and weights with parametrizations (masks), stay as they are. Returns the paths of the layers.
    """
    found = []
    for name, layer in qmodel.named_modules():
        if not isinstance(layer, _QuantWeight) or parametrize.is_parametrized(layer):
            continue
        quant_format = layer.weight_quantizer.format
        deviation = layer.weight.detach().std(correction=0)
        if quant_format.kind == "int" and quant_format.num_bits < MOST_BITS and bool(deviation > 0):
            register_picklable(cast(nn.Module, layer), "weight", NormalizedWeight(deviation))
            found.append(name)
    return tuple(found)


def bake_weights(qmodel: nn.Module) -> None:
    """Make normalized weights plain parameters with the values that are quantized; in place."""
    for layer in list(qmodel.modules()):
        chains: Any = getattr(layer, "parametrizations", {})
        if "weight" in chains and any(isinstance(part, NormalizedWeight) for part in chains["weight"]):
            bake(layer, "weight")


class OffsetQuantizer(LearnedQuantizer):
    """A quantizer whose range and lowest value are parameters; made by `learn_offsets`.

    Attributes:
        amax: parameter, (), the width of the range: the scale times the number of steps.
        offset: parameter, (), the real value of the lowest integer, to the nearest step.
    """

    def __init__(self, source: Quantizer, lowest: Tensor) -> None:
        super().__init__(source, of_weight=False)
        top = source.amax.detach()
        lowest = torch.minimum(lowest.to(top).clamp_min(-top), torch.zeros_like(top))
        self.format = replace(source.format, signed=False, narrow=False, offset=False, lowest=0.0)
        self.amax = nn.Parameter(top - lowest)
        self.offset = nn.Parameter(lowest)

    def _quantized(self, x: Tensor) -> Tensor:
        x = _unrounded(x, self.format)
        factor = self.gradient_factor(x) / self.format.high
        offset = factor * (self.offset - self.offset.detach()) - self.zero * self.scale
        work = x if x.dtype == torch.float64 else x.float()
        return (super()._quantized(work - offset) + offset).to(x.dtype)

    @property
    def zero(self) -> Tensor:
        """The integer of 0.0, (): the offset to the nearest step."""
        return (-self.offset.detach() / self.scale).round().clamp(0, self.format.high)

    def frozen(self) -> Quantizer:
        fixed = ZeroPointQuantizer(self.format, name=self.name).to(self.amax.device)
        fixed.set_amax(self.positive_amax)
        fixed.zero.copy_(self.zero)
        return fixed


class ZeroPointQuantizer(Quantizer):
    """Fake quantization with unsigned integers; buffers (): `amax`, the width of the range, and `zero`, of 0.0."""

    zero: Tensor

    def __init__(self, quant_format: Any, *, name: str = "") -> None:
        super().__init__(quant_format, name=name)
        self.register_buffer("zero", torch.zeros(()))

    @property
    def zero_point(self) -> int:
        return int(self.zero)

    def _quantized(self, x: Tensor) -> Tensor:
        x = _unrounded(x, self.format)
        work = x if x.dtype == torch.float64 else x.float()
        inside = torch.clamp(work / self.scale, -self.zero, self.format.high - self.zero)
        return ((inside + (inside.round() - inside).detach()) * self.scale).to(x.dtype)


class _Lowest:
    def __init__(self) -> None:
        self.value = torch.zeros(())

    def collect(self, x: Tensor) -> None:
        self.value = torch.minimum(self.value.to(x.device), x.min().float())


@alone
def learn_offsets(qmodel: nn.Module, batches: Iterable[Any]) -> tuple[str, ...]:
    """Make range and offset of every signed activation parameters; in place, before `learn_scales` and the optimizer.

    They begin at the largest value of the calibrated range and the lowest that `batches` show. `freeze_scales` makes
    zero points of the offsets. A `state_dict` then has an entry more for each of these quantizers.

    Args:
        qmodel: calibrated.
        batches: calibration data as for `compress.quantize`.

    Returns:
        Paths of the quantizers.

    Raises:
        QuantizationError: the target is TensorRT, which takes no zero points, or no activation is signed.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches, spec=compress.QuantSpec(target="any"))
        >>> compress.learn_offsets(qmodel, batches)
        ('quantizers.input_1',)
    """
    placement = placement_of(qmodel)
    if placement.target in {"tensorrt", "dla"}:
        raise QuantizationError("TensorRT takes no zero points: learn offsets for target any, openvino or onnxruntime")
    found = dict(quantizers(qmodel))
    chosen = {
        site.name: _Lowest()
        for site in placement.activations
        if site.format.signed and site.format.kind == "int" and type(found[site.name]) is Quantizer
    }
    if not chosen:
        raise QuantizationError("no activation is quantized with signed integers: there is no offset to learn")
    with torch.no_grad(), calibrating(qmodel, chosen):
        for batch in batches:
            qmodel(*model_inputs(qmodel, batch))
    for name, lowest in chosen.items():
        qmodel.set_submodule(name, OffsetQuantizer(found[name], lowest.value))
    return tuple(chosen)
