"""BatchNorm, or the factor and the sum that spell it, folded into the layer before it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from compress.graph.functional import constant_value, is_constant
from compress.graph.modules import bake
from compress.graph.ops import (
    BATCH_NORMS,
    SPELLINGS,
    WEIGHTED,
    attribute_of,
    calls_alike,
    module_kind,
    node_kind,
    node_module,
    tensor_of,
)

# Running mean and variance (C,), epsilon, scale and shift (C,) of a BatchNorm.
Statistics = tuple[Tensor, Tensor, float, Tensor | None, Tensor | None]

# torch's classes of layers with a weight.
_LAYERS = tuple(kind for name in WEIGHTED for kind in SPELLINGS[name] if isinstance(kind, type))


def fold_batchnorm(graph_module: fx.GraphModule, *, keep: Collection[fx.Node] = ()) -> tuple[str, ...]:
    """Fold every BatchNorm that alone consumes a conv, transposed conv or linear, in place; return their paths.

    A BatchNorm stays if its layer is called twice, or if it is among `keep`. Nodes carry shapes.
    """
    folded = []
    for node in list(graph_module.graph.nodes):
        pair = foldable_pair(node)
        if pair is None or node in keep:
            continue
        layer, norm = pair
        own: Any = node_module(norm)
        _fold_statistics(node_module(layer), (own.running_mean, own.running_var, own.eps, own.weight, own.bias))
        node.replace_all_uses_with(layer)
        graph_module.graph.erase_node(node)
        folded.append(str(node.target))
    graph_module.delete_all_unused_submodules()
    _only_children(graph_module, folded)
    graph_module.recompile()
    return tuple(folded)


def _only_children(graph_module: fx.GraphModule, paths: list[str]) -> None:
    """Drop unused parameters of folded modules that stay for a child (DistributedDataParallel would wait for them)."""
    read = {str(node.target).rpartition(".")[0] for node in graph_module.graph.nodes if node.op == "get_attr"}
    left = dict(graph_module.named_modules())
    for path in paths:
        if path in left and path not in read:
            holder = nn.Module().train(left[path].training)
            for name, child in left[path].named_children():
                holder.add_module(name, child)
            graph_module.set_submodule(path, holder)


def foldable_pair(norm: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(layer, norm) if `norm` is a BatchNorm that can be folded into the layer before it, else None."""
    if norm.op != "call_module" or node_kind(norm) != "batch_norm" or not norm.args:
        return None
    layer = norm.args[0]
    if not isinstance(layer, fx.Node) or layer.op != "call_module" or len(layer.users) != 1:
        return None
    if node_kind(layer) not in WEIGHTED or not _foldable(node_module(layer), layer.meta.get("shape")):
        return None
    calls = [n.target for n in norm.graph.nodes if n.op == "call_module"]
    if calls.count(layer.target) != 1 or calls.count(norm.target) != 1:
        return None
    module = node_module(norm)
    if type(module).forward not in {norm_class.forward for norm_class in BATCH_NORMS}:
        return None  # a subclass that does more than normalize (timm's BatchNormAct2d)
    return (layer, norm) if getattr(module, "running_mean", None) is not None else None


def fold_constants(graph_module: fx.GraphModule, *, trained: bool) -> bool:
    """Fold into each convolution the factor and sum of constants, or the sum alone, that alone consume it; in place.

    BatchNorm is spelled so where its statistics are buffers (FrozenBatchNorm2d of torchvision, detectron2 and DETR).
    Nodes carry shapes; constants that are trained are folded with `trained`. True if something was folded.
    """
    calls = [node.target for node in graph_module.graph.nodes if node.op == "call_module"]
    folded = False
    for layer in list(graph_module.graph.nodes):
        if layer.op != "call_module" or node_kind(layer) not in {"conv", "conv_transpose"}:
            continue
        if calls.count(layer.target) != 1 or not _foldable(node_module(layer), layer.meta.get("shape")):
            continue
        while (found := _affine_after(graph_module, layer, trained)) is not None:
            scale, shift, nodes = found
            _fold_statistics(node_module(layer), (torch.zeros_like(scale), torch.ones_like(scale), 0.0, scale, shift))
            nodes[-1].replace_all_uses_with(layer)
            for node in reversed(nodes):
                graph_module.graph.erase_node(node)
            folded = True
    if folded:
        _drop_unread_constants(graph_module)
    graph_module.recompile()
    return folded


def _drop_unread_constants(graph_module: fx.GraphModule) -> None:
    """Drop what only computed folded constants, and their parameters."""
    paths = set()
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node.op == "get_attr":
            paths.add(str(node.target))
            graph_module.graph.erase_node(node)
        elif not node.users and node.op in {"call_function", "call_method"} and is_constant(node):
            graph_module.graph.erase_node(node)
    for path in paths - {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}:
        owner, _, name = path.rpartition(".")
        if name in graph_module.get_submodule(owner)._parameters:
            delattr(graph_module.get_submodule(owner), name)


def _affine_after(
    graph_module: fx.GraphModule, layer: fx.Node, trained: bool
) -> tuple[Tensor, Tensor, list[fx.Node]] | None:
    """Return the factor and the sum, both (C,), that a convolution's result goes through, and their nodes."""
    node, scale, nodes = _reader(layer), None, list[fx.Node]()
    if node is not None and node_kind(node) == "mul":
        scale = _channel_constant(graph_module, node, layer, layer, trained)
        nodes.append(node)
        node = _reader(node) if scale is not None else None
    if node is None or node_kind(node) != "add":
        return None
    shift = _channel_constant(graph_module, node, nodes[-1] if nodes else layer, layer, trained)
    if shift is None:
        return None
    return (torch.ones_like(shift) if scale is None else scale), shift, [*nodes, node]


def _reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _channel_constant(
    graph_module: fx.GraphModule, node: fx.Node, source: fx.Node, layer: fx.Node, trained: bool
) -> Tensor | None:
    """Return the constant that a node applies to each channel (axis 1) of a convolution's result, (C,); else None."""
    if node.op == "call_module" or node.kwargs or len(node.args) != 2 or node.args.count(source) != 1:
        return None
    other = node.args[1 - node.args.index(source)]
    if not is_constant(other) or (not trained and _is_trained(graph_module, other)):
        return None
    value = constant_value(graph_module, other) if isinstance(other, fx.Node) else other
    if isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    weight, shape = tensor_of(node_module(layer)), layer.meta["shape"]
    sizes = (1,) * (len(shape) - value.dim()) + tuple(value.shape)
    if len(sizes) != len(shape) or sizes[1] not in (1, shape[1]) or any(n != 1 for i, n in enumerate(sizes) if i != 1):
        return None
    return value.detach().to(weight).reshape(-1).expand(shape[1])


def _is_trained(graph_module: fx.GraphModule, value: object) -> bool:
    if not isinstance(value, fx.Node):
        return False
    if value.op == "get_attr":
        return isinstance(attribute_of(graph_module, str(value.target)), nn.Parameter)
    return any(_is_trained(graph_module, source) for source in value.all_input_nodes)


def _foldable(layer: nn.Module, shape: tuple[int, ...] | None) -> bool:
    """True if a layer computes with its weight alone, and has its channels on axis 1."""
    quantized = isinstance(getattr(layer, "weight_quantizer", None), nn.Module)
    plain = quantized or any(calls_alike(type(layer), kind) for kind in _LAYERS)
    return plain and shape is not None and len(shape) == tensor_of(layer).dim()


def _set_weight(layer: nn.Module, weight: nn.Parameter) -> None:
    """Set a layer's weight. A mask on it stays; a parametrization that would change the weight is baked in."""
    if parametrize.is_parametrized(layer, "weight"):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # the parametrization has no inverse
            layer.weight = weight.detach()
        if torch.allclose(tensor_of(layer), weight):
            return
        bake(layer, "weight")
    layer.weight = weight


def folded_parameters(
    weight: Tensor, bias: Tensor | None, statistics: Statistics, *, kind: str, groups: int = 1
) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias that include the BatchNorm: y = g (Wx + b - m) / sqrt(v + eps) + h.

    The weight is (out, in / groups, k...), of transposed convolutions (in, out / groups, k...); the bias (out,), None
    means zeros. `kind` is the layer's in `graph.ops`.
    """
    if kind == "linear":
        mean, variance, epsilon, scale, shift = statistics
        return fuse_linear_bn_weights(weight, bias, mean, variance, epsilon, scale, shift)  # type: ignore[arg-type]
    transposed = kind == "conv_transpose"
    # A transposed convolution holds (in, out / groups, ...): put its groups side by side, so that dim 1 is out.
    wide = weight.detach().unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2) if transposed else weight
    fused, shift = fuse_conv_bn_weights(wide, bias, *statistics, transpose=transposed)
    if transposed:
        fused = nn.Parameter(fused.detach().unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1).contiguous())
    return fused, shift


def _fold_statistics(layer: Any, statistics: Statistics) -> None:
    weight, bias = layer.weight, layer.bias
    trained = weight.requires_grad
    groups = getattr(layer, "groups", 1)
    fused, shift = folded_parameters(weight, bias, statistics, kind=module_kind(layer), groups=groups)
    fused.requires_grad_(trained)
    _set_weight(layer, fused)
    layer.bias = shift.requires_grad_(trained)  # torch freezes a bias that the layer did not have
