"""Sizes of an ONNX file, and a quantized file against its float file, as written and on its target's engine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.engines.base import Arrays, existing_file, load_onnx, read_onnx
from compress.engines.registry import ENGINES, build_engine
from compress.errors import CompressError
from compress.export.casting import widened
from compress.measure.parity import sqnr_db
from compress.onnx_ptq.source import (
    FloatSession,
    feeds,
    images_of,
    inputs_of_file,
    known_results,
    load_source,
    open_batch,
    unknown_to_runtime,
)
from compress.support.process import NO_VNNI, sums_bytes_in_16_bits

# Largest number of images that are compared.
IMAGES = 8
# Signal to noise below which a quantized file is called far from float: a third of the signal is noise.
LOW_DB = 10.0
# An engine that stays below the first, and that far below the file itself, computes something else: differences of
# rounding, single steps, are smaller.
FAULT_DB, FAULT_LOSS_DB = 25.0, 6.0
_TRY = "Try a fixed batch, or keep layers in float (quantization.rules)"
_COMPILE_IN_SECONDS = ("openvino", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    """Comparison of a quantized file with its float file.

    Attributes:
        written_db: signal to noise of the file run as it is written, in dB; the least of its outputs.
        engine: the target's; "" if it is not installed, or the target has none that compiles in seconds.
        engine_db: the same on that engine; None without one.
        warning: what is wrong and what to do; "" if nothing is.
    """

    images: int
    written_db: float | None
    engine: str
    engine_db: float | None
    warning: str = ""


def check_onnx(
    float_path: Path | str, path: Path | str, batch: Any, *, target: str, ops: Sequence[Path | str] = ()
) -> FileCheck:
    """Compare a quantized file with float on the first images of a batch.

    Outputs that are no floats, whose size depends on values, or that are zero in float are left out.

    Args:
        float_path: file that it was made from.
        path: quantized file.
        batch: as `quantize_onnx` takes it.
        target: that the file was quantized for.
        ops: libraries of operators for ONNX Runtime; OpenVINO does not run such files.

    Examples:
        >>> spec = compress.QuantSpec(target="onnxruntime")
        >>> path = compress.quantize_onnx("float.onnx", [images], spec=spec, out="new.onnx")
        >>> compress.check_onnx("float.onnx", path, images, target="onnxruntime").warning
        ''
    """
    source = load_source(float_path, ops=ops)
    piece = next(feeds([batch], inputs_of_file(source)))
    if all(open_batch(value) for value in source.proto.graph.input if value.name in piece):
        piece = {name: value[:IMAGES] for name, value in piece.items()}
    engine = target if target in _COMPILE_IN_SECONDS and ENGINES[target].availability().available else ""
    found = FileCheck(images=images_of(piece), written_db=None, engine=engine, engine_db=None)
    names = known_results(source)
    if not names:
        why = next(iter(unknown_to_runtime(source).values()), "it has no result")
        return replace(found, engine="", warning=f"not compared with float: {why}")
    own = {"ops": os.pathsep.join(str(one.absolute()) for one in source.ops)} if ops else {}
    try:
        expected = {k: v for k, v in _run(float_path, "onnxruntime", piece, **own).items() if k in names}
        found = replace(found, written_db=_least(expected, _as_written(path, piece, names, own)))
    except CompressError as error:
        return replace(found, engine="", warning=f"not compared with float: {error}")
    try:
        on_engine = (
            _least(expected, _run(path, engine, piece, **own if engine == "onnxruntime" else {})) if engine else None
        )
    except CompressError as error:
        return replace(found, warning=str(error))
    return replace(found, engine_db=on_engine, warning=_warning(found.written_db, on_engine, engine))


def _run(path: Path | str, engine: str, feed: Arrays, **options: Any) -> Arrays:
    precision = "f32" if engine == "openvino" else None
    with build_engine(path, engine, precision=precision, **options) as built:
        return built.run(feed)


def _as_written(path: Path | str, feed: Arrays, names: list[str], own: Mapping[str, str]) -> Arrays:
    """One in bfloat16, which ONNX Runtime does not take, is run with results that are rounded to it."""
    if "bf16" not in read_onnx(path).float_types:
        return _run(path, "onnxruntime", feed, fuse="no", **own)
    source = load_source(path, quantized=True)
    return FloatSession(replace(source, proto=widened(source.proto)), names, plain=True).run(feed)


def _least(expected: Mapping[str, Any], got: Mapping[str, Any]) -> float | None:
    """The least signal to noise of the comparable outputs; None if there is none."""
    found = []
    for name, value in expected.items():
        a, b = np.asarray(value), np.asarray(got.get(name))
        if a.dtype.kind != "f" or a.shape != b.shape or not np.isfinite(a).all() or not a.any():
            continue
        found.append(sqnr_db(a, b) if np.isfinite(b).all() else -math.inf)
    return min(found, default=None)


def _warning(written: float | None, on_engine: float | None, engine: str) -> str:
    if written is not None and on_engine is not None and on_engine < min(FAULT_DB, written - FAULT_LOSS_DB):
        saturates = engine == "openvino" and sums_bytes_in_16_bits()
        return (
            f"{engine} computes something else than the file says: {on_engine:.1f} dB against float, the file itself "
            f"{written:.1f} dB; do not use it there as it is. {NO_VNNI if saturates else _TRY}"
        )
    if written is not None and written < LOW_DB:
        return (
            f"the quantized network is far from float ({written:.1f} dB); `python -m compress inspect parity --onnx "
            "FILE --data DATA --mend-sqnr 20` finds the layers that cost it, and the smallest change that helps"
        )
    return ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of an ONNX model on disk, with external data, and of its initializers and constants, largest type first."""

    file_bytes: int
    weight_bytes: int
    by_type: dict[str, int] = field(default_factory=dict)


def model_sizes(path: Path | str) -> Sizes:
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
    found = re.search(r"\d+", name)
    return int(found.group()) if found else 8  # bool, the only name without a number, takes a byte
