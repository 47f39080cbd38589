"""Bias correction: quantized weights shift the mean of a layer's outputs, and a change of the bias restores it.

With e = W_q - W, outputs move by e E[x] on average (Nagel et al., arXiv 1906.04721, section 4.2). The shift is often
most of the error where a channel has few weights (depthwise convolutions) or a scale few steps. Two ways find it:

- `analytic`: E[x] follows from the BatchNorm statistics of the layers before, for the error of the weights only. A
layer
  whose input has no known mean is left as it is and reported. Zero padding is ignored, as in the paper.
- `empirical`: the shift is the mean difference of the layer's output between the float and the quantized network over
  calibration images, layer after layer. This also corrects the error of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from compress.errors import QuantizationError
from compress.graph.layers import tensor_args
from compress.graph.ops import module_kind, tensor_of
from compress.quantization.ptq.moments import propagate_moments
from compress.quantization.ptq.walk import Visit
from compress.quantization.report import Correction, Moments, placement_of

IMAGES = 256
"""Largest number of images for the empirical correction."""


def expected_shift(layer: Any, error: Tensor, mean: Tensor) -> Tensor:
    """The mean shift (out,) of a layer's outputs when its weight moves by `error`, with mean inputs (in,)."""
    groups = int(getattr(layer, "groups", 1))
    if module_kind(layer) == "conv_transpose":
        stride = 1
        for step in layer.stride:
            stride *= step
        rows = error.flatten(2).sum(2).unflatten(0, (groups, -1))  # (g, in / g, out / g)
        return torch.einsum("gio,gi->go", rows, mean.view(groups, -1)).flatten() / stride
    rows = (error.flatten(2).sum(2) if error.dim() > 2 else error).unflatten(0, (groups, -1))  # (g, out / g, in / g)
    return torch.einsum("goi,gi->go", rows, mean.view(groups, -1)).flatten()


@torch.no_grad()
def correct_bias_analytic(
    qmodel: fx.GraphModule, moments: dict[str, Moments], *, weights: Mapping[str, Tensor] | None = None
) -> tuple[Correction, ...]:
    """Subtract from each bias (`insert_quantizers` adds it) the expected shift of its layer's output; in place.

    `moments` of the layers' outputs are those before quantization, rescaled with the layers; `weights` are the float
    ones, where those of the model are rounded already.

    Raises:
        QuantizationError: the mean of no layer's input is known.
    """
    known = propagate_moments(qmodel, moments)
    rows = []
    for site in placement_of(qmodel).weights:
        calls = [n for n in qmodel.graph.nodes if n.op == "call_module" and n.target == site.path]
        if len(calls) != 1:
            rows.append(Correction(layer=site.path, shift=0.0, reason=f"is called {len(calls)} times"))
            continue
        source = known.get(tensor_args(calls[0])[0])
        if source is None:
            rows.append(
                Correction(layer=site.path, shift=0.0, reason="the mean of its input does not follow from a BatchNorm")
            )
            continue
        layer: Any = qmodel.get_submodule(site.path)
        shift = expected_shift(layer, layer.quantized_weight - (weights or {}).get(site.path, layer.weight), source[0])
        layer.bias.sub_(shift)
        rows.append(Correction(layer=site.path, shift=shift.abs().max().item()))
    if all(row.reason for row in rows):
        raise QuantizationError(
            "bias_correction: analytic needs BatchNorm statistics, and no quantized layer consumes the output of a "
            "folded BatchNorm; use bias_correction: empirical, which takes calibration images"
        )
    return tuple(rows)


@torch.no_grad()
def correct_to_targets(this: Visit, before: Correction | None = None) -> Correction:
    """Add to a layer's bias the mean of (target - output), per channel; in place; once for a layer called twice."""
    if before is not None:
        return replace(before, reason="is called twice: corrected for its first call")
    axis = -1 if module_kind(this.layer) == "linear" else 1
    total, count = torch.zeros((), dtype=torch.float64), 0
    for x, target in zip(this.inputs, this.targets, strict=True):
        difference = (target - this.layer(x, **this.settings)).movedim(axis, 0).flatten(1)
        total = total.to(difference.device) + difference.double().sum(1)
        count += difference.shape[1]
    shift = (total / count).float()
    tensor_of(this.layer, "bias").add_(shift)
    return Correction(layer=this.path, shift=shift.abs().max().item())
