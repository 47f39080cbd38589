"""Signal to quantization noise of every weight and of every layer's output."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compress.graph.inputs import flat_tensors
from compress.graph.ops import node_kind
from compress.graph.traits import WEIGHTED
from compress.quantization.modules import QuantLinear
from compress.quantization.report import placement_of


@dataclass
class Noise:
    """Powers of a signal and of the noise in it, summed over tensors."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, signal: Any, value: Any) -> None:
        """Add a tensor, or all tensors of a structure, and what became of it."""
        for exact, rounded in zip(flat_tensors(signal), flat_tensors(value), strict=True):
            self.signal += exact.double().square().sum().item()
            self.noise += (exact.double() - rounded.double()).square().sum().item()

    @property
    def decibel(self) -> float:
        """The ratio of the two in dB; infinite without noise, -inf without signal."""
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def sqnr(signal: Tensor, value: Tensor) -> float:
    """Return the signal to quantization noise of `value` in dB: 10 log10(sum signal^2 / sum (signal - value)^2).

    Infinite when they are equal, -inf when the signal is zero and the value is not.
    """
    noise = Noise()
    noise.add(signal, value)
    return noise.decibel


@torch.no_grad()
def weight_sqnr(qmodel: nn.Module) -> dict[str, float]:
    """Return the SQNR in dB of every quantized weight, by layer path."""
    found = {site.path: cast(QuantLinear, qmodel.get_submodule(site.path)) for site in placement_of(qmodel).weights}
    return {path: sqnr(layer.weight, layer.quantized_weight) for path, layer in found.items()}


@torch.no_grad()
def output_sqnr(float_model: fx.GraphModule, qmodel: fx.GraphModule, images: Iterable[Tensor]) -> dict[str, float]:
    """Return the SQNR in dB of every weighted layer's output in the quantized network against the float one's.

    Both must come from the same trace, so that their nodes have the same names. The noise includes that of all layers
    before.

    Args:
        float_model: the folded float graph.
        qmodel: the quantized graph.
        images: batches, on the models' device.

    Returns:
        dB by layer path, in graph order.
    """
    names = {n.name: str(n.target) for n in qmodel.graph.nodes if node_kind(n) in WEIGHTED and n.op == "call_module"}
    found = {path: Noise() for path in names.values()}
    for batch in images:
        reference, value = _Recorder(float_model, names), _Recorder(qmodel, names)
        reference.run(batch)
        value.run(batch)
        for name in reference.values.keys() & value.values.keys():
            found[names[name]].add(reference.values[name], value.values[name])
    return {path: noise.decibel for path, noise in found.items()}


class _Recorder(fx.Interpreter):
    """Runs a graph and records the values of some nodes."""

    def __init__(self, module: fx.GraphModule, names: Collection[str]) -> None:
        super().__init__(module)
        self.names = names
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.names:
            self.values[n.name] = result
        return result
