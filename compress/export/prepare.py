"""Prepares a model for the exporter: BatchNorm is folded, and quantizers become the nodes that ONNX will hold.

Integers of weights are computed here, from the float32 weight and the very scale that is written, so that the file
holds exactly what fake quantization computed. Operations that an exporter does not know, or that an engine computes
wrongly, become equivalent ones.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import Counter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import ExportError, ModelError
from compress.export.names import INT4_KEY
from compress.graph.attention import open_attention
from compress.graph.canonical import preserve_input
from compress.graph.fold import fold_batchnorm, foldable_pair
from compress.graph.inputs import Inputs, KeywordInputs, as_inputs
from compress.graph.modules import bake
from compress.graph.ops import node_kind, node_module
from compress.graph.trace import trace
from compress.onnx_graph import AVERAGE_POOLS, MAX_POOLS, free_name
from compress.quantization import MOST_BITS
from compress.quantization.numerics import QuantFormat, quantize_tensor
from compress.quantization.quantizer import Quantizer, can_quantize, quantizers, weight_axis

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


class _LogSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return log_sigmoid(x)


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


class _AvgPool(nn.Module):
    def __init__(self, layer: nn.AvgPool2d | nn.AvgPool3d) -> None:
        super().__init__()
        self.window, self.stride, self.padding = layer.kernel_size, layer.stride, layer.padding
        self.ceil_mode, self.divisor = layer.ceil_mode, layer.divisor_override

    def forward(self, x: Tensor) -> Tensor:
        return avg_pool(x, self.window, self.stride, self.padding, self.ceil_mode, divisor_override=self.divisor)


def spell_plainly(model: nn.Module) -> None:
    """Replace what an exporter does not know or an engine computes wrongly, in place.

    RReLU becomes LeakyReLU of the mean slope, adaptive maxima over equal windows become plain ones, adaptive pools over
    unequal ones reductions of slices, average pooling with a divisor of its own an average and a product, and
    LogSigmoid minus a Softplus.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LogSigmoid):
            model.set_submodule(name, _LogSigmoid())
        if isinstance(module, nn.RReLU):
            model.set_submodule(name, nn.LeakyReLU((module.lower + module.upper) / 2))
        if isinstance(module, (nn.AvgPool2d, nn.AvgPool3d)) and module.divisor_override is not None:
            model.set_submodule(name, _AvgPool(module))
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
    model = copy.deepcopy(model).eval()
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
            inputs = as_inputs(example_inputs)
            model = _ByPosition(model, inputs.names) if isinstance(inputs, KeywordInputs) else model
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
    """Let activations after convolutions return new tensors, in place: torch.export takes those in place to pieces.

    For ReLU6 that is half of the time that a file takes. Only where nothing else reads what is overwritten.
    """
    nodes = model.graph.find_nodes(op="call_module")
    calls = Counter(node.target for node in nodes)
    for source in nodes:
        if len(source.users) != 1 or not isinstance(node_module(source), nn.modules.conv._ConvNd):
            continue
        (reader,) = source.users
        if reader.op == "call_module" and calls[reader.target] == 1 and reader.all_input_nodes == [source]:
            preserve_input(model, reader)


class _ByPosition(nn.Module):
    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> object:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


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
    """Give each call of a quantized layer or BatchNorm that is called several times a copy, where they can fold.

    Heads share a convolution among levels, with a BatchNorm for each (RTMDet): OpenVINO and ONNX Runtime compute the
    convolution in float where the BatchNorm stays.
    """
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
    """Fold the BatchNorm that `batchnorm: keep` has left: integers stay, and ranges grow by |gamma / sigma|.

    After a grouped transposed convolution it stays: its groups share their scales, and its factors are not theirs.
    """
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
    """Return the layer's weight quantizer with a scale for each channel, and integers that BatchNorm may negate.

    The negative of the lowest integer of a range that is not symmetric is beyond its end. Then the weight is rounded
    here, and a quantizer of one more bit and the same scale holds it and its negative.
    """
    old, axis = cast(Quantizer, layer.weight_quantizer), weight_axis(layer)
    quant_format, amax = old.format, old.scale.detach() * old.format.high
    if flips and not quant_format.narrow and quant_format.num_bits < MOST_BITS:
        if parametrize.is_parametrized(layer):
            bake(layer, "weight")
        layer.weight.data = layer.quantized_weight.detach()
        quant_format = dataclasses.replace(quant_format, num_bits=quant_format.num_bits + 1, narrow=True)
        amax = old.scale.detach() * quant_format.high
    channels = layer.weight.shape[axis]
    new = Quantizer(dataclasses.replace(quant_format, axis=axis), channels=channels, name=old.name).to(amax.device)
    new.set_amax(amax.expand(channels))
    layer.weight_quantizer = new
    return new
