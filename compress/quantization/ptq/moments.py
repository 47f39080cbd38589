"""Means and deviations of a network's tensors without data, propagated from its BatchNorms through the graph.

A BatchNorm with shift beta and factor gamma returns values of mean beta and deviation |gamma|, taken as normal (Nagel
et al., "Data-Free Quantization", arXiv 1906.04721, section 4.2.1). A ReLU or ReLU6 clips the normal distribution, sums
add means (and variances, as if independent), and average pooling preserves means. After any other operation, or a
layer without BatchNorm, the moments are unknown.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from compress.graph.fold import foldable_pair
from compress.graph.layers import tensor_args
from compress.graph.ops import node_kind, node_module
from compress.graph.traits import AVERAGES, PASSING, WEIGHTED
from compress.quantization.report import Moments

_PRESERVES = PASSING | {"quantizer"}
_ROOT_2PI = math.sqrt(2 * math.pi)


def clipped_normal(mean: Tensor, deviation: Tensor, high: float = math.inf) -> Moments:
    """Mean and deviation (at least 0) of min(max(x, 0), high) for normal x (arXiv 1906.04721, appendix C)."""
    mean, deviation = mean.double(), deviation.double().clamp_min(1e-12)
    low = -mean / deviation
    top = (high - mean) / deviation
    inside = _cdf(top) - _cdf(low)
    above = 1 - _cdf(top)
    first = mean * inside + deviation * (_pdf(low) - _pdf(top))
    square = (mean.square() + deviation.square()) * inside + 2 * deviation * mean * (_pdf(low) - _pdf(top))
    square += deviation.square() * (_tail(low) - _tail(top))
    if math.isfinite(high):
        first, square = first + high * above, square + high**2 * above
    variance = (square - first.square()).clamp_min(0)
    return first.float(), variance.sqrt().float()


def batchnorm_moments(graph_module: fx.GraphModule) -> dict[str, Moments]:
    """The moments of each layer's output after its BatchNorm, by the layer's path; to call before folding."""
    found = {}
    for node in graph_module.graph.nodes:
        pair = foldable_pair(node)
        if pair is None:
            continue
        norm: Any = node_module(pair[1])
        shift, factor, like = norm.bias, norm.weight, norm.running_mean
        mean = torch.zeros_like(like) if shift is None else shift.detach().clone()
        deviation = torch.ones_like(like) if factor is None else factor.detach().abs()
        found[str(pair[0].target)] = (mean, deviation)
    return found


def propagate_moments(graph_module: fx.GraphModule, layers: dict[str, Moments]) -> dict[fx.Node, Moments]:
    """The moments of every tensor for which they follow from `layers` (`batchnorm_moments`); BatchNorm is folded."""
    known: dict[fx.Node, Moments] = {}
    for node in graph_module.graph.nodes:
        kind = node_kind(node)
        if kind in WEIGHTED and node.op == "call_module":
            moments = layers.get(str(node.target))
        else:
            moments = _through(node, kind, [known.get(source) for source in tensor_args(node)])
        if moments is not None:
            known[node] = moments
    return known


def _through(node: fx.Node, kind: str, sources: list[Moments | None]) -> Moments | None:
    inputs = [source for source in sources if source is not None]
    if not inputs or len(inputs) < len(sources):
        return None
    mean, deviation = inputs[0]
    if kind in _PRESERVES:
        return mean, deviation
    if kind == "relu":
        return clipped_normal(mean, deviation)
    if kind == "relu6":
        return clipped_normal(mean, deviation, 6.0)
    if kind == "add" and len(inputs) == 2 and inputs[1][0].shape == mean.shape:
        return mean + inputs[1][0], (deviation.square() + inputs[1][1].square()).sqrt()
    if kind == "concat":
        return torch.cat([m for m, _ in inputs]), torch.cat([d for _, d in inputs])
    if kind in AVERAGES and _padding(node) == 0:
        return mean, torch.zeros_like(deviation)  # only the mean of a pixel average is used
    if kind == "flatten" and node.meta.get("shape") is not None:
        repeat = node.meta["shape"][-1] // len(mean)
        return mean.repeat_interleave(repeat), deviation.repeat_interleave(repeat)
    return None


def _padding(node: fx.Node) -> int:
    module = node_module(node) if node.op == "call_module" else None
    padding: Any = node.kwargs.get("padding", 0) if module is None else getattr(module, "padding", 0)
    return max(padding) if isinstance(padding, (tuple, list)) else int(padding)


def _pdf(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / _ROOT_2PI


def _cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def _tail(x: Tensor) -> Tensor:
    """The x pdf(x) of a truncated normal's second moment; 0 at infinity."""
    return torch.where(x.isfinite(), x * _pdf(x), 0.0)
