r"""The layers of an engine from TensorRT-RTX's verbose build log, which needs no GPU.

With profiling verbosity DETAILED the builder ends its log with the inspector's text form of the engine, a line a layer:

    Layers:
    Name: N, LayerType: K, Inputs: [ {...}, {...}], Constants: [...], Outputs: [...], TacticName: T, ..., Metadata: M

where each {...} is `Name, Dimensions, Strides, StrideOrder, Datatype, Format`, and M names the ONNX nodes as
`[ONNX Layer: node]`. `I/O Tensors:` follows. The kernel itself is chosen when the engine first runs, so tactics of
convolutions are stubs. Recorded from TensorRT-RTX 1.7.1.
"""

from __future__ import annotations

import re

from compress.engines.engine_layers import EngineLayer, EngineListing, EngineTensor, type_name
from compress.errors import AuditError

_LAYER = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>.*?)\], "
    r"(?:Constants: \[(?P<constants>.*?)\], )?Outputs: \[(?P<outputs>.*?)\], TacticName: (?P<tactic>.*?), "
    r"StreamId: -?\d+, Metadata: ?(?P<metadata>.*)$"
)
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<shape>[-\d,]*)\](?:, Strides: \[(?P<strides>[-\d,]*)\])?.*?"
    r"Datatype: (?P<type>\w+), Format: (?P<format>.*?) ?\}"
)
_IO = re.compile(r"Name: (?P<name>.*?), IOMode: (?P<mode>Input|Output), DataType: ")
_STUB = "__myelin_CASK_STUB"


def parse_build_log(text: str) -> EngineListing:
    """Read the layers of the last engine that a verbose build log tells of.

    Raises:
        AuditError: the log lists no layer; says how to build so that it does.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.search(r"(^|\s)Layers:\s*$", line)]
    block = lines[starts[-1] + 1 :] if starts else []
    layers = [_layer(match) for match in map(_LAYER.search, block) if match is not None]
    if not layers:
        told = sum("LayerType: " in line for line in lines)
        raise AuditError(
            f"the build log lists no engine layer ({len(lines)} lines, {told} of them with a layer in another form); "
            "it must be verbose, of a build with profiling verbosity DETAILED; `python -m compress build` keeps one"
        )
    io = [match for match in map(_IO.search, block) if match is not None]
    return EngineListing(
        source="TensorRT-RTX build log",
        layers=tuple(layers),
        inputs=tuple(m["name"] for m in io if m["mode"] == "Input"),
        outputs=tuple(m["name"] for m in io if m["mode"] == "Output"),
    )


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    r"""The ONNX nodes that a layer's metadata names, each once.

    >>> onnx_nodes("[ONNX Layer: /conv1/Conv]\x1e[ONNX Layer: a [b]]__gemm_from_conv1x1")
    ('/conv1/Conv', 'a [b]')
    """
    parts = metadata.split("[ONNX Layer: ")[1:]
    return tuple(dict.fromkeys(part.rpartition("]")[0] for part in parts))


def _layer(match: re.Match[str]) -> EngineLayer:
    tactic = match["tactic"].strip()
    return EngineLayer(
        name=match["name"],
        kind=match["kind"],
        onnx_nodes=onnx_nodes(match["metadata"]),
        inputs=_tensors(match["inputs"]),
        outputs=_tensors(match["outputs"]),
        constants=_tensors(match["constants"] or ""),
        tactic="" if tactic == _STUB else tactic,
    )


def _tensors(text: str) -> tuple[EngineTensor, ...]:
    return tuple(
        EngineTensor(
            name=match["name"],
            dtype=type_name(match["type"]),
            shape=_numbers(match["shape"]),
            strides=_numbers(match["strides"] or ""),
            format=match["format"],
        )
        for match in _TENSOR.finditer(text)
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)
