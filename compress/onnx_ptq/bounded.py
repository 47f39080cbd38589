"""A trial of files whose graphs decide by values how much they compute: loops, and sizes that are computed.

They run once, within bounds of time and memory, in a process of their own, before anything else is computed of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

from compress.engines.base import Arrays
from compress.errors import CalibrationError
from compress.onnx_graph.graph import subgraphs
from compress.onnx_ptq.load import SourceFile

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
    """Run a file on one batch in a process of its own, if values decide how much it computes.

    Raises:
        CalibrationError: it is not done within the bounds.
    """
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
