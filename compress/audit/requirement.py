"""Checks an engine against the requirement of the recipe (`export.require`), and describes each violation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from compress.audit.engine import EngineAudit
from compress.audit.layers import EIGHT_BITS
from compress.engines.base import RuntimeLayer
from compress.engines.onnx_file import load_onnx
from compress.export.names import is_node
from compress.onnx_graph.graph import WEIGHTED_OPS, OnnxGraph

Require = Literal["int8", "fp16"]

_RUNTIME_WEIGHTED = frozenset(
    {"Convolution", "Deconvolution", "GroupConvolution", "FullyConnected", "MatMul", "Linear", "Attention", "Subgraph"}
    | {"QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "MatMulInteger", "ConvInteger"}
)
"""Kinds of OpenVINO and the engine cuda, and of ONNX Runtime's optimized graph."""
_FOLDED = frozenset({"Add", "Mul", "Sub", "Div"})
_SHOWN = 3


def unmet_by_audit(audit: EngineAudit, require: Require, int8_nodes: Collection[str]) -> tuple[str, ...]:
    """Describe how an audited engine violates a requirement; () if it does not.

    `int8`: every operation of `int8_nodes` computes in 8 bits, and there is one; `fp16`: none computes in FP32.
    """
    if require == "fp16":
        wide = [layer.name for layer in audit.weighted if layer.precision in {"fp32", "tf32"}]
        return (f"{len(wide)} of {len(audit.weighted)} layers compute in FP32: {_some(wide)}",) if wide else ()
    if not int8_nodes:
        return ("the ONNX file has no INT8 operation",)
    eight = [layer for layer in audit.weighted if layer.precision in EIGHT_BITS]
    if not any(layer.onnx_nodes for layer in audit.weighted):  # the engine does not report the nodes of its layers
        short = len(int8_nodes) - len(eight)
        text = f"{len(eight)} layers compute in 8 bits, and the ONNX file asks for {len(int8_nodes)}"
        return (text,) if short > 0 else ()
    return _missing(lost_in_audit(audit, int8_nodes), int8_nodes)


def lost_in_audit(audit: EngineAudit, int8_nodes: Collection[str]) -> tuple[str, ...]:
    """Return those of `int8_nodes` that no layer of an audited engine computes in 8 bits."""
    found = {node for layer in audit.weighted if layer.precision in EIGHT_BITS for node in layer.onnx_nodes}
    return tuple(node for node in int8_nodes if node not in found)


def unmet_by_runtime(
    layers: Sequence[RuntimeLayer], int8_nodes: Collection[str], also: Mapping[str, Collection[str]] | None = None
) -> tuple[str, ...]:
    """Describe how an engine that lists its runtime layers is not INT8 where its ONNX file is."""
    if not int8_nodes:
        return ("the ONNX file has no INT8 operation",)
    return _missing(lost_in_runtime(layers, int8_nodes, also), int8_nodes)


def lost_in_runtime(
    layers: Sequence[RuntimeLayer], int8_nodes: Collection[str], also: Mapping[str, Collection[str]] | None = None
) -> tuple[str, ...]:
    """Return those of `int8_nodes` that no runtime layer (OpenVINO, ONNX Runtime, cuda) computes in 8 bits.

    `also` has further names of an operation (`folded_names`).
    """
    eight = [one for one in layers if one.kind in _RUNTIME_WEIGHTED and one.precision in {"i8", "u8"}]
    names = [name for layer in eight for name in layer.original_names]
    known = {node: (node, *(also or {}).get(node, ())) for node in int8_nodes}
    lost = [node for node in int8_nodes if not any(is_node(name, one) for one in known[node] for name in names)]
    every = [one for group in known.values() for one in group]
    invented = [
        layer
        for layer in eight
        if layer.kind != "Subgraph" and not any(is_node(name, one) for one in every for name in layer.original_names)
    ]
    return tuple(lost) if len(lost) > len(invented) else ()


def folded_names(path: Path | str) -> dict[str, tuple[str, ...]]:
    """The names that an engine may give a product or convolution of a file instead of its own."""
    view = OnnxGraph(load_onnx(path).graph)
    results, fixed = {value.name for value in view.graph.output}, _fixed(view)
    found: dict[str, tuple[str, ...]] = {}
    for first in (node for node in view.graph.node if node.op_type in WEIGHTED_OPS):
        names, tensor = [], first.output[0]
        after = view.consumers.get(tensor, [])
        while len(after) == 1 and after[0].op_type in _FOLDED and fixed.issuperset({*after[0].input} - {tensor}):
            names.append(after[0].name)
            tensor = after[0].output[0]
            after = view.consumers.get(tensor, [])
        found[first.name] = (*names, tensor) if tensor in results else tuple(names)
    return found


def _fixed(view: OnnxGraph) -> set[str]:
    """Return the tensors that the file gives, or computes from those and from sizes."""
    found = set(view.constants)
    for node in view.graph.node:
        if node.op_type == "Shape" or found.issuperset(name for name in node.input if name):
            found.update(node.output)
    return found


def _missing(lost: Sequence[str], int8_nodes: Collection[str]) -> tuple[str, ...]:
    if not lost:
        return ()
    return (f"{len(lost)} of {len(int8_nodes)} INT8 operations of the ONNX file are not INT8 here: {_some(lost)}",)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
