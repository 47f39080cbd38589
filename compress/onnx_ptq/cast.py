"""Half precision for the float32 part of an ONNX file, decided by what its tensors are on the user's images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from compress.engines.base import Arrays
from compress.errors import CalibrationError, QuantizationError
from compress.export.casting import HALVES, PRODUCTS, Casting, Ranges, cast_model, widened
from compress.onnx_graph import opset_of
from compress.onnx_ptq.canonical import constant_axes, copied, name_nodes, open_fused, plain_splits, shape_outputs
from compress.onnx_ptq.source import (
    FloatSession,
    MadeWeights,
    Shapes,
    SourceFile,
    check_bounds,
    elements,
    feeds,
    images_of,
    inferred,
    inputs_of_file,
    known_results,
    load_source,
    raised,
    unknown_to_runtime,
)
from compress.onnx_ptq.write import other_file, save_model
from compress.quantization.ptq.on_images import parts_in_memory
from compress.support.meters import decibel

# Signal to noise of the outputs below which further operations stay float32.
GOAL_DB = {"fp16": 40.0, "bf16": 25.0}
# Opsets that are asked for: the first with scales of half precision, and the first with bfloat16 convolutions.
OPSETS = {"fp16": 19, "bf16": 22}

# Rounds in which further operations are left float32, and how many in each.
_ROUNDS, _WORST = 6, 8


@dataclass(frozen=True, kw_only=True)
class CastFile:
    """Result of writing a file in half precision.

    Attributes:
        casting: what is in half precision, and what stays float32, with the reasons.
        images: number of images that ranges were measured on; 0 = constants and operators alone decided.
        sqnr_db: signal to noise of the least output against float32, computed as the file says; None without images.
    """

    path: Path
    casting: Casting
    images: int
    sqnr_db: float | None
    notes: tuple[str, ...]


def cast_onnx(
    path: Path | str,
    out: Path | str | None = None,
    *,
    precision: str = "fp16",
    batches: Iterable[Any] | None = None,
    keep_io_types: bool = True,
    ops: Sequence[Path | str] = (),
) -> CastFile:
    """Write the float32 part of an ONNX file in half precision; the file itself is not changed.

    What half precision does not hold stays float32, between Casts: values that end beyond the type or are too small for
    it, sums that overflow inside, constants that vanish. Quantized files keep their integers.

    Args:
        path: file of opset 6 to 25, float or with Q/DQ pairs.
        out: file to write, whole or not at all; None = `<name>.<precision>.onnx` beside the file.
        precision: `fp16` or `bf16`.
        batches: images that ranges are measured on, as for `quantize_onnx`; None = constants and operators decide.
        keep_io_types: leave inputs and outputs float32.
        ops: libraries of operators for ONNX Runtime, which the file needs beside the standard ones.

    Raises:
        AuditError: the file is missing, truncated or not valid ONNX.
        QuantizationError: another precision, or nothing in the file is float32.
        CalibrationError: no batches, or batches that the network fails on.
        DataError: a batch does not hold the file's inputs.

    Examples:
        >>> done = compress.cast_onnx("float.onnx", "fp16.onnx", batches=[images])
        >>> done.casting.products, done.casting.kept
        (2, ())
    """
    check_precision(precision, HALVES)
    source = load_source(path, quantized=True, ops=ops)
    target = other_file(source.path, out, precision)
    data = None if batches is None else list(feeds(batches, inputs_of_file(source)))
    if data is not None and not data:
        raise CalibrationError("ranges cannot be measured: `batches` was empty; give at least one batch, or None")
    if data:
        check_bounds(source, data[0])
    source, notes = _with_opset(source, precision)
    shape_outputs(source, data[0] if data else None)
    source, casting, db, lost = cast_source(source, precision, data, beside=target, keep_io_types=keep_io_types)
    if not casting.nodes:
        why = "; ".join(casting.notes()[:3]) or "it holds no float32 operation"
        raise QuantizationError(f"{path}: nothing can be written in {precision}: {why}")
    images = sum(map(images_of, data or ()))
    if db is not None and db < GOAL_DB[precision]:
        notes.append(
            f"the outputs keep {db:.0f} dB of float32; most is lost at {', '.join(lost) or 'no one operation'}"
        )
    if data is None:
        notes.append("no images were given: constants and operators alone decided what stays float32")
    return CastFile(
        path=save_model(source, target), casting=casting, images=images, sqnr_db=db, notes=(*notes, *casting.notes())
    )


def check_precision(precision: str, allowed: Iterable[str]) -> None:
    if precision not in allowed:
        raise QuantizationError(f"precision is {precision!r} (one of: {', '.join(allowed)})")


def _with_opset(source: SourceFile, precision: str) -> tuple[SourceFile, list[str]]:
    source = replace(source, proto=copied(source))
    name_nodes(source.proto.graph)
    notes = [*source.notes, *open_fused(source)]
    constant_axes(source)
    plain_splits(source)
    opset, wanted = opset_of(source.proto), OPSETS[precision]
    if opset >= wanted or (precision == "fp16" and not _is_quantized(source)):
        return source, notes
    try:
        proto = raised(source.path, source.proto, wanted)
    except QuantizationError as error:
        return source, [*notes, f"the opset stays {opset}, in which fewer operators take {precision}: {error}"]
    return replace(source, proto=proto), [
        *notes,
        f"the opset is raised from {opset} to {wanted} for {precision}",
    ]


def _is_quantized(source: SourceFile) -> bool:
    return any(node.op_type in {"QuantizeLinear", "DequantizeLinear"} for node in source.proto.graph.node)


def cast_source(
    source: SourceFile, precision: str, data: list[Arrays] | None, *, beside: Path, keep_io_types: bool = True
) -> tuple[SourceFile, Casting, float | None, list[str]]:
    """Return a model in half precision, what it became, its signal to noise, and where most of that is lost.

    Where the outputs are further from float32 than `GOAL_DB`, the operations at which most is lost stay float32 too.
    """
    if not data:
        made, casting = _cast(source, precision, beside=beside, keep_io_types=keep_io_types)
        return made, casting, None, []
    _, shapes, types = inferred(source, data[0])
    _restate(source.proto.graph.output, shapes)
    tensors = _float_tensors(source, types)
    ranges = Ranges(source.proto.graph, precision)
    for part in parts_in_memory(tensors, lambda name: 4 * elements(shapes.get(name))):
        _measure(ranges, FloatSession(source, part, plain=True), data)  # one session is in memory
    names = [name for name in known_results(source) if types.get(name) == onnx.TensorProto.FLOAT]
    exact = FloatSession(source, names, plain=True).run(data[0])  # before another graph is in memory
    goal = -np.inf if _is_quantized(source) else GOAL_DB[precision]  # there a step of a quantizer decides, not rounding
    options: dict[str, Any] = {"types": types, "ranges": ranges, "keep_io_types": keep_io_types, "beside": beside}
    made, casting = _cast(source, precision, **options)
    db = _distance(exact, made, casting, data[0])
    keep: dict[str, str] = {}
    worst: list[str] = []
    for _ in range(_ROUNDS):
        if db is None or db >= goal:
            break
        worst = _worst(source, made, casting, data[0], tensors, keep)
        again, other = _cast(source, precision, keep=keep | dict.fromkeys(worst, ""), **options)
        gained = _distance(exact, again, other, data[0])
        if not worst or gained is None or gained < db + 3:
            break
        del again  # its weights
        keep |= dict.fromkeys(worst, f"with these the outputs have {gained:.0f} instead of {db:.0f} dB")
        made, casting = _cast(source, precision, keep=keep, **options)
        db = gained
    return made, casting, db, worst[:4]


def _restate(outputs: Iterable[onnx.ValueInfoProto], shapes: Shapes) -> None:
    # A file may state them wrongly, and inference compares them where a Cast comes before.
    for value in outputs:
        stated, shape = value.type.tensor_type.shape.dim, shapes.get(value.name, ())
        if [side.dim_value or size for side, size in zip(stated, shape, strict=False)] != [*shape] and stated and shape:
            del stated[:]
            for axis in range(len(shape)):
                stated.add().dim_param = f"{value.name}_{axis}"


def _measure(ranges: Ranges, session: FloatSession, data: list[Arrays]) -> None:
    for feed in data:
        ranges.add(session.run(feed))


def _cast(
    source: SourceFile, precision: str, *, beside: Path, keep: Mapping[str, str] | None = None, **options: Any
) -> tuple[SourceFile, Casting]:
    # Weights of a model with external data may be more than memory holds: those in half precision are in a file too.
    weights = MadeWeights(beside) if source.external else None
    made = replace(source, proto=copied(source), made=weights)
    return made, cast_model(made.proto, precision, keep=keep, weights=made, **options)


def _float_tensors(source: SourceFile, types: Mapping[str, int]) -> list[str]:
    unknown, graph = unknown_to_runtime(source), source.proto.graph
    names = [value.name for value in graph.input]
    names += [name for node in graph.node if node.op_type != "Constant" for name in node.output]
    given = {tensor.name for tensor in graph.initializer}
    wanted = (name for name in names if name not in unknown and name not in given)
    return [name for name in wanted if name and types.get(name) == onnx.TensorProto.FLOAT]


def _distance(exact: Arrays, made: SourceFile, casting: Casting, feed: Arrays) -> float | None:
    return min(_signal_to_noise(exact, made, casting, feed).values(), default=None)


def _signal_to_noise(exact: Arrays, made: SourceFile, casting: Casting, feed: Arrays) -> dict[str, float]:
    source = replace(made, proto=widened(made.proto, casting.types))
    got = FloatSession(source, list(exact), plain=True).run(feed)
    return {name: db for name in exact if (db := _db(exact[name], got[name])) is not None}


def _db(exact: NDArray[Any], got: NDArray[Any]) -> float | None:
    a, b = np.asarray(exact, np.float64), np.asarray(got, np.float64)
    if a.shape != b.shape or not a.size:
        return None
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    signal = float(np.square(a[np.isfinite(a)]).sum())
    noise = float(np.square((a - b)[~same]).sum())
    if signal == 0:
        return None
    return decibel(signal, noise) if np.isfinite(noise) else -np.inf


def _worst(
    source: SourceFile,
    made: SourceFile,
    casting: Casting,
    feed: Arrays,
    tensors: list[str],
    keep: Mapping[str, str],
) -> list[str]:
    """Return the operations, not products, after which most is lost of what came to them, and what they consume."""
    found = _signal_to_noise(FloatSession(source, tensors, plain=True).run(feed), made, casting, feed)
    kept = {row.node for row in casting.kept} | keep.keys()
    producers = {name: node for node in source.proto.graph.node for name in node.output}
    losses: list[tuple[float, onnx.NodeProto]] = []
    for node in source.proto.graph.node:
        before = [found[name] for name in node.input if name in found]
        after = [found[name] for name in node.output if name in found]
        if before and after and node.name not in kept and node.op_type not in PRODUCTS:
            losses.append((min(before) - min(after), node))
    losses.sort(key=lambda pair: -pair[0])
    chosen = [node for loss, node in losses[:_WORST] if loss > 3]
    return [
        one.name
        for node in chosen
        for one in (node, *(producers[name] for name in node.input if name in producers))
        if one.name and one.name not in keep and one.op_type not in PRODUCTS | {"Constant"}
    ]
