"""Chains of nodes of a quantized graph that become one operation; products of layers, whose weights share launches."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind, node_module, tensor_of
from compress.kernels.epilogue import Epilogue, IntegerGrid
from compress.kernels.fake_quantize import SMOOTH_ACTIVATIONS
from compress.kernels.memory_format import is_channels_last
from compress.kernels.triton.depthwise import depthwise, fits
from compress.kernels.triton.launch import Kernels, use_triton, use_triton_eager
from compress.kernels.triton.weights import quantize_weights
from compress.quantization.quantizer import QuantConv1d, QuantConv2d, QuantConv3d, Quantizer, QuantLinear

_GROUP_BYTES = 25 << 20  # of DistributedDataParallel's buckets: sums of gradients overlap with backward


class QuantizedWeights(nn.Module):
    """Quantized weights of `layers`, in their order, those `coded` as integers too; layers are not registered."""

    def __init__(self, layers: Sequence[nn.Module], kernels: Kernels | None) -> None:
        super().__init__()
        self.layers: tuple[Any, ...] = tuple(layers)
        self.kernels: Kernels | None = kernels
        self.coded = [False] * len(self.layers)

    def forward(self) -> tuple[Tensor | None, ...]:
        """As many int8 tensors follow: None where integers are not wanted, or where Triton does not run."""
        weights = [layer.weight for layer in self.layers]
        found = [layer.weight_quantizer for layer in self.layers]
        if use_triton_eager(weights[0], self.kernels) and all(map(is_plain, found)) and all(map(is_live, found)):
            grids = [grid_of(quantizer) for quantizer in found]
            result = quantize_weights(self, weights, grids, weight_dtype(weights[0]), self.coded)
            if result is not None:
                return result
        values = [quantizer(weight) for quantizer, weight in zip(found, weights, strict=True)]
        return (*values, *(None for _ in values))


def grid_of(quantizer: Quantizer) -> IntegerGrid:
    quant_format = quantizer.format
    return IntegerGrid(quantizer.amax, quant_format.low, quant_format.high, quant_format.axis)


def weight_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def is_plain(quantizer: nn.Module) -> bool:
    """True if a quantizer rounds to integers of a byte in a fixed range that is symmetric or begins at 0."""
    if type(quantizer) is not Quantizer or quantizer.format.wide:
        return False
    return quantizer.format.kind == "int" and not quantizer.format.lowest and not quantizer.amax.requires_grad


def is_live(quantizer: Quantizer) -> bool:
    """True if a quantizer is enabled, has ranges, and no calibrator watches it."""
    return quantizer.enabled and quantizer.calibrator is None and quantizer.ready


def group_weights(graph_module: fx.GraphModule, consumers: dict[fx.Node, nn.Module], kernels: Kernels | None) -> None:
    """Give nodes, in the graph's order, the quantized weights of their layers as the keyword argument `weight`."""
    groups: list[dict[nn.Module, list[fx.Node]]] = []
    seen: dict[nn.Module, dict[nn.Module, list[fx.Node]]] = {}
    room = 0
    for node, layer in consumers.items():
        if layer not in seen:
            size = tensor_of(layer).nbytes
            if room < size:
                groups.append({})
                room = _GROUP_BYTES
            room -= size
            seen[layer] = groups[-1]
        seen[layer].setdefault(layer, []).append(node)
    for i, group in enumerate(groups):
        name = f"quantized_weights.{i}"
        graph_module.add_submodule(name, QuantizedWeights(tuple(group), kernels))
        with graph_module.graph.inserting_before(next(iter(group.values()))[0]):
            weights = graph_module.graph.call_module(name)
        for j, nodes in enumerate(group.values()):
            with graph_module.graph.inserting_before(nodes[0]):
                weight = graph_module.graph.call_function(operator.getitem, (weights, j))
            for node in nodes:
                node.update_kwarg("weight", weight)


def codes_of_weight(graph_module: fx.GraphModule, consumer: fx.Node) -> fx.Node | None:
    """The node of the integers of a consumer's weight, computed from now on; None if it is not of `group_weights`."""
    weight = consumer.kwargs.get("weight")
    if not isinstance(weight, fx.Node):
        return None
    arguments: Any = weight.args
    group, index = arguments
    owner: Any = graph_module.get_submodule(str(group.target))  # of QuantizedWeights
    owner.coded[index] = True
    with graph_module.graph.inserting_after(weight):
        return graph_module.graph.call_function(operator.getitem, (group, len(owner.layers) + index))


# Bounds of the activations that only clip.
BOUNDS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear)
_FORWARDS = {layer.forward for layer in LAYERS}


class Chain:
    """The chain that ends in the node of a quantizer.

    Attributes:
        nodes: from the quantizer back to the first of the chain.
        layer: the node of its layer; None = the chain has none.
        activation: a key of `BOUNDS` or of `SMOOTH_ACTIVATIONS`, or "".
        inputs: arguments of the fused module.
        reason: why the chain does not begin at a layer; "" when it does.
    """

    def __init__(self, quantizer: fx.Node) -> None:
        self.nodes = [quantizer]
        self.layer: fx.Node | None = None
        self.activation = ""
        source = quantizer.all_input_nodes[0]
        found = activation_of(source)
        if found and has_one_consumer(source) and has_one_consumer(source.all_input_nodes[0]):
            self.activation = found
            self.nodes.append(source)
            source = source.all_input_nodes[0]
        if self.activation not in SMOOTH_ACTIVATIONS and has_one_consumer(source) and adds_alike(source):
            self._add(source)
            return
        self.reason = _why_no_layer(source)
        if self.reason:
            self.inputs: tuple[fx.Node, ...] = (source,)
            return
        self._begin(source)
        self.inputs = (source.all_input_nodes[0],)

    def _add(self, add: fx.Node) -> None:
        self.nodes.append(add)
        one, other = add.all_input_nodes
        refusals = [_why_no_layer(operand) for operand in (one, other)]
        self.reason = "" if "" in refusals else refusals[0]
        if self.reason:
            self.inputs = (one, other)
            return
        layer, residual = (one, other) if not refusals[0] else (other, one)
        self._begin(layer)
        self.inputs = (layer.all_input_nodes[0], residual)

    def _begin(self, layer: fx.Node) -> None:
        self.layer = layer
        self.nodes.append(layer)


def fuse_nodes(
    graph_module: fx.GraphModule, name: str, module: nn.Module, nodes: Sequence[fx.Node], call: tuple[Any, ...]
) -> fx.Node:
    """Call a new module, with the arguments of `call`, in the place of nodes, the last of them first."""
    last, graph = nodes[0], graph_module.graph
    graph_module.add_submodule(name, module)
    with graph.inserting_before(last):
        fused = graph.call_module(name, *call)
    fused.meta.update(last.meta)
    last.replace_all_uses_with(fused)
    for old in nodes:  # each has lost its only consumer
        graph.erase_node(old)
    return fused


def quantizer_of(quantize: Any) -> Quantizer:
    return quantize.quantizer


def activation_of(node: fx.Node) -> str:
    kind = node_kind(node)
    if kind in BOUNDS:
        return kind
    if kind != "gelu":
        return kind if kind in SMOOTH_ACTIVATIONS else ""
    if node.op == "call_module":
        approximate = getattr(node_module(node), "approximate", None)
    else:
        approximate = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(approximate), "")


def has_one_consumer(node: fx.Node) -> bool:
    return len(node.users) == 1


def adds_alike(node: fx.Node) -> bool:
    """True if a node adds two tensors of one shape, and changes no tensor that other nodes read."""
    operands = node.all_input_nodes
    if node_kind(node) != "add" or len(operands) != 2 or node.kwargs or len(node.args) != 2:
        return False
    in_place = node.target in (operator.iadd, "add_")
    shapes = [operand.meta.get("shape") for operand in operands]
    return shapes[0] is not None and shapes[0] == shapes[1] and not (in_place and not has_one_consumer(operands[0]))


def _why_no_layer(node: fx.Node) -> str:
    if node.op != "call_module" or node_kind(node) not in {"conv", "linear"}:
        return f"begins after {node_kind(node)} {node.name}, no convolution or linear layer"
    if not has_one_consumer(node):
        return f"begins after {node.name}, whose result has {len(node.users)} consumers"
    layer = node_module(node)
    if type(layer).forward not in _FORWARDS or layer._forward_hooks or layer._forward_pre_hooks:
        return f"begins after {node.name}, a {type(layer).__name__} with a forward pass of its own"
    return ""


ACTIVATIONS = {"relu": F.relu, "relu6": F.relu6, **SMOOTH_ACTIVATIONS}
_PLAIN: tuple[float, float] = (-math.inf, math.inf)
_IMAGE_CHANNELS = 4
_NARROW = range(16, 73)  # channels of the groups that are merged; 24, 48 and 72 were timed on an H200
_EVEN = 32  # cuDNN is fastest with groups of a multiple of it,
_LARGEST_EVEN = 256  # or with one group of at most so many channels,
_LARGEST_ODD = 96  # and else with the widest groups up to this


def epilogue_of(layer: nn.Module | None, activation: str, quantizer: Quantizer) -> Epilogue:
    lower, upper = BOUNDS.get(activation, _PLAIN)
    bias_dim = -1 if isinstance(layer, nn.Linear) else 1
    quant_format = quantizer.format
    return Epilogue(quant_format.low, quant_format.high, lower, upper, quant_format.axis, bias_dim)


def product(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kernels: Kernels | None) -> Tensor:
    """The result of a layer with another weight (None: its own quantized one) and bias (None: without).

    Triton computes only depthwise convolutions with large filters.
    """
    if weight is None:
        weight = layer.quantized_weight if hasattr(layer, "weight_quantizer") else layer.weight
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if _takes_patches(layer) and use_triton(x, kernels):
        return _patch_product(layer, x.to(weight_dtype(x)), weight, bias)
    if layer.groups > 1 and layer.padding_mode == "zeros" and use_triton(x, kernels):
        dtype, padding = weight_dtype(x), layer.padding
        if not isinstance(padding, str) and fits(x, weight, dtype, layer.stride, padding, layer.dilation):
            return depthwise(x.to(dtype), weight.to(dtype), bias)
        timed = isinstance(layer, nn.Conv2d) and tuple(weight.shape[2:]) == (3, 3)
        count = groups_together(layer.groups, weight.shape[1]) if timed else 1
        if count > 1 and dtype in (torch.float16, torch.bfloat16) and is_channels_last(x):
            # cuDNN converts grouped tensors to another memory format and back unless the groups are wide (RegNetY)
            wide = merged_groups(weight.to(dtype), layer.groups, count)
            return F.conv2d(x, wide, bias, layer.stride, padding, layer.dilation, layer.groups // count)
    return layer._conv_forward(x, weight, bias)


def _takes_patches(layer: Any) -> bool:
    """True if a layer is a convolution whose filters read an image in patches that do not overlap (ViT, ConvNeXt)."""
    if not isinstance(layer, nn.Conv2d) or layer.in_channels > _IMAGE_CHANNELS or layer.groups > 1:
        return False
    return layer.kernel_size == layer.stride and layer.padding == (0, 0) and layer.dilation == (1, 1)


def _patch_product(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution of patches as a matrix product; cuDNN pads an image's channels to eight, forward and backward."""
    high, wide = layer.kernel_size
    rows, columns = x.shape[2] // high, x.shape[3] // wide
    x = x[:, :, : rows * high, : columns * wide].unflatten(3, (columns, wide)).unflatten(2, (rows, high))
    patches = x.permute(0, 2, 4, 3, 5, 1).flatten(3)
    return F.linear(patches, weight.permute(0, 2, 3, 1).flatten(1), bias).permute(0, 3, 1, 2)


def groups_together(groups: int, width: int) -> int:
    """How many neighbouring groups of a convolution, of `width` input channels each, are computed as one."""
    if width not in _NARROW or width % _EVEN == 0:
        return 1
    counts = [count for count in range(1, groups + 1) if groups % count == 0 and count * width <= _LARGEST_EVEN]
    even = [count for count in counts if count * width % _EVEN == 0]
    whole = [count for count in counts if count == groups]
    return min([*even, *whole], default=max((count for count in counts if count * width <= _LARGEST_ODD), default=1))


def merged_groups(weight: Tensor, groups: int, count: int) -> Tensor:
    """The filter (K, C * count, R, S), in channels_last, of a convolution (K, C, R, S) whose groups are merged."""
    outputs, width, *taps = weight.shape
    blocks = weight.reshape(groups // count, count, outputs // groups, 1, width, *taps)
    own = torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(1, count, 1, count, 1, 1, 1)
    return (blocks * own).reshape(outputs, count * width, *taps).contiguous(memory_format=torch.channels_last)
