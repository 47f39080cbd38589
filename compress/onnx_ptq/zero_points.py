"""Zero points of a file's activations: where images show that few values are negative, few integers are.

A tensor whose lowest value is not known from the operations (`placement.values`) is measured. An operation that is flat
below a value, as a hard-swish is below -3, needs no integers there either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx

from compress.engines.base import Arrays
from compress.graph.traits import PASSING
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.run import FloatSession
from compress.onnx_ptq.smooth import on_images, spread
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.place import place
from compress.quantization.placement.targets import TABLES
from compress.quantization.placement.view import Node
from compress.quantization.ptq.channel_scales import looks_at_layers
from compress.quantization.spec import QuantSpec

MARGIN = 1 / 16
"""Share of the range that is left for images that were not looked at."""
GAIN = 0.75
"""Largest share of the negative range in the positive one for which a zero point is worth it."""


def place_on_images(source: SourceFile, reading: Reading, spec: QuantSpec, batches: Sequence[Arrays]) -> Placement:
    """Decide where quantizers are placed (`place`), with zero points from images where the specification looks at them.

    Raises:
        QuantizationError: as `place`.
        CalibrationError: the network fails on an image.
    """
    placement = place(reading.view, spec)
    if not looks_at_layers(spec) or not TABLES[spec.only_target].zero_points:
        return placement
    signed = [site for site in placement.activations if site.format.signed and not site.format.lowest]
    tensors = dict.fromkeys(tensor for site in signed for tensor, _ in site.edges)
    if not tensors:
        return placement
    seen = on_images(lambda images: _ranges(FloatSession(source, tensors), images), source, batches)
    flat = _flat_below(source, reading)
    lowest = {name: max(_expected(*ends), flat.get(name, -math.inf)) for name, ends in seen.items()}
    gains = {name: least for name, least in lowest.items() if 0 < -least < GAIN * seen[name][1]}
    return place(reading.view, spec, gains)


def _ranges(session: FloatSession, images: Sequence[Arrays]) -> dict[str, tuple[float, float]]:
    """The lowest and the highest value of each tensor."""
    found: dict[str, tuple[float, float]] = {}
    for image in spread(images):
        for name, value in session.run(image).items():
            array = np.asarray(value)
            if array.size:
                low, high = found.get(name, (math.inf, -math.inf))
                found[name] = min(low, float(array.min())), max(high, float(array.max()))
    return found


def _expected(low: float, high: float) -> float:
    """The value that other images are not expected below."""
    return min(low - MARGIN * (high - low), -MARGIN * high)


def _flat_below(source: SourceFile, reading: Reading) -> dict[str, float]:
    """The tensors whose values below one, which is below 0, make no difference to any operation that consumes them."""
    index, flat = Index(source), dict[Node, float]()
    for node in reversed(reading.view.nodes):
        found = (_flat_for(node, user, flat[user], reading.nodes.get(user.name, ()), index) for user in node.consumers)
        flat[node] = min(found, default=-math.inf)
    return {node.name: least for node, least in flat.items() if -math.inf < least < 0}


def _flat_for(node: Node, user: Node, result: float, made: Sequence[onnx.NodeProto], index: Index) -> float:
    """The value below which one consumer is flat; `result` is that of the consumer's own result."""
    if user.kind in PASSING or (user.traits.free and user.traits.category == "movement"):
        return result
    if user.kind not in ("add", "mul"):
        return user.traits.flat_below
    others = [name for each in made for name in each.input if name != node.name]
    value = index.value(others[0]) if len(made) == len(others) == 1 and others[0] in index.unchanging else None
    if value is None or not value.size or not bool(np.isfinite(value).all()):
        return -math.inf
    if user.kind == "add":
        return float((result - value).min())
    return float((result / value).min()) if bool((value > 0).all()) else -math.inf
