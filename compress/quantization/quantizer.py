"""The quantizer: a module that fake-quantizes a tensor, a Q/DQ pair once it is ONNX.

It holds one buffer, `amax`; the scale follows from it. While a calibrator is attached it watches and returns its
input untouched. Before it has ranges it refuses to run: a scale that nobody measured is not a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.errors import CalibrationError
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax, zero_of


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
        return fake_quantize(x, self.scale, self.format)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}amax" in state_dict:
            self._ready = bool((torch.isfinite(self.amax) & (self.amax > 0)).all())

    def extra_repr(self) -> str:
        """num_bits, axis, signedness and range."""
        f = self.format
        shown = "uncalibrated" if not self._ready else f"amax={self.amax.max().item():.4g}"
        kind = "e4m3" if f.kind == "e4m3" else f"{'int' if f.signed else 'uint'}{f.num_bits}"
        return f"{kind}, axis={f.axis}, {shown}" + (", off" if not self.enabled else "")


def quantizers(qmodel: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    """All quantizers of a model by path, including those of weights."""
    for name, module in qmodel.named_modules():
        if isinstance(module, Quantizer):
            yield name, module
