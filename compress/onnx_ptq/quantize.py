"""Quantizes an ONNX file without its source: Q/DQ pairs are inserted into the user's own graph.

Names, inputs, outputs, open dimensions, metadata and all nodes that no quantizer and no folding touches stay as they
are. Quantizers are placed by the same rules as for torch models, and calibrated on ONNX Runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper
from torch import nn

from compress.engines.base import Arrays
from compress.errors import CalibrationError, QuantizationError
from compress.export.casting import HALVES, Casting, types_of
from compress.export.names import TARGET_KEY
from compress.export.targets import OPSET as WIDE_OPSET
from compress.export.targets import averages_without_padding, finish_for, shape_for
from compress.onnx_graph import drop_unread, tensors_of
from compress.onnx_ptq.calibrate import calibrate_graph
from compress.onnx_ptq.canonical import canonical, comparison, results_for_one, shape_outputs
from compress.onnx_ptq.cast import OPSETS, cast_source, check_precision
from compress.onnx_ptq.improve import (
    Improved,
    correct_biases,
    file_names,
    for_network,
    improve_file,
    on_images,
    place_on_images,
    smooth_file,
    write_trained,
)
from compress.onnx_ptq.read import Reading, read_onnx_graph
from compress.onnx_ptq.source import (
    FloatSession,
    Index,
    SourceFile,
    Types,
    as_tensors,
    check_bounds,
    feeds,
    infer,
    inferred,
    inputs_of_file,
    load_source,
    unknown_to_runtime,
)
from compress.onnx_ptq.to_torch import OPSET, Converted, converted
from compress.onnx_ptq.write import insert_pairs, other_file, save_model
from compress.quantization import MOST_BITS, QuantSpec, Rule, check_quant_spec
from compress.quantization.calibration.calibrate import check_batches
from compress.quantization.placement.decisions import (
    Placement,
    around_closed,
    closed_branches,
    concats_apart,
    shared_tensors,
)
from compress.quantization.placement.place import place
from compress.quantization.placement.targets import TABLES
from compress.quantization.placement.view import GraphView
from compress.quantization.ptq.improve import methods
from compress.quantization.ptq.on_images import looks_at_layers
from compress.quantization.ptq.walk import IMAGES
from compress.quantization.report import CalibrationReport
from compress.quantization.sensitivity import Mended, mend
from compress.support.progress import Progress


@dataclass(frozen=True, kw_only=True)
class QuantizedFile:
    """Result of quantizing an ONNX file; `notes` has a sentence for everything else that was changed."""

    path: Path
    placement: Placement
    calibration: CalibrationReport
    notes: tuple[str, ...]
    view: GraphView
    casting: Casting | None = None


def quantize_onnx(
    path: Path | str,
    batches: Iterable[Any],
    *,
    spec: QuantSpec | None = None,
    out: Path | str | None = None,
    precision: str = "fp32",
    trained: nn.Module | None = None,
    ops: Sequence[Path | str] = (),
    progress: Progress | None = None,
) -> Path:
    """Quantize a float ONNX file; see `quantize_onnx_file`, which also returns the decisions.

    Returns:
        The new file.

    Examples:
        >>> spec = compress.QuantSpec(target="openvino")
        >>> path = compress.quantize_onnx("float.onnx", [images], spec=spec, out="new.onnx")
        >>> compress.audit_onnx(path).int8_share
        1.0
    """
    options: dict[str, Any] = {"precision": precision, "trained": trained, "ops": ops, "progress": progress}
    return quantize_onnx_file(path, batches, spec=spec, out=out, **options).path


def quantize_onnx_file(
    path: Path | str,
    batches: Iterable[Any],
    *,
    spec: QuantSpec | None = None,
    out: Path | str | None = None,
    precision: str = "fp32",
    trained: nn.Module | None = None,
    metadata: Mapping[str, str] | None = None,
    ops: Sequence[Path | str] = (),
    progress: Progress | None = None,
) -> QuantizedFile:
    """Insert Q/DQ pairs into the graph of a float ONNX file; the file itself is not changed.

    Args:
        path: file of opset 9 to 25, in float32, float16 or bfloat16; its external data are in its folder.
        batches: calibration data, all of it is used: tensors or arrays, or tuples that begin with all inputs of the
            file in its order, which a target may follow, or mappings by the names of the inputs.
        spec: target and rules, which match the names of nodes; None = `QuantSpec()`, target TensorRT.
        out: file to write, whole or not at all; None = `<name>.int8.onnx` beside the file.
        precision: of what is not quantized: `fp32` leaves it as it is, `fp16` and `bf16` write it in half precision,
            all but inputs, outputs and what the type does not hold (see `cast_onnx`).
        trained: `quantize(from_onnx(path), ..., spec=spec)` after training: its parameters and ranges are written into
            the file's own graph, and nothing is calibrated; of `batches` the first is needed, for comparisons.
        metadata: entries that the new file gets beside those of the old one.
        ops: libraries of operators for ONNX Runtime, which the file needs beside the standard ones; without them,
            what such operators compute is not known, and what comes after them stays float.
        progress: is informed of each batch.
    """
    spec = spec or QuantSpec()
    check_precision(precision, ("fp32", *HALVES))
    if precision == "bf16" and spec.only_target == "onnxruntime":
        raise QuantizationError("precision is bf16, which ONNX Runtime does not compute on CPUs: choose fp16 or fp32")
    _check_methods(spec, trained)
    check_batches(batches)
    original = load_source(path, ops=ops)
    target = other_file(original.path, out, "int8")
    entries = {entry.key: entry.value for entry in original.proto.metadata_props}
    helper.set_model_props(original.proto, entries | dict(metadata or {}))

    def quantized(chosen: QuantSpec) -> QuantizedFile:
        return _quantized(original, target, batches, chosen, precision=precision, trained=trained, progress=progress)

    return around_closed(quantized, spec, batches)


def _quantized(
    original: SourceFile,
    target: Path,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    precision: str,
    trained: nn.Module | None,
    progress: Progress | None,
) -> QuantizedFile:
    """Quantize a file as a specification says; see `quantize_onnx_file`."""
    pieces = feeds(batches, inputs_of_file(original))
    first = first_batch(pieces)
    check_bounds(original, first)
    opset = max(_opset_for(spec, original), OPSETS.get(precision, 0), OPSET if trained else 0)
    source, notes = canonical(original, opset=opset)
    notes = [*original.notes, *notes]
    shape_outputs(source, first)
    looks = looks_at_layers(spec) or spec.bias_correction == "auto" or precision != "fp32"
    seen, pieces = _some_of(batches, first, pieces, original) if looks else ([first], pieces)
    if trained is None and looks_at_layers(spec):
        rules, smoothing = scale_channels(source, first, seen, spec)
        spec, notes = replace(spec, rules=(*rules, *spec.rules)), [*notes, *smoothing]
    check = comparison(original, first) if notes else None
    if check is not None and (trained is not None or methods(spec)):
        check(results_for_one(source, first))
    fine_tuned, improved = None if trained is None else write_trained(source, trained, first), Improved()
    if fine_tuned is None and methods(spec):
        every = [first, *pieces]
        improved, pieces = improve_file(source, every, spec, progress=progress), iter(every[1:])
    index, types, reading = _read(source, first, spec)
    if fine_tuned is None:
        placement = _placed(source, reading, first, seen, spec)
        images, total = itertools.chain([first], pieces), length_hint(batches)
        with closed_branches({node.name for node in reading.view.nodes if node.kind == "input"}, placement):
            calibration = calibrate_graph(
                source, reading, placement, images, total=total, check=check, progress=progress
            )
    else:
        placement = place(reading.view, spec, fine_tuned.lowest())
        calibration = fine_tuned.ranges(placement)
    improved.finish(index)
    if fine_tuned is None and not improved.later and spec.bias_correction == "auto":
        notes += on_images(partial(correct_biases, source, index, reading, placement, calibration.amax), source, seen)
    insert_pairs(index, types, reading, placement, calibration.amax, precision=precision)
    source, types, casting = _with_remainder(source, types, precision, seen)
    _finish(source, types, spec.only_target)
    notes += [*improved.notes, *(casting.notes() if casting else ())]
    path = save_model(source, target, spec.only_target)
    return QuantizedFile(
        path=path, placement=placement, calibration=calibration, notes=tuple(notes), view=reading.view, casting=casting
    )


def _with_remainder(
    source: SourceFile, types: Types, precision: str, data: list[Arrays]
) -> tuple[SourceFile, Types, Casting | None]:
    """Return a quantized graph with its float part in a precision, its types, and what stays float32."""
    if precision == "fp32":
        return source, types, None
    source, casting, *_ = cast_source(source, precision, data)
    return source, types | casting.types | types_of(source.proto), casting


def _read(source: SourceFile, feed: Arrays, spec: QuantSpec) -> tuple[Index, Types, Reading]:
    index, shapes, types = inferred(source, feed)
    opened = TABLES[spec.only_target].opened
    return index, types, read_onnx_graph(index, shapes, types, unknown_to_runtime(source), opened)


def scale_channels(
    source: SourceFile, first: Arrays, batches: Sequence[Arrays], spec: QuantSpec
) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Do what `smooth: auto` is in a float file, in place; see `smooth_file`, which says what is returned."""
    _, _, reading = _read(source, first, spec)
    return smooth_file(source, reading, place_on_images(source, reading, spec, batches), batches, spec)


def _some_of(
    batches: Iterable[Any], first: Arrays, pieces: Iterator[Arrays], source: SourceFile
) -> tuple[list[Arrays], Iterator[Arrays]]:
    """Return batches from all over the data, or the first ones of what can be read once, and what is left to read."""
    if isinstance(batches, Sequence):
        step = -(-len(batches) // IMAGES)
        return list(feeds(batches[::step], inputs_of_file(source))), pieces
    images, seen = len(next(iter(first.values()))), [first]
    for feed in pieces:
        seen.append(feed)
        images += len(next(iter(feed.values())))
        if images >= IMAGES:
            break
    return seen, itertools.chain(seen[1:], pieces)


def _placed(source: SourceFile, reading: Reading, first: Arrays, seen: list[Arrays], spec: QuantSpec) -> Placement:
    placement = place(reading.view, spec)
    shared = shared_tensors(placement)
    found = FloatSession(source, dict.fromkeys(shared)).run(first) if shared else {}
    ranges = {name: float(np.abs(value).max(initial=0)) for name, value in found.items()}
    apart = concats_apart(reading.view, placement, ranges)
    return place_on_images(source, reading, replace(spec, rules=(*apart, *spec.rules)), seen)


def first_batch(pieces: Iterator[Arrays]) -> Arrays:
    first = next(pieces, None)
    if first is None:
        raise CalibrationError("calibration got no images: `batches` was empty; give at least one batch")
    return first


def _check_methods(spec: QuantSpec, trained: nn.Module | None) -> None:
    check_quant_spec(spec)
    if trained is not None:
        return
    if spec.batchnorm == "keep":
        raise QuantizationError(
            "quantization.batchnorm is keep, which is for training: in a file it is folded; set batchnorm: fold"
        )
    if spec.bias_correction == "analytic":
        raise QuantizationError(
            "quantization.bias_correction: analytic takes the statistics of BatchNorm, which a file holds no longer; "
            "set bias_correction: empirical"
        )


def _opset_for(spec: QuantSpec, source: SourceFile) -> int:
    """Return the lowest opset whose Q/DQ has what the specification and the file's types need."""
    weights = [spec.weights, *(rule.weights for rule in spec.rules if rule.weights is not None)]
    activations = [spec.activations, *(rule.activations for rule in spec.rules if rule.activations is not None)]
    halves = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
    types = {tensor.data_type for tensor in tensors_of(source.proto.graph)}
    types |= {value.type.tensor_type.elem_type for value in source.proto.graph.input}
    if any(part.num_bits > MOST_BITS for part in activations):
        return WIDE_OPSET
    if halves & types or any(part.kind == "e4m3" for part in activations):
        return 19
    clips = any(part.num_bits < MOST_BITS for part in activations)
    return 13 if any(part.axis is not None for part in weights) else 11 if clips else 10


def _finish(source: SourceFile, types: Types, target: str) -> None:
    """Name the target, and apply the passes that exported torch models get, which look types and shapes up."""
    proto = source.proto
    entries = {entry.key: entry.value for entry in proto.metadata_props} | {TARGET_KEY: target}
    helper.set_model_props(proto, entries)
    own = list(proto.graph.value_info)
    shapes, _ = infer(source, {})
    del proto.graph.value_info[:]
    for name, dtype in types.items():
        proto.graph.value_info.append(helper.make_tensor_value_info(name, dtype, shapes.get(name)))
    shape_for(proto, target)
    if target == "onnxruntime":
        averages_without_padding(proto.graph)
    finish_for(proto, target)
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(own)
    drop_unread(proto.graph)


def mend_onnx(
    path: Path | str,
    batches: Iterable[Any],
    images: Iterable[Any] | None = None,
    *,
    spec: QuantSpec | None = None,
    drop: float | None = None,
    sqnr_db: float | None = None,
    metric: Any = None,
    progress: Progress | None = None,
) -> Mended:
    """Find the smallest set of changes with which the quantized form of a file meets a goal; see `compress.mend`.

    Args:
        path: float ONNX file.
        batches: as for `quantize_onnx`.
        images: batches that the goal is measured on, with a target last for a metric; None = `batches`.
        spec: to begin with; rules match the names of nodes.
        drop: as there.
        sqnr_db: as there.
        metric: as there.
        progress: as there.

    Returns:
        The diagnosis, and a specification for `quantize_onnx`.

    Raises:
        ModelError: an operator has no counterpart in torch, which the message names.
        QuantizationError: as `compress.mend` and `quantize_onnx`.
        CalibrationError: no batches.

    Examples:
        >>> spec = compress.QuantSpec(target="openvino")
        >>> compress.mend_onnx("float.onnx", [images], spec=spec, sqnr_db=5.0).met  # its `.spec` is for `quantize_onnx`
        True
    """
    spec = spec or QuantSpec()
    original = load_source(path)
    order = [tensor.name for tensor in inputs_of_file(original)]
    data = [_in_order(batch, order) for batch in batches]
    first = first_batch(feeds(iter(data), inputs_of_file(original)))
    made, index, own = _network(original, first, data, spec)
    judged = data if images is None else [_in_order(batch, order) for batch in images]
    found = mend(
        made.network,
        data[0][: len(order)],
        data,
        judged,
        spec=own,
        drop=drop,
        sqnr_db=sqnr_db,
        metric=metric,
        fixed=() if own.smooth == spec.smooth else ("smooth",),  # `auto` has scaled the file already
        progress=progress,
    )
    return _renamed(found, file_names(made, index), made.origin, spec, len(own.rules))


def _network(
    original: SourceFile, first: Arrays, data: list[Any], spec: QuantSpec
) -> tuple[Converted, Index, QuantSpec]:
    source, _ = canonical(original, opset=OPSET)
    rules: tuple[Rule, ...] = ()
    if scaled := looks_at_layers(spec):
        some = feeds(iter(data[:: -(-len(data) // IMAGES)]), inputs_of_file(original))
        rules, _ = scale_channels(source, first, list(some), spec)
    made, index = converted(source, first), Index(source)
    own = for_network(replace(spec, rules=(*rules, *spec.rules)), made, index)
    return made, index, replace(own, smooth=None) if scaled else own


def _in_order(batch: Any, order: list[str]) -> tuple[Any, ...]:
    if isinstance(batch, Mapping):
        batch = (*(batch[name] for name in order), *(v for k, v in batch.items() if k not in order))
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    halves = {torch.float16, torch.bfloat16}
    return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype in halves else x for x in map(as_tensors, parts))


def _renamed(
    found: Mended, names: Mapping[str, str], tensors: Mapping[str, str], spec: QuantSpec, count: int
) -> Mended:
    """Return a result that names the file's nodes and tensors, and begins with the caller's own rules."""

    def mended_spec(own: QuantSpec) -> QuantSpec:
        added = tuple(replace(rule, match=names.get(rule.match, rule.match)) for rule in own.rules[count:])
        return replace(own, rules=(*spec.rules, *added), smooth=spec.smooth if own.smooth is None else own.smooth)

    rows, changes = [], []
    for row in found.diagnosis.rows:
        causes = tuple(replace(cause, tensor=tensors.get(cause.tensor, cause.tensor)) for cause in row.causes)
        rows.append(replace(row, layer=names.get(row.layer, row.layer), causes=causes))
    for one in found.changes:
        name = names.get(one.layer, one.layer)
        changes.append(replace(one, layer=name, text=one.text.replace(f"{one.layer}: ", f"{name}: ", 1)))
    first = found.diagnosis.first
    if first is not None:
        first = replace(first, tensor=tensors.get(first.tensor, first.tensor))
    return replace(
        found,
        diagnosis=replace(found.diagnosis, rows=tuple(rows), first=first),
        spec=mended_spec(found.spec),
        specs=tuple(map(mended_spec, found.specs)),
        changes=tuple(changes),
    )
