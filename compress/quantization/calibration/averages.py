"""Averages of quantized tensors: their ranges are not chosen finer than their values can be."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from compress.graph.traits import AVERAGES
from compress.quantization.numerics import amax_from_scale, scale_from_amax
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.view import GraphView, Node


def raised_ranges(view: GraphView, placement: Placement, amax: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ranges of averages over an image that have to be larger, by quantizer.

    A mean of n integers is a multiple of 1/n, so that a step below 1/n of the input's adds nothing. Such ranges come
    from tensors that are zero but for rounding; ONNX Runtime refuses files whose steps lie further apart, at their
    first run. `view` is of the graph that the placement is for, `amax` the range of each activation quantizer.
    """
    nodes = {node.name: node for node in view.nodes}
    of_tensor = {tensor: site for site in placement.activations for tensor, _ in site.edges}
    before = {consumer: (tensor, site) for site in placement.activations for tensor, consumer in site.edges}
    found: dict[str, Tensor] = {}
    for node in view.nodes:  # in graph order: the input of an average may be an average
        if node.kind not in AVERAGES or node.name not in of_tensor or node.name not in before:
            continue
        tensor, given = before[node.name]
        most, own = _values(node, nodes[tensor]), of_tensor[node.name]
        step = scale_from_amax(found.get(given.name, amax[given.name]), given.format).max() / most
        least = float(amax_from_scale(step, own.format))
        if float(amax[own.name].max()) < least:
            found[own.name] = amax[own.name].clamp_min(least)
    return found


def _values(node: Node, before: Node) -> int:
    """Return how many values one element of an average is the mean of, at most."""
    whole, kept = math.prod(before.shape or ()), math.prod(node.shape or ())
    return max(1, whole // max(kept, 1)) if node.kind == "mean" else math.prod((before.shape or ())[2:])
