"""Bias correction: quantized weights shift the mean of a layer's outputs, and a change of the bias restores it.

With e = W_q - W, outputs move by e E[x] on average (Nagel et al., arXiv 1906.04721, section 4.2). The shift is often
most of the error where a channel has few weights (depthwise convolutions) or a scale few steps. Three ways find it:

- `auto`: with the error of the inputs too, the mean over images and windows is W E[x] in float and W_q E[x_q] in 8
  bits, so only the mean of the inputs at each tap of the window is needed, and no layer waits for those before it.
- `analytic`: E[x] follows from the BatchNorm statistics of the layers before, for the error of the weights only. A
  layer whose input has no known mean is reported. Zero padding is ignored, as in the paper.
- `empirical`: the shift is the mean difference of the layer's output between the float and the quantized network over
  calibration images, layer after layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.layers import tensor_args
from compress.graph.ops import TRAITS, Watching, module_kind, node_kind, node_module, tensor_of
from compress.quantization.calibration.calibrate import calibrating
from compress.quantization.numerics import fake_quantize
from compress.quantization.ptq.on_images import spread
from compress.quantization.ptq.rescaling import channel_groups, propagate_moments, shared_parameters
from compress.quantization.ptq.walk import Visit, on_images
from compress.quantization.quantizer import Quantizer
from compress.quantization.report import Correction, Moments, placement_of

# Largest number of images for the empirical correction.
IMAGES = 256


@dataclass(frozen=True, kw_only=True)
class Window:
    """The window of a convolution, a number for each axis; `before` and `after` are its paddings with zeros."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


def mean_inputs(x: Tensor, window: Window | None) -> Tensor:
    """The mean input at each tap of a layer's window, over images and places: (C, kernel...); (C,) if it is linear."""
    if window is None:
        return x.reshape(-1, x.shape[-1]).mean(0)
    count, sums = len(x), x.sum(0) if len(x) > 1 else x[0]
    for i, kernel in enumerate(window.kernel):  # (C, kernel..., sizes...): each axis gives way to the window's taps
        places = torch.arange(-window.before[i], sums.shape[i + 1] + window.after[i])
        places = places.unfold(0, window.dilations[i] * (kernel - 1) + 1, window.strides[i])[:, :: window.dilations[i]]
        met = (places[..., None] == torch.arange(sums.shape[i + 1])).any(0).T.to(sums)  # (size, kernel)
        sums, count = torch.tensordot(sums, met, ([i + 1], [0])).movedim(-1, i + 1), count * len(places)
    return sums / count


def certain_shift(weight: Tensor, rounded: Tensor, means: Sequence[tuple[Tensor, Tensor]], groups: int) -> Tensor:
    """The mean shift (out,) of a layer's outputs, of each channel less what chance explains (James and Stein).

    `means` are the inputs of each image (`mean_inputs`), in float and rounded.
    """
    shifts = torch.stack([_times(rounded, y, groups) - _times(weight, x, groups) for x, y in means])
    mean = shifts.mean(0)
    if len(shifts) == 1:
        return mean
    chance = shifts.var(0) / len(shifts)
    return mean * (1 - chance / mean.square().clamp_min(1e-30)).clamp_min(0)


def _times(weight: Tensor, inputs: Tensor, groups: int) -> Tensor:
    rows = weight.reshape(groups, len(weight) // groups, -1)
    return torch.einsum("goi,gi->go", rows, inputs.reshape(groups, -1)).reshape(-1)


def expected_shift(layer: Any, error: Tensor, mean: Tensor) -> Tensor:
    """The mean shift (out,) of a layer's outputs when its weight moves by `error`, with mean inputs (in,)."""
    groups = channel_groups(layer)
    if module_kind(layer) == "conv_transpose":
        rows = error.flatten(2).sum(2).unflatten(0, (groups, -1))  # (g, in / g, out / g)
        return torch.einsum("gio,gi->go", rows, mean.view(groups, -1)).flatten() / math.prod(layer.stride)
    rows = (error.flatten(2).sum(2) if error.dim() > 2 else error).unflatten(0, (groups, -1))  # (g, out / g, in / g)
    return torch.einsum("goi,gi->go", rows, mean.view(groups, -1)).flatten()


@torch.no_grad()
def correct_bias_analytic(
    qmodel: fx.GraphModule, moments: dict[str, Moments], *, weights: Mapping[str, Tensor] | None = None
) -> tuple[Correction, ...]:
    """Subtract from each bias (`insert_quantizers` adds it) the expected shift of its layer's output; in place.

    `moments` of the layers' outputs are those before quantization, rescaled with the layers; `weights` are the float
    ones, where those of the model are rounded already.
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
        rows.append(_corrected(site.path, layer, -shift))
    if all(row.reason for row in rows):
        raise QuantizationError(
            "bias_correction: analytic needs BatchNorm statistics, and no quantized layer consumes the output of a "
            "folded BatchNorm; use bias_correction: empirical, which takes calibration images"
        )
    return tuple(rows)


@torch.no_grad()
def correct_bias_means(
    qmodel: fx.GraphModule, batches: Sequence[Any], weights: Mapping[str, Tensor]
) -> tuple[Correction, ...]:
    """Subtract from each bias the mean shift of its layer's output on some images, for `auto`; in place.

    Layers without a bias have no row, nor have those that are called twice or whose parameters are used elsewhere too.
    `weights` are the float ones where those of the model are rounded already.
    """
    found, shared = dict[str, list[tuple[str, Any, Window | None, Quantizer]]](), shared_parameters(qmodel)
    calls = Counter(str(node.target) for node in qmodel.graph.nodes)
    for node in qmodel.graph.nodes:
        path, quantizer = str(node.target), _quantizer_before(node)
        layer: Any = node_module(node) if node.op == "call_module" else None
        known = node_kind(node) in ("conv", "linear") and hasattr(layer, "weight_quantizer")
        own = known and calls[path] == 1 and path not in shared and isinstance(layer.bias, nn.Parameter)
        batch = own and (isinstance(layer, nn.Linear) or len(node.meta.get("shape") or ()) == layer.weight.dim())
        if batch and quantizer is not None:
            found.setdefault(node.all_input_nodes[0].name, []).append((path, layer, _window(layer), quantizer))
    means: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def look(name: str, x: Tensor) -> None:
        x, rounded = x.float(), dict[Quantizer, Tensor]()
        for path, _, window, quantizer in found[name] if x.numel() else ():  # empty: an expert that no token reaches
            if quantizer not in rounded:
                rounded[quantizer] = fake_quantize(x, quantizer.scale, quantizer.format)
            both = mean_inputs(x, window), mean_inputs(rounded[quantizer], window)
            means.setdefault(path, []).append(both)

    def measured(images: Sequence[tuple[Tensor, ...]]) -> bool:
        means.clear()
        for image in spread(images):
            Watching(qmodel, found, look).run(*image)
        return True

    with calibrating(qmodel, {}):
        on_images(measured, qmodel, batches, all_reduce=False)
    rows = []
    for path, layer, *_ in (each for same in found.values() for each in same if each[0] in means):
        shift = certain_shift(
            weights.get(path, layer.weight), layer.quantized_weight, means[path], channel_groups(layer)
        )
        rows.append(_corrected(path, layer, -shift))
    return tuple(rows)


def _corrected(path: str, layer: nn.Module, added: Tensor) -> Correction:
    tensor_of(layer, "bias").add_(added)
    return Correction(layer=path, shift=added.abs().max().item(), added=added)


def _quantizer_before(node: fx.Node) -> Quantizer | None:
    """The quantizer of a layer's input, which may be before operations that it passes."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        module = node_module(node) if node.op == "call_module" else None
        if isinstance(module, Quantizer):
            return module
        traits = TRAITS[node_kind(node)]
        if not (traits.commutes_with_quantization or traits.takes_apart):
            return None
    return None


def _window(layer: Any) -> Window | None:
    if module_kind(layer) != "conv":
        return None
    pads = layer._reversed_padding_repeated_twice  # of the last axis first
    return Window(
        kernel=layer.kernel_size,
        strides=layer.stride,
        dilations=layer.dilation,
        before=tuple(pads[::2][::-1]),
        after=tuple(pads[1::2][::-1]),
    )


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
    return _corrected(this.path, this.layer, (total / count).float())
