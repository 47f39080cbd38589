"""Which nodes of a quantized graph become one operation with a quantizer: found by walking back from it."""

from __future__ import annotations

import math
import operator

from torch import fx, nn

from compress.graph.ops import node_kind, node_module
from compress.qat_fusion.activation import GATES, gate_of
from compress.quantization.modules import QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear

BOUNDS = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
"""Of activations that do nothing but clip."""
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear)
_FORWARDS = {layer.forward for layer in LAYERS}


class Chain:
    """The chain that ends in a quantizer's node, found by walking back.

    Attributes:
        nodes: from the quantizer back to the chain's first.
        layer: the one of them; None where there is none.
        activation: `relu`, `relu6`, one of `fused_gate.GATES`, or "".
        inputs: what the fused module is called with.
        reason: why the walk ended.
    """

    def __init__(self, quantizer: fx.Node) -> None:
        self.nodes = [quantizer]
        self.layer: fx.Node | None = None
        self.activation = ""
        source = quantizer.all_input_nodes[0]
        found = _activation_of(source)
        if found and only_reader(source) and only_reader(source.all_input_nodes[0]):
            self.activation = found
            self.nodes.append(source)
            source = source.all_input_nodes[0]
        if self.activation not in GATES and only_reader(source) and adds_alike(source):
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


def _activation_of(node: fx.Node) -> str:
    """Which activation of chains a node computes; "" = none."""
    kind = node_kind(node)
    return kind if kind in BOUNDS else gate_of(node)


def only_reader(node: fx.Node) -> bool:
    """Whether one node reads it."""
    return len(node.users) == 1


def adds_alike(node: fx.Node) -> bool:
    """Whether a node adds two tensors of one shape, and changes none that others read."""
    operands = node.all_input_nodes
    if node_kind(node) != "add" or len(operands) != 2 or node.kwargs or len(node.args) != 2:
        return False
    in_place = node.target in (operator.iadd, "add_")
    shapes = [operand.meta.get("shape") for operand in operands]
    return shapes[0] is not None and shapes[0] == shapes[1] and not (in_place and not only_reader(operands[0]))


def _why_no_layer(node: fx.Node) -> str:
    """Why a chain cannot begin with this node; "" when it can."""
    if node.op != "call_module" or node_kind(node) not in {"conv", "linear"}:
        return f"begins behind {node_kind(node)} {node.name}, no convolution or linear layer"
    if not only_reader(node):
        return f"begins behind {node.name}, whose result has {len(node.users)} readers"
    layer = node_module(node)
    if type(layer).forward not in _FORWARDS or layer._forward_hooks or layer._forward_pre_hooks:
        return f"begins behind {node.name}, a {type(layer).__name__} with a forward pass of its own"
    return ""
