"""ONNX Runtime's own profile of a session: a JSON file of events, one for each node that a kernel has computed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from compress.engines.base import RuntimeLayer
from compress.errors import EngineError
from compress.files import parse_json

_KERNEL, _END = "_kernel_time", "model_run"
_TYPES = {"float": "f32", "float16": "f16", "bfloat16": "bf16", "uint8": "u8", "int8": "i8", "int32": "i32"}

_COPY = re.compile(r"_token_\d+$")
"""What ONNX Runtime adds to a node's name where it makes the node anew, to move channels last for example."""

Profile = Mapping[str, tuple[RuntimeLayer, float]]
"""Each node of the optimized graph, and its time in a run in ms, by name in the order of execution."""


def read_profile(text: str) -> list[Profile]:
    """Return the nodes of each run in a profile's JSON.

    Raises:
        EngineError: it is no list of events.
    """
    try:
        events = parse_json(text)
    except ValueError as error:
        raise EngineError(f"onnxruntime wrote a profile that cannot be read: {error}") from error
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise EngineError("onnxruntime wrote a profile that is no list of events")
    return list(_runs(events))


def _runs(events: list[Mapping[str, Any]]) -> Iterator[Profile]:
    """Yield the nodes of each run: the event of the run itself follows those of its nodes."""
    nodes: dict[str, tuple[RuntimeLayer, float]] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL):
            layer = _layer(name.removesuffix(_KERNEL), event.get("args", {}))
            nodes[layer.name] = layer, float(event.get("dur", 0.0)) / 1e3
        elif name == _END and nodes:
            yield nodes
            nodes = {}


def _layer(name: str, facts: Mapping[str, Any]) -> RuntimeLayer:
    read, written = _types(facts.get("input_type_shape")), _types(facts.get("output_type_shape"))
    return RuntimeLayer(
        name=name,
        kind=str(facts.get("op_name", "")),
        precision=read[0] if read else "unknown",
        output_precisions=written,
        original_names=(_COPY.sub("", name),),
    )


def _types(shapes: Any) -> tuple[str, ...]:
    """Return the types of a node's tensors: each is a mapping of its type to its shape."""
    return tuple(_TYPES.get(key, key) for shape in shapes or () for key in shape)
