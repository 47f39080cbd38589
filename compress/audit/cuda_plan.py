"""The layers that our own engine `cuda` makes of a file, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from compress.audit.layers import EngineLayer, EngineListing, EngineTensor, type_name
from compress.engines.cuda.executor import dtype_name
from compress.engines.cuda.plan.layout import Layout, lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.plan.steps import Convolution, Linear, Operation, Product, Step
from compress.engines.onnx_file import read_onnx
from compress.errors import EngineError

_KINDS = {"Linear": "MatMul", "PackImage": "QuantizeImage", "LayerNorm": "ReduceLayerNorm"}
"""Kinds whose own name does not say what is computed."""


def read_cuda_layers(path: Path | str, *, sides: Sequence[int] = ()) -> EngineListing:
    """Plan an ONNX file for one image, and list the steps (EngineError: the engine cannot run it).

    `sides` are sizes left open after the batch.
    """
    inputs = read_onnx(path).inputs if sides else ()
    shapes = {tensor.name: tensor.with_batch(1).with_sides(sides).shape for tensor in inputs}
    layout = lay_out(make_plan(path, shapes, batch_size=1))
    if not layout.steps:
        raise EngineError(f"{path}: the network computes nothing")
    plan = layout.plan
    return EngineListing(
        source="plan of the cuda engine, one image",
        layers=tuple(_layer(step, layout) for step in layout.steps),
        inputs=tuple(plan.inputs),
        outputs=tuple(plan.outputs.values()),
    )


def _layer(step: Step, layout: Layout) -> EngineLayer:
    kind = step.op if isinstance(step, Operation) else type(step).__name__
    constants: tuple[EngineTensor, ...] = ()
    if isinstance(step, Product):
        shape = tuple(step.weight.shape)
        constants = (EngineTensor(name=f"{step.name}/weight", dtype="int8", shape=shape),)
    return EngineLayer(
        name=step.name,
        kind=_KINDS.get(kind, kind),
        onnx_nodes=step.origins,
        inputs=tuple(_tensor(name, layout) for name in step.reads),
        outputs=tuple(_tensor(name, layout) for name in step.writes if _is_result(name, layout)),
        constants=constants,
        tactic="" if isinstance(step, Product) else "torch" if isinstance(step, Operation) else "",
        out_channels=step.weight.shape[0] if isinstance(step, (Convolution, Linear)) else None,
    )


def _is_result(name: str, layout: Layout) -> bool:
    """False for a second view of what the step writes, in which pixels overlap."""
    place = layout.places.get(name)
    if place is None:
        return True
    size = place.dtype.itemsize * torch.Size(place.shape).numel()
    return size <= layout.buffer_bytes.get(place.buffer, size)


def _tensor(name: str, layout: Layout) -> EngineTensor:
    """A tensor with its bytes in memory: one whose pixels overlap counts as its buffer."""
    place = layout.places.get(name)
    shape = place.shape if place is not None else layout.plan.tensors[name].shape
    if place is not None and not _is_result(name, layout):
        shape = (1, layout.buffer_bytes[place.buffer] // place.dtype.itemsize)
    return EngineTensor(name=name, dtype=_TYPES.get(dtype_name(name, layout), "unknown"), shape=shape)


_TYPES = {
    name: type_name(long)
    for name, long in {
        "i8": "int8",
        "u8": "uint8",
        "f16": "half",
        "bf16": "bf16",
        "f32": "float",
        "f64": "double",
        "i32": "int32",
        "i64": "int64",
        "bool": "bool",
    }.items()
}
