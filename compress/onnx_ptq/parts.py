"""Slices and gathers that take one tensor apart along one axis, without gap or overlap: `chunk` and `unbind`.

Exporters write `split` in this way when they do not know the sizes. torch.fx sees one operation that takes the tensor
apart, and each part is quantized with a range of its own; a single slice is a view of the whole tensor.
"""

from __future__ import annotations

from itertools import pairwise

import onnx

from compress.onnx_ptq.index import Index, Shapes

Span = tuple[int, int, int]
"""Axis, first index, and index after the last."""


def find_parts(index: Index, shapes: Shapes) -> dict[str, Span]:
    """Return where each part lies in its tensor, by name."""
    found: dict[str, Span] = {}
    for name, readers in index.consumers.items():
        shape = shapes.get(name)
        if shape is None or len(readers) < 2:
            continue
        spans = {reader.output[0]: span for reader in readers if (span := _span(reader, name, shape, index))}
        for axis in {span[0] for span in spans.values()}:
            along = sorted((span[1:], part) for part, span in spans.items() if span[0] == axis)
            edges = sorted({edge for (start, end), _ in along for edge in (start, end)})
            pieces = {piece for piece, _ in along}
            whole = [0, *edges[1:]] == edges and edges[-1] == shape[axis]
            if len(pieces) > 1 and whole and pieces == set(pairwise(edges)):
                found.update((part, (axis, *piece)) for piece, part in along)
    return found


def _span(node: onnx.NodeProto, name: str, shape: tuple[int, ...], index: Index) -> Span | None:
    """Return the indices that a node takes of one axis of a tensor; None if it takes anything else."""
    if node.input[0] != name or not index.fixed.issuperset(node.input[1:]):
        return None
    if node.op_type == "Gather":
        value = index.value(node.input[1])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % len(shape)
        if value is None or value.size != 1:
            return None
        start = int(value.reshape(-1)[0]) % shape[axis]
        return axis, start, start + 1
    if node.op_type != "Slice" or len(node.input) < 4:
        return None
    values = [index.value(key) for key in node.input[1:]]
    if any(value is None or value.size != 1 for value in values):
        return None
    start, end, axis, *step = (int(value.reshape(-1)[0]) for value in values if value is not None)
    axis %= len(shape)
    first, last, stride = slice(start, end, *step).indices(shape[axis])
    return (axis, first, last) if stride == 1 and first < last else None
