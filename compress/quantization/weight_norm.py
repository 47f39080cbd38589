"""Weight normalization before rounding (Li et al., Additive Powers-of-Two Quantization, arXiv 1909.13144, section 2.3).

A layer quantizes

    w' = (w - mean(w)) / std(w) * gain

instead of w, which keeps a learned step stable while weights train. `gain` is the first standard deviation: a
trained network computes nearly what it did.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.graph.parametrized import bake, register_picklable
from compress.quantization.modules import _QuantWeight
from compress.quantization.spec import MOST_BITS


class NormalizedWeight(nn.Module):
    """Parametrization of a weight: mean 0 and the standard deviation that it had at first (buffer `gain`, ())."""

    gain: Tensor

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.register_buffer("gain", gain.detach().clone())

    def forward(self, weight: Tensor) -> Tensor:
        """Return the normalized weight; any shape."""
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
