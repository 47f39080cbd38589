"""Inserts Q/DQ pairs into an ONNX graph, in place, and writes the file; everything else stays as it is.

    x -> Conv          becomes   x -> QuantizeLinear -> DequantizeLinear -> Conv
    W (initializer)    becomes   W_quantized (INT8 initializer) -> DequantizeLinear -> Conv

Consumers that no quantizer was placed for go on reading the float tensor. Integers of weights are computed here, from
the scale that is written. Files are written whole or not at all; large ones with their weights in a file beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper
from torch import Tensor

from compress.engines.base import read_onnx
from compress.errors import AuditError, EngineError, QuantizationError
from compress.export.names import INT4_KEY, TARGET_KEY, added_tensor
from compress.export.onnx import NOT_HALF, half_or_more, half_scale, held_by_half
from compress.export.targets import warn_of_refusal
from compress.files import replacing
from compress.onnx_graph import (
    WRITTEN_KEY,
    constant_tensor,
    consumed_as,
    drop_unread,
    rename,
    replacing_model,
    tensors_of,
    write_model,
)
from compress.onnx_ptq.read import OUTPUT, Reading, Weight
from compress.onnx_ptq.source import Index, SourceFile, Types, move_data, session_options, unknown_to_runtime
from compress.quantization.numerics import QuantFormat, bounds_of, quantize_tensor, scale_from_amax, zero_of
from compress.quantization.placement.decisions import ActivationSite, Placement, WeightSite
from compress.support.libraries import import_library, library_errors

_FLOAT8 = TensorProto.FLOAT8E4M3FN
# Elements of a weight that are quantized at a time: below the grain of most of torch's operations, which one thread
# then computes; `torch.round` alone has a smaller one.
_BLOCK = (1 << 15) - 64


def insert_pairs(
    index: Index,
    types: Types,
    reading: Reading,
    placement: Placement,
    amax: Mapping[str, Tensor],
    *,
    precision: str = "fp32",
) -> None:
    """Insert the quantizers of a placement, with ranges by path, into the graph of `index`, which is then stale."""
    writer = _Writer(index, types, precision)
    for weight in placement.weights:
        writer.weight(weight, reading.weights[weight.path], amax[f"{weight.path}.weight_quantizer"])
    for site in placement.activations:
        writer.activation(site, reading, amax[site.name])
    writer.finish()


class _Writer:
    """Collects new nodes by the place where they go."""

    def __init__(self, index: Index, types: Types, precision: str) -> None:
        self.index, self.types, self.precision = index, types, precision
        self.graph = index.graph
        index.taken.update(node.name for node in self.graph.node)
        self.before: dict[str, list[onnx.NodeProto]] = {}
        self.after: dict[str, list[onnx.NodeProto]] = {}
        self.shared: dict[Any, str] = {}
        self.results: dict[str, str] = {}

    def weight(self, site: WeightSite, weight: Weight, amax: Tensor) -> None:
        old = weight.node.input[weight.place]
        key = (old, weight.transposed, site.format, tuple(amax.reshape(-1).tolist()))
        if key not in self.shared:
            self.shared[key] = self._weight(site, weight, amax, old)
        weight.node.input[weight.place] = self.shared[key]
        self._plain_bias(weight.node)

    def _weight(self, site: WeightSite, weight: Weight, amax: Tensor, old: str) -> str:
        quant_format, value = site.format, self.index.value(old)
        numbers = np.asarray(value, np.float32)
        real = torch.from_numpy(np.array(numbers.T if weight.transposed else numbers))
        scale = self._scale(scale_from_amax(amax, quant_format), old, site.path, of_weight=True)
        q = _quantized(real, scale.to(real.dtype), quant_format)
        q = q.T.contiguous() if weight.transposed else q
        quantized, scales, points = self._free(*(added_tensor(old, p) for p in ("quantized", "scale", "zero_point")))
        self._constant(quantized, q, quant_format)
        self._constant(scales, scale)
        self._constant(points, torch.zeros(scale.shape, dtype=q.dtype), quant_format)
        result, name = self._free(added_tensor(old, "dequantized"), added_tensor(old, "DequantizeLinear"))
        attributes: dict[str, Any] = {}
        if quant_format.axis is not None:  # in the file's own layout
            attributes["axis"] = q.ndim - 1 - quant_format.axis if weight.transposed else quant_format.axis
        node = helper.make_node("DequantizeLinear", [quantized, scales, points], [result], name=name, **attributes)
        if quant_format.kind == "int" and quant_format.num_bits <= 4:
            node.metadata_props.add(key=INT4_KEY, value=str(quant_format.num_bits))
        self.before.setdefault(weight.node.name, []).append(node)
        return result

    def activation(self, site: ActivationSite, reading: Reading, amax: Tensor) -> None:
        """Insert a pair after each tensor of a site; they share one scale."""
        made: dict[torch.dtype, tuple[str, str]] = {}  # a scale has the type of its tensor
        for tensor in dict.fromkeys(tensor for tensor, _ in site.edges):
            scale = self._scale(scale_from_amax(amax, site.format), tensor, site.name, wide=site.format.wide)
            if scale.dtype not in made:
                scales, points = self._free(added_tensor(tensor, "scale"), added_tensor(tensor, "zero_point"))
                self._constant(scales, scale)
                zero = torch.as_tensor(zero_of(scale.float(), site.format)).to(site.format.dtype)
                self._constant(points, zero, site.format)
                made[scale.dtype] = scales, points
            result, nodes = self._pair(tensor, scale, *made[scale.dtype], site.format)
            self.after.setdefault(tensor, []).extend(nodes)
            if (tensor, OUTPUT) in site.edges:
                self.results[tensor] = result
            for consumer in (consumer for source, consumer in site.edges if source == tensor):
                for node in reading.nodes[consumer]:
                    consumed_as(node, tensor, result)

    def _pair(
        self, tensor: str, scale: Tensor, scales: str, points: str, quant_format: QuantFormat
    ) -> tuple[str, list[onnx.NodeProto]]:
        parts = ("clipped", "quantized", "dequantized", "low", "high", "Clip", "QuantizeLinear", "DequantizeLinear")
        clipped, q, result, low, high, clip, quantize, dequantize = self._free(
            *(added_tensor(tensor, p) for p in parts)
        )
        nodes, source = [], tensor
        if not quant_format.fills_type:
            least, most = bounds_of(scale.float(), quant_format)
            self._constant(low, (least * scale).to(scale.dtype))
            self._constant(high, (most * scale).to(scale.dtype))
            nodes.append(helper.make_node("Clip", [tensor, low, high], [clipped], name=clip))
            source = clipped
        nodes.append(helper.make_node("QuantizeLinear", [source, scales, points], [q], name=quantize))
        nodes.append(helper.make_node("DequantizeLinear", [q, scales, points], [result], name=dequantize))
        return result, nodes

    def finish(self) -> None:
        nodes = [node for value in self.graph.input for node in self.after.get(value.name, ())]
        for node in self.graph.node:
            nodes += [*self.before.get(node.name, ()), node]
            nodes += [made for name in node.output for made in self.after.get(name, ())]
        for tensor, result in self.results.items():  # the file's output keeps its name
            rename(nodes, {tensor: self._free(added_tensor(tensor, "float"))[0], result: tensor})
        self.index.replace_nodes(nodes)
        drop_unread(self.graph)

    def _plain_bias(self, node: onnx.NodeProto) -> None:
        """Give a layer whose bias is computed from constants the value itself, as the passes of `export` expect it."""
        name = node.input[2] if len(node.input) > 2 else ""
        if not name or name in self.index.constants or name not in self.index.unchanging:
            return
        value = self.index.value(name)
        if value is not None and self.index.producers[name].op_type != "Constant":
            node.input[2] = self.index.add_constant(added_tensor(name, "value"), value)

    def _scale(self, scale: Tensor, tensor: str, name: str, *, of_weight: bool = False, wide: bool = False) -> Tensor:
        dtype = self.types.get(tensor)
        if wide and (dtype in {TensorProto.FLOAT16, TensorProto.BFLOAT16} or self.precision != "fp32"):
            raise QuantizationError(f"{name} is in half precision: {NOT_HALF}")
        if dtype == TensorProto.FLOAT16:
            return half_scale(half_or_more(scale) if of_weight else scale, name)
        if dtype == TensorProto.BFLOAT16:
            return scale.bfloat16()
        return held_by_half(scale.float(), self.precision, of_weight=of_weight)

    def _constant(self, name: str, value: Tensor, quant_format: QuantFormat | None = None) -> None:
        if quant_format is not None and quant_format.kind == "e4m3":
            raw = value.contiguous().view(torch.uint8).numpy().tobytes()
            tensor = helper.make_tensor(name, _FLOAT8, list(value.shape), raw, raw=True)
        elif value.dtype == torch.bfloat16:
            raw = value.contiguous().view(torch.int16).numpy().tobytes()
            tensor = helper.make_tensor(name, TensorProto.BFLOAT16, list(value.shape), raw, raw=True)
        else:
            array: NDArray[Any] = value.detach().numpy()
            tensor = constant_tensor(name, array)
        self.graph.initializer.append(tensor)

    def _free(self, *names: str) -> list[str]:
        return [self.index.free(name) for name in names]


def _quantized(real: Tensor, scale: Tensor, quant_format: QuantFormat) -> Tensor:
    """Quantize a weight a few rows at a time: small operations stay in the cache and seldom wait for other threads."""
    if real.ndim == 0 or quant_format.axis not in {None, 0}:
        return quantize_tensor(real, scale, quant_format)
    rows = max(1, _BLOCK * len(real) // max(real.numel(), 1))
    scales = scale.split(rows) if quant_format.axis == 0 else itertools.repeat(scale)
    result = torch.empty(real.shape, dtype=quant_format.dtype)
    for part, own, q in zip(real.split(rows), scales, result.split(rows), strict=False):
        q.copy_(quantize_tensor(part, own, quant_format))
    return result


# Bytes of a file of one piece, less than protobuf's limit of 2 GiB.
_LARGEST = (1 << 31) - (1 << 20)
# Bytes of tensors that always stay in the model itself: shapes, axes, scales.
_INSIDE = 1024


def other_file(path: Path, out: Path | str | None, ending: str, kind: str = "float") -> Path:
    """Return the file to write, by default `<name>.<ending>.onnx` beside one that is not changed, of a `kind`."""
    target = path.with_name(f"{path.stem}.{ending}.onnx") if out is None else Path(out)
    if target.resolve() == path.resolve():
        raise QuantizationError(f"{target} is the {kind} file itself; give another name for the new one")
    return target


def save_model(source: SourceFile, path: Path, target: str = "") -> Path:
    """Write a model; it has external data if it is too large without, or if the file that it comes from had them.

    Tensors that go to another file are taken out of the model, so that large ones are not in memory twice. External
    data go to the first of `<path>.data`, `<path>.2.data`, ... that is not there, so that no model loses its weights;
    those of a model that was at `path` are removed afterwards. A file is loaded once by its target's engine. Nothing
    is written if the model is not valid.
    """
    if not any(entry.key in {WRITTEN_KEY, TARGET_KEY} for entry in source.proto.metadata_props):
        source.proto.metadata_props.add(key=WRITTEN_KEY, value="changed")
    whole = b"" if source.external else source.proto.SerializeToString()
    if 0 < len(whole) < _LARGEST:
        _check(whole, path, target, source)
        write_model(path, whole)
        warn_of_refusal(path, target if target == "openvino" else "")
        return path
    del whole
    older, data = _weight_files(path), _free_data(path)
    with replacing_model(path) as temporary:
        with _external(source, data) as proto:
            temporary.write_bytes(proto.SerializeToString())
        try:
            _check(str(temporary), path, target, source)
        except BaseException:  # here no model refers to these data yet
            data.unlink(missing_ok=True)
            raise
    warn_of_refusal(path, target if target == "openvino" else "")
    for place in older - _weights_of_others(path):
        own = place.name.startswith(f"{path.name}.") and place.name.endswith(".data")
        if own and place.parent == path.parent:
            place.unlink(missing_ok=True)
    return path


def _free_data(path: Path) -> Path:
    """Return the first of `<path>.data`, `<path>.2.data`, ... that is not there: any that is may be another model's."""
    names = (path.with_name(f"{path.name}{f'.{i}' if i > 1 else ''}.data") for i in itertools.count(1))
    return next(place for place in names if not place.exists() and not place.is_symlink())


def _weights_of_others(path: Path) -> set[Path]:
    found: set[Path] = set()
    for other in path.parent.glob("*.onnx"):
        if other != path:
            found |= _weight_files(other)
    return found


def _weight_files(path: Path) -> set[Path]:
    try:
        return set(read_onnx(path).weight_files)
    except EngineError:
        return set()


@contextmanager
def _external(source: SourceFile, data: Path) -> Iterator[onnx.ModelProto]:
    """Move the tensors of a model to a file, one at a time, and yield the model, which refers to it."""
    proto = source.proto
    with replacing(data) as temporary:
        with temporary.open("wb") as file:
            for tensor in tensors_of(proto.graph):
                if tensor.data_type == TensorProto.STRING:
                    continue
                outside = external_data_helper.uses_external_data(tensor)
                if not outside and len(tensor.raw_data) <= _INSIDE:
                    continue
                move_data(tensor, source.whole(tensor).raw_data, file, data.name)
        yield proto


def _check(model: bytes | str, path: Path, target: str, source: SourceFile) -> None:
    """Refuse a model that onnx's checker or its shape inference refuses, and one that its own engine does not load."""
    with library_errors(AuditError, f"the new form of {path.name} is not valid (", "); report it, please"):
        onnx.checker.check_model(model, full_check=True)
        if target == "onnxruntime" and not unknown_to_runtime(source):
            onnxruntime = import_library("onnxruntime", "pip install onnxruntime")
            options = session_options(path.parent, 0, source.ops)
            options.log_severity_level = 4
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
