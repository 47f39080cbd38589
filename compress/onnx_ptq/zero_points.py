"""Zero points of a file's activations from images (`quantization.ptq.zero_points` decides)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compress.engines.base import Arrays
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.read import Reading
from compress.onnx_ptq.run import FloatSession
from compress.onnx_ptq.smooth import on_images
from compress.quantization.placement.decisions import Placement
from compress.quantization.placement.place import place
from compress.quantization.placement.view import Node
from compress.quantization.ptq.zero_points import lowest_expected, signed_tensors, spread
from compress.quantization.spec import QuantSpec


def place_on_images(source: SourceFile, reading: Reading, spec: QuantSpec, batches: Sequence[Arrays]) -> Placement:
    """Decide where quantizers are placed (`place`), with zero points from images where the specification looks at them.

    Raises:
        QuantizationError: as `place`.
        CalibrationError: the network fails on an image.
    """
    placement = place(reading.view, spec)
    tensors = signed_tensors(placement, spec)
    if not tensors:
        return placement
    seen = on_images(lambda images: _ranges(FloatSession(source, tensors), images), source, batches)
    index = Index(source)

    def constant(user: Node, node: Node) -> Tensor | None:
        made = reading.nodes.get(user.name, ())
        others = [name for each in made for name in each.input if name != node.name]
        value = index.value(others[0]) if len(made) == len(others) == 1 and others[0] in index.unchanging else None
        return None if value is None else torch.tensor(value, dtype=torch.float32)

    return place(reading.view, spec, lowest_expected(reading.view, seen, constant))


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
