r"""Parses the layers of an engine from a verbose build log of TensorRT-RTX, which needs no GPU, or of TensorRT.

With profiling verbosity DETAILED the builder ends its log with the inspector's text form of the engine, a line a layer:

    Layers:
    Name: N, LayerType: K, Inputs: [ {...}, {...}], Constants: [...], Outputs: [...], TacticName: T, ..., Metadata: M

where each {...} is `Name, Dimensions, Strides, StrideOrder, Datatype, Format` (TensorRT-RTX, recorded from 1.7.1) or
`Name, Location, Dimensions, Format/Datatype` (TensorRT 10, from logs in issues), and M names the ONNX nodes as
`[ONNX Layer: node]`. `I/O Tensors:` or `Bindings:` follows. TensorRT-RTX chooses kernels when the engine first runs, so
its tactics of convolutions are stubs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from compress.audit.layers import EngineLayer, EngineListing
from compress.audit.nvidia_layer import engine_layer, split_bindings, without_constants
from compress.errors import AuditError
from compress.files import parse_json

_LAYER = re.compile(
    r"Name: (?P<Name>.*?), LayerType: (?P<LayerType>\w+), Inputs: \[(?P<Inputs>.*?)\], "
    r"(?:Constants: \[(?P<Constants>.*?)\], )?Outputs: \[(?P<Outputs>(?:.*? ?\})?)\](?:, (?P<rest>.*?))??"
    r"(?:, Metadata: ?(?P<Metadata>.*))?$"
)
_TENSOR = re.compile(r"\{ (Name: .*?) ?\}(?=, \{|$)")
_TENSOR_KEY = r"(?:Name|Location|Dimensions|Strides|StrideOrder|Datatype|Format/Datatype|Format)"
_TENSOR_ITEM = re.compile(rf"({_TENSOR_KEY}): (.*?)(?=, {_TENSOR_KEY}: |$)")
_ITEM = re.compile(r"(\w+): (\{.*?\}|\[.*?\]|.*?)(?=, \w+: |$)")
_IO = re.compile(r"Name: (?P<name>.*?), IOMode: (?P<mode>Input|Output), DataType: ")


def parse_build_log(text: str) -> EngineListing:
    """Read the layers of the last engine in a verbose build log.

    Raises:
        AuditError: the log lists no layer; the message says how to build so that it does.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.search(r"(^|\s)Layers:\s*$", line)]
    block = lines[starts[-1] + 1 :] if starts else []
    layers = [engine_layer(_keys(match)) for match in map(_LAYER.search, block) if match is not None]
    if not layers:
        others = sum("LayerType: " in line for line in lines)
        raise AuditError(
            f"the build log lists no engine layer ({len(lines)} lines, {others} of them with a layer in another form); "
            "it must be verbose, with profiling verbosity DETAILED; `python -m compress build onnx` keeps such a log"
        )
    inputs, outputs = _io_names(block, layers)
    return EngineListing(
        source="build log",
        layers=without_constants(layers, {*inputs, *outputs}),
        inputs=inputs,
        outputs=outputs,
    )


def _keys(match: re.Match[str]) -> dict[str, Any]:
    """Return the keys of a layer's line in the form of the inspector's JSON."""
    found = match.groupdict()
    row: dict[str, Any] = {key: _value(value) for key, value in _ITEM.findall(found.pop("rest") or "")}
    for key in ("Inputs", "Constants", "Outputs"):
        blocks = _TENSOR.findall((found.pop(key) or "").strip())
        row[key] = [{name: _value(value) for name, value in _TENSOR_ITEM.findall(block)} for block in blocks]
    return row | found


def _value(text: str) -> Any:
    """Return the number, list or object that a text holds; else the text."""
    if not re.match(r"[\[{\d-]", text):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


def _io_names(block: Sequence[str], layers: Sequence[EngineLayer]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the network's inputs and outputs: from `I/O Tensors`, or from the names that follow `Bindings:`."""
    io = [match for match in map(_IO.search, block) if match is not None]
    if io:
        inputs, outputs = ([m["name"] for m in io if m["mode"] == mode] for mode in ("Input", "Output"))
        return tuple(inputs), tuple(outputs)
    at = next((i for i, line in enumerate(block) if line.rstrip().endswith("Bindings:")), len(block))
    known = {tensor.name for layer in layers for tensor in (*layer.inputs, *layer.outputs)}
    return split_bindings([line.strip() for line in block[at + 1 :] if line.strip() in known], layers)
