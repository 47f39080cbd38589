"""Averages of quantized tensors: their ranges are not chosen finer than their values can be."""

from __future__ import annotations

import math
from typing import cast

from torch import fx

from compress.graph.ops import node_kind, node_module
from compress.graph.traits import AVERAGES
from compress.quantization.quantizer import Quantizer


def widen_averages(graph_module: fx.GraphModule) -> None:
    """Raise the ranges of averages over an image whose input is quantized, in place.

    A mean of n integers is a multiple of 1/n, so that a step below 1/n of the input's adds nothing. Such ranges come
    from tensors that are zero but for rounding, as the mean of what a mean was taken from; ONNX Runtime refuses files
    whose steps lie further apart, at their first run.

    Args:
        graph_module: whose quantizers have ranges.
    """
    for node in graph_module.graph.nodes:
        source = node.args[0] if node_kind(node) == "quantizer" else None
        if not isinstance(source, fx.Node) or node_kind(source) not in AVERAGES or not source.args:
            continue
        before = source.args[0]
        if not isinstance(before, fx.Node) or node_kind(before) != "quantizer":
            continue
        most = math.prod((before.meta.get("shape") or ())[2:])  # values in a window, at most
        quantizer, given = cast(Quantizer, node_module(node)), cast(Quantizer, node_module(before))
        quantizer.set_amax(quantizer.amax.clamp_min(float(given.scale.max()) / most * quantizer.format.high))
