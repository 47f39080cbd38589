"""Activations with learned ranges and learned offsets: LSQ+ (Bhalgat et al., arXiv 2004.09576).

A signed tensor that is rarely far below zero (SiLU, GELU, a linear bottleneck) uses few of its negative integers, which
hurts at 4 bits or fewer. LSQ+ quantizes v -> clip(round((v - beta) / s), 0, Q) s + beta and trains both (equations 2 to
5): s has LSQ's gradient, at v - beta, and

    d/dbeta = 0     inside the range,     1     where it saturates.

Both are scaled by LSQ's 1 / sqrt(N Q). Here the forward pass takes beta to the nearest multiple of s, straight through:
0.0 is an integer, which padding and ONNX's zero point need, and what is exported is what was trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import QuantizationError
from compress.graph.batches import model_inputs
from compress.quantization.calibration.calibrate import calibrating
from compress.quantization.learned import LearnedQuantizer
from compress.quantization.quantizer import Quantizer, quantizers
from compress.quantization.report import placement_of


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
        factor = self.gradient_factor(x) / self.format.high
        offset = factor * (self.offset - self.offset.detach()) - self.zero * self.scale
        work = x if x.dtype == torch.float64 else x.float()
        return (super()._quantized(work - offset) + offset).to(x.dtype)

    @property
    def zero(self) -> Tensor:
        """The integer of 0.0, (): the offset to the nearest step."""
        return (-self.offset.detach() / self.scale).round().clamp(0, self.format.high)

    def frozen(self) -> Quantizer:
        """A quantizer with this range and zero point."""
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
        """The integer of 0.0."""
        return int(self.zero)

    def _quantized(self, x: Tensor) -> Tensor:
        work = x if x.dtype == torch.float64 else x.float()
        inside = torch.clamp(work / self.scale, -self.zero, self.format.high - self.zero)
        return ((inside + (inside.round() - inside).detach()) * self.scale).to(x.dtype)


class _Lowest:
    """Collects the lowest value of a tensor."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def collect(self, x: Tensor) -> None:
        self.value = torch.minimum(self.value.to(x.device), x.min().float())


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
    if placement.target == "tensorrt":
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
