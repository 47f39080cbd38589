"""The layers that LiteRT runs of a .tflite file, with the type and the kernel of each."""

from __future__ import annotations

from pathlib import Path

from compress.audit.layers import EngineLayer, EngineListing, EngineTensor, type_name
from compress.engines import litert
from compress.engines.base import BuildOptions, TensorInfo


def read_litert_layers(path: Path | str) -> EngineListing:
    engine = litert.load(path, BuildOptions())
    operators = engine.operators()
    given, returned = [[tensor.name for tensor in tensors] for tensors in (engine.inputs, engine.outputs)]
    engine.close()
    computed = {*given, *(tensor.name for op in operators for tensor in op.outputs)}
    layers = tuple(
        EngineLayer(
            name=op.outputs[0].name,
            kind=op.kind.title().replace("_", ""),
            onnx_nodes=(op.outputs[0].name,),
            inputs=tuple(_tensor(tensor) for tensor in op.inputs if tensor.name in computed),
            outputs=tuple(map(_tensor, op.outputs)),
            constants=tuple(_tensor(tensor) for tensor in op.inputs if tensor.name not in computed),
            tactic=op.kernel,
            out_channels=op.outputs[0].shape[-1] if "CONV" in op.kind else None,
        )
        for op in operators
    )
    return EngineListing(source="LiteRT on this CPU", layers=layers, inputs=tuple(given), outputs=tuple(returned))


def _tensor(tensor: TensorInfo) -> EngineTensor:
    return EngineTensor(name=tensor.name, dtype=type_name(tensor.dtype), shape=tensor.shape)
