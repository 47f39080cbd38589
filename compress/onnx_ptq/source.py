"""The user's ONNX file: read within limits, run on ONNX Runtime, and its graph with values, types and shapes.

The file may come from anywhere: sizes are compared with the bytes that hold them, weights in other files are read only
from the model's folder, a size that the file merely states allocates nothing, and what cannot be quantized is refused
before anything is written. Files whose graphs decide by values how much they compute (loops, computed sizes) first run
once, within bounds of time and memory, in a process of their own (`check_bounds`). Sizes that inference leaves open are
measured.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper, version_converter
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError

from compress.engines.base import Arrays, TensorInfo, load_onnx, read_interface, shape_text
from compress.errors import (
    AuditError,
    CalibrationError,
    DataError,
    EngineError,
    QuantizationError,
    first_few,
    near_misses,
)
from compress.export.casting import Weights, types_of
from compress.files import path_of
from compress.graph.inputs import as_array, batch_inputs
from compress.onnx_graph import (
    RANDOM,
    SMALL_CONSTANT,
    OnnxGraph,
    all_nodes,
    attribute,
    graphs_of,
    inferred_graph,
    inputs_of,
    lacks,
    mend,
    opset_of,
    replace_attributes,
    subgraphs,
    tensors_of,
    whole_shapes,
    without_weights,
)
from compress.support.libraries import import_library, library_errors
from compress.support.process import thread_count

# Opsets that are read.
OLDEST, NEWEST = 6, 25
# ONNX Runtime computes operators as this opset says, and few of older ones.
_FIRST_RUN = 7

# Bytes at whose multiples weights begin in files: pages.
_ALIGNED = 4096

# Elements of the largest tensor that is taken for real, 8 GB in float32.
MOST_ELEMENTS = 1 << 31

# Operations of a graph whose functions are inlined.
MOST_OPERATIONS = 1 << 20

# Operators of files that are quantized already.
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


# Domain of operators that a raise of the opset leaves as they are.
_ASIDE = "compress.aside"


def move_data(tensor: onnx.TensorProto, raw: bytes, file: IO[bytes], name: str) -> None:
    # Writes the bytes of a tensor at the end of a file, whose name the tensor has instead of them.
    offset = file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
    file.write(raw)
    tensor.raw_data = b"\0"
    external_data_helper.set_external_data(tensor, name, offset=offset, length=len(raw))
    tensor.ClearField("raw_data")


class MadeWeights:
    """Weights in a temporary file beside `path`: a session maps them."""

    def __init__(self, path: Path) -> None:
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        self._file = tempfile.NamedTemporaryFile(prefix=".", suffix=".part", dir=folder)  # noqa: SIM115 (ends with this object)
        self.path = Path(self._file.name)

    def add(self, tensor: onnx.TensorProto) -> None:
        """Move the data of a tensor to the file, if they are large."""
        if len(tensor.raw_data) > SMALL_CONSTANT:
            move_data(tensor, tensor.raw_data, self._file, self.path.name)
            self._file.flush()

    def __contains__(self, tensor: onnx.TensorProto) -> bool:
        return any(one.value == self.path.name for one in tensor.external_data)


@dataclass(frozen=True, kw_only=True)
class SourceFile(Weights):
    """A float ONNX file.

    Attributes:
        proto: the model; weights in other files (`external`) are not in it.
        notes: what was mended on reading, a sentence each.
        ops: libraries of operators for ONNX Runtime, which the file needs beside the standard ones.
        apart: results of an image do not depend on the others of its batch.
        made: weights of `proto` that were computed, if they are large.
    """

    path: Path
    proto: onnx.ModelProto
    external: bool = False
    notes: tuple[str, ...] = ()
    ops: tuple[Path, ...] = ()
    apart: bool = True
    made: MadeWeights | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent

    def array(self, tensor: onnx.TensorProto) -> NDArray[Any]:
        with self._reading(tensor):
            return numpy_helper.to_array(self.whole(tensor))

    def tensor(self, array: NDArray[Any], name: str) -> onnx.TensorProto:
        tensor = super().tensor(array, name)
        if self.made is not None:
            self.made.add(tensor)
        return tensor

    def whole(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        if not external_data_helper.uses_external_data(tensor):
            return tensor
        whole = onnx.TensorProto()
        whole.CopyFrom(tensor)
        folder = self.made.path.parent if self.made is not None and tensor in self.made else self.folder
        with self._reading(tensor):
            external_data_helper.load_external_data_for_tensor(whole, str(folder))
        return whole

    def _reading(self, tensor: onnx.TensorProto) -> contextlib.AbstractContextManager[None]:
        return library_errors(
            QuantizationError,
            f"{self.path}: the data of {tensor.name!r} cannot be read (",
            "); weights in other files must be whole and in the model's folder",
        )


def load_source(path: Path | str, *, quantized: bool = False, ops: Iterable[Path | str] = ()) -> SourceFile:
    """Read a float ONNX file; `quantized`: or one that is quantized; `ops`: libraries of its own operators."""
    path, libraries = path_of(path), tuple(map(Path, ops))
    for library in libraries:
        if not library.is_file():
            raise QuantizationError(f"{library}: no such file; ops takes libraries for ONNX Runtime, such as lib.so")
    try:
        proto = load_onnx(path)
    except EngineError as error:
        raise AuditError(str(error)) from error
    if missing := lacks(proto) or ("" if proto.graph.node else "it has no node; export it again"):
        raise AuditError(f"{path}: {missing}")
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
    notes += _without_wrong_shapes(proto)
    return SourceFile(path=path, proto=proto, external=external, notes=notes, ops=libraries)


def _mend(path: Path, proto: onnx.ModelProto) -> tuple[str, ...]:
    """Mend what ONNX Runtime loads and the standard forbids; in place."""
    # ONNX Runtime's own optimizer writes LayerNormalization into files of any opset, exporters leave out the shapes of
    # outputs, and scripts append nodes in any order.
    notes = mend(proto)
    newer = _newer_operators(proto)
    if newer and not proto.functions:
        notes.append(
            f"the opset is raised from {opset_of(proto)} to {max(newer.values())}, which {', '.join(newer)} need"
        )
        _raise_around(path, proto, newer)
    if OLDEST <= opset_of(proto) < _FIRST_RUN:
        with contextlib.suppress(QuantizationError):  # it may run as it is
            old = opset_of(proto)
            proto.CopyFrom(raised(path, proto, _FIRST_RUN))
            notes.append(f"the opset is raised from {old} to {_FIRST_RUN}, the first that ONNX Runtime computes")
    _without_cast_like(proto)
    return (*notes, *_for_inference(proto))


def _without_cast_like(proto: onnx.ModelProto) -> None:
    # It reads an activation for its type alone, and a constant that it casts, such as a bias, would not be one.
    found = [node for node in proto.graph.node if node.op_type == "CastLike" and node.domain in ("", "ai.onnx")]
    types = types_of(proto) if found else {}
    for node in found:
        if (kind := types.get(node.input[1], 0)) > 0:
            node.op_type = "Cast"
            del node.input[1:]
            replace_attributes(node, to=kind)


def _for_inference(proto: onnx.ModelProto) -> Iterator[str]:
    # ONNX Runtime leaves out Dropout in training too; batch statistics and random numbers stay, and are named.
    dropped, normed, drawn = list[str](), list[str](), list[str]()
    for graph in graphs_of(proto.graph):
        view = OnnxGraph(graph)
        for node in graph.node:
            name = node.name or node.output[0]
            if node.op_type == "Dropout" and np.any(view.array(node.input[2] if len(node.input) > 2 else "")):
                del node.input[2:]
                dropped.append(name)
            elif node.op_type == "BatchNormalization" and len(node.output) > 1:
                normed.append(name)
            elif node.op_type in RANDOM:
                drawn.append(name)
    if dropped:
        yield f"{first_few(dropped)}: in training mode in the file, and written for inference, where it does nothing"
    if normed:
        yield (
            f"{first_few(normed)}: in training mode, so that results depend on the other images of a batch; export the "
            "network with model.eval()"
        )
    if drawn:
        yield f"{first_few(drawn)}: random in every run, also where results are compared"


def _without_wrong_shapes(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Take off the shapes that a valid file states if its nodes compute others, in place; return a sentence if so."""
    # ONNX Runtime warns of them, and onnx's full check, which every file that is written passes, refuses them.
    model = without_weights(proto)
    model.graph.value_info.extend(proto.graph.value_info)
    for value in model.graph.output:  # those without dimensions get them from a run
        if not value.type.tensor_type.shape.dim:
            value.type.tensor_type.ClearField("shape")
    try:
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except (InferenceError, ValueError) as error:
        if "existing shape differ" in str(error):  # others are reported where shapes are needed
            del proto.graph.value_info[:]
            for value in proto.graph.output:
                del value.type.tensor_type.shape.dim[:]
            return ("the file states shapes that its nodes do not compute: they are left out",)
    return ()


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
    opset, needed = max(newer.values()), f"{', '.join(newer)} need"
    above = raised(path, proto, opset, needed, f"Export it again with opset {opset}, or optimize it after quantization")
    for node in above.graph.node:
        if node.domain == _ASIDE:
            node.domain = ""
    imports = [entry for entry in above.opset_import if entry.domain != _ASIDE]
    del above.opset_import[:]
    above.opset_import.extend(imports)
    proto.CopyFrom(above)


def raised(
    path: Path, proto: onnx.ModelProto, opset: int, needed: str = "what is asked for needs", advice: str = ""
) -> onnx.ModelProto:
    """Return a model whose standard operators are those of a later opset."""
    with library_errors(
        QuantizationError,
        f"{path} has opset {opset_of(proto)}, and {needed} {opset}; it cannot be raised: ",
        f". {advice or f'Export it again with opset {opset} or later'}",
    ):
        newer = version_converter.convert_version(proto, opset)
    known = {entry.domain for entry in newer.opset_import}
    newer.opset_import.extend(entry for entry in proto.opset_import if entry.domain not in known)
    newer.ir_version = max(newer.ir_version, helper.find_min_ir_version_for(list(newer.opset_import), True))
    return newer


def check_float(path: Path, proto: onnx.ModelProto) -> None:
    """Refuse a file that holds operators of quantized ones, also inside functions and other graphs."""
    found = [node for function in proto.functions for node in function.node] + list(all_nodes(proto.graph.node))
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
    """Refuse what onnx's checker refuses."""
    with library_errors(AuditError, f"{path} is not a valid ONNX file: "):
        if external:
            onnx.checker.check_model(_with_inputs_for_weights(proto) if mended else str(path))
        else:  # the bytes of a file .onnx are the model, which need not be made once more
            onnx.checker.check_model(proto if mended or path.suffix != ".onnx" else path.read_bytes())


def _with_inputs_for_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    # The checker looks for weights in other files in the folder of the process: here they are inputs.
    copy, inputs = onnx.ModelProto(), {value.name for value in proto.graph.input}
    copy.CopyFrom(proto)
    del copy.graph.initializer[:]
    for tensor in proto.graph.initializer:
        if not external_data_helper.uses_external_data(tensor):
            copy.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            copy.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return copy


def _check_functions(path: Path, proto: onnx.ModelProto) -> None:
    """Refuse functions that call each other so often that no memory holds them all; cycles are refused before."""
    bodies = {(function.domain, function.name): list(all_nodes(function.node)) for function in proto.functions}
    calls = {key: {(n.domain, n.op_type) for n in nodes} & bodies.keys() for key, nodes in bodies.items()}
    sizes: dict[tuple[str, str], int] = {}
    for key in TopologicalSorter(calls).static_order():
        sizes[key] = sum(sizes.get((node.domain, node.op_type), 1) for node in bodies[key])
    total = sum(sizes.get((node.domain, node.op_type), 1) for node in all_nodes(proto.graph.node))
    if total > MOST_OPERATIONS:
        raise QuantizationError(
            f"{path}: its functions call each other so often that they stand for {total} operations; at most "
            f"{MOST_OPERATIONS} are read. Export the file without functions"
        )


_ERRORS_ONLY = 3
# Bytes of constants that stay in the model of a session.
_SMALL = 1 << 10
# Types of weights that a session reads where they are.
_PLAIN = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
# Domains whose operators ONNX Runtime knows beside the standard ones.
_RUNTIMES = frozenset({"com.microsoft", "com.ms.internal.nhwc", "ai.onnx.ml"})


def unknown_to_runtime(source: SourceFile) -> dict[str, str]:
    """Return the tensors that come from or after an operator that ONNX Runtime does not know, each with the reason."""
    found: dict[str, str] = {}
    for node in source.proto.graph.node if not source.ops else ():
        before = next((found[name] for name in inputs_of(node) if name in found), "")
        if not all(part.domain in _RUNTIMES or onnx.defs.has(part.op_type, part.domain) for part in all_nodes([node])):
            before = f"{node.op_type} of the domain {node.domain!r} runs with its own library only (--ops, or ops=)"
            text = before
        else:
            text = before if before.startswith("after: ") or not before else f"after: {before}"
        if text:
            found.update(dict.fromkeys(filter(None, node.output), text))
    return found


def known_results(source: SourceFile) -> list[str]:
    unknown = unknown_to_runtime(source)
    return [value.name for value in source.proto.graph.output if value.name not in unknown]


def session_options(folder: Path, threads: int, ops: Iterable[Path] = ()) -> Any:
    """Return the options of a session whose large weights are in files of a folder, or given by name."""
    options = import_library("onnxruntime", "pip install onnxruntime").SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads, options.inter_op_num_threads = threads or thread_count(), 1
    options.enable_mem_pattern = False  # the second run would get its memory anew: pages cost as much as a run
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.absolute()))
    for library in ops:
        with library_errors(CalibrationError, f"{library} is no library of operators that ONNX Runtime loads: "):
            options.register_custom_ops_library(str(library.absolute()))
    return options


class FloatSession:
    """A float graph, ready to run, with some of its tensors as results.

    Inputs of the graph among `tensors` (`given`) are returned as they are given. `threads` are of one run; 0 = one for
    each core. With `plain` every operation is computed by itself, in the order of the file: quantized files are
    computed as they say. ONNX Runtime writes its optimized graph to the file `optimized`, with `<name>.weights` beside
    it.
    """

    def __init__(
        self,
        source: SourceFile,
        tensors: Iterable[str],
        *,
        threads: int = 0,
        plain: bool = False,
        optimized: Path | None = None,
    ) -> None:
        ort = import_library("onnxruntime", "pip install onnxruntime")
        inputs = {value.name for value in source.proto.graph.input}
        self.given = [name for name in tensors if name in inputs]
        self.computed = [name for name in tensors if name not in inputs]
        proto, weights = _with_results(source, self.computed)
        self._reads = {value.name for value in proto.graph.input}
        self._session, self.ops = None, source.ops
        if not self.computed:
            return
        options = session_options(source.made.path.parent if source.made else source.folder, threads, source.ops)
        if plain:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.add_session_config_entry("session.disable_prepacking", "1")  # a copy of every weight, for few runs
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
            apart = "session.optimized_model_external_initializers"
            options.add_session_config_entry(f"{apart}_file_name", f"{optimized.name}.weights")
            options.add_session_config_entry(f"{apart}_min_size_in_bytes", str(_SMALL))
        self._weights = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in weights.items()}
        options.add_external_initializers(list(self._weights), list(self._weights.values()))
        with library_errors(CalibrationError, f"ONNX Runtime cannot load {source.path}: "):
            self._session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(self, feeds: Arrays) -> Arrays:
        found: Arrays = {name: feeds[name] for name in self.given}
        if self._session is None:
            return found
        return found | results_of(self._session, self.computed, {k: v for k, v in feeds.items() if k in self._reads})


def results_of(session: Any, names: Sequence[str], feeds: Arrays) -> Arrays:
    shapes = ", ".join(f"{name} {value.shape} {value.dtype}" for name, value in feeds.items())
    with library_errors(CalibrationError, f"the network fails on a calibration batch of {shapes}: "):
        return dict(zip(names, session.run(names, feeds), strict=True))


def _with_results(source: SourceFile, names: Sequence[str]) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """Return a copy whose results are other tensors, with only the nodes that they depend on, and its weights."""
    # The session reads large weights where they are: to write and read them takes longer than to make a session.
    proto, wanted, kept = source.proto, set(names), []
    for node in reversed(proto.graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(inputs_of(node))
    copy = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    copy.functions.extend(proto.functions)
    copy.graph.name = proto.graph.name or "graph"
    copy.graph.node.extend(reversed(kept))
    weights = {}
    for tensor in proto.graph.initializer:
        if tensor.name not in wanted:
            continue
        array = _plain_array(source, tensor)
        if array is None:
            copy.graph.initializer.append(tensor)
            continue
        weights[tensor.name] = array
        apart = copy.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        apart.data_location = TensorProto.EXTERNAL
        apart.external_data.add(key="location", value="weights")  # no file: the session is given them by name
    copy.graph.sparse_initializer.extend(proto.graph.sparse_initializer)
    copy.graph.input.extend(value for value in proto.graph.input if value.name in wanted)
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return copy, weights


def _plain_array(source: SourceFile, tensor: onnx.TensorProto) -> NDArray[Any] | None:
    """Return a large weight that is given by name, or None."""
    raw = tensor.raw_data
    if source.made is not None and external_data_helper.uses_external_data(tensor) and tensor not in source.made:
        return source.array(tensor)  # a session knows one folder
    if len(raw) <= _SMALL or tensor.data_type not in _PLAIN:
        return None
    return np.frombuffer(raw, helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))


def inputs_of_file(source: SourceFile) -> tuple[TensorInfo, ...]:
    return read_interface(source.path, source.proto).inputs


def feeds(batches: Iterable[Any], inputs: Sequence[TensorInfo]) -> Iterator[Arrays]:
    """Yield the inputs of a file from a user's batches, in pieces of its own batch size where that is fixed.

    A batch is tensors or arrays; a tuple that begins with all inputs, which a target may follow; or a mapping by name.
    """
    for batch in batches:
        arrays = _arrays(batch, inputs)
        lengths = {len(value) for value in arrays.values() if value.ndim}
        fixed = [t for t in inputs if t.shape and t.shape[0] != -1]
        if len(lengths) > 1 and all(len(arrays[t.name]) == t.shape[0] for t in fixed):
            yield arrays  # the first dimension of some input is no batch
            continue
        sizes = {tensor.shape[0] for tensor in inputs if tensor.shape and tensor.shape[0] != -1}
        images = min((len(value) for value in arrays.values() if value.ndim), default=1)
        step = sizes.pop() if len(sizes) == 1 else images
        if images < step:
            raise CalibrationError(
                f"a batch has {images} images, and the file has a fixed batch of {step}: give batches of that size, or "
                "of a multiple of it"
            )
        for start in range(0, images - step + 1, max(step, 1)):
            yield {k: (v[start : start + step] if v.ndim and images != step else v) for k, v in arrays.items()}


def images_of(feed: Arrays) -> int:
    return next((len(value) for value in feed.values() if value.ndim), 1)


def open_batch(value: onnx.ValueInfoProto) -> bool:
    dims = value.type.tensor_type.shape.dim
    return bool(dims) and not dims[0].HasField("dim_value")


def one_image(proto: onnx.ModelProto, feed: Arrays) -> Arrays | None:
    """Return one image of a batch; None if the file has a fixed batch, or inputs whose first dimensions differ.

    It is the second, if there are two.
    """
    given = [value for value in proto.graph.input if value.name in feed]
    names = {value.type.tensor_type.shape.dim[0].dim_param for value in given if value.type.tensor_type.shape.dim}
    if not all(open_batch(value) for value in given) or len({value.shape[:1] for value in feed.values()}) > 1:
        return None
    if len(names) > 1:
        return None
    return {name: value[:2][-1:] for name, value in feed.items()}


def _arrays(batch: Any, inputs: Sequence[TensorInfo]) -> Arrays:
    names = [tensor.name for tensor in inputs]
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        if missing:
            got = ", ".join(map(str, batch)) or "nothing"
            raise DataError(
                f"a batch holds {got}; the file's inputs are {', '.join(names)}{near_misses(missing[0], batch)}"
            )
        values = [as_array(batch[name]) for name in names]
    else:
        values = [as_array(x) for x in batch_inputs(as_tensors(batch), len(inputs))]
    return {t.name: _fitting(t, value) for t, value in zip(inputs, values, strict=True)}


def as_tensors(batch: Any) -> object:
    """Convert the arrays of a batch to tensors, in the tuples that hold them."""
    if isinstance(batch, (tuple, list)):
        return type(batch)(as_tensors(part) for part in batch)
    if not isinstance(batch, np.ndarray):
        return batch
    try:
        return torch.from_numpy(as_array(batch))
    except TypeError:  # objects, texts
        raise CalibrationError(f"a batch is an array of {batch.dtype}; give numbers, such as float32") from None


def _fitting(tensor: TensorInfo, value: NDArray[Any]) -> NDArray[Any]:
    """Return an array in the type of an input; floats are converted, and integers to wider ones."""
    if tensor.dtype == "bfloat16":
        raise CalibrationError(
            f"the input {tensor.name!r} is bfloat16, which ONNX Runtime does not take on a CPU: export the file with "
            "inputs of float32 or float16"
        )
    wanted = np.dtype(tensor.dtype)
    shape_fits = len(value.shape) == len(tensor.shape) and all(
        w in (-1, g) or i == 0 for i, (g, w) in enumerate(zip(value.shape, tensor.shape, strict=True))
    )
    kind_fits = value.dtype == wanted or (value.dtype.kind == wanted.kind and wanted.kind in "fiu")
    if not shape_fits or not kind_fits:
        raise CalibrationError(
            f"a batch holds {value.shape} {value.dtype} for the input {tensor.name!r}, which takes "
            f"{shape_text(tensor.shape)} {tensor.dtype}; give batches of that type and shape"
        )
    return np.ascontiguousarray(value.astype(wanted, copy=False)).reshape(value.shape)  # a number stays one


# Bounds of a trial on one batch; the memory includes the libraries. The seconds are those in which the thread that runs
# the operations is on a processor: on a busy machine a valid file waits long.
SECONDS, BYTES = 20, 8 << 30

# Seconds of the clock for a trial that computes nothing and does not end.
_LAST_RESORT = 600

# Exit status of the process that runs the trial, where it ends itself because its processor time is spent.
_LATE = 99

# Rounds of a Loop that take days in every engine.
_MOST_ROUNDS = 1 << 31
_LOOPS = frozenset({"Loop", "Scan"})
# Inputs that decide about the size of a result.
_SIZES = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Tile": (1,),
    "Range": (0, 1, 2),
    "Resize": (2, 3),
    "Upsample": (1,),
    "Pad": (1,),
    "OneHot": (1,),
    "CenterCropPad": (1,),
    "HannWindow": (0,),
    "HammingWindow": (0,),
    "BlackmanWindow": (0,),
    "MelWeightMatrix": (0, 1),
    "DFT": (1,),
    "AffineGrid": (1,),
    "Col2Im": (0, 1),
}
# Operators by which exporters compute sizes from sizes.
_OF_SIZES = frozenset({"Shape", "Size", "Constant", "Identity", "Cast", "Gather", "Slice", "Concat", "Unsqueeze"}) | {
    *("Squeeze", "Reshape", "Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Floor", "Ceil", "Sqrt", "Equal"),
    *("Where", "Neg", "ReduceProd"),
}
_FACTOR = 1 << 20

_CODE = """
import os, resource, sys, threading, time
path, arrays, memory, cores, seconds, late, *libraries = sys.argv[1:]
def bound(kind, most):  # a lower limit of the user stays
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
bound(resource.RLIMIT_CORE, 0)
bound(resource.RLIMIT_AS, int(memory))
bound(resource.RLIMIT_CPU, int(cores))
def watch(clock):
    while time.clock_gettime(clock) < int(seconds):
        time.sleep(0.1)
    os._exit(int(late))
if hasattr(time, "pthread_getcpuclockid"):  # macOS has none
    clock = time.pthread_getcpuclockid(threading.get_ident())
    threading.Thread(target=watch, args=(clock,), daemon=True).start()
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.enable_cpu_mem_arena = False
for library in libraries:
    options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
with numpy.load(arrays) as feed:
    session.run(None, {value.name: feed[value.name] for value in session.get_inputs()})
"""


def check_bounds(source: SourceFile, feed: Arrays) -> None:
    """Run a file on one batch in a process of its own, if values decide how much it computes."""
    for node in _endless(source.proto.graph):
        raise CalibrationError(
            f"{source.path}: the Loop {node.name or node.output[0]!r} has {_MOST_ROUNDS:,} rounds or more, and its "
            "condition never changes: no engine ends it. Export it with fewer rounds, or a condition that it computes"
        )
    if not _unbounded(source.proto) or sys.platform == "win32":
        return
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "feed.npz"
        np.savez(arrays, **dict[str, Any](feed))
        cores = 2 * SECONDS * (os.cpu_count() or 1)  # of all its threads; it ends if this process is killed before
        limits = map(str, (BYTES, cores, SECONDS, _LATE))
        command = [sys.executable, "-c", _CODE, str(source.path), str(arrays), *limits, *map(str, source.ops)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LAST_RESORT, check=False)
            late = f"{SECONDS} seconds on a processor" if done.returncode in {_LATE, -signal.SIGXCPU} else ""
        except subprocess.TimeoutExpired:
            late = f"{_LAST_RESORT} seconds"
    if late:
        raise CalibrationError(
            f"{source.path} is not done with one batch after {late}, and it has loops or sizes that values decide "
            "about: it may never be. Give smaller batches, or export it without them"
        )
    if done.returncode and ("bad_alloc" in done.stderr or "memory" in done.stderr.lower() or done.returncode < 0):
        raise CalibrationError(
            f"{source.path} takes more than {BYTES >> 30} GiB for one batch, and it has loops or sizes that values "
            "decide about. Give smaller batches, or export it without them"
        )


def _endless(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Loops of too many rounds, or of any number, whose condition stays true."""
    graphs = list(graphs_of(graph))
    nodes = [node for one in graphs for node in one.node]
    known = {tensor.name: tensor for one in graphs for tensor in one.initializer}
    known.update({node.output[0]: attribute(node, "value", None) for node in nodes if node.op_type == "Constant"})
    values = {
        name: numpy_helper.to_array(tensor).item()
        for name, tensor in known.items()
        if tensor is not None and tensor.data_location != TensorProto.EXTERNAL and list(tensor.dims) in ([], [1])
    }
    before = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Identity"}
    for loop in nodes:
        if loop.op_type == "Loop":
            limit, first = (*loop.input, "", "")[:2]
            body: onnx.GraphProto = attribute(loop, "body", None)
            condition = body.output[0].name
            while condition in before:
                condition = before[condition]
            stays = condition == body.input[1].name or bool(values.get(condition, False))
            begins = not first or bool(values.get(first, False))
            if stays and begins and (not limit or values.get(limit, 0) >= _MOST_ROUNDS):
                yield loop


def _unbounded(proto: onnx.ModelProto) -> bool:
    """Whether a graph has loops, or sizes computed from values of tensors, not from sizes and constants alone."""
    functions = [node for function in proto.functions for node in function.node]
    if any(node.op_type in _LOOPS for node in (*functions, *all_nodes(proto.graph.node))):
        return True
    return any(map(_sized_by_values, graphs_of(proto.graph))) or any(n.op_type in _SIZES for n in functions)


def _sized_by_values(graph: onnx.GraphProto) -> bool:
    known = {tensor.name for tensor in graph.initializer if _small(tensor)}
    for node in graph.node:
        asked = [node.input[i] for i in _SIZES.get(node.op_type, ()) if i < len(node.input) and node.input[i]]
        if any(name not in known for name in asked):
            return True
        if (
            node.op_type in {"Shape", "Size"}
            or (
                node.op_type in _OF_SIZES
                and known.issuperset(name for name in node.input if name)
                and all(not own.HasField("t") or _small(own.t) for own in node.attribute)
            )
            or node.op_type == "ConstantOfShape"
        ):
            known.update(node.output)
    return False


def _small(tensor: onnx.TensorProto) -> bool:
    """Whether a constant multiplies a size by no more than a million; weights are no sizes and are not read."""
    if external_data_helper.uses_external_data(tensor) or np.prod(tensor.dims, initial=1.0) > 64:
        return True
    value = numpy_helper.to_array(tensor)
    return value.dtype.kind not in "iuf" or not value.size or bool(np.abs(value.astype(np.float64)).max() < _FACTOR)


# Types that QuantizeLinear takes.
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

Shapes = dict[str, tuple[int, ...]]
Types = dict[str, int]

# Operators whose result may be of any size that the file states; they are run to learn small constants only.
_GROWING = frozenset({"ConstantOfShape", "Expand", "Tile", "Range", "Resize", "Pad", "OneHot", "EyeLike"})

# Elements of the largest result of such an operator that is computed: its size is known before.
_COMPUTED = 1 << 22


class Index(OnnxGraph):
    """An index over the graph of a file; made anew after a change, but for constants that are added through it.

    Attributes:
        consumers: the nodes that read each tensor, each once, in order, with those whose graphs read it.
        unchanging: tensors that follow from constants alone.
    """

    def __init__(self, source: SourceFile, shapes: Shapes | None = None) -> None:
        super().__init__(source.proto.graph)
        self.source = source
        self.opset = {entry.domain: entry.version for entry in source.proto.opset_import}
        self.consumers = {}
        self.unchanging = {tensor.name for tensor in self.graph.initializer} | {""}
        for node in self.graph.node:
            read = [name for name in dict.fromkeys(inputs_of(node)) if name]
            for name in read:
                self.consumers.setdefault(name, []).append(node)
            if node.op_type not in RANDOM and self.unchanging.issuperset(read):
                self.unchanging.update(node.output)
        self.shapes = shapes or {}
        self._values: dict[str, NDArray[Any] | None] = {}

    def value(self, name: str) -> NDArray[Any] | None:
        """Return the value of a fixed tensor, for the shapes that the index was made with; None if it is not known."""
        if not name:
            return None
        if name in self._values:
            return self._values[name]
        value, tensor = self._compute(name), self.constants.get(name)
        if tensor is None or not external_data_helper.uses_external_data(tensor):
            self._values[name] = value  # weights in other files may be more than memory holds
        return value

    def add_constant(self, name: str, value: NDArray[Any]) -> str:
        name = super().add_constant(name, value)
        self.unchanging.add(name)
        self.shapes[name] = value.shape
        return name

    def deciding(self) -> dict[str, NDArray[Any]]:
        """Return the computed values, all integers, that decide about the shapes of results."""
        found = {}
        for node in self.graph.node:
            for name in node.input[1:]:
                if name in self.fixed and name in self.producers and self.producers[name].op_type != "Constant":
                    value = self.value(name)
                    if value is not None and value.dtype.kind == "i" and value.size < SMALL_CONSTANT:
                        found[name] = value
        return found

    def _compute(self, name: str) -> NDArray[Any] | None:
        if name in self.constants:
            return self.source.array(self.constants[name])
        node = self.producers.get(name)
        if node is None or name not in self.fixed or list(subgraphs([node])):
            return None
        if node.op_type == "Shape":
            shape = self.shapes.get(node.input[0])
            part = slice(attribute(node, "start", 0), attribute(node, "end", None))
            return None if shape is None else np.asarray(shape[part], np.int64)
        feeds = {key: value for key in node.input if key and (value := self.value(key)) is not None}
        if not feeds.keys() >= {key for key in node.input if key}:
            return None
        shape = self.shapes.get(name)
        small = shape is not None and math.prod(shape) <= _COMPUTED
        if node.op_type in _GROWING and not small and not _stays_small(node, feeds):
            return None
        return _evaluated(node, feeds, name, self.opset)


def _stays_small(node: onnx.NodeProto, feeds: dict[str, NDArray[Any]]) -> bool:
    """Return True if a ConstantOfShape is of a small size; the size of others is not looked at."""
    if node.op_type != "ConstantOfShape":
        return False
    sizes = [int(size) for size in feeds[node.input[0]].reshape(-1)]
    return min(sizes, default=1) >= 0 and math.prod(sizes) <= SMALL_CONSTANT


def _evaluated(
    node: onnx.NodeProto, feeds: dict[str, NDArray[Any]], name: str, opset: dict[str, int]
) -> NDArray[Any] | None:
    inputs = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()
    ]
    graph = helper.make_graph([node], "constant", inputs, [onnx.ValueInfoProto(name=name)])
    if node.op_type in QUANTIZED:  # onnx 1.23 evaluates no older ones, which compute the same
        opset = opset | {"": max(opset.get("", 1), 19)}
    imports = [helper.make_opsetid(domain, version) for domain, version in opset.items()]
    try:
        results: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=imports)).run([name], feeds)
        return np.asarray(results[0])
    except Exception:  # the reference evaluator raises whatever the numpy code of an operator does
        return None


def infer(
    source: SourceFile, sizes: dict[str, tuple[int, ...]], known: dict[str, NDArray[Any]] | None = None
) -> tuple[Shapes, Types]:
    """Infer shapes and types of the tensors of a graph whose inputs have given shapes; unknown ones are left out.

    `known`: as of `inferred_graph`.
    """
    with library_errors(QuantizationError, f"{source.path}: its shapes cannot be inferred (", ")"):
        graph = inferred_graph(source.proto, sizes, known)
    values = (*graph.value_info, *graph.output, *graph.input)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    return whole_shapes(graph), types


def elements(shape: tuple[int, ...] | None) -> int:
    return 0 if shape is None else math.prod(shape)


# Rounds of inference, each with the values that follow from the shapes of the round before.
_ROUNDS = 4

# Elements that every tensor may have, and elements for each element of the inputs.
_LARGE, _GROWTH = 1 << 28, 1 << 10


def inferred(source: SourceFile, feed: Arrays) -> tuple[Index, Shapes, Types]:
    """Return the index, shapes and types of a graph; what inference leaves open is measured on one batch."""
    sizes = {name: value.shape for name, value in feed.items()}
    shapes, types = infer(source, sizes)
    _check_sizes(source, shapes, feed)
    index = Index(source, shapes)
    unknown = unknown_to_runtime(source)
    for _ in range(_ROUNDS):
        known = {} if len(shapes) == len(types) else index.deciding()
        before = len(shapes)
        if known:
            shapes, types = infer(source, sizes, known)
            index = Index(source, shapes)
        if len(shapes) == before:
            break
    open_ = [
        name
        for node in index.graph.node
        for name in node.output
        if name and name not in index.fixed and name not in unknown and not (name in shapes and name in types)
    ]
    if open_:
        for name, value in FloatSession(source, open_).run(feed).items():
            if isinstance(value, np.ndarray):
                shapes[name] = value.shape
                types.setdefault(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
        index = Index(source, shapes)
    return index, shapes, types


def _check_sizes(source: SourceFile, shapes: Shapes, feed: Arrays) -> None:
    """Refuse a tensor that is out of all proportion to the inputs, before anything is allocated."""
    allowed = max(_LARGE, _GROWTH * sum(value.size for value in feed.values()))
    given = {tensor.name for tensor in source.proto.graph.initializer}
    name = max(shapes.keys() - given, key=lambda key: elements(shapes[key]), default="")
    if name and elements(shapes[name]) > allowed:
        raise QuantizationError(
            f"{source.path}: tensor {name!r} has the shape {shapes[name]}, {elements(shapes[name])} elements; at most "
            f"{allowed} are computed for inputs of this size. Give smaller batches, or export the file again"
        )
