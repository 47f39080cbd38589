"""The chain of nodes of a quantized graph that becomes one operation with a quantizer."""

from __future__ import annotations

import math
import operator
from typing import Any, cast

from torch import fx, nn

from compress.graph.ops import node_kind, node_module
from compress.kernels.activation import SMOOTH_ACTIVATIONS
from compress.quantization.modules import QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear
from compress.quantization.quantizer import Quantizer

BOUNDS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
"""Bounds of the activations that only clip."""
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


def called_module(node: fx.Node) -> Any:  # Any: callers ask for attributes of many classes
    """The module that a node calls; None for another node."""
    return node_module(node) if node.op == "call_module" else None


def quantizer_of(quantize: nn.Module) -> Quantizer:
    """The quantizer of a module that only quantizes."""
    return cast(Quantizer, quantize.quantizer)  # torch types attributes of modules as Tensor | Module


def activation_of(node: fx.Node) -> str:
    """The activation that a node computes, if chains may have it; "" = none."""
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
    """True if one node alone reads the result of a node."""
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
    """Why a chain cannot begin with this node; "" when it can."""
    if node.op != "call_module" or node_kind(node) not in {"conv", "linear"}:
        return f"begins after {node_kind(node)} {node.name}, no convolution or linear layer"
    if not has_one_consumer(node):
        return f"begins after {node.name}, whose result has {len(node.users)} consumers"
    layer = node_module(node)
    if type(layer).forward not in _FORWARDS or layer._forward_hooks or layer._forward_pre_hooks:
        return f"begins after {node.name}, a {type(layer).__name__} with a forward pass of its own"
    return ""
