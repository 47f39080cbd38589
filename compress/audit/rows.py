"""Infers how many rows each image has in the open dimension of an engine's tensors, such as tokens or heads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from compress.audit.layers import (
    EngineLayer,
    EngineListing,
    EngineTensor,
    fused_steps,
    operation,
)
from compress.onnx_graph import OnnxGraph

_View = tuple[str, tuple[int, ...]]
_Rows = dict[_View, int]
_MIXES = {"Resh", "Tran", "Slic", "Gath", "Repl", "Squ", "Perm"}
"""Steps after which the open dimension may hold something else."""
_GROWS = {"Repl", "Conc", "Iota", "Gath"}
"""Steps that may write more than was read."""
_KEEPS = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Cast",
    "Relu",
    "Erf",
    "Exp",
    "Sqrt",
    "Min",
    "Max",
    "Roun",
    "Resh",
    "Tran",
    "Move",
}
"""Steps that write one element for each that they read."""
_TWO, _THREE = 2, 3
_SMALL = 1024


@dataclass(frozen=True, kw_only=True)
class NodeOutput:
    """A result of a node.

    Attributes:
        dims: shape for one image; a dimension of batch times tokens is given as tokens.
        users: nodes that read it.
        result: True if it is an output of the network.
    """

    dims: tuple[int, ...]
    users: frozenset[str]
    result: bool


OnnxShapes = Mapping[str, tuple[NodeOutput, ...]]
"""Results by the name of their node, without those that do not grow with the batch or whose size is unknown."""


def with_rows(listing: EngineListing, shapes: OnnxShapes | None = None) -> EngineListing:
    """The listing with `rows` of every tensor, None if unknown; `shapes` are of its ONNX file."""
    known = _borders(listing)
    _spread(listing, shapes or {}, known)
    _drop_contradictions(listing, known)

    def filled(tensors: Sequence[EngineTensor]) -> tuple[EngineTensor, ...]:
        return tuple(replace(t, rows=known.get(_view(t))) if -1 in t.shape else t for t in tensors)

    layers = tuple(replace(x, inputs=filled(x.inputs), outputs=filled(x.outputs)) for x in listing.layers)
    return replace(listing, layers=layers)


def _view(tensor: EngineTensor) -> _View:
    return tensor.name, tensor.shape


def _open(tensors: Sequence[EngineTensor]) -> Iterator[EngineTensor]:
    return (t for t in tensors if t.shape.count(-1) == 1 and 0 not in t.shape)


def _known_size(shape: tuple[int, ...]) -> int:
    return math.prod(size for size in shape if size != -1)


def _borders(listing: EngineListing) -> _Rows:
    """The rows of the network's own inputs and outputs, whose first dimension is the batch."""
    border = {*listing.inputs, *listing.outputs}
    every = [t for layer in listing.layers for t in (*_open(layer.inputs), *_open(layer.outputs)) if t.name in border]
    ranks = {name: max(len(t.shape) for t in every if t.name == name) for name in {t.name for t in every}}
    return {_view(t): 1 for t in every if t.shape[0] == -1 and len(t.shape) == ranks[t.name]}


def _from_onnx(layer: EngineLayer, shapes: OnnxShapes, known: _Rows) -> None:
    """Infer rows from ONNX results of the same shape that the layer writes, if all of them agree."""
    leaving = [
        out
        for node in layer.onnx_nodes
        for out in shapes.get(node, ())
        if out.result or not out.users <= set(layer.onnx_nodes)
    ]
    most = _most_written(layer, known)
    for tensor in _open(layer.outputs):
        rows = {n for out in leaving if (n := _rows_left(tensor.shape, out.dims)) is not None}
        rows = {n for n in rows if n * _known_size(tensor.shape) <= most}
        if len(rows) == 1:
            known.setdefault(_view(tensor), rows.pop())


def _most_written(layer: EngineLayer, known: _Rows) -> float:
    steps, read = fused_steps(layer.name), list(_open(layer.inputs))
    if not steps or set(steps) & _GROWS or not read or operation(layer) == "product":
        return math.inf
    sizes = [known[_view(t)] * _known_size(t.shape) for t in read if _view(t) in known]
    return max(sizes) if len(sizes) == len(read) else math.inf


def _rows_left(shape: tuple[int, ...], dims: tuple[int, ...]) -> int | None:
    """The rows of the open dimension for a result of `dims`; None if the shape is not a view of it.

    >>> _rows_left((-1, 64), (17, 64)), _rows_left((-1, 17, 32), (2, 17, 32)), _rows_left((-1, 1), (17, 64))
    (17, 2, None)
    """
    own, whole = (Counter(size for size in sizes if size > 1) for sizes in (shape, dims))
    reduced = shape[-1] == 1 and dims[-1:] != (1,)
    if not own or reduced or own - whole:
        return None
    return math.prod((whole - own).elements())


def _spread(listing: EngineListing, shapes: OnnxShapes, known: _Rows) -> None:
    """Infer further rows from `known`, layer after layer, until none follow."""
    views: dict[str, dict[_View, EngineTensor]] = {}
    for layer in listing.layers:
        for tensor in (*_open(layer.inputs), *_open(layer.outputs)):
            views.setdefault(tensor.name, {})[_view(tensor)] = tensor
    before = -1
    while len(known) > before:
        before = len(known)
        for layer in listing.layers:
            for tensor in (*_open(layer.inputs), *_open(layer.outputs)):
                _from_other_views(tensor, views[tensor.name], known)
            _conserve(layer, known)
            _from_onnx(layer, shapes, known)
            _through(layer, known)


def _from_other_views(tensor: EngineTensor, views: dict[_View, EngineTensor], known: _Rows) -> None:
    """Infer rows from other views of the same tensor: a part has its strides and rows, any other all its elements."""
    if _view(tensor) in known:
        return
    found = set()
    for view, other in views.items():
        if view not in known:
            continue
        part = tensor.strides and tensor.strides == other.strides and tensor.shape.index(-1) == other.shape.index(-1)
        size, own = known[view] * _known_size(other.shape), _known_size(tensor.shape)
        if part:
            found.add(known[view])
        elif size % own == 0:
            found.add(size // own)
    if len(found) == 1:
        known[_view(tensor)] = found.pop()


def _conserve(layer: EngineLayer, known: _Rows) -> None:
    """Infer rows through a kernel that writes as many elements as it reads."""
    read, written = list(_open(layer.inputs)), list(_open(layer.outputs))
    steps = set(fused_steps(layer.name))
    if not steps or steps - _KEEPS or len(read) != 1 or len(written) != 1 or _view(read[0]) not in known:
        return
    size = known[_view(read[0])] * _known_size(read[0].shape)
    if size % _known_size(written[0].shape) == 0:
        known.setdefault(_view(written[0]), size // _known_size(written[0].shape))


def _through(layer: EngineLayer, known: _Rows) -> None:
    """Infer rows from other tensors of the layer whose rows are the same."""
    tensors = [*_open(layer.inputs), *_open(layer.outputs)]
    for tensor in tensors:
        if _view(tensor) in known:
            continue
        rows = {known[_view(t)] for t in tensors if _view(t) in known and _same_rows(layer, tensor.shape, t.shape)}
        if len(rows) == 1:
            known[_view(tensor)] = rows.pop()


def _same_rows(layer: EngineLayer, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if the open dimensions of two tensors of a layer hold the same rows."""
    if len(one) != len(other) or one.index(-1) != other.index(-1):
        return False
    if one[:-1] == other[:-1] and 1 in (one[-1], other[-1]) and one[-1] != other[-1]:
        return True  # a mean over the last dimension, and what it is the mean of
    steps = fused_steps(layer.name)
    if steps:
        return not set(steps) & _MIXES or (set(steps) & _MIXES == {"Repl"} and "Conc" in steps)
    return one == other or operation(layer) in {"conv", "product", "pool"} or "gemm" in layer.name


def _drop_contradictions(listing: EngineListing, known: _Rows) -> None:
    """Remove tensors of which a layer would read more than another wrote."""
    written = {
        t.name: known[_view(t)] * _known_size(t.shape)
        for layer in listing.layers
        for t in _open(layer.outputs)
        if _view(t) in known
    }
    wrong = {name for (name, shape), n in known.items() if n * _known_size(shape) > written.get(name, math.inf)}
    for view in [view for view in known if view[0] in wrong]:
        del known[view]


def onnx_shapes(path: Path | str) -> OnnxShapes:
    """The shapes of a file; {} if it cannot be read or shape inference fails."""
    try:
        model = onnx.load(str(path), load_external_data=False)
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) > _SMALL:
                tensor.ClearField("raw_data")
        two, three = (_inferred(model, batch) for batch in (_TWO, _THREE))
    except Exception:  # protobuf and shape inference have many classes of errors; rows are then unknown
        return {}
    consumers = OnnxGraph(model.graph).consumers
    results = {value.name for value in model.graph.output}
    found: dict[str, tuple[NodeOutput, ...]] = {}
    for node in model.graph.node:
        found[node.name] = tuple(
            NodeOutput(dims=dims, users=frozenset(n.name for n in consumers.get(name, ())), result=name in results)
            for name in node.output
            if (dims := _per_image(two.get(name), three.get(name))) is not None
        )
    return found


def _inferred(model: onnx.ModelProto, batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes that are known in all dimensions if the open batch of the inputs is `batch`."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    weights = {tensor.name for tensor in fixed.graph.initializer}
    for value in fixed.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in weights and dims and not dims[0].HasField("dim_value"):
            dims[0].dim_value = batch
    del fixed.graph.value_info[:]
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    return {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.output)
        if all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }


def _per_image(two: tuple[int, ...] | None, three: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The dimensions for one image.

    >>> _per_image((2, 17, 64), (3, 17, 64)), _per_image((34, 64), (51, 64)), _per_image((64, 64), (64, 64))
    ((17, 64), (17, 64), None)
    """
    if two is None or three is None or len(two) != len(three):
        return None
    grown = [i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if len(grown) != 1 or two[grown[0]] * _THREE != three[grown[0]] * _TWO:
        return None
    rows = two[grown[0]] // _TWO
    return tuple(rows if i == grown[0] else size for i, size in enumerate(two) if i != grown[0] or rows != 1)
