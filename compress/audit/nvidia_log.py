r"""Parses the layers of an engine from a verbose build log of TensorRT-RTX or TensorRT, a line a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from compress.audit.layers import EngineLayer, EngineListing
from compress.audit.nvidia_layer import engine_layer, split_bindings, without_constants
from compress.errors import AuditError
from compress.files import parse_json

_TENSOR_KEY = r"(?:Name|Location|Dimensions|Strides|StrideOrder|Datatype|Format/Datatype|Format)"
_TENSOR_ITEM = re.compile(rf"({_TENSOR_KEY}): (.*?)(?=, {_TENSOR_KEY}: |$)")
# A line may be long and hostile: `str.partition` and one pass take it apart, in time that grows with its length alone.


def parse_build_log(text: str) -> EngineListing:
    """Read the layers of the last engine in a verbose build log.

    Raises:
        AuditError: the log lists no layer; the message says how to build so that it does.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.split()[-1:] == ["Layers:"]]
    block = lines[starts[-1] + 1 :] if starts else []
    layers = [engine_layer(keys) for line in block if (keys := _keys(line)) is not None]
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


def _keys(line: str) -> dict[str, Any] | None:
    """Return the keys of a layer's line; None for any other line."""
    name, found, rest = line.partition("Name: ")[2].partition(", LayerType: ")
    kind, begun, rest = rest.partition(", Inputs: [")
    ends = [at for mark in ("], Constants: [", "], Outputs: [") if (at := rest.find(mark)) >= 0]
    if not found or not begun or not re.fullmatch(r"\w+", kind) or not ends:
        return None
    inputs, rest = rest[: min(ends)], rest[min(ends) + 3 :]
    constants, inner, after = rest.removeprefix("Constants: [").partition("], Outputs: [")
    if not rest.startswith("Constants: ["):
        constants, after = "", rest.removeprefix("Outputs: [")
    elif not inner:
        return None
    outputs, closed, after = ("", "]", after[1:]) if after.startswith("]") else after.partition("}]")
    if not closed or (after and not after.startswith(", ")):
        return None
    others, _, metadata = after.partition(", Metadata:")
    row: dict[str, Any] = {key: _value(value) for key, value in _items(others.removeprefix(", "))}
    blocks = {"Inputs": inputs, "Constants": constants, "Outputs": outputs}
    return (
        row
        | {key: [_tensor(text) for text in _blocks(value)] for key, value in blocks.items()}
        | {"Name": name, "LayerType": kind, "Metadata": metadata.removeprefix(" ") or None}
    )


def _blocks(text: str) -> list[str]:
    """Return the insides of `{ Name: ...}, { Name: ...}`."""
    parts = text.strip().removeprefix("{").removesuffix("}").split("}, {")
    return [part.strip() for part in parts if part.strip().startswith("Name: ")]


def _tensor(text: str) -> dict[str, Any]:
    return {name: _value(value) for name, value in _TENSOR_ITEM.findall(text)}


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of `key: value, key: {...}, key: [...]`."""
    depth = begun = 0
    for at, letter in enumerate(f"{text}, "):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth <= 0 and text[at + 1 : at + 2] in ("", " "):
            key, found, value = text[begun:at].strip().partition(": ")
            if found and key.isidentifier():
                yield key, value
            begun = at + 1


def _value(text: str) -> Any:
    """Return the number, list or object that a text holds; else the text."""
    if not re.match(r"[\[{\d-]", text):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


def _io_names(block: Sequence[str], layers: Sequence[EngineLayer]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the network's inputs and outputs, from `I/O Tensors` or `Bindings:`."""
    io = [line.partition("Name: ")[2].partition(", IOMode: ") for line in block if ", IOMode: " in line]
    if io:
        inputs, outputs = (
            tuple(name for name, _, after in io if after.startswith(f"{mode}, DataType: "))
            for mode in ("Input", "Output")
        )
        return inputs, outputs
    at = next((i for i, line in enumerate(block) if line.rstrip().endswith("Bindings:")), len(block))
    known = {tensor.name for layer in layers for tensor in (*layer.inputs, *layer.outputs)}
    return split_bindings([line.strip() for line in block[at + 1 :] if line.strip() in known], layers)
