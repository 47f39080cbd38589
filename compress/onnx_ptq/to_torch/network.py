"""An ONNX file as a torch.fx network: what needs gradients or quantizers in torch works on files through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import fx, nn

from compress.engines.base import Arrays, TensorInfo, library_errors
from compress.errors import CompressError, ModelError, QuantizationError
from compress.graph.inputs import flat_tensors
from compress.graph.spelled import KNOWN
from compress.onnx_ptq.canonical import canonical, change_of
from compress.onnx_ptq.index import Index, Shapes, Types, inferred
from compress.onnx_ptq.load import SourceFile, load_source
from compress.onnx_ptq.passes import open_batch
from compress.onnx_ptq.read import Compound, find_compounds, find_parts
from compress.onnx_ptq.run import FloatSession, check_bounds, feeds, inputs_of_file
from compress.onnx_ptq.to_torch.builder import Builder, Place, Value
from compress.onnx_ptq.to_torch.operators import (
    LAYERS,
    OPERATORS,
    linear_with_sum,
    part,
    plain_layer_norm,
    written_layer_norm,
)

OPSET = 13
"""The lowest opset whose operators are known; files of older ones are raised."""

_CHANGED = 1e-3
"""Largest difference between network and file, relative to an output's largest value."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A file as a torch network that computes its outputs, in order, in evaluation mode; names as in `Builder`."""

    network: fx.GraphModule
    origin: dict[str, str]
    path: dict[str, str]
    places: dict[str, dict[str, Place]]


def from_onnx(file: str | Path, batch: Any = None, *, size: tuple[int, int] | None = None) -> fx.GraphModule:
    """Return an ONNX file as a torch network, compared with the file on ONNX Runtime.

    Args:
        file: float ONNX file of opset 6 to 25.
        batch: one batch of its inputs; None = random numbers of the shapes that the file states.
        size: height and width for open sides, with `batch` None.

    Returns:
        A GraphModule in evaluation mode, whose layers have the names of the file's nodes. Sizes follow the batch; all
        others are those of `batch`.

    Raises:
        AuditError: the file is missing, truncated or not valid ONNX.
        QuantizationError: it is quantized already.
        ModelError: an operator has no counterpart, which the message names, or the network computes something else.

    Examples:
        >>> network = compress.from_onnx("float.onnx")
        >>> torch.allclose(network(images), model(images), atol=1e-4)
        True
    """
    source = load_source(file)
    given = random_feed(source, size=size) if batch is None else next(feeds([batch], inputs_of_file(source)))
    check_bounds(source, given)
    return converted(canonical(source, opset=OPSET)[0], given).network


def converted(source: SourceFile, feed: Arrays) -> Converted:
    found = network_of(source, feed)
    compare_network(source, found.network, feed)
    return found


def network_of(source: SourceFile, feed: Arrays) -> Converted:
    """Convert a file as `converted` does, without comparing; Q/DQ pairs become PT2E's operators."""
    index, shapes, types = inferred(source, feed)
    builder = _built(index, shapes, types, _wider(source, feed))
    network = fx.GraphModule(builder.root, builder.graph, class_name="OnnxNetwork").eval()
    return Converted(network=network, origin=builder.origin, path=builder.path, places=builder.places)


def _wider(source: SourceFile, feed: Arrays) -> Index | None:
    """Return the index of a graph for one more image; None if the file states the size of its batch."""
    if any(not open_batch(value) for value in source.proto.graph.input if value.name in feed):
        return None
    try:
        return inferred(source, {name: np.concatenate([value, value[:1]]) for name, value in feed.items()})[0]
    except QuantizationError:
        return None


def _built(index: Index, shapes: Shapes, types: Types, wider: Index | None) -> Builder:
    builder = Builder(index, shapes, types, wider)
    for value in index.graph.input:
        if value.name not in index.constants:
            builder.input(value.name)
    compounds = [
        found for found in find_compounds(index) if found.kind != "layer_norm" or plain_layer_norm(builder, found)
    ]
    last = {found.nodes[-1].output[0]: found for found in compounds}
    inside = {part.output[0] for found in compounds for part in found.nodes[:-1]}
    parts = find_parts(index, shapes)
    builder.convert = partial(_convert, builder, compound=None)
    for node in index.graph.node:
        results = [name for name in node.output if name]
        if not results or results[0] in inside or index.fixed.issuperset(results):
            continue
        made = part(builder, node, parts) if results[0] in parts else _convert(builder, node, last.get(results[0]))
        for name, value in zip(node.output, made if isinstance(made, list) else [made], strict=False):
            builder.set(name, value)
    outputs = [builder.tensor(value.name) for value in index.graph.output]
    builder.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
    builder.graph.lint()
    return builder


def _convert(builder: Builder, node: onnx.NodeProto, compound: Compound | None) -> Value:
    try:
        if compound is not None:
            return _compound(builder, compound)
        convert = LAYERS.get(node.op_type) or OPERATORS.get(node.op_type)
        if convert is None or node.domain not in {"", "ai.onnx"}:
            raise QuantizationError("torch has no counterpart that is known here")
        return convert(builder, node)
    except QuantizationError as error:
        domain = f" of the domain {node.domain}" if node.domain else ""
        raise ModelError(
            f"{builder.index.source.path} cannot become a torch network: operator {node.op_type}{domain} at "
            f"{node.name or node.output[0]!r}: {error}. Calibration alone (ptq --onnx) does not need this"
        ) from error


def _compound(builder: Builder, found: Compound) -> Value:
    if found.kind == "linear":
        return linear_with_sum(builder, found)
    if found.kind == "layer_norm":
        return written_layer_norm(builder, found)
    if found.kind == "gelu":
        tanh = any(part.op_type == "Tanh" for part in found.nodes)
        return builder.call(F.gelu, builder.tensor(found.input), approximate="tanh" if tanh else "none")
    return builder.call(KNOWN[found.kind], builder.tensor(found.input))


def compare_network(source: SourceFile, network: nn.Module, feed: Arrays) -> None:
    names = [value.name for value in source.proto.graph.output]
    expected = FloatSession(source, names).run(feed)
    inputs = [torch.from_numpy(np.asarray(feed[v.name])) for v in source.proto.graph.input if v.name in feed]
    with library_errors(ModelError, f"{source.path} as a torch network does not run: "), torch.no_grad():
        got = flat_tensors(network(*(x.float() if x.is_floating_point() else x for x in inputs)))
    limit = 20 * _CHANGED if any(expected[name].dtype == np.float16 for name in names) else _CHANGED
    for name, value in zip(names, got, strict=True):
        change, largest = change_of(np.asarray(expected[name]), value.double().numpy())
        if not change <= limit * largest + 1e-6:
            raise ModelError(
                f"{source.path} as a torch network differs from the file on ONNX Runtime: output {name!r} by "
                f"{change:.3g}, more than {limit:g} of its largest value. Calibration alone (ptq --onnx) does not need "
                "this network"
            )


def _without_sides(path: Path, tensor: TensorInfo) -> ModelError:
    return ModelError(
        f"{path}: input {tensor.name!r} has open sides {tensor.shape}; give a batch, or a height and a "
        "width for images (size=; in a recipe model.options: {size: [224, 224]})"
    )


def random_feed(
    source: SourceFile,
    *,
    batch_size: int = 2,
    size: tuple[int, int] | None = None,
    refusal: Callable[[Path, TensorInfo], CompressError] = _without_sides,
) -> Arrays:
    """Normal numbers for the inputs, an open batch of `batch_size`; `refusal` is raised for sides that stay open."""
    generator, found = np.random.default_rng(0), {}
    for tensor in inputs_of_file(source):
        shape = [batch_size if i == 0 and side < 0 else side for i, side in enumerate(tensor.shape)]
        if size is not None and len(shape) == 4:
            shape[2:] = [given if side < 0 else side for given, side in zip(size, shape[2:], strict=True)]
        if min(shape, default=1) < 1:
            raise refusal(source.path, tensor)
        found[tensor.name] = generator.standard_normal(shape).astype(tensor.dtype)
    return found
