"""Measures what the methods beyond calibration do to a network: noise at its outputs, beside that of plain PTQ.

A method may change the float function (ReLU6 to ReLU), or fail on a network that it does not suit. Both show as noise
at the outputs on the calibration pictures, against the float network, and plain PTQ is the yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.graph.batches import device_of, model_inputs
from compress.graph.inputs import flat_tensors
from compress.quantization.report import Comparison
from compress.quantization.spec import QuantSpec

IMAGES = 64
"""Largest number of pictures that are compared."""

_OFF: dict[str, Any] = {
    "relu6": "keep", "equalize": False, "smooth": None, "adaround": None, "bias_correction": None,
}  # fmt: skip


def methods(spec: QuantSpec) -> tuple[str, ...]:
    """Return the methods beyond calibration that a specification asks for, by the names of their keys."""
    return tuple(name for name, off in _OFF.items() if getattr(spec, name) != off)


def plain(spec: QuantSpec) -> QuantSpec:
    """Return a specification without them."""
    return replace(spec, **_OFF)


@torch.no_grad()
def compare_with_plain(
    model: nn.Module, qmodel: nn.Module, simple: nn.Module, batches: Iterable[Any], spec: QuantSpec, *, all_reduce: bool
) -> Comparison:
    """Return the signal to noise of two quantized forms of a network on calibration pictures.

    Args:
        model: the float network, in evaluation mode during the comparison.
        qmodel: with the methods of `spec`.
        simple: plain PTQ.
        batches: calibration data.
        spec: names the methods.
        all_reduce: sum over the processes of torch.distributed's default group.
    """
    training, totals, left = model.training, torch.zeros(3, dtype=torch.float64), IMAGES
    model.eval()
    try:
        for batch in batches:
            inputs = tuple(x[:left] for x in model_inputs(model, batch))
            left -= len(inputs[0])
            expected, ours, theirs = (_outputs(network, inputs) for network in (model, qmodel, simple))
            parts = (expected.square().sum(), (ours - expected).square().sum(), (theirs - expected).square().sum())
            totals += torch.stack(parts).cpu()
            if left <= 0:
                break
    finally:
        model.train(training)
    if all_reduce:
        found = totals.to(device_of(model))
        torch.distributed.all_reduce(found)
        totals = found.cpu()
    signal, noise, noise_plain = totals.tolist()
    return Comparison(
        methods=methods(spec), sqnr_db=_decibel(signal, noise), plain_sqnr_db=_decibel(signal, noise_plain)
    )


def _outputs(network: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return all floating-point results of a network as one vector."""
    tensors = [x for x in flat_tensors(network(*inputs)) if x.is_floating_point()]
    return torch.cat([x.double().reshape(-1) for x in tensors])


def _decibel(signal: float, noise: float) -> float:
    return 10 * math.log10(max(signal, 1e-300) / max(noise, 1e-300))
