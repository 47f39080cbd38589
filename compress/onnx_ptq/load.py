"""Reads the ONNX file that is to be quantized, within limits, and refuses what cannot be, before anything is written.

The file may come from anywhere: sizes are compared with the bytes that hold them, weights in other files are read only
from the model's folder, and a size that the file merely states allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import external_data_helper, helper, numpy_helper, version_converter

from compress.engines.base import library_errors
from compress.engines.onnx_file import load_onnx
from compress.errors import AuditError, EngineError, QuantizationError
from compress.onnx_graph import opset_of, subgraphs

OLDEST, NEWEST = 6, 25
"""Opsets that are read."""

MOST_ELEMENTS = 1 << 31
"""Elements of the largest tensor that is taken for real, 8 GB in float32."""

MOST_OPERATIONS = 1 << 20
"""Operations of a graph whose functions are inlined."""

QUANTIZED = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
        "QLinearAdd",
        "QLinearMul",
        "QLinearGlobalAveragePool",
        "QLinearAveragePool",
        "QLinearConcat",
        "QLinearSigmoid",
        "QLinearLeakyRelu",
        "QLinearSoftmax",
        "QLinearWhere",
        "QLinearReduceMean",
        "QGemm",
        "MatMulNBits",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "QAttention",
        "QEmbedLayerNormalization",
        "DynamicQuantizeLSTM",
        "MatMulBnb4",
        "GatherBlockQuantized",
    }
)
"""Operators of files that are quantized already."""


_ASIDE = "compress.aside"
"""Domain of operators that a raise of the opset leaves as they are."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A float ONNX file.

    Attributes:
        proto: the model; weights in other files (`external`) are not in it.
        notes: what was mended on reading, a sentence each.
        ops: libraries of operators for ONNX Runtime, which the file needs beside the standard ones.
    """

    path: Path
    proto: onnx.ModelProto
    external: bool = False
    notes: tuple[str, ...] = ()
    ops: tuple[Path, ...] = ()

    @property
    def folder(self) -> Path:
        return self.path.parent

    def array(self, tensor: onnx.TensorProto) -> NDArray[Any]:
        """Return the value of a tensor, also from the file that holds its external data."""
        with library_errors(
            QuantizationError,
            f"{self.path}: the data of {tensor.name!r} cannot be read (",
            "); weights in other files must be whole and in the model's folder",
        ):
            if not external_data_helper.uses_external_data(tensor):
                return numpy_helper.to_array(tensor)
            whole = onnx.TensorProto()
            whole.CopyFrom(tensor)
            external_data_helper.load_external_data_for_tensor(whole, str(self.folder))
            return numpy_helper.to_array(whole)


def load_source(path: Path | str, *, quantized: bool = False, ops: Iterable[Path | str] = ()) -> SourceFile:
    """Read a float ONNX file; `quantized`: or one that is quantized; `ops`: libraries of its own operators."""
    path, libraries = Path(path), tuple(map(Path, ops))
    for library in libraries:
        if not library.is_file():
            raise QuantizationError(f"{library}: no such file; ops takes libraries for ONNX Runtime, such as lib.so")
    try:
        proto = load_onnx(path)
    except EngineError as error:
        raise AuditError(str(error)) from error
    if not (proto.ir_version and proto.opset_import and proto.graph.node and proto.graph.output):
        raise AuditError(f"{path}: not an ONNX model, or a truncated or empty one; export it again")
    notes = _mend(path, proto)
    opset = opset_of(proto)
    if not OLDEST <= opset <= NEWEST:
        named = f"has opset {opset}" if opset else "names no opset of the standard operators"
        raise QuantizationError(f"{path} {named}; opsets {OLDEST} to {NEWEST} are read: export it in one of them")
    if not quantized:
        check_float(path, proto)
    for tensor in tensors_of(proto.graph):
        _check_tensor(path, tensor)
    external = any(external_data_helper.uses_external_data(tensor) for tensor in tensors_of(proto.graph))
    _check_valid(path, proto, external, mended=bool(notes))
    _check_functions(path, proto)
    return SourceFile(path=path, proto=proto, external=external, notes=notes, ops=libraries)


def _mend(path: Path, proto: onnx.ModelProto) -> tuple[str, ...]:
    """Mend what ONNX Runtime loads and the standard forbids, in place; return a sentence for each kind.

    ONNX Runtime's own optimizer writes LayerNormalization into files of any opset, exporters leave out the shapes of
    outputs, and scripts append nodes in any order.
    """
    notes = []
    if _sort(proto.graph):
        notes.append("the nodes of the file are put in order")
    newer = _newer_operators(proto)
    if newer and not proto.functions:
        notes.append(
            f"the opset is raised from {opset_of(proto)} to {max(newer.values())}, which {', '.join(newer)} need"
        )
        _raise_around(path, proto, newer)
    bare = [value for value in proto.graph.output if value.type.HasField("tensor_type")]
    bare = [value for value in bare if not value.type.tensor_type.HasField("shape")]
    for value in bare:
        value.type.tensor_type.shape.SetInParent()  # no dimensions, until a run shows how many there are
    if bare:
        notes.append("the file's outputs get their number of dimensions")
    return tuple(notes)


def _sort(graph: onnx.GraphProto) -> bool:
    """Put nodes after those that they read; False if they are already, or read each other in a circle."""
    made = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    before = [
        {made[name] for name in _reads(node) if name in made and made[name] != place}
        for place, node in enumerate(graph.node)
    ]
    if all(max(places, default=-1) < place for place, places in enumerate(before)):
        return False
    try:
        order = list(TopologicalSorter(dict(enumerate(before))).static_order())
    except CycleError:
        return False
    nodes = [graph.node[place] for place in order]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return True


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for graph in subgraphs([node]):
        for inner in graph.node:
            yield from _reads(inner)


def _newer_operators(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the standard operators that the opset of a file does not have yet, with the first that does."""
    opset, found = opset_of(proto), {}
    for name in {node.op_type for node in proto.graph.node if node.domain in ("", "ai.onnx")}:
        try:
            if opset and onnx.defs.get_schema(name, opset):
                continue
        except onnx.defs.SchemaError:
            pass
        versions = [
            s.since_version for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", name)
        ]
        if versions and opset < min(versions) <= NEWEST:
            found[name] = min(versions)
    return found


def _raise_around(path: Path, proto: onnx.ModelProto, newer: dict[str, int]) -> None:
    """Raise the opset of a file whose newer operators already are in the form of the new one; in place."""
    moved = [node for node in proto.graph.node if node.op_type in newer and node.domain in ("", "ai.onnx")]
    for node in moved:
        node.domain = _ASIDE
    proto.opset_import.add(domain=_ASIDE, version=1)
    with library_errors(
        QuantizationError,
        f"{path} has opset {opset_of(proto)}, and {', '.join(newer)} need {max(newer.values())}, to which it cannot be "
        "raised: ",
        ". Export it again with that opset, or optimize it after quantization",
    ):
        raised = version_converter.convert_version(proto, max(newer.values()))
    for node in raised.graph.node:
        if node.domain == _ASIDE:
            node.domain = ""
    imports = [entry for entry in raised.opset_import if entry.domain != _ASIDE]
    known = {entry.domain for entry in imports}
    imports += [entry for entry in proto.opset_import if entry.domain not in known | {_ASIDE}]
    raised.ir_version = max(raised.ir_version, helper.find_min_ir_version_for(imports, True))
    del raised.opset_import[:]
    raised.opset_import.extend(imports)
    proto.CopyFrom(raised)


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers and constants of a graph and of the graphs in its nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
    for inner in subgraphs(graph.node):
        yield from tensors_of(inner)


def check_float(path: Path, proto: onnx.ModelProto) -> None:
    """Refuse a file that holds operators of quantized ones, also inside functions and other graphs."""
    functions = [node for function in proto.functions for node in function.node]
    graphs, found = [proto.graph], list(functions)
    while graphs:
        graph = graphs.pop()
        found += graph.node
        graphs += subgraphs(graph.node)
    quantized = next((node for node in found if node.op_type in QUANTIZED), None)
    if quantized is not None:
        raise QuantizationError(
            f"{path} is quantized already: {quantized.name or quantized.output[0]} is a {quantized.op_type}; give the "
            "float file that it was made from, or make one of it: `ptq --onnx --again`, or compress.dequantize_onnx"
        )


def _check_tensor(path: Path, tensor: onnx.TensorProto) -> None:
    if any(size < 0 for size in tensor.dims) or math.prod(tensor.dims) > MOST_ELEMENTS:
        raise QuantizationError(
            f"{path}: tensor {tensor.name!r} has the shape {tuple(tensor.dims)}; at most {MOST_ELEMENTS} elements are "
            "read. The file is broken: export it again"
        )
    if external_data_helper.uses_external_data(tensor) or not tensor.HasField("raw_data"):
        return
    try:
        bits = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * 8
    except (KeyError, ValueError, TypeError):
        raise QuantizationError(f"{path}: tensor {tensor.name!r} is of an unknown type {tensor.data_type}") from None
    packed = tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
    if not packed and math.prod(tensor.dims) * bits // 8 != len(tensor.raw_data):
        raise QuantizationError(
            f"{path}: tensor {tensor.name!r} has the shape {tuple(tensor.dims)} and {len(tensor.raw_data)} bytes; the "
            "file is broken: export it again"
        )


def _check_valid(path: Path, proto: onnx.ModelProto, external: bool, *, mended: bool) -> None:
    """Refuse what onnx's checker refuses; a model with weights beside it is checked with them."""
    with library_errors(AuditError, f"{path} is not a valid ONNX file: "):
        binary = path.suffix == ".onnx"  # its bytes are the model, which need not be made once more
        whole = proto if mended or not binary else path.read_bytes()
        onnx.checker.check_model(str(path) if external and not mended else whole)


def _check_functions(path: Path, proto: onnx.ModelProto) -> None:
    """Refuse functions that call each other so often that no memory holds them all; cycles are refused before."""
    bodies = {(function.domain, function.name): list(_all_nodes(function.node)) for function in proto.functions}
    calls = {key: {(n.domain, n.op_type) for n in nodes} & bodies.keys() for key, nodes in bodies.items()}
    sizes: dict[tuple[str, str], int] = {}
    for key in TopologicalSorter(calls).static_order():
        sizes[key] = sum(sizes.get((node.domain, node.op_type), 1) for node in bodies[key])
    total = sum(sizes.get((node.domain, node.op_type), 1) for node in _all_nodes(proto.graph.node))
    if total > MOST_OPERATIONS:
        raise QuantizationError(
            f"{path}: its functions call each other so often that they stand for {total} operations; at most "
            f"{MOST_OPERATIONS} are read. Export the file without functions"
        )


def _all_nodes(nodes: Any) -> Iterator[onnx.NodeProto]:
    yield from nodes
    for graph in subgraphs(nodes):
        yield from _all_nodes(graph.node)
