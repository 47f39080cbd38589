"""The quantizer, a module that fake-quantizes a tensor, a Q/DQ pair once exported; and layers with a quantized weight.

Such a layer is of the float layer's own class, with one child more. The weight stays a float parameter of the same
name: float state_dicts load, and masks on it keep working.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import CalibrationError, QuantizationError
from compress.graph.modules import Named
from compress.graph.ops import altered, calls_alike, tensor_of
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax, zero_of

# Name in a state_dict of the lowest value that a quantizer holds; older files have none.
LOWEST = "lowest"


class Collector(Protocol):
    """What collects the tensors of a quantizer, such as a calibrator."""

    def collect(self, x: Tensor) -> None:
        """Take a tensor of any shape into the statistics."""


def quantizer_path(name: str) -> str:
    """The path of the quantizer of a tensor; a name that every module has already gets "_" at its end.

    >>> quantizer_path("conv1"), quantizer_path("train")
    ('quantizers.conv1', 'quantizers.train_')
    """
    return f"quantizers.{name}{'_' if hasattr(nn.Module(), name) else ''}"


class Quantizer(nn.Module):
    """Fake quantization of one tensor.

    Attributes:
        format: which integers.
        amax: buffer, () or (C,), float32: the largest magnitudes kept. NaN until calibrated.
        enabled: False lets tensors pass unchanged.
        calibrator: while set, tensors are collected by it and pass unchanged.
        name: how errors and tables call it.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches)
        >>> all(module.ready for module in qmodel.modules() if isinstance(module, compress.Quantizer))
        True
    """

    is_quantizer = True
    amax: Tensor

    def __init__(self, quant_format: QuantFormat, *, channels: int | None = None, name: str = "") -> None:
        super().__init__()
        self.format = quant_format
        self.name = name
        self.enabled = True
        self.calibrator: Collector | None = None
        shape = () if quant_format.axis is None else (channels or 1,)
        self.register_buffer("amax", torch.full(shape, torch.nan))
        self._ready = False

    @property
    def ready(self) -> bool:
        """True if ranges are there."""
        return self._ready

    @property
    def scale(self) -> Tensor:
        """Real value of one integer step, shape of `amax`."""
        return scale_from_amax(self.amax, self.format)

    @property
    def zero_point(self) -> int:
        """The integer of 0.0, as ONNX counts."""
        return int(zero_of(self.scale, self.format))

    @torch.no_grad()
    def set_amax(self, amax: Tensor) -> None:
        """Set the ranges.

        Raises:
            CalibrationError: `amax` has another shape, or holds NaN, infinity, zero or a negative value.
        """
        if amax.shape != self.amax.shape:
            raise CalibrationError(
                f"{self.name or 'quantizer'}: amax has shape {tuple(amax.shape)}, expected {tuple(self.amax.shape)}"
            )
        self._check(amax)
        self.amax.copy_(amax.detach())
        self._ready = True

    def _check(self, amax: Tensor) -> None:
        bad = ~(torch.isfinite(amax) & (amax > 0))
        if bool(bad.any()):
            value = amax[bad].flatten()[0].item()
            share = "" if amax.dim() == 0 else f" in {int(bad.sum())} of {amax.numel()} channels"
            raise CalibrationError(
                f"{self.name or 'quantizer'}: amax is {value}{share}; a scale must be positive and finite. The tensor "
                "was constant zero or held NaN in calibration: look at the calibration images, or leave the layer "
                "float with a rule (enable: false)"
            )

    def forward(self, x: Tensor) -> Tensor:
        """`x`, rounded to the grid; any shape."""
        if self.calibrator is not None:
            self.calibrator.collect(x.detach())
            return x
        if not self.enabled:
            return x
        if not self._ready:
            raise CalibrationError(
                f"{self.name or 'quantizer'} has no ranges yet; run compress.calibrate(qmodel, batches) or load a "
                "state_dict of a calibrated model first"
            )
        return self._quantized(x)

    def _quantized(self, x: Tensor) -> Tensor:
        return fake_quantize(_unrounded(x, self.format), self.scale, self.format)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.format.signed and self.format.offset:
            destination[f"{prefix}{LOWEST}"] = torch.tensor(self.format.lowest, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        lowest = state_dict.pop(f"{prefix}{LOWEST}", None)  # images may have chosen it, so that it belongs to the range
        if lowest is not None:
            self.format = replace(self.format, offset=True, lowest=float(lowest))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}amax" in state_dict:
            self._ready = bool((torch.isfinite(self.amax) & (self.amax > 0)).all())

    def extra_repr(self) -> str:
        """num_bits, axis, signedness and range."""
        f = self.format
        shown = "uncalibrated" if not self._ready else f"amax={self.amax.max().item():.4g}"
        kind = "e4m3" if f.kind == "e4m3" else f"{'int' if f.signed else 'uint'}{f.num_bits}"
        return f"{kind}, axis={f.axis}, {shown}" + (", off" if not self.enabled else "")


def _unrounded(x: Tensor, quant_format: QuantFormat) -> Tensor:
    """`x` in float32 if autocast has rounded it to half precision, which does not hold the steps of a wide format."""
    half = quant_format.wide and x.dtype in {torch.float16, torch.bfloat16}
    return x.float() if half and torch.is_autocast_enabled(x.device.type) else x


def quantizers(qmodel: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    for name, module in qmodel.named_modules():
        if isinstance(module, Quantizer):
            yield name, module


@contextmanager
def switched_off(found: Iterable[Quantizer]) -> Iterator[None]:
    """Let tensors pass quantizers unchanged for a while."""
    states = [(quantizer, quantizer.enabled) for quantizer in found]
    for quantizer, _ in states:
        quantizer.enabled = False
    try:
        yield
    finally:
        for quantizer, enabled in states:
            quantizer.enabled = enabled


class _QuantWeight(nn.Module):
    weight: Tensor
    weight_quantizer: Quantizer

    @property
    def quantized_weight(self) -> Tensor:
        """The weight on its grid, as the engine will hold it."""
        return self.weight_quantizer(self.weight)


class _QuantConv(_QuantWeight):
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self
        return own._conv_forward(input, self.quantized_weight, own.bias)


class QuantConv1d(_QuantConv, nn.Conv1d):
    """`nn.Conv1d` with a quantized weight; input (N, C, L)."""


class QuantConv2d(_QuantConv, nn.Conv2d):
    """`nn.Conv2d` with a quantized weight; input (N, C, H, W)."""


class QuantConv3d(_QuantConv, nn.Conv3d):
    """`nn.Conv3d` with a quantized weight; input (N, C, D, H, W)."""


class _QuantTransposed(_QuantWeight):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
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
    return layer.weight_quantizer


def can_quantize(module: nn.Module) -> str:
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
    """A quantized twin of a float layer that holds the same parameters and parametrizations; `name` is for messages."""
    reason = can_quantize(module)
    if reason:
        raise QuantizationError(f"layer {name} {reason}; leave it float with a rule (match: {name}, enable: false)")
    float_class = _float_class(module)
    assert float_class is not None  # `can_quantize` has found it
    quantized = _QUANTIZED[float_class]
    if isinstance(module, Named):
        quantized = _NAMED[quantized]
    layer = twin_of(module, quantized)
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


def twin_of(module: nn.Module, kind: type[nn.Module]) -> Any:
    """A layer of another class with the parameters and settings of a module, and neither its buffers nor children."""
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    constants = {k: v for k, v in vars(module).items() if k not in vars(layer)}
    layer.__dict__.update(constants)  # kernel_size, stride, ...: what the float layer was made with
    layer.training = module.training
    layer._parameters.update(module._parameters)  # weight, bias (None too), and what a subclass adds to them
    return layer


def quantize_channels(layer: Any, amax: Tensor, quant_format: QuantFormat) -> Quantizer:
    """Give a quantized layer's weight a range for each channel, from one or as many as there are; in place."""
    axis, old = weight_axis(layer), weight_quantizer_of(layer)
    channels = layer.weight.shape[axis]
    new = Quantizer(replace(quant_format, axis=axis), channels=channels, name=old.name).to(amax.device)
    new.set_amax(amax.expand(channels))
    layer.weight_quantizer = new
    return new


def _move_parametrizations(source: Any, target: Any) -> None:
    """Share the parametrizations of `source`; a tensor computed of several (weight_norm) becomes a plain parameter."""
    for key, chain in source.parametrizations.items():
        target.register_parameter(key, nn.Parameter(getattr(source, key).detach().clone()))
        if not chain.is_tensor:
            continue
        for item in chain:
            parametrize.register_parametrization(target, key, item, unsafe=True)
        target.parametrizations[key].original = chain.original
