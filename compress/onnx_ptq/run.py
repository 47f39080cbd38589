"""Runs a float ONNX graph on ONNX Runtime with chosen tensors as its results, on the user's own batches.

Files whose graphs decide by values how much they compute (loops, computed sizes) first run once, within bounds of time
and memory, in a process of their own (`check_bounds`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from compress.engines.base import Arrays, TensorInfo, import_library, library_errors, shape_text
from compress.engines.onnx_file import read_interface
from compress.errors import CalibrationError, DataError, near_misses
from compress.graph.inputs import batch_inputs
from compress.onnx_graph import inputs_of, subgraphs
from compress.onnx_ptq.load import SourceFile

_ERRORS_ONLY = 3
_SMALL = 1 << 10
"""Bytes of constants that stay in the model of a session."""
_PLAIN = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
"""Types of weights that a session reads where they are."""
_RUNTIMES = frozenset({"com.microsoft", "com.ms.internal.nhwc", "ai.onnx.ml"})
"""Domains whose operators ONNX Runtime knows beside the standard ones."""


def unknown_to_runtime(source: SourceFile) -> dict[str, str]:
    """Return the tensors that come from or after an operator that ONNX Runtime does not know, each with the reason."""
    found: dict[str, str] = {}
    for node in source.proto.graph.node if not source.ops else ():
        before = next((found[name] for name in inputs_of(node) if name in found), "")
        if not _known(node):
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


def _known(node: onnx.NodeProto) -> bool:
    inner = [part for graph in subgraphs([node]) for part in graph.node]
    return all(_known(part) for part in inner) and (
        node.domain in _RUNTIMES or onnx.defs.has(node.op_type, node.domain)
    )


def session_options(folder: Path, threads: int, ops: Iterable[Path] = ()) -> Any:
    """Return the options of a session whose large weights are in files of a folder, or given by name."""
    options = import_library("onnxruntime", "pip install onnxruntime").SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
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
        proto, weights = _with_results(source.proto, self.computed)
        self._reads = {value.name for value in proto.graph.input}
        self._session, self.ops = None, source.ops
        if not self.computed:
            return
        options = session_options(source.folder, threads, source.ops)
        if plain:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
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


def _with_results(proto: onnx.ModelProto, names: Sequence[str]) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """Return a copy whose results are other tensors, with only the nodes that they depend on, and its weights.

    The session reads large weights where they are: to write and read them takes longer than to make a session.
    """
    wanted, kept = set(names), []
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
        array = _plain_array(tensor)
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


def _plain_array(tensor: onnx.TensorProto) -> NDArray[Any] | None:
    """Return the value of a large weight that numpy has a type for; None for all others."""
    raw = tensor.raw_data
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


def _arrays(batch: Any, inputs: Sequence[TensorInfo]) -> Arrays:
    names = [tensor.name for tensor in inputs]
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        if missing:
            got = ", ".join(map(str, batch)) or "nothing"
            raise DataError(
                f"a batch holds {got}; the file's inputs are {', '.join(names)}{near_misses(missing[0], batch)}"
            )
        values = [_as_array(batch[name]) for name in names]
    else:
        values = [_as_array(x) for x in batch_inputs(as_tensors(batch), len(inputs))]
    return {t.name: _fitting(t, value) for t, value in zip(inputs, values, strict=True)}


def as_tensors(batch: Any) -> object:
    """Convert the arrays of a batch to tensors, in the tuples that hold them."""
    if isinstance(batch, (tuple, list)):
        return type(batch)(as_tensors(part) for part in batch)
    if not isinstance(batch, np.ndarray):
        return batch
    try:
        return torch.from_numpy(_as_array(batch))
    except TypeError:  # objects, texts
        raise CalibrationError(f"a batch is an array of {batch.dtype}; give numbers, such as float32") from None


def _as_array(value: Any) -> NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        array = np.asarray(value)
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array  # a type of ml_dtypes
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


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


SECONDS, BYTES = 20, 8 << 30
"""Bounds of a trial on one batch; the memory includes the libraries."""

_LOOPS = frozenset({"Loop", "Scan"})
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
"""Inputs that decide about the size of a result."""
_OF_SIZES = frozenset({"Shape", "Size", "Constant", "Identity", "Cast", "Gather", "Slice", "Concat", "Unsqueeze"}) | {
    *("Squeeze", "Reshape", "Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Floor", "Ceil", "Sqrt", "Equal"),
    *("Where", "Neg", "ReduceProd"),
}
"""Operators by which exporters compute sizes from sizes."""
_LARGE = 1 << 20

_CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[4]),) * 2)
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.enable_cpu_mem_arena = False
for library in sys.argv[5:]:
    options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
with numpy.load(sys.argv[2]) as feed:
    session.run(None, {value.name: feed[value.name] for value in session.get_inputs()})
"""


def check_bounds(source: SourceFile, feed: Arrays) -> None:
    """Run a file on one batch in a process of its own, if values decide how much it computes."""
    if not _unbounded(source.proto) or sys.platform == "win32":
        return
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "feed.npz"
        np.savez(arrays, **dict[str, Any](feed))
        seconds = 2 * SECONDS * (os.cpu_count() or 1)  # of all its threads; it ends if this process is killed before
        limits = str(BYTES), str(seconds)
        command = [sys.executable, "-c", _CODE, str(source.path), str(arrays), *limits, *map(str, source.ops)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise CalibrationError(
                f"{source.path} is not done with one batch after {SECONDS} seconds, and it has loops or sizes that "
                "values decide about: it may never be. Give smaller batches, or export it without them"
            ) from None
    if done.returncode and ("bad_alloc" in done.stderr or "memory" in done.stderr.lower() or done.returncode < 0):
        raise CalibrationError(
            f"{source.path} takes more than {BYTES >> 30} GiB for one batch, and it has loops or sizes that values "
            "decide about. Give smaller batches, or export it without them"
        )


def _unbounded(proto: onnx.ModelProto) -> bool:
    """Whether a graph has loops, or sizes that follow from anything but constants and other sizes."""
    functions = [node for function in proto.functions for node in function.node]
    if any(node.op_type in _LOOPS for node in functions) or any(_holds_loop(node) for node in proto.graph.node):
        return True
    return any(_sized_by_values(graph) for graph in _graphs(proto.graph)) or any(n.op_type in _SIZES for n in functions)


def _holds_loop(node: onnx.NodeProto) -> bool:
    return node.op_type in _LOOPS or any(_holds_loop(inner) for graph in subgraphs([node]) for inner in graph.node)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for inner in subgraphs(graph.node):
        yield from _graphs(inner)


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
    return value.dtype.kind not in "iuf" or not value.size or bool(np.abs(value.astype(np.float64)).max() < _LARGE)
