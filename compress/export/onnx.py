"""Exports PyTorch models to ONNX with Q/DQ: torch's exporter, then passes over the file, metadata, and a check."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import json
import logging
import math
import operator
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compress.data.base import Preprocessing
from compress.errors import CompressWarning, ExportError, ModelError
from compress.export import ExportSpec
from compress.export.casting import Ranges, cast_model
from compress.export.names import INT4_KEY, LABELS_KEY, PREPROCESSING_KEY, TARGET_KEY, input_names, output_names
from compress.export.targets import OPSET, clean, finish_for, pads_into_convolutions, shape_for, warn_of_refusal
from compress.export.tensorrt import scales_on_outputs
from compress.graph.attention import open_attention
from compress.graph.canonical import preserve_input
from compress.graph.compare import alone, own_copy
from compress.graph.fold import fold_batchnorm, foldable_pair
from compress.graph.inputs import Inputs, KeywordInputs, as_inputs, each_input, flat_tensors, named_tensors
from compress.graph.modules import bake
from compress.graph.ops import node_kind, node_module
from compress.graph.report import leaves_of, report_of
from compress.graph.trace import check_module, trace, unwrapped
from compress.onnx_graph import AVERAGE_POOLS, MAX_POOLS, drop_unread, free_name, write_model
from compress.quantization import MOST_BITS
from compress.quantization.numerics import QuantFormat, quantize_tensor
from compress.quantization.quantizer import Quantizer, can_quantize, quantize_channels, quantizers, weight_axis
from compress.quantization.report import QuantizationReport
from compress.support.validation import validate

NOT_HALF = (
    "the network has activations of more than 8 bits, whose steps half precision does not hold; choose fp32, or leave "
    "such layers at 8 bits"
)


def half_or_more(scale: Tensor) -> Tensor:
    """Round scales up where float16 is coarse, so that the scale of a nearly zero channel stays above zero."""
    step = 2.0**-24  # the smallest float16, and the distance of those below 2**-14
    return torch.where(scale < 2.0**-14, (scale / step).ceil() * step, scale)


def held_by_half(scale: Tensor, precision: str, *, of_weight: bool) -> Tensor:
    """Return a float32 scale in the form that a file gets, so that a cast of the file to a precision changes nothing.

    A scale that float16 does not hold stays as it is, and its pair float32. For weights all are held: the integers
    follow the scale.
    """
    if precision == "fp32":
        return scale
    if precision == "bf16":
        return scale.bfloat16().float()
    held = (half_or_more(scale) if of_weight else scale).half().float()
    fine = held.isfinite() & ((held - scale).abs() <= 2.0**-10 * scale)
    return torch.where(fine | (held.isfinite() & of_weight), held, scale)


def half_scale(scale: Tensor, name: str) -> Tensor:
    written = scale.half()
    if not bool((torch.isfinite(written) & (written > 0)).all()):
        raise ExportError(
            f"{name}: a scale of {scale.min().item():.3g} to {scale.max().item():.3g} is zero or infinite in float16; "
            "export with precision fp32, or leave the layer float"
        )
    return written


_MAX_POOLS: dict[int, type[nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d]] = {
    1: nn.MaxPool1d,
    2: nn.MaxPool2d,
    3: nn.MaxPool3d,
}
_AVERAGES = (F.avg_pool2d, F.avg_pool3d)


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.function = functools.partial(function, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log(sigmoid(x)); ONNX Runtime cuts off the sigmoid at -18, and its logarithm has no tail there."""
    return -F.softplus(-x)


def avg_pool(
    x: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return an average with a divisor of its own as a product: torch's exporter leaves `divisor_override` out.

    The arguments are those of `F.avg_pool2d` and `F.avg_pool3d`; `count_include_pad` has no effect where there is a
    divisor.
    """
    pool = AVERAGE_POOLS[x.dim() - 2]
    stride = kernel_size if stride is None else stride
    if divisor_override is None:
        averaged: Tensor = pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
        return averaged
    if ceil_mode:
        raise ExportError(
            "an average pooling has divisor_override and ceil_mode: ONNX has no such form; pad it instead"
        )
    window = (kernel_size,) * (x.dim() - 2) if isinstance(kernel_size, int) else kernel_size
    averaged = pool(x, kernel_size, stride, padding)
    return averaged * (math.prod(window) / divisor_override)


def uneven_pool(x: Tensor, sizes: tuple[int, ...], maximum: bool) -> Tensor:
    """Return an adaptive pooling along one axis after the other, each window a slice."""
    for axis, count in enumerate(sizes, start=2):
        size, reduce = int(x.shape[axis]), torch.amax if maximum else torch.mean
        windows = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        x = torch.cat([reduce(x.narrow(axis, a, b - a), dim=axis, keepdim=True) for a, b in windows], dim=axis)
    return x


def spell_plainly(model: nn.Module) -> None:
    """Replace what an exporter does not know or an engine computes wrongly, in place.

    RReLU becomes LeakyReLU of the mean slope, adaptive maxima over equal windows become plain ones, adaptive pools over
    unequal ones reductions of slices, average pooling with a divisor of its own an average and a product, and
    LogSigmoid minus a Softplus.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LogSigmoid):
            model.set_submodule(name, _Call(log_sigmoid))
        if isinstance(module, nn.RReLU):
            model.set_submodule(name, nn.LeakyReLU((module.lower + module.upper) / 2))
        if isinstance(module, (nn.AvgPool2d, nn.AvgPool3d)) and module.divisor_override is not None:
            keys = ("kernel_size", "stride", "padding", "ceil_mode", "divisor_override")
            model.set_submodule(name, _Call(avg_pool, **{key: getattr(module, key) for key in keys}))
    if isinstance(model, fx.GraphModule):
        for node in list(model.graph.nodes):
            if node_kind(node) in {"adaptive_max_pool", "adaptive_avg_pool"}:
                _spell_pool(model, node)
            if node.target is F.logsigmoid:
                node.target = log_sigmoid
            if node.target in _AVERAGES and (len(node.args) > 6 or node.kwargs.get("divisor_override") is not None):
                node.target = avg_pool
                node.kwargs = {("x" if name == "input" else name): value for name, value in node.kwargs.items()}
        model.recompile()


def _spell_pool(model: fx.GraphModule, node: fx.Node) -> None:
    """Make a plain max pooling of an adaptive one, which torch 2.11 does not export, or reductions of slices."""
    source = node.all_input_nodes[0]
    before, after = source.meta.get("shape"), node.meta.get("shape")
    if before is None or after is None or len(before) != len(after) or len(after) - 2 not in _MAX_POOLS:
        return
    sizes = list(zip(before[2:], after[2:], strict=True))
    maximum = node_kind(node) == "adaptive_max_pool"
    if any(size % windows for size, windows in sizes):
        node.op, node.target, node.kwargs = "call_function", uneven_pool, {}
        node.args = (source, tuple(after[2:]), maximum)
    if any(size % windows for size, windows in sizes) or not maximum:
        return
    window = tuple(size // windows for size, windows in sizes)
    users = [other for other in model.graph.nodes if other.op == "call_module" and other.target == node.target]
    if users == [node]:  # its name stays that of the file's node
        model.set_submodule(str(node.target), _MAX_POOLS[len(window)](window))
    else:
        node.op, node.target = "call_function", MAX_POOLS[len(window)]
        node.args, node.kwargs = (source, window), {}


def prepare(model: nn.Module, example_inputs: Inputs, *, precision: str = "fp32") -> nn.Module:
    """A copy of a float or quantized model that the ONNX exporter turns into Q/DQ form.

    With precision `fp16` scales are those that float16 holds, so that the file can be cast.
    """
    model = own_copy(model)
    bare = [name for name, quantizer in quantizers(model) if not quantizer.ready]
    if bare:
        raise ExportError(f"{len(bare)} quantizers have no ranges ({bare[0]}, ...); run compress.calibrate first")
    if isinstance(model, fx.GraphModule):
        _part_before_norms(model)
        _fold_kept_batchnorm(model)
    else:
        try:
            model = trace(model, example_inputs)
            fold_batchnorm(model)
            open_attention(model, exportable=False)
        except ModelError:
            model.eval()  # torch.export may manage what torch.fx cannot; BatchNorm is then the exporter's to fold
            if isinstance(inputs := as_inputs(example_inputs), KeywordInputs):
                model = _Called(model, lambda own, *given: own(**dict(zip(inputs.names, given, strict=True))))
    if isinstance(model, fx.GraphModule):
        _activate_apart(model)
    spell_plainly(model)
    if isinstance(model, fx.GraphModule):
        _rename_constants(model)
    for layer in [m for m in model.modules() if parametrize.is_parametrized(m)]:
        for key in list(cast(Any, layer).parametrizations):
            bake(layer, key)
    for name, quantizer in list(quantizers(model)):
        parent = model.get_submodule(name.rpartition(".")[0])
        model.set_submodule(name, _written(parent, name, quantizer, precision))
    return model


def _rename_constants(model: fx.GraphModule) -> None:
    """Rename tensors of the model itself that have a name which the exporter gives to constants of its own; in place.

    Networks of files that torch.onnx wrote have such tensors (`val_20`).
    """
    for node in model.graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and re.fullmatch(r"val_\d+", name):
            node.target = f"{name}_of_model"
            for table in (model._parameters, model._buffers):
                if name in table:
                    cast(Any, table)[node.target] = table.pop(name)
    model.recompile()


def _activate_apart(model: fx.GraphModule) -> None:
    """Let activations after convolutions return new tensors, in place: torch.export takes those in place to pieces."""
    # The decomposition of an in-place ReLU6 takes half of the time of an export. An activation is changed only where
    # nothing else reads the tensor that it overwrites.
    nodes = model.graph.find_nodes(op="call_module")
    calls = Counter(node.target for node in nodes)
    for source in nodes:
        if len(source.users) != 1 or not isinstance(node_module(source), nn.modules.conv._ConvNd):
            continue
        (reader,) = source.users
        if reader.op == "call_module" and calls[reader.target] == 1 and reader.all_input_nodes == [source]:
            preserve_input(model, reader)


class _Called(nn.Module):
    """A model that `call` is given with its inputs by position."""

    def __init__(self, model: nn.Module, call: Callable[..., object]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Tensor) -> object:
        return self.call(self.model, *inputs)


def _written(parent: nn.Module, name: str, quantizer: Quantizer, precision: str) -> nn.Module:
    of_weight = name.endswith(".weight_quantizer")
    scale = held_by_half(quantizer.scale.detach(), precision, of_weight=of_weight)
    if of_weight:
        weight = cast(Tensor, parent.weight).detach()
        return _WeightDequantize(
            quantize_tensor(weight, scale.to(weight.dtype), quantizer.format), scale, quantizer.format
        )
    return _QuantizeDequantize(scale, quantizer.format, quantizer.zero_point)


class _QuantizeDequantize(nn.Module):
    """Writes QuantizeLinear and DequantizeLinear, after a Clip where their type has more bits."""

    is_quantizer = True
    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, quant_format: QuantFormat, zero_point: int) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", torch.tensor(zero_point, dtype=quant_format.dtype))
        moved = zero_point - quant_format.zero_point
        self.bounds = None if quant_format.fills_type else (quant_format.low - moved, quant_format.high - moved)

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds is not None:
            x = torch.clamp(x, self.bounds[0] * self.scale, self.bounds[1] * self.scale)
        q = _symbolic("QuantizeLinear", (x, self.scale, self.zero_point), self.zero_point.dtype, x.shape)
        return _symbolic("DequantizeLinear", (q, self.scale, self.zero_point), self.scale.dtype, x.shape)


class _WeightDequantize(nn.Module):
    """Writes DequantizeLinear of an integer constant in place of the float weight."""

    is_quantizer = True
    q: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, q: Tensor, scale: Tensor, quant_format: QuantFormat) -> None:
        super().__init__()
        self.register_buffer("q", q)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", torch.zeros(scale.shape, dtype=q.dtype))
        self.attributes: dict[str, Any] = {} if quant_format.axis is None else {"axis": quant_format.axis}
        whole = quant_format.kind == "int" and quant_format.num_bits <= 4
        self.metadata = {INT4_KEY: str(quant_format.num_bits)} if whole else {}

    def forward(self, weight: Tensor) -> Tensor:
        return _symbolic(
            "DequantizeLinear",
            (self.q, self.scale, self.zero_point),
            self.scale.dtype,
            self.q.shape,
            self.attributes,
            self.metadata,
        )


def _symbolic(
    op: str,
    inputs: tuple[Any, ...],
    dtype: torch.dtype,
    shape: Any,
    attributes: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> Tensor:
    return torch.onnx.ops.symbolic(
        op, inputs, attributes or {}, dtype=dtype, shape=shape, version=19, metadata_props=metadata or {}
    )


def _part_before_norms(graph_module: fx.GraphModule) -> None:
    """Give each call of a quantized layer or BatchNorm that is called several times a copy, where they can fold."""
    # Heads share a convolution among levels, with a BatchNorm for each (RTMDet): OpenVINO and ONNX Runtime compute the
    # convolution in float where the BatchNorm stays.
    calls = Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_module")
    taken = {name for name, _ in graph_module.named_modules()}
    for norm in list(graph_module.graph.nodes):
        layer = norm.args[0] if norm.op == "call_module" and norm.args else None
        if not isinstance(layer, fx.Node) or layer.op != "call_module" or node_kind(norm) != "batch_norm":
            continue
        if len(layer.users) != 1 or not can_quantize(node_module(layer)).startswith("is quantized"):
            continue
        for node in (layer, norm):
            path = str(node.target)
            if calls[path] > 1:
                calls[path] -= 1
                node.target = free_name(path, taken)
                graph_module.add_submodule(node.target, copy.deepcopy(graph_module.get_submodule(path)))
    graph_module.recompile()


def _fold_kept_batchnorm(graph_module: fx.GraphModule) -> None:
    """Fold the BatchNorm that `batchnorm: keep` has left: integers stay, and ranges grow by |gamma / sigma|."""
    # After a grouped transposed convolution it stays: its groups share their scales, and its factors are not theirs.
    kept = []
    for node in list(graph_module.graph.nodes):
        pair = foldable_pair(node)
        if pair is None:
            continue
        layer, norm = node_module(pair[0]), node_module(pair[1])
        if not can_quantize(layer).startswith("is quantized"):
            continue
        statistics: Any = norm
        factor = torch.rsqrt(statistics.running_var + statistics.eps)
        if statistics.weight is not None:
            factor = factor * statistics.weight
        if len(factor) != cast(Tensor, layer.weight).shape[weight_axis(layer)]:
            kept.append(node)
            continue
        quantizer = _quantizer_by_channel(layer, flips=bool((factor < 0).any()))
        quantizer.set_amax(quantizer.amax * factor.detach().abs().clamp_min(torch.finfo(torch.float32).tiny * 256))
    fold_batchnorm(graph_module, keep=kept)


def _quantizer_by_channel(layer: Any, *, flips: bool) -> Quantizer:
    """Return the layer's weight quantizer with a scale for each channel, and integers that BatchNorm may negate."""
    # The negative of the lowest integer of a range that is not symmetric is beyond its end. Then the weight is rounded
    # here, and a quantizer of one more bit and the same scale holds it and its negative.
    old = cast(Quantizer, layer.weight_quantizer)
    quant_format, amax = old.format, old.scale.detach() * old.format.high
    if flips and not quant_format.narrow and quant_format.num_bits < MOST_BITS:
        if parametrize.is_parametrized(layer):
            bake(layer, "weight")
        layer.weight.data = layer.quantized_weight.detach()
        quant_format = dataclasses.replace(quant_format, num_bits=quant_format.num_bits + 1, narrow=True)
        amax = old.scale.detach() * quant_format.high
    return quantize_channels(layer, amax, quant_format)


_LARGEST = 2**31 - 1
_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir", "torch.fx.experimental.symbolic_shapes", "coremltools")


@alone
def export_onnx(
    model: nn.Module,
    example_inputs: Inputs,
    path: Path | str,
    *,
    precision: str = "fp32",
    dynamic_batch: bool = True,
    opset: int = 19,
    channel_scales: str = "weight",
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write `model` as ONNX: weights INT8, activations as Q/DQ pairs, bias float, BatchNorm folded.

    Inputs and outputs are named by `export.names`: `input`, `logits`. Weights of up to 4 bits are INT4 from opset 21
    on; all others below 8 bits are INT8 of a narrower range, and activations below 8 bits are Q/DQ after a Clip. E4M3
    is FLOAT8E4M3FN throughout.

    Args:
        model: quantized by compress, or float; not changed.
        example_inputs: a tensor, or a sequence or mapping of tensors, float32.
        path: file to write; whole or not at all.
        precision: `fp32`, or `fp16` to write all that is not quantized in float16. Inputs, outputs and what float16
            does not hold stay float32, by the values of calibration and of `example_inputs` (`export.casting`).
        dynamic_batch: leave the first dimension of all inputs open (named `batch`).
        opset: 19 or later.
        channel_scales: `weight`, or `output` for TensorRT-RTX (see `compress.export.tensorrt`).
        preprocessing: of its input; written into the metadata.
        labels: names of the classes; written into the metadata.
        metadata: further entries, key to text.

    Returns:
        `path`.

    Raises:
        ModelError: the model is no module.
        ExportError: bad arguments or inputs, a quantizer without ranges, or an operation that cannot be exported.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches)
        >>> print(compress.export_onnx(qmodel, images[:1], "int8.onnx", precision="fp16"))
        int8.onnx
    """
    asked = {"opset": opset, "precision": precision, "dynamic_batch": dynamic_batch, "channel_scales": channel_scales}
    spec = ExportSpec(**asked)  # type: ignore[arg-type]
    check_export(spec)
    _check_model(model)
    inputs = as_inputs(example_inputs)
    spec = _for_wide(spec, model)
    proto = _export(prepare(model, inputs, precision=spec.precision), inputs, spec)
    report = report_of(model)
    target = report.placement.target if isinstance(report, QuantizationReport) else ""
    _apply_passes(proto, inputs, spec, target=target)
    proto.producer_name, proto.producer_version = "compress", ""
    onnx.helper.set_model_props(proto, metadata_entries(preprocessing, labels, metadata or {}, target))
    _check(proto)
    write_model(path, proto.SerializeToString())
    warn_of_refusal(Path(path), target)
    return Path(path)


def _for_wide(spec: ExportSpec, model: nn.Module) -> ExportSpec:
    """The form with the opset that activations of more than 8 bits need."""
    if not any(quantizer.format.wide for _, quantizer in quantizers(model)):
        return spec
    if spec.precision != "fp32":
        raise ExportError(f"precision is {spec.precision}: {NOT_HALF}")
    return replace(spec, opset=max(spec.opset, OPSET))


def _cast(proto: onnx.ModelProto, inputs: tuple[Tensor, ...], precision: str) -> None:
    """Write the float32 part of a graph in half precision, in place, by its tensors on the example inputs."""
    casting = cast_model(proto, precision, ranges=_ranges(proto, inputs, precision))
    products = [row for row in casting.kept if row.product]
    if products:
        notes = "; ".join(replace(casting, kept=tuple(products)).notes())
        warnings.warn(CompressWarning(f"{len(products)} products stay float32: {notes}"), stacklevel=4)


def _ranges(proto: onnx.ModelProto, inputs: tuple[Tensor, ...], precision: str) -> Ranges | None:
    """Measure the tensors of a graph on ONNX Runtime; None if it does not compute them, as FP8."""
    import onnxruntime  # lazy: half a second, which files in float32 do without

    ranges, shown = Ranges(proto.graph, precision), onnx.ModelProto()
    shown.CopyFrom(proto)
    del shown.graph.output[:]
    names = dict.fromkeys(
        name for node in proto.graph.node if node.op_type != "Constant" for name in node.output if name
    )
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    feeds = {value.name: x.detach().cpu().numpy() for value, x in zip(proto.graph.input, inputs, strict=True)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = session.run(None, feeds)
    except Exception:  # ONNX Runtime's errors have no other base
        return None
    ranges.add(feeds | {k: v for k, v in zip(names, found, strict=True) if isinstance(v, np.ndarray)})
    return ranges


def _check_model(model: nn.Module) -> None:
    """Refuse anything but a Python module, and parameters of a type that files are not written in."""
    check_module(model)
    if report_of(model).for_training:
        raise ExportError(
            "the model is what fuse_for_training returned, a graph for training steps: export the model that it was "
            "given, whose parameters it shares"
        )
    inside = "" if hasattr(model, "_orig_mod") else unwrapped(model)  # torch.onnx reads compiled modules
    if inside:
        raise ExportError(f"the model is a {type(model).__name__}, which cannot be traced: give {inside}")
    for name, parameter in model.named_parameters():
        if parameter.dtype in {torch.bfloat16, torch.float64}:
            raise ExportError(
                f"the model's parameters are {parameter.dtype} ({name}): export it in float32 (model.float()); "
                "precision='fp16' writes the remainder in half precision"
            )


def _apply_passes(proto: onnx.ModelProto, inputs: tuple[Tensor, ...], spec: ExportSpec, *, target: str) -> None:
    """Rewrite torch's ONNX in place for the target that its quantizers were placed for; "" for a float model."""
    if spec.precision != "fp32":
        _cast(proto, inputs, spec.precision)
    pads_into_convolutions(proto)
    shape_for(proto, target)
    clean(proto)
    finish_for(proto, target)
    drop_unread(proto.graph)  # biases that were replaced
    if spec.channel_scales == "output":
        scales_on_outputs(proto)


def _check(proto: onnx.ModelProto) -> None:
    if proto.ByteSize() > _LARGEST:
        raise ExportError(f"the ONNX model has {proto.ByteSize()} bytes; files of one piece hold at most {_LARGEST}")
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise ExportError(f"the exported model does not pass onnx.checker: {error}") from error


def check_export(spec: ExportSpec) -> None:
    """Refuse a form that no file can have, or that the installed onnx does not know."""
    validate(spec, ExportSpec, section="export", error=ExportError)
    newest = onnx.defs.onnx_opset_version()
    if spec.opset > newest:
        raise ExportError(f"export.opset is {spec.opset}: the installed onnx knows opsets from 19 to {newest}")


def _export(model: nn.Module, inputs: tuple[Tensor, ...], spec: ExportSpec) -> onnx.ModelProto:
    if spec.dynamic_batch:  # torch.export takes a batch of one for a constant
        inputs = each_input(lambda x: x.repeat(2, *[1] * (x.dim() - 1)) if len(x) == 1 else x, inputs)
    batch = torch.export.Dim("batch", min=1)
    names = input_names(len(inputs))
    try:
        with torch.no_grad():
            output = model(*inputs)
    except Exception as error:  # the model is the user's code
        got = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)
        raise ExportError(
            f"the model fails on example_inputs of {got}: {_cause(error)}; export it in float32 (model.float(); "
            "precision='fp16' writes the file in half) with inputs that it takes, on its device"
        ) from error
    results = output_names([key for key, _ in named_tensors(output)], taken=names)
    if not results:
        raise ExportError(f"the model returned {type(output).__name__}, which holds no tensor that a file could return")
    numbers = any(isinstance(leaf, (int, float, str)) for leaf in tree_leaves(output))
    if numbers or is_dataclass(output) or not isinstance(output, (Tensor, tuple, list, dict)):
        # torch.export knows no other containers, and torch.onnx no numbers: the tensors, in order
        model = _Called(model, lambda own, *given: tuple(flat_tensors(own(*given))))
    shapes: Any = tuple({0: batch} for _ in inputs) if spec.dynamic_batch else None
    if shapes is not None and model.forward.__code__.co_flags & inspect.CO_VARARGS:
        shapes = (shapes,)  # torch.export sees *args as one argument that is a tuple
    try:
        with quiet(), torch.no_grad(), looked_up_once(), _ExactNumbers():
            program = torch.onnx.export(
                model,
                tuple(inputs),
                dynamo=True,
                opset_version=spec.opset,
                dynamic_shapes=shapes,
                input_names=names,
                output_names=results,
                verbose=False,
            )
    except Exception as error:  # torch.onnx runs the user's code, and raises whatever its passes do
        cause, fixed = _cause(error), ""
        if spec.dynamic_batch and _SYMBOLS.search(cause):
            fixed = (
                "; if it computes with the batch size, such as groups=x.shape[0], or the first dimension of an input "
                f"is no batch, {_FIX_BATCH}"
            )
        raise ExportError(f"torch.onnx cannot export the model: {cause}{fixed}{_suspects(model)}") from error
    if program is None:
        raise ExportError("torch.onnx returned no model")
    graph = program.model.graph
    values = [value for node in graph for value in node.outputs if value not in graph.outputs]
    taken = {value.name or "" for value in (*values, *graph.inputs, *graph.outputs, *graph.initializers.values())}
    for value in values:
        if value.name in results:  # torch.onnx calls results of functions `mean` or `softmax`, as callers call theirs
            value.name = free_name(f"{value.name}_inner", taken)
    if spec.dynamic_batch:
        _check_batch(program.model_proto)
    return program.model_proto


def _check_batch(proto: onnx.ModelProto) -> None:
    """Refuse a file of one batch size where an open one is asked for: torch fixes what Python computed with."""
    for value in proto.graph.input:
        first = value.type.tensor_type.shape.dim[:1]
        if first and first[0].HasField("dim_value"):
            raise ExportError(
                f"the batch size of {value.name} cannot be left open: the model's Python uses it as a number, such as "
                "int(x.shape[0]), range(len(x)) or a size that is written out, such as x.reshape(8, -1). Write "
                f"x.shape[0] in its place, or {_FIX_BATCH}"
            )


# The way out where a file cannot have an open batch.
_FIX_BATCH = "fix the size to that of example_inputs (dynamic_batch=False; export.dynamic_batch: false in a recipe)"


class _ExactNumbers(TorchFunctionMode):
    """Gives `clamp(x, 0, 0.5)` two limits of one type, and an epsilon a dimension."""

    # torch.export finds no operator for two types (2.15), and onnxscript's optimizer (0.7) drops sums with scalars of
    # 1e-8 or less, after which zero is divided by zero.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        given = {**dict(zip(("min", "max"), args[1:], strict=False)), **kwargs}
        if name in _CLAMPS and {type(limit) for limit in given.values()} == {int, float}:
            return func(args[0], **{name: float(limit) for name, limit in given.items()})
        if name.strip("_") in _SUMS and len(args) == 2 and isinstance(args[1], float) and 0 < abs(args[1]) <= _DROPPED:
            x = args[0]
            if isinstance(x, Tensor) and x.ndim and x.is_floating_point():
                return func(x, x.new_full((1,), args[1]), **kwargs)
        return func(*args, **kwargs)


# What errors of torch.export and torch.onnx say where a size is a symbol.
_SYMBOLS = re.compile(r"Symbolic|SymInt|symbol|GuardOn|data-dependent|[Dd]ynamic|[Ss]pecializ|size\(\)\[0\]")
_SUMS = frozenset({"add", "radd", "iadd", "sub", "isub"})
_DROPPED = 1e-8
_CLAMPS = frozenset({"clamp", "clamp_", "clip", "clip_"})


def _cause(error: BaseException) -> str:
    """Return the first paragraph of the innermost error on one line, without the exporter's own advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n\n")[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:500]}"


def _suspects(model: nn.Module) -> str:
    """Name modules that torch.fx could not trace either: their code often stops both tracers."""
    leaves = [leaf for m in model.modules() if isinstance(m, fx.GraphModule) for leaf in leaves_of(m)]
    named = ", ".join(f"{leaf.path} ({leaf.kind}: {leaf.reason})" for leaf in leaves[:3])
    return f"; look first at what torch.fx kept whole: {named}" if leaves else ""


class _OfThread(type):
    """The class of a category that holds all warnings of one thread."""

    thread: int

    def __subclasscheck__(cls, subclass: type) -> bool:
        return threading.get_ident() == cls.thread


class _Printed:
    """The standard error without the text that the thread which made this object writes."""

    def __init__(self) -> None:
        self._stream, self._thread = sys.stderr, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's warnings and the graphs that it prints when it fails: they are not about the model.

    What other threads print and warn of is left alone.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    ignored: Any = _OfThread("Ignored", (Warning,), {"thread": threading.get_ident()})
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        warnings.simplefilter("ignore", ignored)
        with contextlib.redirect_stderr(_Printed()):
            yield
    finally:
        with contextlib.suppress(ValueError):  # the exporter reset all filters
            warnings.filters.remove(("ignore", None, ignored, None, 0))  # type: ignore[attr-defined]
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def metadata_entries(
    preprocessing: Preprocessing | None, labels: Sequence[str], metadata: Mapping[str, str], target: str = ""
) -> dict[str, str]:
    """Return the metadata of a file: preprocessing of its input, names of its classes, target, and further entries."""
    entries = dict(metadata) | ({TARGET_KEY: target} if target else {})
    if preprocessing is not None:
        entries[PREPROCESSING_KEY] = preprocessing.to_json()
    if labels:
        entries[LABELS_KEY] = json.dumps(list(labels), ensure_ascii=False)
    return entries


_BUILT: dict[tuple[int | None, frozenset[str]], Any] = {}
# Modules whose import gives torch operators that its table has functions for: without them it is built without.
_REGISTERING = frozenset({"torchvision", "torch.ao.quantization.fx._decomposed"})


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Let exports of this thread take tables from here, and leave out a trace without effect; inside of `alone`."""
    # That is most of the time of a small network's export: torch.onnx reads the source of some 500 functions for its
    # table, torch.export asks for its composite operators 64 times, and the program is traced a second time (2.15) to
    # replace operators that ONNX lacks. A torch that keeps them elsewhere is left alone.
    with (
        _replaced("torch._export.utils", "", "_materialize_cpp_cia_ops", functools.cache),
        _replaced("torch.onnx._internal.exporter._registration", "ONNXRegistry", "from_torchlib", _built_once),
        _replaced("torch.onnx._internal.exporter._fx_passes", "", "decompose_with_registry", _decomposed_if_needed),
    ):
        yield


@contextmanager
def _replaced(module: str, owner: str, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let a function of torch be what `change` makes of it while the context lasts, where torch has it there."""
    try:
        holder: Any = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        original = holder.__dict__[name]
    except (ImportError, AttributeError, KeyError):  # private, moves with torch
        yield
        return
    setattr(holder, name, change(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


def _built_once(build: Any) -> Any:
    def copied(registry: Any, **options: int) -> object:
        key = options.get("opset_version"), _REGISTERING.intersection(sys.modules)
        if key not in _BUILT:
            _BUILT[key] = build.__get__(None, registry)(**options)
        table = registry()
        table.__dict__.update(_BUILT[key].__dict__)
        table.functions = {target: list(rows) for target, rows in _BUILT[key].functions.items()}
        return table

    return classmethod(copied)


def _decomposed_if_needed(decompose: Any) -> Any:
    thread = threading.get_ident()

    def decomposed(program: Any, registry: Any) -> object:
        known = {rows[0].fx_target for rows in registry.functions.values() if rows}
        if threading.get_ident() == thread and _made_functional(program.graph, known):
            return program
        return decompose(program, registry)

    return decomposed


def _made_functional(graph: fx.Graph, known: Collection[object]) -> bool:
    """Write operators as the second trace would, in place; False, and nothing is changed, if it must do that itself."""
    aten, written, flattened = torch.ops.aten, dict[fx.Node, object](), set[object]()
    for node in (node for node in graph.nodes if node.op == "call_function"):
        target: Any = node.target
        if target is operator.getitem or getattr(target, "namespace", "") == "onnx_symbolic":
            continue
        if target is aten.adaptive_avg_pool2d.default and list(node.args[1]) == [1, 1]:
            written[node] = aten.mean.dim
        elif isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            written[node] = _returning(node, written)
        packet, done = getattr(target, "overloadpacket", None), written.get(node, target)
        if done not in known or packet in _TRACED or (packet is aten.flatten and node.args[0] in flattened):
            return False
        if packet is aten.flatten:  # onnxscript (0.7) loses the shape of the second flattening of a tensor
            flattened.add(node.args[0])
    for node, target in written.items():
        node.target = target
        if target is aten.mean.dim:
            node.args = (node.args[0], [-1, -2], True)
    return True


def _returning(node: fx.Node, written: Collection[fx.Node]) -> object:
    """Return the operator that returns what one in place writes into a result that nothing else reads, or None."""
    x, target = node.args[0], cast(Any, node.target)
    packet = getattr(torch.ops.aten, target._schema.name.partition("::")[2].removesuffix("_"), None)
    if not isinstance(x, fx.Node) or len(x.users) != 1 or not target._schema.name.startswith("aten::"):
        return None
    own = x in written or getattr(x.target, "overloadpacket", None) in _NEW_TENSORS
    types = {value.meta["val"].dtype for value in node.all_input_nodes if isinstance(value.meta.get("val"), Tensor)}
    return getattr(packet, target._overloadname, None) if own and len(types) == 1 else None


def _packets(names: str) -> frozenset[object]:
    return frozenset(getattr(torch.ops.aten, name) for name in names.split())


# Operators whose result is memory of its own.
_NEW_TENSORS = _packets("conv1d conv2d conv3d linear batch_norm add sub mul matmul cat")
# Registered, and decomposed by the second trace for open lengths.
_TRACED = _packets("lstm gru rnn_tanh rnn_relu")
