"""The accuracy debugger for ONNX files: the same tool as for torch models, on the file as a torch network.

What it returns names the file's own nodes, so that the specification works with `quantize_onnx`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.engines.base import Arrays
from compress.errors import CalibrationError
from compress.onnx_ptq.canonical import canonical
from compress.onnx_ptq.improve import file_names, for_network
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile, load_source
from compress.onnx_ptq.quantize import looks_at_layers, scale_channels
from compress.onnx_ptq.run import as_tensors, feeds, inputs_of_file
from compress.onnx_ptq.to_torch.network import OPSET, converted
from compress.quantization.ptq.channel_scales import IMAGES
from compress.quantization.sensitivity.diagnose import Diagnosis
from compress.quantization.sensitivity.mend import Change, Mended, mend
from compress.quantization.spec import QuantSpec, Rule
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
    """Find the smallest set of changes with which the quantized form of a file meets a goal.

    Args:
        path: float ONNX file.
        batches: calibration data, as for `quantize_onnx`.
        images: batches that the goal is measured on, with a target last for a metric; None = `batches`.
        spec: target, rules and methods to begin with; rules match the names of nodes.
        drop, sqnr_db, metric, progress: as for `compress.mend`.

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
    inputs = inputs_of_file(original)
    order = [tensor.name for tensor in inputs]
    data = [_in_order(batch, order) for batch in batches]
    first = next(feeds(iter(data), inputs), None)
    if first is None:
        raise CalibrationError("calibration got no images: `batches` was empty; give at least one batch")
    source, _ = canonical(original, opset=OPSET)
    scaled = looks_at_layers(spec)
    rules = _scaling(source, first, data[:: -(-len(data) // IMAGES)], spec) if scaled else ()
    made, index = converted(source, first), Index(source)
    own = for_network(replace(spec, rules=(*rules, *spec.rules)), made, index)
    found = mend(
        made.network,
        data[0][: len(order)],
        data,
        data if images is None else [_in_order(batch, order) for batch in images],
        spec=replace(own, smooth=None) if scaled else own,  # the network's channels are scaled already
        drop=drop,
        sqnr_db=sqnr_db,
        metric=metric,
        progress=progress,
    )
    names = file_names(made, index)
    found = replace(found, diagnosis=renamed_diagnosis(found.diagnosis, names, made.origin))
    return _renamed(found, names, spec, len(own.rules), scaled)


def _scaling(source: SourceFile, first: Arrays, batches: list[Any], spec: QuantSpec) -> tuple[Rule, ...]:
    """Scale the channels of a file as `quantize_onnx` does, in place, and return the rules that it adds."""
    return scale_channels(source, first, list(feeds(iter(batches), inputs_of_file(source))), spec)[0]


def _in_order(batch: Any, order: list[str]) -> tuple[Any, ...]:
    """Return a batch as tensors in the order of the file's inputs, and what follows them as it is."""
    if isinstance(batch, Mapping):
        batch = tuple(itertools.chain((batch[name] for name in order), (v for k, v in batch.items() if k not in order)))
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    halves = {torch.float16, torch.bfloat16}
    return tuple(x.float() if isinstance(x, torch.Tensor) and x.dtype in halves else x for x in map(as_tensors, parts))


def _renamed(found: Mended, names: Mapping[str, str], spec: QuantSpec, count: int, scaled: bool) -> Mended:
    """Return a result that names the file's nodes, and begins with the caller's own rules."""

    def mended_spec(own: QuantSpec) -> QuantSpec:
        added = tuple(replace(rule, match=names.get(rule.match, rule.match)) for rule in own.rules[count:])
        return replace(own, rules=(*spec.rules, *added), smooth=spec.smooth if scaled else own.smooth)

    def change(one: Change) -> Change:
        name = names.get(one.layer, one.layer)
        return replace(
            one, layer=name, text=one.text.replace(f"{one.layer}: ", f"{name}: ", 1) if one.layer else one.text
        )

    return replace(
        found,
        spec=mended_spec(found.spec),
        specs=tuple(mended_spec(own) for own in found.specs),
        changes=tuple(change(one) for one in found.changes),
    )


def renamed_diagnosis(found: Diagnosis, names: Mapping[str, str], tensors: Mapping[str, str]) -> Diagnosis:
    """Return a diagnosis whose layers and tensors have other names; those that are not named keep theirs."""
    rows = tuple(
        replace(
            row,
            layer=names.get(row.layer, row.layer),
            causes=tuple(replace(cause, tensor=tensors.get(cause.tensor, cause.tensor)) for cause in row.causes),
        )
        for row in found.rows
    )
    first = found.first
    if first is not None:
        first = replace(first, tensor=tensors.get(first.tensor, first.tensor))
    return replace(found, rows=rows, first=first)
