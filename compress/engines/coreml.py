"""Core ML: lists the operators of an .mlpackage, which Apple's systems alone run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from compress.engines.base import Availability, RuntimeLayer, TensorInfo, operator
from compress.errors import EngineError
from compress.export.onnx import quiet
from compress.support.libraries import import_library, library_errors

NAME = "coreml"
_WEIGHT = "constexpr_affine_dequantize"
_BOUNDED = {"relu", "relu6", "clip"}
INSTALL = "pip install 'compress-vision[coreml]'"
INSTEAD = "its files run on iPhones, iPads and Macs; here they are written: compress build onnx FILE --engine coreml"


def availability() -> Availability:
    return Availability(name=NAME, available=False, reason=INSTEAD, install=INSTALL)


def library(module: str = "coremltools") -> ModuleType:
    with quiet():  # it reports each part of Apple's systems that is not here
        return import_library(module, INSTALL)


def operators(path: Path) -> tuple[list[str], list[str], tuple[RuntimeLayer, ...]]:
    """Return names of inputs and outputs, and what is computed between them.

    A tensor with pairs, and a weight of integers, has the type of its integers. A device may compute it otherwise.
    """
    load = library("coremltools.converters.mil.frontend.milproto.load").load
    with library_errors(EngineError, f"{path}: no Core ML package, or a damaged one (", "); export it again"), quiet():
        model = library().models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        function = load(spec, spec.specificationVersion, model.weights_dir).functions["main"]
    names = [[feature.name for feature in features] for features in (spec.description.input, spec.description.output)]
    return names[0], names[1], tuple(_layers(function))


def _layers(function: Any) -> Iterator[RuntimeLayer]:
    for op in function.operations:
        if op.op_type in {"const", _WEIGHT, "quantize", "dequantize"} or _after_product(op):
            continue
        read = [var for var in op.inputs.values() if hasattr(var, "child_ops")]
        inputs = [_tensor(var, _kind(var.op)) for var in read if var.val is None and _kind(var.op) != _WEIGHT]
        constants = [_tensor(var, _WEIGHT) for var in read if _kind(var.op) == _WEIGHT]
        last = op
        while len(last.outputs) == len(last.outputs[0].child_ops) == 1 and _after_product(last.outputs[0].child_ops[0]):
            last = last.outputs[0].child_ops[0]
        after = [{reader.op_type for reader in var.child_ops} for var in last.outputs]
        pairs = ["quantize" if kinds == {"quantize"} else "" for kinds in after]
        kind = "FullyConnected" if op.op_type == "linear" else op.op_type
        yield operator(kind, "Core ML", inputs, list(map(_tensor, last.outputs, pairs)), constants)


def _after_product(op: Any) -> bool:
    """Return True for an activation that alone reads a product or convolution, which then is one step with it."""
    made = op.x.op if op.op_type in _BOUNDED else None
    return made is not None and "weight" in made.inputs and len(made.outputs[0].child_ops) == 1


def _kind(op: Any) -> str:
    return "" if op is None else str(op.op_type)


def _tensor(var: Any, pair: str) -> TensorInfo:
    held = var
    if pair == "quantize":
        held = var.child_ops[0].outputs[0]
    elif pair in {"dequantize", _WEIGHT}:
        held = var.op.input if pair == "dequantize" else var.op.quantized_data
    kind = library("coremltools.converters.mil.mil.types").builtin_to_string(held.dtype)
    return TensorInfo(name=var.name, dtype=kind.replace("fp", "float"), shape=tuple(map(int, var.shape)))
