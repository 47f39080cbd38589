"""Damping of oscillations (Nagel et al., Overcoming Oscillations in QAT, arXiv 2203.11086, section 4.1).

With straight-through gradients a weight near the border of two integers goes back and forth between them, most of all
in depthwise convolutions of few bits, and the statistics of BatchNorm never fit. The loss

    strength * sum || Q(w) - clip(w, low * s, high * s) ||^2        (equation 5, Q(w) without a gradient)

pulls weights to the centre of their integer. It must not keep them from moving early in training, so its strength
rises from zero as half a cosine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compress.kernels.memory_format import along_axis
from compress.quantization.modules import _QuantWeight


def damping_strength(peak: float, share: float) -> float:
    """Return the strength after a share (0 to 1) of the training.

    >>> damping_strength(0.01, 0.0), damping_strength(0.01, 1.0)
    (0.0, 0.01)
    """
    return peak * (1 - math.cos(math.pi * share)) / 2


def damping_loss(qmodel: nn.Module) -> Tensor:
    """Return the squared distance of all quantized weights to their integers, (), with a gradient for weights alone."""
    total: Tensor | None = None
    for layer in qmodel.modules():
        if not isinstance(layer, _QuantWeight) or not layer.weight_quantizer.enabled:
            continue
        quantizer, weight = layer.weight_quantizer, layer.weight
        if quantizer.format.kind != "int":
            continue
        with torch.no_grad():
            scale = along_axis(quantizer.scale.detach(), weight, quantizer.format.axis)
            low, high = quantizer.format.low * scale, quantizer.format.high * scale
            center = quantizer(weight.detach())
        part = (center - weight.clamp(low, high)).square().sum()
        total = part if total is None else total + part
    return torch.zeros(()) if total is None else total
