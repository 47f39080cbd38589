"""Work of layers under a configuration, from shapes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from compress.graph.layers import Layer
from compress.search.space import SPARSE_24, Configuration, formats_of, left_out, sparse_layers, widths_of
from compress.search.structure import Structure, shares_of_axes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Work of a layer for one image.

    Attributes:
        kind: `conv`, `pointwise`, `depthwise`, `grouped`, `linear`, ...
        format: of the weight, such as `int8 2:4`.
        read, written, weights: elements.
        inputs, outputs: channels; 0 = none may go.
    """

    path: str
    kind: str
    format: str
    macs: float
    read: float
    written: float
    weights: float
    inputs: float = 0.0
    outputs: float = 0.0

    def padded(self, block: int) -> LayerCost:
        """The work of an engine that fills up blocks of so many channels."""
        if block == 1:
            return self
        read, written = _padding(self.inputs, block), _padding(self.outputs, block)
        both = read if self.kind == "depthwise" else read * written
        return replace(
            self,
            macs=both * self.macs,
            read=read * self.read,
            written=written * self.written,
            weights=both * self.weights,
        )


@dataclass(frozen=True, kw_only=True)
class _Channels:
    """Share of an axis that is left, and its channels; 0 of an axis that stays whole."""

    share: float
    count: float


class Costs:
    """Costs of a float network's layers under any configuration."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self._sizes = {name: len(group.classes) for name, group in structure.groups.items()}
        self._axes = shares_of_axes(structure)
        self._batch = max(1, len(structure.inputs[0]))

    def of(self, configuration: Configuration) -> tuple[LayerCost, ...]:
        """Costs of every weighted layer that is left."""
        widths, gone = {**self._sizes, **widths_of(configuration)}, left_out(configuration)
        formats = formats_of(self.structure, configuration)
        sparse = set(sparse_layers(self.structure, configuration))
        skipped = {layer for name in gone for layer in self.structure.blocks[name].layers}
        return tuple(
            self._cost(row, widths, f"{formats[row.path]} {SPARSE_24}" if row.path in sparse else formats[row.path])
            for row in self.structure.layers
            if row.path not in skipped
        )

    def _cost(self, row: Layer, widths: dict[str, int], name: str) -> LayerCost:
        weight = f"{row.path}.weight"
        kind = kind_of(row)
        if kind == "depthwise":
            read = written = self._channels((weight, "vector"), widths)
        else:
            read, written = self._channels((weight, "in"), widths), self._channels((weight, "out"), widths)
        both = read.share if kind == "depthwise" else read.share * written.share
        return LayerCost(
            path=row.path,
            kind=kind,
            format=name,
            macs=both * row.weight_macs / self._batch,
            read=read.share * _elements(row.input_shapes[0]) / self._batch,
            written=written.share * _elements(row.output_shape or ()) / self._batch,
            weights=both * row.weight_elements,
            inputs=read.count,
            outputs=written.count,
        )

    def _channels(self, axis: tuple[str, str], widths: dict[str, int]) -> _Channels:
        counts: Counter[str] = self._axes.get(axis, Counter())
        if not any(counts):
            return _Channels(share=1.0, count=0.0)
        left = sum(n * (widths[name] / self._sizes[name] if name else 1.0) for name, n in counts.items())
        return _Channels(share=left / sum(counts.values()), count=left)


def kind_of(row: Layer) -> str:
    """The kind of a layer as engines have kernels for it."""
    if row.kind != "conv":
        return row.kind
    if row.groups > 1:
        return "depthwise" if row.input_shapes[0][1] == row.groups else "grouped"
    return "pointwise" if all(size == 1 for size in row.kernel) else "conv"


def _padding(count: float, block: int) -> float:
    """Channels that are computed for each one that is there."""
    return math.ceil(count / block) * block / count if count else 1.0


def _elements(shape: tuple[int, ...]) -> float:
    count = 1.0
    for size in shape:
        count *= size
    return count
