"""The work of each layer of a network under a configuration: macs, elements moved, format; from shapes alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from compress.graph.layers import Layer
from compress.search.space import SPARSE_24, Configuration, formats_of, left_out, sparse_layers, widths_of
from compress.search.structure import Structure, shares_of_axes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Work of a layer for one image.

    Attributes:
        path: of the layer.
        kind: `conv`, `pointwise`, `depthwise`, `grouped`, `linear`, ...
        format: of its weight, such as `int8` or `int8 2:4`.
        macs: multiply-accumulates.
        read: elements of its input.
        written: elements of its output.
        weights: elements of its weight.
    """

    path: str
    kind: str
    format: str
    macs: float
    read: float
    written: float
    weights: float


class Costs:
    """Costs of a network's layers under any configuration; the network is looked at once.

    Args:
        structure: of the float network.
    """

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self._sizes = {name: len(group.classes) for name, group in structure.groups.items()}
        self._axes = shares_of_axes(structure)
        self._batch = max(1, len(structure.inputs[0]))

    def of(self, configuration: Configuration) -> tuple[LayerCost, ...]:
        """Costs of every weighted layer that is left, in graph order."""
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
            left = self._share((weight, "vector"), widths)
            shares = (left, left, left, left)
        else:
            read, written = self._share((weight, "in"), widths), self._share((weight, "out"), widths)
            shares = (read * written, read, written, read * written)
        return LayerCost(
            path=row.path,
            kind=kind,
            format=name,
            macs=shares[0] * row.weight_macs / self._batch,
            read=shares[1] * _elements(row.input_shapes[0]) / self._batch,
            written=shares[2] * _elements(row.output_shape or ()) / self._batch,
            weights=shares[3] * row.weight_elements,
        )

    def _share(self, axis: tuple[str, str], widths: dict[str, int]) -> float:
        """Share of an axis that is left."""
        counts: Counter[str] = self._axes.get(axis, Counter())
        total = sum(counts.values())
        if not total:
            return 1.0
        return sum(n * (widths[name] / self._sizes[name] if name else 1.0) for name, n in counts.items()) / total


def kind_of(row: Layer) -> str:
    """The kind of a layer as far as engines run it by different kernels."""
    if row.kind != "conv":
        return row.kind
    if row.groups > 1:
        return "depthwise" if row.input_shapes[0][1] == row.groups else "grouped"
    return "pointwise" if all(size == 1 for size in row.kernel) else "conv"


def _elements(shape: tuple[int, ...]) -> float:
    count = 1.0
    for size in shape:
        count *= size
    return count
