"""What the open dimension of an engine's tensors stands for: images, or rows of which each image has many.

TensorRT flattens: in a transformer `[-1, 768]` holds batch times tokens, and `[-1, 197, 64]` batch times heads. Taken
for the batch alone, such a tensor counts a two-hundredth of its bytes. Told are the network's own inputs and outputs
(one row an image), and what the ONNX nodes of the layer that writes a tensor leave to others: known dimensions of the
tensor that all stand in the shape of such a result leave the rest of it to the open one. From there it spreads: to
other views of the same tensor, which have as many elements, and through kernels that keep their rows. What nothing
tells stays unknown, and is reported so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from compress.engines.engine_layers import (
    EngineLayer,
    EngineListing,
    EngineTensor,
    fused_steps,
    operation,
)
from compress.engines.onnx_shapes import NodeOutput, OnnxShapes

_View = tuple[str, tuple[int, ...]]
_Rows = dict[_View, int]
_MIXES = {"Resh", "Tran", "Slic", "Gath", "Repl", "Squ", "Perm"}
"""Steps after which the open dimension may hold something else."""


def with_rows(listing: EngineListing, shapes: OnnxShapes | None = None) -> EngineListing:
    """The listing with `rows` of every tensor told, or None where they are unknown.

    Args:
        listing: as a parser read it.
        shapes: of the ONNX file that the engine was built from, where that is at hand.
    """
    known = _borders(listing) | _from_onnx(listing, shapes or {})
    _spread(listing, known)
    _drop_contradictions(listing, known)

    def told(tensors: Sequence[EngineTensor]) -> tuple[EngineTensor, ...]:
        return tuple(replace(t, rows=known.get(_view(t))) if -1 in t.shape else t for t in tensors)

    layers = tuple(replace(x, inputs=told(x.inputs), outputs=told(x.outputs)) for x in listing.layers)
    return replace(listing, layers=layers)


def _view(tensor: EngineTensor) -> _View:
    return tensor.name, tensor.shape


def _open(tensors: Sequence[EngineTensor]) -> Iterator[EngineTensor]:
    """Those with one open dimension; two of them cannot be told apart."""
    return (t for t in tensors if t.shape.count(-1) == 1)


def _known_size(shape: tuple[int, ...]) -> int:
    return math.prod(size for size in shape if size >= 0)


def _borders(listing: EngineListing) -> _Rows:
    """The network's own inputs and outputs, whose first dimension is the batch."""
    border = {*listing.inputs, *listing.outputs}
    every = [t for layer in listing.layers for t in (*_open(layer.inputs), *_open(layer.outputs)) if t.name in border]
    ranks = {name: max(len(t.shape) for t in every if t.name == name) for name in {t.name for t in every}}
    return {_view(t): 1 for t in every if t.shape[0] == -1 and len(t.shape) == ranks[t.name]}


def _from_onnx(listing: EngineListing, shapes: OnnxShapes) -> _Rows:
    """Of tensors whose layer leaves a result of their dimensions, and none of the same dimensions with other rows."""
    found: _Rows = {}
    for layer in listing.layers:
        leaving = [out for node in layer.onnx_nodes for out in shapes.get(node, ()) if _leaves(out, layer)]
        for tensor in _open(layer.outputs):
            rows = {n for out in leaving if (n := _rows_left(tensor.shape, out.dims)) is not None}
            if len(rows) == 1:
                found[_view(tensor)] = rows.pop()
    return found


def _leaves(out: NodeOutput, layer: EngineLayer) -> bool:
    return out.result or not out.users <= set(layer.onnx_nodes)


def _rows_left(shape: tuple[int, ...], dims: tuple[int, ...]) -> int | None:
    """Rows of the open dimension for a result of `dims`; None where the shape is not a view of it.

    >>> _rows_left((-1, 64), (17, 64)), _rows_left((-1, 17, 32), (2, 17, 32)), _rows_left((-1, 1), (17, 64))
    (17, 2, None)
    """
    own, whole = (Counter(size for size in sizes if size > 1) for sizes in (shape, dims))
    reduced = shape[-1] == 1 and dims[-1:] != (1,)
    if not own or reduced or own - whole:
        return None
    return math.prod((whole - own).elements())


def _spread(listing: EngineListing, known: _Rows) -> None:
    """Add to `known` what follows from it, until nothing more does."""
    views: dict[str, set[_View]] = {}
    for layer in listing.layers:
        for tensor in (*_open(layer.inputs), *_open(layer.outputs)):
            views.setdefault(tensor.name, set()).add(_view(tensor))
    before = -1
    while len(known) > before:
        before = len(known)
        for same in views.values():
            sizes = {known[v] * _known_size(v[1]) for v in same if v in known}
            if len(sizes) == 1:
                size = sizes.pop()
                for view in same:
                    if view not in known and size % _known_size(view[1]) == 0:
                        known[view] = size // _known_size(view[1])
        for layer in listing.layers:
            _through(layer, known)


def _through(layer: EngineLayer, known: _Rows) -> None:
    """From a layer's tensors to those that have the same rows."""
    tensors = [*_open(layer.inputs), *_open(layer.outputs)]
    for tensor in tensors:
        if _view(tensor) in known:
            continue
        rows = {known[_view(t)] for t in tensors if _view(t) in known and _same_rows(layer, tensor.shape, t.shape)}
        if len(rows) == 1:
            known[_view(tensor)] = rows.pop()


def _same_rows(layer: EngineLayer, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the open dimensions of two tensors of a layer hold the same."""
    if len(one) != len(other) or one.index(-1) != other.index(-1):
        return False
    if one[:-1] == other[:-1] and 1 in (one[-1], other[-1]) and one[-1] != other[-1]:
        return True  # a mean over the last dimension, and what it is the mean of
    steps = fused_steps(layer.name)
    if steps:
        return not set(steps) & _MIXES or (set(steps) & _MIXES == {"Repl"} and "Conc" in steps)
    return one == other or operation(layer) in {"conv", "product", "pool"} or "gemm" in layer.name


def _drop_contradictions(listing: EngineListing, known: _Rows) -> None:
    """Forget tensors of which a layer would read more than another wrote."""
    written = {
        t.name: known[_view(t)] * _known_size(t.shape)
        for layer in listing.layers
        for t in _open(layer.outputs)
        if _view(t) in known
    }
    wrong = {name for (name, shape), n in known.items() if n * _known_size(shape) > written.get(name, math.inf)}
    for view in [view for view in known if view[0] in wrong]:
        del known[view]
