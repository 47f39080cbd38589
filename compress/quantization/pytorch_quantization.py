"""Conversion of models that were built and calibrated with pytorch-quantization; the outputs stay the same.

pytorch-quantization 2.1.3 has quantizers inside its layers and as modules on residual branches. The former are moved
into the graph; each takes over the format and the calibrated `amax`. Equal quantizers of one tensor become one.

Its arithmetic is round(x * (bound / amax)) clipped, divided by (bound / amax) (Wu et al., arXiv 2004.09602, section
3.1.1). Ours divides by amax / bound, as ONNX does, so that a value at a tie between two steps may be rounded to the
other side. The library is not imported: its classes are recognized by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compress.errors import CalibrationError, QuantizationError
from compress.graph.fold import foldable_pair
from compress.graph.inputs import Inputs
from compress.graph.ops import node_module, tensor_of
from compress.graph.report import attach_report, leaves_of
from compress.graph.trace import trace
from compress.quantization import LEAST_BITS, MOST_BITS, ActivationSpec, WeightSpec
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.decisions import ActivationSite, Decision, Placement, WeightSite
from compress.quantization.quantizer import (
    QuantConv2d,
    Quantizer,
    quantize_channels,
    quantized_layer,
    quantizer_path,
    twin_of,
    weight_axis,
    weight_quantizer_of,
)
from compress.quantization.report import QuantizationReport

_PACKAGE = "pytorch_quantization"
_SMALLEST_AMAX = 2.0**-24  # it quantizes everything under a smaller amax to zero
_RULE = "pytorch-quantization"


def from_pytorch_quantization(model: nn.Module, example_inputs: Inputs) -> fx.GraphModule:
    """A model of pytorch-quantization as a model of compress: same outputs, ready for `export_onnx` or training.

    Args:
        model: with calibrated quantizers; not changed.
        example_inputs: its inputs, to trace it.

    Returns:
        A GraphModule in evaluation mode with the float weights under their own names; `.placement` is the table of the
        quantizers that were taken over. Disabled quantizers are left out.

    Raises:
        QuantizationError: no quantizer is enabled, a layer or quantizer (named) has no equivalent here, or compress was
            imported while pytorch-quantization had replaced layers of torch.nn.
        CalibrationError: a quantizer (named) has no calibrated range, or is still in calibration.
        ModelError: the model cannot be traced.

    Examples:
        >>> qmodel = compress.from_pytorch_quantization(their_model, images)  # doctest: +SKIP
    """
    if any(cls.__module__.startswith(_PACKAGE) for cls in QuantConv2d.__mro__):
        raise QuantizationError(
            "compress was imported while pytorch-quantization had its layers in torch.nn, and is built on them now: "
            "import compress before quant_modules.initialize(), or call quant_modules.deactivate() before the import"
        )
    paths = [path for path, module in model.named_modules() if _is_theirs(module)]
    inside = {path for path in paths for outer in paths if path.startswith(f"{outer}.")}
    graph_module = trace(model, example_inputs, leaves=[path for path in paths if path not in inside])
    moved = _Moved()
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module" and _is_theirs(node_module(node)):
            _take_over(graph_module, node, moved)
    if not moved.activations and not moved.weights:
        raise QuantizationError(
            "the model holds no quantizer of pytorch-quantization that is on: build it with quant_modules.initialize() "
            "or its Quant layers, calibrate it, and call enable_quant() and disable_calib() on its TensorQuantizers"
        )
    _expand_before_batchnorm(graph_module, moved)
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()
    leaves = tuple(leaf for leaf in leaves_of(graph_module) if leaf.path not in paths)
    attach_report(graph_module, QuantizationReport(leaves=leaves, placement=moved.placement()))
    return graph_module.eval()


@dataclass(frozen=True, kw_only=True)
class _Range:
    format: QuantFormat
    amax: Tensor

    def same(self, other: _Range) -> bool:
        return self.format == other.format and torch.equal(self.amax, other.amax)


class _Moved:
    """What was taken over so far: ranges and edges, formats of weights, and replaced modules, by path."""

    def __init__(self) -> None:
        self.activations: dict[str, tuple[_Range, list[tuple[str, str]]]] = {}
        self.weights: dict[str, QuantFormat] = {}
        self.called: dict[str, Any] = {}

    def placement(self) -> Placement:
        rows = [
            _decision(tensor, consumer, name, found.format)
            for name, (found, edges) in self.activations.items()
            for tensor, consumer in edges
        ]
        rows += [_decision(f"{p}.weight", p, f"{p}.weight_quantizer", f) for p, f in self.weights.items()]
        activations = tuple(
            ActivationSite(
                name=name,
                edges=tuple(edges),
                format=found.format,
                spec=ActivationSpec(num_bits=found.format.num_bits, calibrator="max"),
            )
            for name, (found, edges) in self.activations.items()
        )
        weights = tuple(
            WeightSite(path=p, format=f, spec=WeightSpec(num_bits=f.num_bits, axis=None if f.axis is None else 0))
            for p, f in self.weights.items()
        )
        return Placement(target="tensorrt", decisions=tuple(rows), activations=activations, weights=weights)


def _decision(tensor: str, layer: str, quantizer: str, quant_format: QuantFormat) -> Decision:
    return Decision(
        tensor=tensor,
        layer=layer,
        decision="quantize",
        quantizer=quantizer,
        num_bits=quant_format.num_bits,
        axis=quant_format.axis,
        signed=quant_format.signed,
        rule=_RULE,
        reason="taken over with its range",
    )


def _is_theirs(module: nn.Module) -> bool:
    return any(cls.__module__.split(".")[0] == _PACKAGE for cls in type(module).__mro__)


def _take_over(graph_module: fx.GraphModule, node: fx.Node, moved: _Moved) -> None:
    """Replace one of their modules, at its node, by one of ours."""
    path, source = str(node.target), node.all_input_nodes[0]
    module: Any = node_module(node)
    if any(cls.__name__ == "TensorQuantizer" for cls in type(module).__mro__):
        found = _range_of(module, path, None)
        replacement = source if found is None else _quantizer_node(graph_module, source, found, path, node, moved)
        node.replace_all_uses_with(replacement)
        graph_module.graph.erase_node(node)
        return
    if path in moved.called:  # a layer that is called twice was replaced at its first call
        return
    moved.called[path] = module
    twin = _float_twin(module, path)
    calls = [n for n in graph_module.graph.nodes if n.op == "call_module" and n.target == path]
    found = _range_of(module._input_quantizer, f"{path}._input_quantizer", None)
    for call in calls:
        if found is None:
            break
        read = call.all_input_nodes[0]
        call.replace_input_with(read, _quantizer_node(graph_module, read, found, path, call, moved))
    weights = getattr(module, "_weight_quantizer", None)
    if weights is not None:
        own = _range_of(weights, f"{path}._weight_quantizer", tensor_of(twin).detach())
        if own is not None:
            twin = quantized_layer(twin, own.format, name=path)
            weight_quantizer_of(twin).set_amax(own.amax)
            moved.weights[path] = own.format
    graph_module.set_submodule(path, twin)


def _quantizer_node(
    graph_module: fx.GraphModule, source: fx.Node, found: _Range, path: str, consumer: fx.Node, moved: _Moved
) -> fx.Node:
    """A node that quantizes `source`: an equal one if there is one, or a new one named after its layer."""
    for user in source.users:
        known = moved.activations.get(str(user.target)) if user.op == "call_module" else None
        if known is not None and known[0].same(found):
            known[1].append((source.name, consumer.name))
            return user
    name = quantizer_path(path.replace(".", "_"))
    while name in moved.activations:
        name += "_"
    channels = None if found.format.axis is None else found.amax.numel()
    quantizer = Quantizer(found.format, channels=channels, name=name).to(found.amax.device)
    quantizer.set_amax(found.amax)
    graph_module.add_submodule(name, quantizer)
    with graph_module.graph.inserting_after(source):
        node = graph_module.graph.call_module(name, (source,))
    node.meta.update(shape=source.meta.get("shape"), dtype=source.meta.get("dtype"))
    moved.activations[name] = (found, [(source.name, consumer.name)])
    return node


def _range_of(module: nn.Module, path: str, weight: Tensor | None) -> _Range | None:
    """Format and range of one of their quantizers; None if it is off. `weight` is None for activations."""
    theirs: Any = module
    if theirs._disabled:
        return None
    if theirs._if_calib:
        raise CalibrationError(
            f"{path} is still in calibration: call load_calib_amax(), disable_calib(), enable_quant()"
        )
    if not theirs._if_quant:
        return None
    if not theirs._fake_quant:
        raise QuantizationError(
            f"{path} gives integers (fake_quant=False); only fake quantization has an equivalent here"
        )
    if weight is not None and theirs._num_bits > MOST_BITS:
        raise QuantizationError(f"{path} has {theirs._num_bits} bits; weights have {LEAST_BITS} to {MOST_BITS} here")
    narrow = theirs._narrow_range and not theirs.use_fb_fake_quant
    amax = _learned_amax(theirs, path) if theirs._learn_amax else getattr(theirs, "_amax", None)
    if amax is None:
        if weight is None:
            raise CalibrationError(
                f"{path} has no calibrated range (it measures every batch); calibrate it and call load_calib_amax()"
            )
        amax = _dynamic_amax(weight, theirs._axis)
    amax = amax.detach().float() * (1.0 if theirs._scale_amax is None else theirs._scale_amax)
    axis = _axis(amax, theirs._axis, path)
    quant_format = QuantFormat(
        num_bits=theirs._num_bits, signed=not theirs._unsigned, axis=axis, narrow=bool(narrow or theirs._learn_amax)
    )
    return _Range(format=quant_format, amax=_usable(amax.reshape(() if axis is None else -1), path))


def _learned_amax(theirs: Any, path: str) -> Tensor:
    low: Tensor = theirs.clip.clip_value_min.detach()
    high: Tensor = theirs.clip.clip_value_max.detach()
    if not torch.equal(-low, high):
        raise QuantizationError(
            f"{path} has learned to clip from {low.item():.4g} to {high.item():.4g}: a range that is not symmetric has "
            "no equivalent here; set both bounds to the larger magnitude and train a little more"
        )
    return high


def _dynamic_amax(weight: Tensor, axis: Any) -> Tensor:
    """The range that they compute for a weight at each call if none was calibrated."""
    if axis is None:
        return weight.abs().amax()
    kept = {a % weight.dim() for a in (axis if isinstance(axis, (tuple, list)) else (axis,))}
    return weight.abs().amax(dim=[i for i in range(weight.dim()) if i not in kept], keepdim=True)


def _axis(amax: Tensor, axis: Any, path: str) -> int | None:
    """The one axis along which `amax` varies, from its shape (1, C, 1, 1); None for a single range."""
    if amax.numel() == 1:
        return None
    wide = [i for i, size in enumerate(amax.shape) if size > 1]
    if len(wide) == 1 and amax.dim() > 1:
        return wide[0]
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    if amax.dim() == 1 and len(given) == 1 and isinstance(given[0], int) and given[0] >= 0:
        return given[0]
    raise QuantizationError(
        f"{path} has ranges of shape {tuple(amax.shape)}: here they may vary along one axis at most"
    )


def _usable(amax: Tensor, path: str) -> Tensor:
    """Give channels of zeros the largest range (CalibrationError: all channels are such)."""
    dead = amax <= _SMALLEST_AMAX
    if bool(dead.all()):
        raise CalibrationError(
            f"{path}: amax is {amax.max().item():.3g}, so that everything becomes zero; calibrate once more"
        )
    return torch.where(dead, amax.max(), amax)


def _float_twin(module: nn.Module, path: str) -> nn.Module:
    """A layer of torch with the parameters of one of theirs."""
    names = [c.__name__.removeprefix("Quant") for c in type(module).__mro__ if c.__module__.startswith(_PACKAGE)]
    # quant_modules.initialize may have replaced the layers of torch.nn by theirs.
    layer_class = next((getattr(nn.modules, name) for name in names if hasattr(nn.modules, name)), None)
    theirs: Any = module
    if layer_class is None or not hasattr(module, "_input_quantizer"):
        raise QuantizationError(f"layer {path} is a {type(module).__name__}, which has no quantized form here")
    if getattr(theirs, "padding_mode", "zeros") != "zeros":
        raise QuantizationError(
            f"layer {path} pads with {theirs.padding_mode!r}, which pytorch-quantization computes in its own way"
        )
    twin = twin_of(module, layer_class)
    twin._buffers.update(module._buffers)
    return cast(nn.Module, twin)


def _expand_before_batchnorm(graph_module: fx.GraphModule, moved: _Moved) -> None:
    """Expand the one range of a weight before a BatchNorm to all channels, so that the BatchNorm can be folded."""
    for node in graph_module.graph.nodes:
        pair = foldable_pair(node)
        if pair is None or str(pair[0].target) not in moved.weights:
            continue
        path = str(pair[0].target)
        layer: Any = node_module(pair[0])
        old = weight_quantizer_of(layer)
        if old.format.axis is None and (weight_axis(layer) == 0 or layer.groups == 1):
            moved.weights[path] = quantize_channels(layer, old.amax, old.format).format
