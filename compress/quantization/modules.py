"""Weighted layers whose weight passes a quantizer: the float layer's own class, one child more.

The weight stays a float parameter of the same name: float state_dicts load, and masks on it keep working.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import QuantizationError
from compress.graph.modules import Named
from compress.graph.ops import altered, calls_alike, tensor_of
from compress.quantization.numerics import QuantFormat
from compress.quantization.quantizer import Quantizer


class _QuantWeight(nn.Module):
    weight: Tensor
    weight_quantizer: Quantizer

    @property
    def quantized_weight(self) -> Tensor:
        """The weight on its grid, as the engine will hold it."""
        return self.weight_quantizer(self.weight)


class QuantConv1d(nn.Conv1d, _QuantWeight):
    """`nn.Conv1d` with a quantized weight; input (N, C, L)."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the quantized weight."""
        return self._conv_forward(input, self.quantized_weight, self.bias)


class QuantConv2d(nn.Conv2d, _QuantWeight):
    """`nn.Conv2d` with a quantized weight; input (N, C, H, W)."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the quantized weight."""
        return self._conv_forward(input, self.quantized_weight, self.bias)


class QuantConv3d(nn.Conv3d, _QuantWeight):
    """`nn.Conv3d` with a quantized weight; input (N, C, D, H, W)."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the quantized weight."""
        return self._conv_forward(input, self.quantized_weight, self.bias)


class _QuantTransposed(_QuantWeight):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Transposed convolution with the quantized weight."""
        own: Any = self
        rank = len(own.kernel_size)
        stride, padding, dilation = list(own.stride), list(own.padding), list(own.dilation)
        extra = own._output_padding(input, output_size, stride, padding, list(own.kernel_size), rank, dilation)
        run = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        return run(input, self.quantized_weight, own.bias, stride, padding, extra, own.groups, dilation)


class QuantConvTranspose1d(_QuantTransposed, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d` with a quantized weight; input (N, C, L)."""


class QuantConvTranspose2d(_QuantTransposed, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with a quantized weight; input (N, C, H, W)."""


class QuantConvTranspose3d(_QuantTransposed, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with a quantized weight; input (N, C, D, H, W)."""


class QuantLinear(nn.Linear, _QuantWeight):
    """`nn.Linear` with a quantized weight; input (..., in_features)."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by the quantized weight."""
        return F.linear(input, self.quantized_weight, self.bias)


class QuantNamedLinear(Named, QuantLinear):  # type: ignore[misc,override]
    """`QuantLinear` with parameters under the names that the float model has for them; input (..., in_features)."""


_QUANTIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: QuantConv1d,
    nn.Conv2d: QuantConv2d,
    nn.Conv3d: QuantConv3d,
    nn.ConvTranspose1d: QuantConvTranspose1d,
    nn.ConvTranspose2d: QuantConvTranspose2d,
    nn.ConvTranspose3d: QuantConvTranspose3d,
    nn.Linear: QuantLinear,
}
_NAMED: dict[type[nn.Module], type[nn.Module]] = {QuantLinear: QuantNamedLinear}


def _float_class(module: nn.Module) -> type[nn.Module] | None:
    """The table's class whose forward `module` runs; a parametrized layer is a subclass with the same forward."""
    return next((c for c in _QUANTIZED if isinstance(module, c) and calls_alike(type(module), c)), None)


def weight_quantizer_of(layer: Any) -> Quantizer:
    """The quantizer of the weight of a quantized layer."""
    return layer.weight_quantizer


def can_quantize(module: nn.Module) -> str:
    """Why a weighted layer cannot be quantized; "" when it can."""
    if isinstance(module, _QuantWeight):
        return "is quantized already"
    if altered(module):
        return altered(module)
    if _float_class(module) is None:
        return f"is a {type(module).__name__}, which has a forward of its own that a quantized weight cannot enter"
    return ""


def weight_axis(module: nn.Module) -> int:
    """Axis of a weight that holds its output channels: 1 for transposed convolutions (in, out / groups, ..), else 0."""
    return 1 if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)) else 0


def quantized_layer(module: nn.Module, quant_format: QuantFormat, *, name: str) -> nn.Module:
    """A quantized twin of a float layer that holds the same parameters and parametrizations; `name` is for messages.

    Raises:
        QuantizationError: the layer is of a kind that cannot be quantized.
    """
    reason = can_quantize(module)
    if reason:
        raise QuantizationError(f"layer {name} {reason}; leave it float with a rule (match: {name}, enable: false)")
    float_class = _float_class(module)
    assert float_class is not None  # `can_quantize` has found it
    quantized = _QUANTIZED[float_class]
    if isinstance(module, Named):
        quantized = _NAMED[quantized]
    layer: Any = quantized.__new__(quantized)
    nn.Module.__init__(layer)
    constants = {k: v for k, v in vars(module).items() if k not in vars(layer)}
    layer.__dict__.update(constants)  # kernel_size, stride, ...: what the float layer was made with
    layer.training = module.training
    for key, parameter in module._parameters.items():  # weight, bias (None too), and what a subclass adds to them
        layer.register_parameter(key, parameter)
    if parametrize.is_parametrized(module):
        _move_parametrizations(module, layer)
    for key, buffer in module._buffers.items():  # buffers and modules beside a layer at its path
        layer.register_buffer(key, buffer, persistent=key not in module._non_persistent_buffers_set)
    for key, child in module._modules.items():
        if key != "parametrizations":
            layer.add_module(key, child)
    weight = tensor_of(module)
    channels = None if quant_format.axis is None else weight.shape[quant_format.axis]
    layer.weight_quantizer = Quantizer(quant_format, channels=channels, name=f"{name}.weight").to(weight.device)
    return layer


def _move_parametrizations(source: Any, target: Any) -> None:
    """Share the parametrizations of `source`; a tensor computed of several (weight_norm) becomes a plain parameter."""
    for key, chain in source.parametrizations.items():
        target.register_parameter(key, nn.Parameter(getattr(source, key).detach().clone()))
        if not chain.is_tensor:
            continue
        for item in chain:
            parametrize.register_parametrization(target, key, item, unsafe=True)
        target.parametrizations[key].original = chain.original
