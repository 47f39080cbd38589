"""The passes over a file: those for all, which tidy torch's ONNX, and those that its target needs, in order.

One list serves exported models and users' files.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from compress.errors import CompressWarning, EngineError, EngineUnavailableError
from compress.export.names import INT4_KEY, added_tensor, node_name, tensor_name
from compress.export.onnxruntime import (
    AXIS_OPSET,
    activations_in_integers,
    bounded_softmaxes,
    clips_apart,
    dilations_apart,
    floats_apart,
    integer_biases,
    layouts_apart,
    repeat_pairs,
    room_for_biases,
    scaled_in_integers,
    transposes_apart,
    weights_to_unsigned,
)
from compress.export.openvino import (
    PAD_OPSET,
    axes_from_the_front,
    batches_kept,
    bias_shared_convolutions,
    biases_apart,
    ceilings_apart,
    concatenated_pads,
    extremes_apart,
    factors_apart,
    flat_gathers,
    float_averages,
    holds_pairs,
    joins_apart,
    orders_in_two,
    padding_apart,
    products_apart,
    signs_apart,
    strides_kept,
    warn_of_resizes,
    whole_transforms,
    zero_points_into_biases,
)
from compress.onnx_graph import WEIGHTED_OPS, OnnxGraph, attribute, drop_unread, opset_of, rename, replace_attributes
from compress.support.libraries import import_library, keep_signal_stack, library_errors
from compress.support.process import sums_bytes_in_16_bits

_SCOPES = "pkg.torch.onnx.name_scopes"


def clean(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    _global_average_pools(graph)
    averages_without_padding(graph)
    _rename_nodes(graph)
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for tensor in graph.initializer:
        tensor.doc_string = ""
    del graph.metadata_props[:]
    del graph.value_info[:]  # engines infer shapes themselves; stale symbolic ones can contradict them
    drop_unread(graph)


def averages_without_padding(graph: onnx.GraphProto) -> None:
    """Let averages over images without padding count what is there, which is the same in torch and in ONNX.

    A window that reaches over the edge (`ceil_mode`) is divided by its part in the image. ONNX Runtime's integer kernel
    divides by the whole window if padding is to be counted (1.31).
    """
    for node in graph.node:
        over_the_edge = node.op_type == "AveragePool" and attribute(node, "ceil_mode", 0)
        if over_the_edge and not any(attribute(node, "pads", [])):
            replace_attributes(node, count_include_pad=None)


def _rename_nodes(graph: onnx.GraphProto) -> None:
    """Name nodes after the module that they come from, and inner tensors after the node that writes them."""
    seen: Counter[tuple[str, str]] = Counter()
    renamed: dict[str, str] = {}
    fixed = {value.name for value in graph.output}
    for node in graph.node:
        origin = _module_path(node), node.op_type
        node.name = node_name(*origin, seen[origin])
        seen[origin] += 1
        for i, output in enumerate(node.output):
            if output and output not in fixed:
                renamed[output] = tensor_name(node.name, i)
    rename(graph.node, renamed)


def _module_path(node: onnx.NodeProto) -> str:
    for prop in node.metadata_props:
        if prop.key == _SCOPES:
            scopes = ast.literal_eval(prop.value)
            return str(scopes[-2]).removeprefix("model.") if len(scopes) > 1 else ""
    return ""


def _global_average_pools(graph: onnx.GraphProto) -> None:
    """Turn a ReduceMean over the last two axes of an image into GlobalAveragePool, which engines fuse and quantize."""
    view = OnnxGraph(graph)
    for node in graph.node:
        axes = view.array(node.input[1]) if node.op_type == "ReduceMean" and len(node.input) == 2 else None
        # torch writes adaptive pooling in this form, and only that of images
        if axes is not None and attribute(node, "keepdims", 1) == 1 and sorted(axes.tolist()) == [-2, -1]:
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]


Values = Callable[[str], NDArray[Any] | None]


def pads_into_convolutions(proto: onnx.ModelProto, value: Values | None = None) -> int:
    """Remove every Pad by zeros of which all consumers are convolutions, which pad in its place; return the number.

    Frameworks that pad unevenly ("same" padding at stride 2, as TensorFlow) write a Pad before the convolution, which
    engines run in float. ONNX's Conv pads each side by itself, and a padded zero is exact on every grid. `value`
    returns a constant by name; None reads initializers and Constant nodes.
    """
    view = OnnxGraph(proto.graph)

    def removed(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        consumers = view.consumers.get(node.output[0], []) if node.op_type == "Pad" else []
        amounts = _amounts(node, value or view.array) if consumers else None
        fits = amounts is not None and node.output[0] not in view.outputs
        if amounts is None or not fits or not all(_pads_itself(c, node.output[0], len(amounts)) for c in consumers):
            return None
        for conv in consumers:
            own = attribute(conv, "pads", [0] * len(amounts))
            replace_attributes(conv, auto_pad=None, pads=[int(a + b) for a, b in zip(own, amounts, strict=True)])
            conv.input[0] = node.input[0]
        return []

    return view.rewrite(removed)


def _amounts(node: onnx.NodeProto, value: Values) -> list[int] | None:
    """Return what a Pad adds to the spatial axes, in the order of Conv's `pads`; None if it pads anything else."""
    pads, filler, axes = [*node.input[1:], "", "", ""][:3]
    given = value(pads) if pads else attribute(node, "pads", None)
    filling = value(filler) if filler else attribute(node, "value", 0.0)
    constant = attribute(node, "mode", b"constant") == b"constant" and not axes
    if not constant or given is None or filling is None or np.any(filling):
        return None
    amounts = [int(amount) for amount in given]
    rank = len(amounts) // 2
    outside = [amounts[i] for i in (0, 1, rank, rank + 1)] if rank > 2 else [1]
    if any(outside) or min(amounts) < 0:
        return None
    return [*amounts[2:rank], *amounts[rank + 2 :]]


def _pads_itself(node: onnx.NodeProto, source: str, sides: int) -> bool:
    """Return True if a node is a convolution of a tensor with padding that is given in numbers."""
    if node.op_type != "Conv" or node.input[0] != source or list(node.input).count(source) != 1:
        return False
    automatic = attribute(node, "auto_pad", b"NOTSET")
    own = attribute(node, "pads", None)
    return automatic in {b"NOTSET", b"VALID"} and (own is None or len(own) == sides)


def shape_for(proto: onnx.ModelProto, target: str) -> None:
    """Rewrite operations that a target's engine ("" = of a float model) reads or computes otherwise; before tidying."""
    others = target != "onnxruntime"  # files for TensorRT are measured on OpenVINO too
    openvino, reads_float = target == "openvino", target in {"openvino", ""}
    _run(
        proto,
        [
            (True, room_for_biases),
            (True, pack_int4),
            (others, bias_shared_convolutions),
            (openvino, warn_of_resizes),
            (openvino, axes_from_the_front),
            (openvino, products_apart),
            (openvino, flat_gathers),
            (openvino, float_averages),
            (openvino, padding_apart),
            (openvino, extremes_apart),
            (openvino, joins_apart),
            (openvino, factors_apart),
            (others, strides_kept),
            (reads_float, concatenated_pads),
            (reads_float, whole_transforms),
            (reads_float and opset_of(proto) >= PAD_OPSET, ceilings_apart),
            (reads_float, orders_in_two),
        ],
    )


def _run(proto: onnx.ModelProto, passes: Iterable[tuple[bool, Callable[[onnx.ModelProto], object]]]) -> None:
    for wanted, run in passes:
        if wanted:
            run(proto)


def finish_for(proto: onnx.ModelProto, target: str) -> None:
    """Write biases, zero points and pairs as a target's engine computes them, in place; after the graph is tidied."""
    openvino, runtime = target == "openvino", target == "onnxruntime"
    types = {one.data_type for one in proto.graph.initializer} | {attribute(n, "to", 0) for n in proto.graph.node}
    half = types & {TensorProto.FLOAT16, TensorProto.BFLOAT16}  # ONNX Runtime leaves biases of such files as they are
    _run(
        proto,
        [
            (openvino, partial(repeat_pairs, after=holds_pairs)),
            (openvino, signs_apart),
            (openvino, zero_points_into_biases),
            (openvino, batches_kept),
            (openvino, biases_apart),
            (runtime, bounded_softmaxes),
            (runtime, dilations_apart),
            (runtime, clips_apart),
            (runtime, repeat_pairs),
            (runtime, scaled_in_integers),
            (runtime, activations_in_integers),
            (runtime, partial(integer_biases, operators=WEIGHTED_OPS if half else ("Gemm", "MatMul"))),
            (runtime and opset_of(proto) >= AXIS_OPSET, floats_apart),
            (runtime, layouts_apart),
            (runtime, transposes_apart),
            (runtime and sums_bytes_in_16_bits(), weights_to_unsigned),
            (target in {"litert", "qnn"}, partial(integer_biases, operators=WEIGHTED_OPS)),
            (target in {"dla", "qnn"}, partial(repeat_pairs, everywhere=True)),  # pairs around every operator
            (bool(target), partial(_own_constants, integers=not runtime)),
        ],
    )


def _own_constants(proto: onnx.ModelProto, *, integers: bool) -> None:
    """Give each DequantizeLinear of a weight a zero point of its own, and integers of its own if `integers`."""
    # OpenVINO (2026.4) computes a product in float where its weight shares the zero point of a convolution's weight,
    # and convolutions that share integers with other scales. ONNX Runtime (1.31) does not load a file with a shared
    # zero point where it makes the weights unsigned, `x64quantprecision`.
    view, seen = OnnxGraph(proto.graph), set[str]()
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear" and len(node.input) > 2 and node.input[0] in view.constants:
            for place, part in ((0, "integers"), (2, "zero_point")) if integers else ((2, "zero_point"),):
                value = view.array(node.input[place])
                if node.input[place] in seen and value is not None:
                    node.input[place] = view.add_constant(added_tensor(node.output[0], part), value)
                seen.add(node.input[place])


# First opset whose QuantizeLinear and DequantizeLinear take INT4, and integers of 16 bits.
OPSET = 21


def pack_int4(proto: onnx.ModelProto) -> int:
    """Write weights of 4 bits and fewer as INT4, in place; return their number, 0 below opset 21.

    torch has no 4-bit tensor, so `prepare` writes INT8 constants and marks their DequantizeLinear.
    """
    if opset_of(proto) < OPSET:
        return 0
    view, dtype = OnnxGraph(proto.graph), helper.tensor_dtype_to_np_dtype(TensorProto.INT4)
    marked = [node for node in proto.graph.node if any(prop.key == INT4_KEY for prop in node.metadata_props)]
    packed: dict[str, str] = {}
    for node in marked:
        for i in (0, 2):
            name = node.input[i]
            values = view.array(name)
            if name not in packed and values is not None:
                packed[name] = view.add_constant(added_tensor(name, "int4"), values.astype(dtype))
            node.input[i] = packed[name]
    return len(marked)


# ONNX Runtime's words for an operator of a user's own domain, which it loads with its library.
_OF_A_LIBRARY = re.compile(r"(?<![\w.-])(?!ai\.onnx|com\.microsoft)[\w.-]+:\w+\(-?\d+\) is not a registered")


def refusal(file: Path, engine: str) -> str:
    """Why OpenVINO or ONNX Runtime does not load a model; "" if it does, or is not installed."""
    if not file.is_file():  # audited, and removed since
        return ""
    try:
        if engine == "openvino":
            library = import_library(engine, "pip install openvino")
            with library_errors(EngineError, "OpenVINO does not load the file: "), keep_signal_stack():
                library.Core().read_model(file)
        elif engine == "onnxruntime":
            library = import_library(engine, "pip install onnxruntime")
            options = library.SessionOptions()
            options.log_severity_level = 4
            options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
            with library_errors(EngineError, "ONNX Runtime does not load the file: "):
                library.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except EngineUnavailableError:
        return ""
    except EngineError as error:
        return "" if _OF_A_LIBRARY.search(str(error)) else str(error)
    return ""


def warn_of_refusal(file: Path, target: str) -> None:
    if found := refusal(file, target):
        warnings.warn(CompressWarning(f"{found}; it is written nevertheless"), stacklevel=4)
