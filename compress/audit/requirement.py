"""Checks an engine against the requirement of the recipe (`export.require`), and describes each violation.

`int8`: every operation that is INT8 in the ONNX file computes in 8 bits in the engine, and there is at least one.
`fp16`: no convolution or product computes in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from compress.audit.engine import EngineAudit
from compress.audit.layers import EIGHT_BITS
from compress.engines.base import RuntimeLayer
from compress.export.names import is_node

Require = Literal["int8", "fp16"]

_RUNTIME_WEIGHTED = frozenset(
    {"Convolution", "Deconvolution", "GroupConvolution", "FullyConnected", "MatMul", "Linear", "Attention"}
)
_SHOWN = 3


def unmet_by_audit(audit: EngineAudit, require: Require, int8_nodes: Collection[str]) -> tuple[str, ...]:
    """Describe how an audited engine violates a requirement; () if it does not.

    Args:
        audit: of the engine.
        require: requirement.
        int8_nodes: names of the operations that are INT8 in its ONNX file (`audit_onnx`).
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
    found = {node for layer in eight for node in layer.onnx_nodes}
    return _missing(int8_nodes, lambda node: node in found)


def unmet_by_runtime(layers: Sequence[RuntimeLayer], int8_nodes: Collection[str]) -> tuple[str, ...]:
    """Describe how an engine that lists its runtime layers (OpenVINO, cuda) is not INT8 where its ONNX file is."""
    if not int8_nodes:
        return ("the ONNX file has no INT8 operation",)
    names = [
        name
        for layer in layers
        if layer.kind in _RUNTIME_WEIGHTED and layer.precision in {"i8", "u8"}
        for name in layer.original_names
    ]
    return _missing(int8_nodes, lambda node: any(is_node(name, node) for name in names))


def _missing(int8_nodes: Collection[str], found: Callable[[str], bool]) -> tuple[str, ...]:
    lost = [node for node in int8_nodes if not found(node)]
    if not lost:
        return ()
    return (f"{len(lost)} of {len(int8_nodes)} INT8 operations of the ONNX file are not INT8 here: {_some(lost)}",)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
