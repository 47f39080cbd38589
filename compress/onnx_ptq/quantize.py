"""Quantizes an ONNX file without its source: Q/DQ pairs are inserted into the user's own graph.

Names, inputs, outputs, open dimensions, metadata and all nodes that no quantizer and no folding touches stay as they
are. Quantizers are placed by the same rules as for torch models, and calibrated on ONNX Runtime.

Methods beyond calibration, and fine-tuning, work on the file as a torch network and come back into its own graph:
weights, biases and factors of norms change, and ReLU6 becomes ReLU. `Trained` is a network that was fine-tuned with
quantizers (`quantize(from_onnx(file), ...)`).

Channel scales, zero points and biases are measured on some images; `quantization.ptq` switches them on
(`channel_scales`, `zero_points`, `bias_correction`). A channel scale is folded into the operation before it if that is
linear (a layer, a normalization, a product with a constant); else it is a Mul.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor, nn

from compress.engines.base import Arrays
from compress.errors import CalibrationError, ModelError, QuantizationError
from compress.export.casting import HALVES, Casting, types_of
from compress.export.names import TARGET_KEY, added_tensor
from compress.export.targets import OPSET as WIDE_OPSET
from compress.export.targets import averages_without_padding, finish_for, shape_for
from compress.onnx_graph import attribute, drop_unread, tensors_of
from compress.onnx_ptq.calibrate import AT_ONCE, calibrate_graph, in_order
from compress.onnx_ptq.canonical import canonical, comparison, images_apart, results_for_one, shape_outputs
from compress.onnx_ptq.cast import OPSETS, cast_source, check_precision
from compress.onnx_ptq.read import Reading, read_onnx_graph
from compress.onnx_ptq.source import (
    FloatSession,
    Index,
    Shapes,
    SourceFile,
    Types,
    as_tensors,
    check_bounds,
    elements,
    feeds,
    infer,
    inferred,
    inputs_of_file,
    load_source,
    one_image,
    unknown_to_runtime,
)
from compress.onnx_ptq.to_torch import OPSET, Converted, Place, compare_network, converted
from compress.onnx_ptq.write import insert_pairs, other_file, save_model
from compress.quantization import MOST_BITS, QuantSpec, Rule, check_quant_spec
from compress.quantization.calibration.calibrate import check_batches
from compress.quantization.numerics import fake_quantize, scale_from_amax
from compress.quantization.placement.decisions import (
    ActivationSite,
    Placement,
    WeightSite,
    around_closed,
    closed_branches,
    concats_apart,
    shared_tensors,
)
from compress.quantization.placement.insert import float_graph
from compress.quantization.placement.place import place
from compress.quantization.placement.targets import TABLES
from compress.quantization.placement.view import GraphView, Node, Parameters
from compress.quantization.ptq.bias_correction import Window, certain_shift, mean_inputs
from compress.quantization.ptq.on_images import (
    ChannelScale,
    Consumer,
    Group,
    choose,
    convolve,
    groups_of,
    looks_at_layers,
    lowest_expected,
    products_of,
    scaling_note,
    signed_tensors,
    spread,
    widen,
)
from compress.quantization.ptq.quantize import kept, methods, quantize, smoothed
from compress.quantization.ptq.rescaling import column_factor
from compress.quantization.ptq.walk import IMAGES
from compress.quantization.quantizer import Quantizer, quantizers
from compress.quantization.report import CalibrationReport, placement_of, quantization_report_of
from compress.quantization.sensitivity import Mended, mend
from compress.support.process import core_count
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
    pieces = feeds(batches, inputs_of_file(original))
    first = first_batch(pieces)
    check_bounds(original, first)
    opset = max(_opset_for(spec, original), OPSETS.get(precision, 0), OPSET if trained else 0)
    source, notes = canonical(original, opset=opset)
    notes = [*original.notes, *notes]
    shape_outputs(source, first)
    looks = looks_at_layers(spec) or spec.bias_correction == "auto" or precision != "fp32"
    seen, pieces = _some_of(batches, first, pieces, original) if looks else ([first], pieces)
    source = replace(source, apart=not looks or images_apart(source, first))
    look = Looked(source, seen)
    known: tuple[Shapes, Types] | None = None
    if trained is None and looks_at_layers(spec):
        rules, smoothing, known = scale_channels(look, first, spec)
        spec, notes = replace(spec, rules=(*rules, *spec.rules)), [*notes, *smoothing]
    check = comparison(original, first) if notes else None
    if check is not None and (trained is not None or methods(spec)):
        check(results_for_one(source, first))
    fine_tuned, improved = None if trained is None else write_trained(source, trained, first), Improved()
    if fine_tuned is None and methods(spec):
        every = [first, *pieces]
        improved, pieces, known = improve_file(source, every, spec, progress=progress), iter(every[1:]), None
        look.begin((), ())
    index, types, reading = _read(source, first, spec, known)
    if fine_tuned is None:
        placement = _placed(look, reading, first, spec)
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
        notes += correct_biases(look, index, reading, placement, calibration.amax)
    insert_pairs(index, types, reading, placement, calibration.amax, precision=precision)
    source, types, casting = _with_remainder(source, types, precision, seen, target)
    _finish(source, types, spec.only_target)
    notes += [*improved.notes, *(casting.notes() if casting else ())]
    path = save_model(source, target, spec.only_target)
    return QuantizedFile(
        path=path, placement=placement, calibration=calibration, notes=tuple(notes), view=reading.view, casting=casting
    )


def _with_remainder(
    source: SourceFile, types: Types, precision: str, data: list[Arrays], beside: Path
) -> tuple[SourceFile, Types, Casting | None]:
    """Return a quantized graph with its float part in a precision, its types, and what stays float32."""
    if precision == "fp32":
        return source, types, None
    source, casting, *_ = cast_source(source, precision, data, beside=beside)
    return source, types | casting.types | types_of(source.proto), casting


def _read(
    source: SourceFile, feed: Arrays, spec: QuantSpec, known: tuple[Shapes, Types] | None = None
) -> tuple[Index, Types, Reading]:
    index, shapes, types = inferred(source, feed) if known is None else (Index(source, known[0]), *known)
    opened = TABLES[spec.only_target].opened
    return index, types, read_onnx_graph(index, shapes, types, unknown_to_runtime(source), opened)


def scale_channels(
    look: Looked, first: Arrays, spec: QuantSpec
) -> tuple[tuple[Rule, ...], tuple[str, ...], tuple[Shapes, Types]]:
    """Scale channels of a float file in canonical form, in place; return rules for products, notes, shapes, types."""
    source = look.source
    index, types, reading = _read(source, first, spec)
    placement = place_on_images(look, reading, spec)
    groups = _groups(index, reading, placement)
    scales, rules = choose(
        groups,
        _products(reading, placement),
        look.images,
        spec,
        watch=look.watch,
        consumer=partial(_consumer, reading),
        least=lambda _: 0.0,
    )
    used, count = list[ChannelScale](), len(index.graph.node)
    for group in (group for group in groups if group.tensor in scales):
        if _write(index, reading, group, scales[group.tensor], spec.only_target):
            used.append(scales[group.tensor])
        if count != len(index.graph.node):
            index, count = Index(source, index.shapes), len(index.graph.node)
    if used:
        look.begin((), ())
    types |= dict.fromkeys(index.shapes.keys() - types.keys(), TensorProto.FLOAT)
    return rules, scaling_note(used), (index.shapes, types)


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


def _placed(look: Looked, reading: Reading, first: Arrays, spec: QuantSpec) -> Placement:
    placement = place(reading.view, spec)
    shared = shared_tensors(placement)
    found = FloatSession(look.source, dict.fromkeys(shared)).run(first) if shared else {}
    ranges = {name: float(np.abs(value).max(initial=0)) for name, value in found.items()}
    apart = concats_apart(reading.view, placement, ranges)
    return place_on_images(look, reading, replace(spec, rules=(*apart, *spec.rules)))


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
        source = replace(source, apart=images_apart(source, first))
        some = feeds(iter(data[:: -(-len(data) // IMAGES)]), inputs_of_file(original))
        rules, *_ = scale_channels(Looked(source, list(some)), first, spec)
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


@dataclass(frozen=True, kw_only=True)
class Improved:
    """Result of the methods beyond calibration.

    `later` are parameters that make up for rounding: ranges are calibrated without them.
    """

    later: tuple[tuple[Place, Tensor], ...] = ()
    notes: tuple[str, ...] = ()

    def finish(self, index: Index) -> None:
        for where, value in self.later:
            write_parameter(index, where, value)


def improve_file(
    source: SourceFile, batches: list[Arrays], spec: QuantSpec, *, progress: Progress | None = None
) -> Improved:
    """Apply the methods of a specification to the parameters of a float file in canonical form; in place.

    Equalization, smoothing and ReLU instead of ReLU6 are written at once. AdaRound and bias correction belong to the
    quantized network: the caller writes them when the ranges are calibrated.
    """
    made, order = converted(source, batches[0]), [tensor.name for tensor in inputs_of_file(source)]
    data = [tensors_of_feed(feed, order) for feed in batches]
    auto: dict[str, Any] = {name: None for name in ("smooth", "bias_correction") if getattr(spec, name) == "auto"}
    own = for_network(replace(spec, **auto), made, Index(source))  # they are of the file itself
    qmodel = quantize(made.network, data[0], data, spec=own, progress=progress)
    ready, _ = smoothed(made.network, data[0], data, kept(qmodel, own))
    rescaled, prepared = float_graph(ready, data[0], replace(kept(qmodel, own), bias_correction=None))
    index, later = Index(source), []
    for path, places in made.places.items():
        before, between, after = (net.get_submodule(path) for net in (made.network, rescaled, qmodel))
        for name, where in places.items():
            old, middle, new = (getattr(layer, name, None) for layer in (before, between, after))
            if not isinstance(new, Tensor):
                continue
            middle = torch.zeros_like(new) if middle is None else middle
            if old is None or not torch.equal(old, middle):
                where = write_parameter(index, where, middle.detach())
            if not torch.equal(middle, new):
                later.append((where, new.detach()))
    replaced = {made.origin[name] for name in prepared.relu6}
    for node in index.graph.node:
        if replaced.intersection(node.output):
            node.op_type = "Relu"
            del node.input[1:]
            del node.attribute[:]
    return Improved(later=tuple(later), notes=tuple(quantization_report_of(qmodel).notes()))


def tensors_of_feed(feed: Arrays, order: Iterable[str]) -> tuple[Tensor, ...]:
    found = [torch.from_numpy(np.asarray(feed[name])) for name in order]
    return tuple(x.float() if x.is_floating_point() else x for x in found)


def for_network(spec: QuantSpec, made: Converted, index: Index) -> QuantSpec:
    """Return a specification whose rules match the operations of the network that the file's rules match."""
    names = file_names(made, index)
    rules: list[Rule] = []
    for rule in spec.rules:
        matched = [own for own, name in names.items() if fnmatch.fnmatchcase(name, rule.match)]
        rules += [replace(rule, match=own) for own in matched] or [rule]
    return replace(spec, rules=tuple(rules))


def file_names(made: Converted, index: Index) -> dict[str, str]:
    """Return the name of the file's node by that of the network's operation: a layer's path, or a node's name."""
    found = {path: name for name, path in made.path.items()}
    for node in made.network.graph.nodes:
        producer = index.producers.get(made.origin.get(node.name, ""))
        if producer is not None and node.op != "call_module":
            found[node.name] = producer.name
    return found


def write_parameter(index: Index, place: Place, value: Tensor) -> Place:
    """Give a node of the file a parameter of its own, and return the place where it is now."""
    node = next(node for node in index.graph.node if node.name == place.node)
    reads = node.input[place.input] if place.input < len(node.input) else ""
    like = index.value(reads if reads else node.input[1])
    array: NDArray[Any] = (value.T if place.transposed and value.dim() == 2 else value).contiguous().numpy()
    if reads and like is not None and like.size == array.size:
        array = array.reshape(like.shape)
    wanted = added_tensor(node.output[0], f"improved_{place.input}")
    name = index.add_constant(wanted, array.astype(np.float32 if like is None else like.dtype))
    if place.input < len(node.input):
        node.input[place.input] = name
    elif node.op_type == "MatMul":
        return _added_after(index, node, name)
    else:
        node.input.append(name)
    return place


def _added_after(index: Index, node: onnx.NodeProto, bias: str) -> Place:
    result = node.output[0]
    node.output[0] = index.free(added_tensor(result, "product"))
    add = helper.make_node("Add", [node.output[0], bias], [result], name=added_tensor(node.name, "bias"))
    index.replace_nodes(
        part for old in list(index.graph.node) for part in ((old, add) if old.name == node.name else (old,))
    )
    return Place(node=add.name, input=1)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A fine-tuned network with quantizers, and `made`, the file that holds its parameters now as a torch network."""

    network: nn.Module
    made: Converted

    def lowest(self) -> dict[str, float]:
        """Return the values that tensors of the file are not expected below, which images showed before."""
        sites = placement_of(self.network).activations
        found = {name: self._quantizer(site.name).format.lowest for site in sites for name in _tensors(site, self.made)}
        return {name: least for name, least in found.items() if least}

    def ranges(self, placement: Placement) -> CalibrationReport:
        """Return the ranges of the network's quantizers under the names of the file's."""
        own = {_tensors(site, self.made): site for site in placement_of(self.network).activations}
        amax: dict[str, Tensor] = {}
        for site in placement.activations:
            trained = own.pop(frozenset(tensor for tensor, _ in site.edges), None)
            if trained is None or self._quantizer(trained.name).format != site.format:
                raise _other_placement(site.name)
            amax[site.name] = self._amax(trained.name)
        if own:
            raise _other_placement(next(iter(own.values())).name)
        formats = {site.path: site.format for site in placement_of(self.network).weights}
        for weight in placement.weights:
            path = self.made.path.get(weight.path, weight.path)
            if formats.pop(path, None) != weight.format:
                raise _other_placement(weight.path)
            amax[f"{weight.path}.weight_quantizer"] = self._amax(f"{path}.weight_quantizer")
        if formats:
            raise _other_placement(next(iter(formats)))
        seen = quantization_report_of(self.network).calibration
        return CalibrationReport(images=seen.images if seen else 0, amax=amax, histograms={})

    def _amax(self, path: str) -> Tensor:
        return self._quantizer(path).amax.detach().float().cpu()

    def _quantizer(self, path: str) -> Quantizer:
        found = self.network.get_submodule(path)
        if not isinstance(found, Quantizer):
            raise _other_placement(path)
        return found


def write_trained(source: SourceFile, network: nn.Module, feed: Arrays) -> Trained:
    """Write the parameters of a fine-tuned network into the file that it came from; in place.

    The float file is in canonical form, and is compared with the network on a batch, `feed`.
    """
    placement_of(network)
    network = copy.deepcopy(network).cpu().eval()
    made = converted(source, feed)
    index = Index(source)
    for path, places in made.places.items():
        for name, where in places.items():
            old, new = (_parameter(model, path, name) for model in (made.network, network))
            if new is not None and (old is None or not torch.equal(old, new)):
                if old is not None and old.shape != new.shape:
                    raise _not_of(source, f"{path}.{name} has the shape {tuple(new.shape)}, there {tuple(old.shape)}")
                write_parameter(index, where, new)
    _compare_float(source, network, feed)
    return Trained(network=network, made=made)


def _parameter(network: nn.Module, path: str, name: str) -> Tensor | None:
    try:
        value = getattr(network.get_submodule(path), name, None)
    except AttributeError:
        return None
    return value.detach().float() if isinstance(value, Tensor) else None


def _compare_float(source: SourceFile, network: nn.Module, feed: Arrays) -> None:
    """Refuse a network that computes something else without its quantizers than the file with its parameters."""
    plain = copy.deepcopy(network)
    for _, quantizer in quantizers(plain):
        quantizer.enabled = False
    try:
        compare_network(source, plain, feed)
    except ModelError as error:
        raise _not_of(
            source, f"its parameters in the file do not compute what it does without quantizers: {error}"
        ) from None


def _tensors(site: ActivationSite, made: Converted) -> frozenset[str]:
    return frozenset(made.origin.get(tensor, tensor) for tensor, _ in site.edges)


def _not_of(source: SourceFile, text: str) -> QuantizationError:
    return QuantizationError(
        f"the trained network cannot be written into {source.path}: {text}. Train the network that "
        "compress.from_onnx(file) returns, quantized by compress.quantize without methods that change what it computes"
    )


def _other_placement(name: str) -> QuantizationError:
    return QuantizationError(
        f"the trained network and the specification differ at quantizer {name!r}: one of them has none there, or of "
        "another format. Give the specification that the network was quantized with"
    )


# Operators that a positive factor for each channel passes.
_THROUGH = frozenset({"Identity", "Relu", "LeakyRelu", "PRelu", "AveragePool", "GlobalAveragePool", "MaxPool"})
# Bytes of tensors of all images that are kept.
_KEPT = 1 << 30


def images_of(source: SourceFile, batches: Sequence[Arrays]) -> list[Arrays]:
    """Return images of a file's batches, each alone where the file takes that, evenly spread over all."""
    if not source.apart or one_image(source.proto, batches[0]) is None:
        return [batches[i * len(batches) // IMAGES] for i in range(IMAGES)] if len(batches) > IMAGES else list(batches)
    lengths = [max((len(value) for value in feed.values() if value.ndim), default=1) for feed in batches]
    places = [(feed, start) for feed, length in zip(batches, lengths, strict=True) for start in range(length)]
    chosen = [places[i * len(places) // IMAGES] for i in range(IMAGES)] if len(places) > IMAGES else places
    return [{name: v[start : start + 1] if v.ndim else v for name, v in feed.items()} for feed, start in chosen]


class Looked:
    """Images of batches, and tensors of a file's graph on them, computed once if memory holds them."""

    def __init__(self, source: SourceFile, batches: Sequence[Arrays]) -> None:
        self.source, self.images = source, images_of(source, batches)
        self.begin((), ())

    def begin(self, names: Iterable[str], again: Iterable[str]) -> None:
        """Look at tensors of the graph as it is now, and keep those of `again`."""
        self.session: FloatSession | None = None
        self.again, self.ranges = frozenset(again), dict[str, tuple[float, float]]()
        self.names, self.kept, self.room = self.again.union(names), dict[int, Mapping[str, Tensor]](), _KEPT

    def watch(self, names: Sequence[str], images: Sequence[Arrays]) -> Iterator[Mapping[str, Tensor]]:
        if not self.names.issuperset(names):
            self.begin(names, ())
        session = self.session = self.session or FloatSession(self.source, sorted(self.names), threads=1)
        return in_order(partial(self._tensors, session, names), images, min(core_count(), AT_ONCE))

    def _tensors(self, session: FloatSession, names: Sequence[str], image: Arrays) -> Mapping[str, Tensor]:
        kept = self.kept.get(id(image), {})
        if kept.keys() >= set(names):
            return kept
        found = {name: torch.from_numpy(np.asarray(x, np.float32)) for name, x in session.run(image).items()}
        again = {name: found[name] for name in self.again}
        self.room -= sum(x.nbytes for x in again.values())
        if self.room >= 0:
            self.kept[id(image)] = again
        return found


def _groups(index: Index, reading: Reading, placement: Placement) -> list[Group]:
    def plain(node: Node) -> bool:
        """True for a layer of float32 that reads the tensor and its weight as they are in the file."""
        if node.path not in reading.weights:
            return False
        own = reading.weights[node.path].node
        weight = index.value(own.input[1])
        return own.input[0] == node.inputs[0].name and weight is not None and weight.dtype == np.float32

    return groups_of(reading.view, placement, plain)


def _products(reading: Reading, placement: Placement) -> list[Node]:
    found = [node for node in products_of(reading.view, placement) if node.path]
    made = {node.name: reading.nodes[node.name][0] for node in found}
    plain = {name for name, node in made.items() if node.op_type == "MatMul"}
    return [n for n in found if n.name in plain and [each.name for each in n.inputs] == list(made[n.name].input)]


def _consumer(reading: Reading, layer: Node) -> Consumer | None:
    parameters, node = layer.parameters, reading.weights[layer.path].node
    weight = parameters.weight() if parameters is not None else None
    if weight is None or parameters is None:
        return None
    if layer.kind == "linear":
        return Consumer(weight=weight, groups=1, compute=lambda x, w: x @ w.T)
    rank = weight.ndim - 2
    strides, dilations = (list(attribute(node, name, [1] * rank)) for name in ("strides", "dilations"))
    groups = parameters.groups
    return Consumer(weight=weight, groups=groups, compute=convolve(strides, dilations, groups))


def _write(index: Index, reading: Reading, group: Group, scale: ChannelScale, target: str) -> bool:
    """Write a scale into the graph of an index; False if the target would compute a Mul before a convolution."""
    factor = (1 / scale.scale).numpy().astype(np.float32)
    nodes = [reading.weights[layer.path].node for layer in group.layers]
    alone = group.tensor not in index.outputs and len(index.consumers[group.tensor]) == len(nodes)
    plan = _absorbed(index, reading, group, factor) if alone else None
    if plan is None and target == "onnxruntime" and group.convolution:
        return False  # its kernels for convolutions want a pair before the Mul, whose range would have the outliers
    graph = index.graph

    def constant(node: onnx.NodeProto, place: int, value: NDArray[np.float32]) -> None:
        old, name = node.input[place], index.free(f"{node.input[place]}_smooth")
        if old in index.unchanging:
            node.input[place] = index.add_constant(name, value.astype(np.float32))
            return
        factors = index.add_constant(f"{name}_scale", value.astype(np.float32))
        node.input[place], index.shapes[name] = name, value.shape
        at = next(i for i, each in enumerate(graph.node) if each is node or each.name == node.name)
        graph.node.insert(at, helper.make_node("Mul", [old, factors], [name], name=name))

    if plan is None:
        name = index.free(f"{group.tensor}_smooth")
        shape = (1, -1, *(1,) * (len(group.layers[0].inputs[0].shape or ()) - 2)) if group.convolution else (-1,)
        first = next(place for place, node in enumerate(graph.node) if group.tensor in node.output)
        constants = index.add_constant(f"{name}_scale", factor.reshape(shape))
        graph.node.insert(first + 1, helper.make_node("Mul", [group.tensor, constants], [name], name=name))
        index.shapes[name] = group.layers[0].inputs[0].shape or ()
        for node in nodes:
            node.input[0] = name
    for node, position, value in plan or []:
        constant(node, position, value)
    for layer in group.layers:
        weight = reading.weights[layer.path]
        own: Tensor = layer.parameters.weight()  # type: ignore
        value = (own * column_factor(own, scale.scale, layer.parameters.groups)).numpy()  # type: ignore
        constant(weight.node, weight.place, value.T if weight.transposed else value)
    return True


# A node, the place of an input, and the new value of that constant, or the factor of an input that is computed.
_Change = tuple[onnx.NodeProto, int, NDArray[np.float32]]


def _absorbed(index: Index, reading: Reading, group: Group, factor: NDArray[np.float32]) -> list[_Change] | None:
    """Return the new constants of the operations before, which make the tensor times a factor; None if none do."""
    compound = {id(node): name for name, members in reading.nodes.items() if len(members) > 1 for node in members}
    kinds = {node.name: node.kind for node in reading.view.nodes}
    changes: list[_Change] = []
    name = group.tensor
    while (node := index.producers.get(name)) is not None:
        if name != group.tensor and index.alone(name) is None:
            return None
        if kinds.get(compound.get(id(node), ""), "layer_norm") not in ("layer_norm", "linear"):
            return None
        if node.op_type in _THROUGH:
            name = node.input[0]
            continue
        value = _constants(index, node)
        if node.op_type == "Add" and len(value) == 1:
            ((place, old),) = value.items()
            changes.append((node, place, _times(old, factor, group)))
            name = node.input[1 - place]
            continue
        done = _scaled(index, reading, node, value, factor, group)
        return None if done is None else changes + done
    return None


def _scaled(
    index: Index,
    reading: Reading,
    node: onnx.NodeProto,
    values: Mapping[int, NDArray[np.float32]],
    factor: NDArray[np.float32],
    group: Group,
) -> list[_Change] | None:
    """Return the new constants of an operation whose result is to be times a factor; None if it has none."""
    if (node.op_type == "Mul" and len(values) == 1) or (node.op_type == "Div" and list(values) == [1]):
        ((place, old),) = values.items()
        return [(node, place, _times(old, factor if node.op_type == "Mul" else 1 / factor, group))]
    gate = _gate(reading, node, factor) if node.op_type == "Mul" and group.convolution else None
    if gate is not None:
        return [(node, gate, factor.reshape(1, -1, *(1,) * (len(group.layers[0].inputs[0].shape or ()) - 2)))]
    weighted = node.op_type == "Conv" if group.convolution else node.op_type in ("MatMul", "Gemm")
    if weighted and 1 in values and (len(node.input) < 3 or not node.input[2] or 2 in values):
        weight = values[1]
        columns = node.op_type == "MatMul" or (node.op_type == "Gemm" and not attribute(node, "transB", 0))
        if weight.shape[-1 if columns else 0] != len(factor):
            return None
        by = factor if columns else factor.reshape(-1, *(1,) * (weight.ndim - 1))
        return [
            (node, 1, weight * by),
            *[
                (node, 2, np.broadcast_to(value, factor.shape) * factor)
                for place, value in values.items()
                if place == 2
            ],
        ]
    axis = attribute(node, "axis", -1)
    norm = (
        node.op_type == "BatchNormalization"
        if group.convolution
        else (node.op_type == "LayerNormalization" and axis in (-1, len(group.layers[0].inputs[0].shape or ()) - 1))
    )
    if norm and {place for place in (1, 2) if len(node.input) > place and node.input[place]} <= values.keys():
        return [(node, place, values[place] * factor) for place in (1, 2) if place in values]
    return None


def _gate(reading: Reading, node: onnx.NodeProto, factor: NDArray[np.float32]) -> int | None:
    """The operand of a product that has one number a channel, as in squeeze and excite: a factor is free there."""
    shapes = {made.name: made.shape or () for made in reading.view.nodes if made.name in node.input}
    found = [shapes.get(name, ()) for name in node.input]
    gates = [shape[1:2] == (len(factor),) and math.prod(shape[2:]) == 1 for shape in found]
    return gates.index(True) if any(gates) and all(found) else None


def _constants(index: Index, node: onnx.NodeProto) -> dict[int, NDArray[np.float32]]:
    found = {}
    for position, name in enumerate(node.input):
        value = index.value(name) if name in index.unchanging and name else None
        if value is not None and value.dtype == np.float32:
            found[position] = value
    return found


def _times(old: NDArray[np.float32], factor: NDArray[Any], group: Group) -> NDArray[np.float32]:
    rank = len(group.layers[0].inputs[0].shape or ())
    return (old * (factor.reshape(1, -1, *(1,) * (rank - 2)) if group.convolution else factor)).astype(np.float32)


def place_on_images(look: Looked, reading: Reading, spec: QuantSpec) -> Placement:
    """Place quantizers, with zero points from images where the specification looks at them."""
    placement = place(reading.view, spec)
    signed, weighted = signed_tensors(placement, spec), {site.path for site in placement.weights}
    layers = [node.inputs[:1] for node in reading.view.nodes if node.path in weighted]
    layers += [node.inputs for node in _products(reading, placement)]
    again = {node.name for inputs in layers for node in inputs}
    if not (look.ranges.keys() >= {*signed} and look.again >= again):
        size = sum(4 * elements(node.shape) for node in reading.view.nodes if node.name in again.union(signed))
        look.begin(signed, again if size < _KEPT else ())
        for found in look.watch(signed, spread(look.images)) if signed else ():
            for name in signed:
                widen(look.ranges, name, found[name])
    if not signed:
        return placement
    index = Index(look.source)

    def constant(user: Node, node: Node) -> Tensor | None:
        made = reading.nodes.get(user.name, ())
        others = [name for each in made for name in each.input if name != node.name]
        value = index.value(others[0]) if len(made) == len(others) == 1 and others[0] in index.unchanging else None
        return None if value is None else torch.tensor(value, dtype=torch.float32)

    seen = {name: both for name, both in look.ranges.items() if name in signed}
    return place(reading.view, spec, lowest_expected(reading.view, seen, constant))


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A quantized layer: its input, constants, the quantizers of input and weight, its window, where its bias is."""

    input: str
    parameters: Parameters
    site: ActivationSite
    weight: WeightSite
    window: Window | None
    place: Place


@torch.no_grad()
def correct_biases(
    look: Looked,
    index: Index,
    reading: Reading,
    placement: Placement,
    amax: Mapping[str, Tensor],
) -> tuple[str, ...]:
    """Write the bias of each quantized layer so that the mean of its results is right; return a note if any."""
    layers = _layers(reading, placement)
    if not layers:
        return ()
    means: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for found in look.watch([layer.input for layer in layers], spread(look.images)):
        rounded: dict[tuple[str, str], Tensor] = {}
        for layer, own in zip(layers, means, strict=True):
            x = found[layer.input]
            if not x.numel():
                continue
            key, scale = (layer.input, layer.site.name), scale_from_amax(amax[layer.site.name], layer.site.format)
            if key not in rounded:
                rounded[key] = fake_quantize(x, scale, layer.site.format)
            own.append((mean_inputs(x, layer.window), mean_inputs(rounded[key], layer.window)))
    reached = [(layer, own) for layer, own in zip(layers, means, strict=True) if own]
    for layer, own in reached:
        _correct(index, layer, own, amax[f"{layer.weight.path}.weight_quantizer"])
    return (f"the biases of {len(reached)} layers make up for the mean error of rounding (bias_correction: auto)",)


def _correct(index: Index, layer: _Layer, means: Sequence[tuple[Tensor, Tensor]], amax: Tensor) -> None:
    """Write a bias; `means` are the inputs of each image, in float and rounded."""
    weight, bias = cast(Tensor, layer.parameters.weight()), layer.parameters.bias()  # read again: all may be too many
    rounded = fake_quantize(weight, scale_from_amax(amax, layer.weight.format), layer.weight.format)
    bias = torch.zeros(len(weight)) if bias is None else bias.reshape(-1)
    write_parameter(index, layer.place, bias - certain_shift(weight, rounded, means, layer.parameters.groups))


def _layers(reading: Reading, placement: Placement) -> list[_Layer]:
    weights = {site.path: site for site in placement.weights}
    sites, found = {edge: site for site in placement.activations for edge in site.edges}, list[_Layer]()
    for node in reading.view.nodes:
        if node.kind not in ("conv", "linear") or node.path not in weights:
            continue
        site, place, parameters = _site(node, sites), _place(reading, node), node.parameters
        weight = None if parameters is None else parameters.weight()
        if site is None or place is None or parameters is None or weight is None:
            continue
        found.append(
            _Layer(
                input=node.inputs[0].name,
                parameters=parameters,
                site=site,
                weight=weights[node.path],
                window=_window(reading.weights[node.path].node, tuple(weight.shape[2:])),
                place=place,
            )
        )
    return found


def _site(layer: Node, sites: Mapping[tuple[str, str], ActivationSite]) -> ActivationSite | None:
    """The quantizer of a layer's input, which may be before operations that Q/DQ pass."""
    consumer, tensor = layer, layer.inputs[0]
    while (tensor.name, consumer.name) not in sites:
        if not tensor.inputs:
            return None
        consumer, tensor = tensor, tensor.inputs[0]
    return sites[tensor.name, consumer.name]


def _place(reading: Reading, layer: Node) -> Place | None:
    """Where the bias of a layer is, or can be without another operation; None where that is not known."""
    made, own = reading.nodes[layer.name], reading.weights[layer.path].node
    given = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    if own.op_type == "Gemm" and any(attribute(own, name, usual) != usual for name, usual in given.items()):
        return None
    bias = None if layer.parameters is None else layer.parameters.bias()
    if own.op_type != "Conv" and bias is not None and bias.numel() != (bias.shape[-1] if bias.ndim else 1):
        return None  # one of each row
    if own.op_type == "Conv" and attribute(own, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    if len(made) == 1:
        return None if own.op_type == "MatMul" else Place(node=own.name, input=2)
    add = made[-1]
    return Place(node=add.name, input=int(add.input[0] in own.output)) if add.op_type == "Add" else None


def _window(node: onnx.NodeProto, kernel: tuple[int, ...]) -> Window | None:
    if node.op_type != "Conv":
        return None
    rank = len(kernel)
    strides, dilations = (tuple(attribute(node, name, [1] * rank)) for name in ("strides", "dilations"))
    pads = tuple(attribute(node, "pads", [0] * 2 * rank))
    return Window(kernel=kernel, strides=strides, dilations=dilations, before=pads[:rank], after=pads[rank:])
