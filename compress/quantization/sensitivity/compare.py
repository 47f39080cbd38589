"""Signal to quantization noise of every weight and of every layer's output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind
from compress.graph.traits import WEIGHTED
from compress.quantization.modules import QuantLinear
from compress.quantization.report import placement_of


def sqnr(signal: Tensor, value: Tensor) -> float:
    """Return the signal to quantization noise of `value` in dB: 10 log10(sum signal^2 / sum (signal - value)^2).

    Infinite when they are equal, -inf when the signal is zero and the value is not.
    """
    return decibel(signal.double().square().sum().item(), (signal.double() - value.double()).square().sum().item())


def weight_sqnr(qmodel: nn.Module) -> dict[str, float]:
    """Return the SQNR in dB of every quantized weight, by layer path."""
    found = {}
    with torch.no_grad():
        for site in placement_of(qmodel).weights:
            layer = cast(QuantLinear, qmodel.get_submodule(site.path))
            found[site.path] = sqnr(layer.weight, layer.quantized_weight)
    return found


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
    power = dict.fromkeys(names.values(), (0.0, 0.0))
    for batch in images:
        reference = _outputs(float_model, set(names), batch)
        value = _outputs(qmodel, set(names), batch)
        for name, path in names.items():
            if name in reference and name in value:
                signal, noise = power[path]
                difference = reference[name].double() - value[name].double()
                power[path] = (
                    signal + reference[name].double().square().sum().item(),
                    noise + difference.square().sum().item(),
                )
    return {path: decibel(signal, noise) for path, (signal, noise) in power.items()}


def decibel(signal: float, noise: float) -> float:
    """Return the ratio of two powers in dB; infinite without noise, -inf without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


class _Recorder(fx.Interpreter):
    """Runs a graph and records the values of some nodes."""

    def __init__(self, module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names = names
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.names:
            self.values[n.name] = result
        return result


def _outputs(module: fx.GraphModule, names: set[str], batch: Tensor) -> dict[str, Tensor]:
    recorder = _Recorder(module, names)
    with torch.no_grad():
        recorder.run(batch)
    return recorder.values
