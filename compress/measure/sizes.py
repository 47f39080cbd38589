"""Sizes of an ONNX file: on disk, and of its weights by type."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.engines.onnx_file import existing_file, load_onnx


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of an ONNX model.

    Attributes:
        file_bytes: on disk, with external data.
        weight_bytes: of all initializers and constants.
        by_type: the same by data type, such as {"int8": 23454912}, largest first.
    """

    file_bytes: int
    weight_bytes: int
    by_type: dict[str, int] = field(default_factory=dict)


def model_sizes(path: Path | str) -> Sizes:
    """Measure an ONNX file.

    Raises:
        EngineError: the file, or one that it names, is missing, truncated or not ONNX.
    """
    path, model = Path(path), load_onnx(path)
    by_type: dict[str, int] = {}
    external: set[Path] = set()
    for tensor in _tensors(model):
        name, size = _type_and_bytes(tensor)
        by_type[name] = by_type.get(name, 0) + size
        external |= {path.parent / entry.value for entry in tensor.external_data if entry.key == "location"}
    files = [path, *(existing_file(file) for file in sorted(external))]
    return Sizes(
        file_bytes=sum(file.stat().st_size for file in files),
        weight_bytes=sum(by_type.values()),
        by_type=dict(sorted(by_type.items(), key=lambda item: -item[1])),
    )


def _tensors(model: Any) -> Iterator[Any]:
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("t"):
                yield attribute.t
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _of_graph(graph)


def _type_and_bytes(tensor: Any) -> tuple[str, int]:
    name = tensor.DataType.Name(tensor.data_type).lower()
    if name == "string":
        return name, sum(map(len, tensor.string_data))
    name = {"float": "float32", "double": "float64"}.get(name, name)
    return name, math.ceil(math.prod(tensor.dims) * _bits(name) / 8)


def _bits(name: str) -> int:
    """Bits of one element: the first number in the type's name."""
    found = re.search(r"\d+", name)
    return int(found.group()) if found else 8  # bool, the only name without a number, takes a byte
