"""An ONNX graph with its constants, producers and consumers at hand, and the windows of its operators."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from compress.errors import ExportError
from compress.files import path_of, replacing
from compress.graph.ops import onnx_operators
from compress.graph.spelled import AT

WEIGHTED_OPS = onnx_operators(lambda t: t.category == "weighted") | {"MatMul"}

# Operators that move the elements of their first input.
MOVES = onnx_operators(lambda t: t.category == "movement" and t.commutes_with_quantization)

# Operators whose result is quantized if their first input is; of a Concat, if all are.
PASSES = onnx_operators(lambda t: t.commutes_with_quantization) | {"Concat"}
# Those over which ONNX Runtime 1.31 moves pairs; it removes Dropout and Identity before.
MOVED_OVER = frozenset({"Dropout", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})

# Standard operators that have graphs as attributes.
_WITH_GRAPHS = frozenset({"If", "Loop", "Scan", "SequenceMap"})

# Operators whose results are not fixed, although they read nothing.
RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)

# Bytes of constants, of four each number, that shape inference may look at; larger ones are weights.
SMALL_CONSTANT = 1 << 16
# Metadata entry of a file of another program that was changed, and not quantized, which has an entry of its own.
WRITTEN_KEY = "compress.written"
_OWN = (b"\x12\x08compress", b"compress.target", WRITTEN_KEY.encode())  # the first: the producer of exported files
_UNMARKED = (".tflite", ".pte")  # hold no mark of who wrote them


@contextlib.contextmanager
def replacing_model(path: Path | str) -> Iterator[Path]:
    """`replacing`, but of no file of another program and of no weights of an ONNX file beside it (ExportError)."""
    path = path_of(path)
    content = path.read_bytes() if path.suffix not in _UNMARKED and path.is_file() else b""
    for other in sorted(path.parent.glob("*.onnx")) if path.is_file() else ():
        if other == path or not other.is_file() or path.name.encode() not in other.read_bytes():
            continue
        with contextlib.suppress(DecodeError):  # no ONNX file
            tensors = onnx.load(other, load_external_data=False).graph.initializer
            places = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
            if path.name in {place.removeprefix("./") for place in places}:
                raise ExportError(f"{path} holds weights of {other.name}, which would lose them: give another name")
    if content and not any(mark in content for mark in _OWN):
        raise ExportError(f"{path} is there, and compress did not write it: give another name, or remove that file")
    with replacing(path) as temporary:
        yield temporary


def write_model(path: Path | str, content: bytes) -> Path:
    with replacing_model(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


class OnnxGraph:
    """An index over a graph. It follows the constants that are added through it, and no other change of the graph.

    `outer` is the graph of the node that holds this one, such as a Loop, whose constants and results it reads.

    Attributes:
        constants: initializers and results of Constant nodes, by name.
        taken: names of all tensors, with those of the graphs inside nodes, which `free` does not give.
        consumers: the nodes that read each tensor, also in their graphs, once for each time; no outputs.
        fixed: tensors that follow from constants, or from the shapes of tensors.
    """

    def __init__(self, graph: onnx.GraphProto, outer: OnnxGraph | None = None) -> None:
        self.graph = graph
        self.constants: dict[str, onnx.TensorProto] = {} if outer is None else dict(outer.constants)
        self.constants |= {tensor.name: tensor for tensor in graph.initializer}
        self.producers: dict[str, onnx.NodeProto] = {} if outer is None else dict(outer.producers)
        self.consumers: dict[str, list[onnx.NodeProto]] = {}
        self.taken = {value.name for one in graphs_of(graph) for value in (*one.input, *one.output, *one.initializer)}
        self.taken.update(name for node in all_nodes(graph.node) for name in (*node.input, *node.output) if name)
        self.outputs = {value.name for value in graph.output}
        self.fixed = {*self.constants, ""}
        for node in graph.node:
            read = inputs_of(node)
            for name in read:
                self.consumers.setdefault(name, []).append(node)
            for name in node.output:
                self.producers[name] = node
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                self.constants[node.output[0]] = node.attribute[0].t
            if node.op_type == "Shape" or (node.op_type not in RANDOM and self.fixed.issuperset(read)):
                self.fixed.update(node.output)

    def array(self, name: str) -> NDArray[Any] | None:
        """Return a constant's value, also through Identity; None if `name` is computed."""
        if name in self.constants:
            return numpy_helper.to_array(self.constants[name])
        producer = self.producers.get(name)
        return self.array(producer.input[0]) if producer is not None and producer.op_type == "Identity" else None

    def value(self, name: str) -> NDArray[Any] | None:
        return self.array(name)

    def number(self, name: str) -> float | None:
        """Return the value of a constant that is one number; None for any other tensor."""
        value = self.value(name) if name in self.fixed and name else None
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def alone(self, name: str) -> onnx.NodeProto | None:
        """Return the only node that reads a tensor; None if there are several, or the graph returns it."""
        found = self.consumers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None

    def before(self, name: str, through: Iterable[str] = ()) -> Iterator[onnx.NodeProto | None]:
        """Yield the operators that a tensor is computed by, back to the first that is not of `through` (None: no node).

        Of an operator the first input is followed, and every input of a Concat.
        """
        waiting, seen = [name], {name}
        while waiting:
            producer = self.producers.get(waiting.pop())
            yield producer
            if producer is not None and producer.op_type in through:
                parts = list(producer.input) if producer.op_type == "Concat" else [producer.input[0]]
                waiting += [part for part in reversed(parts) if part not in seen]
                seen.update(parts)

    def dequantizer(self, name: str, through: Iterable[str] = ()) -> onnx.NodeProto | None:
        """Return the DequantizeLinear that a tensor comes from; None if there is none.

        Operators of `through` may lie between, as in `before`: one float part of a Concat makes the whole float. The
        result is then that of the first.
        """
        ends = [node for node in self.before(name, through) if node is None or node.op_type not in through]
        whole = all(node is not None and node.op_type == "DequantizeLinear" for node in ends)
        return ends[0] if ends and whole else None

    def free(self, name: str) -> str:
        """Return a name that no tensor of the graph has, the one given if it is free; it is taken from now on."""
        return free_name(name, self.taken)

    def add_constant(self, name: str, value: NDArray[Any]) -> str:
        """Add an initializer, and return its name, which another tensor may have made differ from the one given."""
        name = self.free(name)
        tensor = constant_tensor(name, value)
        self.graph.initializer.append(tensor)
        self.constants[name] = tensor
        self.fixed.add(name)
        return name

    def rewrite(self, rule: Callable[[onnx.NodeProto], list[onnx.NodeProto] | None]) -> int:
        """Put what `rule` returns in the place of each node (None = it stays); return how many nodes it replaced."""
        nodes: list[onnx.NodeProto] = []
        changed = 0
        for node in self.graph.node:
            made = rule(node)
            nodes += [node] if made is None else made
            changed += made is not None
        if changed:
            self.replace_nodes(nodes)
        return changed

    def replace_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        replace_nodes(self.graph, nodes)


# Returns the nodes in the place of one, which it may change; None = it stays.
Rule = Callable[[onnx.NodeProto, OnnxGraph], list[onnx.NodeProto] | None]


def each_node(rule: Rule) -> Callable[[onnx.ModelProto], int]:
    """A pass that applies a rule to each node of a model, in place, and returns how many nodes it replaced."""

    @functools.wraps(rule)
    def run(proto: onnx.ModelProto) -> int:
        view = OnnxGraph(proto.graph)
        return view.rewrite(lambda node: rule(node, view))

    return run


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Give a graph other nodes, in topological order, each with its own name; an index of it is stale afterwards."""
    nodes, taken = list(nodes), {""}
    for node in nodes:
        if node.name:  # a file may have the name that a pass invents
            node.name = free_name(node.name, taken)
    del graph.node[:]
    graph.node.extend(nodes)


_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Greater", "Where"})
# Functions that spelled activations have inside.
TELLING = frozenset({"Sigmoid", "HardSigmoid", "Softplus", "Erf", "Tanh", "Clip"})


class OnnxForm:
    """A graph in which `graph.spelled` looks for activations; a value is the name of a tensor."""

    def __init__(self, view: OnnxGraph, opset: int) -> None:
        self._view, self._opset = view, opset

    def node(self, value: str) -> onnx.NodeProto:
        return self._view.producers[value]

    def inputs(self, value: str) -> Sequence[str]:
        return [name for name in dict.fromkeys(self.node(value).input) if name not in self._view.fixed]

    def is_arithmetic(self, value: str) -> bool:
        maker = self._view.producers.get(value)
        return maker is not None and maker.op_type in _ARITHMETIC

    def reader(self, value: str) -> str | None:
        after = self._view.alone(value)
        return after.output[0] if after is not None and after.op_type in _ARITHMETIC | TELLING else None

    def computed(self, values: Sequence[str], x: str) -> Tensor | None:
        nodes = [self.node(value) for value in values]
        read = {name for node in nodes for name in node.input if name} - {x, *values}
        numbers = {name: self._view.number(name) for name in read}
        if None in numbers.values():
            return None
        graph = helper.make_graph(
            nodes,
            "activation",
            [helper.make_tensor_value_info(x, TensorProto.FLOAT, [len(AT)])],
            [helper.make_tensor_value_info(values[-1], TensorProto.FLOAT, None)],
            [numpy_helper.from_array(np.asarray(number, np.float32), name) for name, number in numbers.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)])
        with np.errstate(all="ignore"):
            (result,) = ReferenceEvaluator(model).run(None, {x: AT.numpy()})
        return torch.from_numpy(np.asarray(result))


def rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Give the tensors that nodes read and write other names, in place."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def sort_nodes(graph: onnx.GraphProto) -> bool:
    """Put nodes after those that they read; False if they are already, or read each other in a circle."""
    made = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    before = [
        {made[name] for name in inputs_of(node) if name in made and made[name] != place}
        for place, node in enumerate(graph.node)
    ]
    if all(max(places, default=-1) < place for place, places in enumerate(before)):
        return False
    try:
        order = list(TopologicalSorter(dict(enumerate(before))).static_order())
    except CycleError:
        return False
    _replace_nodes(graph, [graph.node[place] for place in order])
    return True


def _replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    # Of copies, as those of the graph itself end with its list.
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def free_name(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, the one given if it is free, and take it."""
    made = next(made for i in itertools.count() if (made := f"{name}_{i}" if i else name) not in taken)
    taken.add(made)
    return made


def constant_tensor(name: str, value: NDArray[Any]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)


def mend(proto: onnx.ModelProto) -> list[str]:
    """Mend what ONNX Runtime loads and onnx's checker refuses; in place."""
    notes = []
    unnamed = [graph for graph in graphs_of(proto.graph) if not graph.name]
    for graph in unnamed:
        graph.name = "graph"
    if unnamed:
        notes.append("the file's graph gets a name")
    imports = {"" if entry.domain == "ai.onnx" else entry.domain: entry for entry in proto.opset_import}
    if len(imports) < len(proto.opset_import):
        kept = [helper.make_opsetid(domain, entry.version) for domain, entry in imports.items()]
        del proto.opset_import[:]
        proto.opset_import.extend(kept)
        notes.append(f"of several imports of a domain the last is taken: opset {opset_of(proto)}")
    if sort_nodes(proto.graph):
        notes.append("the nodes of the file are put in order")
    grouped = [_write_groups(graph) for graph in [*graphs_of(proto.graph)] if opset_of(proto) in _FACTORS_OF_GROUPS]
    if any(grouped):
        notes.append("GroupNormalization with a factor for each group is written as InstanceNormalization of groups")
    bare = [value for value in (*proto.graph.input, *proto.graph.output) if value.type.HasField("tensor_type")]
    bare = [value for value in bare if not value.type.tensor_type.HasField("shape")]
    if bare:
        notes.append("inputs and outputs of the file without a shape get their number of dimensions")
        view, results = OnnxGraph(proto.graph), {value.name for value in proto.graph.output}
    for value in bare:
        sizes = [] if value.name in results else _sizes_read(view, value.name)
        if sizes or value.name in results:  # an output gets none, until a run shows how many there are
            value.type.tensor_type.shape.SetInParent()
            value.type.tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=n or None) for n in sizes)
    return notes


# Opsets in which GroupNormalization has a factor for each group; the standard took that version back.
_FACTORS_OF_GROUPS = range(18, 21)


def _write_groups(graph: onnx.GraphProto) -> bool:
    grouped = [
        place for place, node in enumerate(graph.node) if (node.op_type, node.domain) == ("GroupNormalization", "")
    ]
    if not grouped:
        return False
    view, nodes = OnnxGraph(graph), list[onnx.NodeProto]()
    for place, node in enumerate(graph.node):
        if place not in grouped:
            nodes.append(node)
            continue
        x, *factors = node.input
        names = [view.free(f"{node.output[0]}_{part}") for part in ("rows", "of_groups", "normed", "shape")]
        graph.initializer.append(constant_tensor(names[0], np.array([0, attribute(node, "num_groups", 1), -1])))
        epsilon = attribute(node, "epsilon", 1e-5)
        nodes += [
            helper.make_node("Reshape", [x, names[0]], [names[1]]),
            helper.make_node("InstanceNormalization", [names[1], *factors], [names[2]], node.name, epsilon=epsilon),
            helper.make_node("Shape", [x], [names[3]]),
            helper.make_node("Reshape", [names[2], names[3]], list(node.output)),
        ]
    _replace_nodes(graph, nodes)
    return True


# Operators whose result has as many dimensions as the image that is their first input.
_KEEPS_RANK = frozenset({"Cast", "Identity", "Sub", "Add", "Mul", "Div", "Clip", "Pad", "Relu", "LeakyRelu"}) | {
    *("BatchNormalization", "InstanceNormalization", "LRN", "QuantizeLinear", "DequantizeLinear"),
}


def _sizes_read(view: OnnxGraph, name: str) -> list[int]:
    # The sizes of a tensor that the operators after it imply: 0 for an open one, none for an unknown rank.
    for node in view.consumers.get(name, []):
        kind, weight = node.op_type, view.constants.get(node.input[1]) if len(node.input) > 1 else None
        sizes: list[int] = []
        if node.input[0] == name and kind in {"Conv", "ConvTranspose"} and weight is not None:
            channels = weight.dims[1] * attribute(node, "group", 1) if kind == "Conv" else weight.dims[0]
            sizes = [0, channels, *(0 for _ in weight.dims[2:])]
        elif kind in {"MaxPool", "AveragePool", "LpPool"}:
            sizes = [0, 0, *(0 for _ in attribute(node, "kernel_shape", ()))]
        elif kind == "Transpose":
            sizes = [0 for _ in attribute(node, "perm", ())]
        elif kind == "Gemm":
            sizes = [0, 0]
        elif kind in _KEEPS_RANK and node.input[0] == name:
            sizes = _sizes_read(view, node.output[0])
        if sizes:
            return sizes
    return []


def without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model in which large constants have types and shapes, but no values."""
    model, graph = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import), proto.graph
    model.functions.extend(proto.functions)
    model.graph.name = graph.name
    model.graph.node.extend(graph.node)
    model.graph.input.extend(graph.input)
    model.graph.output.extend(graph.output)
    model.graph.sparse_initializer.extend(graph.sparse_initializer)
    for tensor in graph.initializer:
        if tensor.HasField("raw_data") and 4 * math.prod(tensor.dims) > SMALL_CONSTANT:
            model.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        else:
            model.graph.initializer.append(tensor)
    return model


def forget_shapes_of_outputs(graph: onnx.GraphProto) -> None:
    # Without the shapes of outputs that are inputs or constants, onnx infers nothing.
    given = {value.name for value in (*graph.input, *graph.initializer)}
    for value in graph.output:
        if value.name not in given:
            value.type.tensor_type.ClearField("shape")


def inferred_graph(
    proto: onnx.ModelProto,
    sizes: Mapping[str, Sequence[int | None]],
    known: Mapping[str, NDArray[Any]] | None = None,
) -> onnx.GraphProto:
    """Return a graph without its weights, with the shapes and types that follow from those of its inputs.

    `sizes` are of inputs by name, None = open; what a file says of its results is not looked at. `known` values decide
    about shapes, such as computed pads, which inference does not compute.
    """
    model = without_weights(proto)
    for value in (*model.graph.input, *model.graph.output):
        if value.name in sizes:
            del value.type.tensor_type.shape.dim[:]
            dims = [onnx.TensorShapeProto.Dimension(dim_value=size) for size in sizes[value.name]]
            value.type.tensor_type.shape.dim.extend(dims)
    forget_shapes_of_outputs(model.graph)
    if known:
        kept = [node for node in model.graph.node if not set(node.output) <= known.keys()]
        del model.graph.node[:]
        model.graph.node.extend(kept)
        model.graph.initializer.extend(constant_tensor(name, value) for name, value in known.items())
    return onnx.shape_inference.infer_shapes(model, data_prop=True).graph


def whole_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.output, *graph.input):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    return shapes


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def replace_attributes(node: onnx.NodeProto, **values: object) -> None:
    """Give a node new values of attributes, after its others; None removes one."""
    kept = [own for own in node.attribute if own.name not in values]
    made = [helper.make_attribute(name, value) for name, value in values.items() if value is not None]
    del node.attribute[:]
    node.attribute.extend([*kept, *made])


def made_after(node: onnx.NodeProto, op: str, inputs: Iterable[str], output: str, name: str = "") -> onnx.NodeProto:
    """Return a new node that comes from the same module as one that is there."""
    made = helper.make_node(op, list(inputs), [output], name=name or None)
    made.metadata_props.extend(node.metadata_props)
    return made


def consumed_as(node: onnx.NodeProto, old: str, new: str) -> None:
    """Make a node read tensor `new` where it read `old`, also in the graphs inside it."""
    node.input[:] = [new if name == old else name for name in node.input]
    for graph in subgraphs([node]):
        if old in _captured(graph):
            for inner in graph.node:
                consumed_as(inner, old, new)
            for value in graph.output:
                value.name = new if value.name == old else value.name


def without_identities(nodes: Iterable[onnx.NodeProto], kept: Collection[str]) -> list[onnx.NodeProto]:
    # Nodes in topological order but for those Identity operations whose result is not among `kept`; in place.
    before, left = dict[str, str](), list[onnx.NodeProto]()
    for node in nodes:
        for name in before.keys() & set(inputs_of(node)):
            consumed_as(node, name, before[name])
        if node.op_type == "Identity" and node.output[0] not in kept:
            before[node.output[0]] = node.input[0]
        else:
            left.append(node)
    return left


def opset_of(proto: onnx.ModelProto) -> int:
    """Return the version of the standard operators; 0 if the file names none, the last of several as ONNX Runtime."""
    return next((entry.version for entry in reversed(proto.opset_import) if entry.domain in {"", "ai.onnx"}), 0)


def drop_unread(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers that nothing reads, in place; the graphs inside nodes are consumers too."""
    results = {value.name for value in graph.output}
    while True:
        used = {name for node in graph.node for name in inputs_of(node)} | results
        unread = [i for i, node in enumerate(graph.node) if used.isdisjoint(node.output)]
        if not unread:
            break
        for i in reversed(unread):
            del graph.node[i]
    inputs = {value.name for value in graph.input}
    for i, tensor in reversed(list(enumerate(graph.initializer))):
        if tensor.name not in used and tensor.name not in inputs:
            del graph.initializer[i]  # a new list would copy the weights that stay


def inputs_of(node: onnx.NodeProto) -> list[str]:
    """Return the tensors that a node reads, with those that the graphs inside it take from around it."""
    return [*node.input, *itertools.chain.from_iterable(_captured(graph) for graph in subgraphs([node]))]


def _captured(graph: onnx.GraphProto) -> list[str]:
    inside = {t.name for t in graph.initializer} | {v.name for v in graph.input}
    inside.update(name for node in graph.node for name in node.output)
    read = [name for node in graph.node for name in inputs_of(node)] + [value.name for value in graph.output]
    return [name for name in read if name and name not in inside]


def subgraphs(nodes: Any) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that nodes hold as attributes (branches, loop bodies)."""
    for node in nodes:
        if not node.domain and node.op_type not in _WITH_GRAPHS:
            continue  # the checker refuses other attributes
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def lacks(model: onnx.ModelProto) -> str:
    parts = {"IR version": model.ir_version, "opset import": model.opset_import, "output": model.graph.output}
    missing = " and ".join(f"no {name}" for name, found in parts.items() if not found)
    kind = "not a whole ONNX model" if model.graph.output else "not an ONNX model, or a truncated one"
    return missing and f"{kind} (it has {missing}); export it again"


# Largest weight with which two products of bytes fit into 16 bits: 2 * 255 * 64 < 2**15.
_EXACT = 64


def may_saturate(weight: onnx.TensorProto) -> bool:
    """True if sums of two products of an int8 weight may not fit into 16 bits."""
    if weight.data_type != TensorProto.INT8 or len(weight.dims) < 2:
        return False
    return bool(np.abs(numpy_helper.to_array(weight).astype(np.int16)).max(initial=0) > _EXACT)


def unsigned(view: OnnxGraph, name: str, made: dict[str, str]) -> str:
    """The name of the unsigned form of an int8 constant, which is added to the graph where it is not in `made`."""
    if name not in made:
        shifted = np.asarray(view.array(name), np.int16) + 128
        made[name] = view.add_constant(f"{name}_unsigned", shifted.astype(np.uint8))
    return made[name]


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, with those of the graphs inside them."""
    for node in nodes:
        yield node
        for graph in subgraphs([node]):
            yield from all_nodes(graph.node)


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph, and the graphs inside its nodes."""
    yield graph
    yield from subgraphs(all_nodes(graph.node))


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and constants of a graph and of the graphs in its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for own in node.attribute:
            if own.HasField("t"):
                yield own.t
            yield from own.tensors
    for inner in subgraphs(graph.node):
        yield from tensors_of(inner)


MAX_POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOLS: dict[int, Callable[..., Any]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
# Names of `F.interpolate` by the mode of a Resize.
INTERPOLATIONS: dict[str, dict[int, str]] = {
    "linear": {1: "linear", 2: "bilinear", 3: "trilinear"},
    "cubic": {2: "bicubic"},
}


@dataclass(frozen=True, kw_only=True)
class Window:
    """The window of a convolution or pool, with an entry for each axis of the image; `pads` are (before, after).

    `ceil`: a last window that is not whole counts.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    ceil: bool

    @property
    def sides(self) -> list[int]:
        """The padding as `F.pad` takes it, the last axis first."""
        return [size for pair in reversed(self.pads) for size in pair]

    @property
    def padding(self) -> tuple[int, ...] | None:
        """The padding as a convolution of torch takes it; None if the two ends of an axis differ."""
        even = all(before == after for before, after in self.pads)
        return tuple(before for before, _ in self.pads) if even else None

    @property
    def pool_padding(self) -> tuple[int, ...] | None:
        """The padding as a pool of torch takes it, which is at most half the kernel; None for another."""
        fits = all(2 * max(pair) <= size for pair, size in zip(self.pads, self.kernel, strict=True))
        return self.padding if fits else None


def read_window(attributes: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int] | None = None) -> Window:
    """The window of an operator, `auto_pad` resolved, on an image of a size without batch and channels.

    `kernel`: of a convolution; None = the attribute that a pool has.
    """
    kernel = tuple(int(n) for n in (attributes["kernel_shape"] if kernel is None else kernel))
    rank = len(kernel)
    strides, dilations = (tuple(int(n) for n in attributes.get(key, [1] * rank)) for key in ("strides", "dilations"))
    automatic = attributes.get("auto_pad", "NOTSET")
    if automatic in {"NOTSET", "VALID", ""}:
        given = [0] * 2 * rank if automatic == "VALID" else [int(n) for n in attributes.get("pads", [0] * 2 * rank)]
        pads = list(zip(given[:rank], given[rank:], strict=True))
    else:
        pads = []
        for n, k, s, d in zip(size, kernel, strides, dilations, strict=True):
            total = max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
            small = total // 2
            pads.append((small, total - small) if automatic == "SAME_UPPER" else (total - small, small))
    return Window(
        kernel=kernel,
        strides=strides,
        dilations=dilations,
        pads=tuple(pads),
        ceil=bool(attributes.get("ceil_mode", 0)),
    )


def transposed_pads(attributes: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int]) -> list[int] | None:
    # `size` is without batch and channels, 0 = open; None if it does not tell the pads.
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    mode, wanted = attributes.get("auto_pad", "NOTSET"), attributes.get("output_shape", [])
    if not wanted and mode in {"NOTSET", "VALID", ""}:
        return [*zeros, *zeros] if mode == "VALID" else list(attributes.get("pads", [*zeros, *zeros]))
    strides, dilations = (attributes.get(key, ones) for key in ("strides", "dilations"))
    extra = attributes.get("output_padding", zeros)
    size, results = (size, wanted[-len(kernel) :]) if wanted else (ones, strides)
    parts = zip(size, kernel, strides, dilations, extra, results, strict=True)
    total = [(n - 1) * s + (k - 1) * d + 1 + e - out for n, k, s, d, e, out in parts]
    if wanted and (min(total) < 0 or not all(size)):
        return None
    less = [max(n, 0) // 2 for n in total]
    more = [max(n, 0) - half for n, half in zip(total, less, strict=True)]
    return [*less, *more] if mode == "SAME_UPPER" else [*more, *less]


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    values = {own.name: helper.get_attribute_value(own) for own in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
