"""`compress.mend` for ONNX files, on the file as a torch network; what it returns names the file's own nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.engines.base import Arrays
from compress.onnx_ptq.canonical import canonical
from compress.onnx_ptq.improve import file_names, for_network
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile, load_source
from compress.onnx_ptq.quantize import first_batch, scale_channels
from compress.onnx_ptq.run import as_tensors, feeds, inputs_of_file
from compress.onnx_ptq.to_torch.network import OPSET, Converted, converted
from compress.quantization import QuantSpec, Rule
from compress.quantization.ptq.on_images import looks_at_layers
from compress.quantization.ptq.walk import IMAGES
from compress.quantization.sensitivity.mend import Mended, mend
from compress.support.progress import Progress


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
