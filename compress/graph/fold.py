"""BatchNorm folded into the layer before it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from compress.graph.modules import bake
from compress.graph.ops import SPELLINGS, calls_alike, module_kind, node_kind, node_module, tensor_of
from compress.graph.traits import WEIGHTED

Statistics = tuple[Tensor, Tensor, float, Tensor | None, Tensor | None]
"""Running mean and variance (C,), epsilon, scale and shift (C,) of a BatchNorm."""

_LAYERS = tuple(kind for name in WEIGHTED for kind in SPELLINGS[name] if isinstance(kind, type))
"""torch's classes of layers with a weight."""


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
        _fold_into(node_module(layer), node_module(norm))
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
    if type(module).forward not in {nn.BatchNorm1d.forward, nn.BatchNorm2d.forward, nn.BatchNorm3d.forward}:
        return None  # a subclass that does more than normalize (timm's BatchNormAct2d)
    return (layer, norm) if getattr(module, "running_mean", None) is not None else None


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
    means zeros. `kind` is the layer's in `graph.traits`.
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


def _fold_into(layer: Any, norm: Any) -> None:
    weight, bias = layer.weight, layer.bias
    statistics = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    trained = weight.requires_grad
    groups = getattr(layer, "groups", 1)
    fused, shift = folded_parameters(weight, bias, statistics, kind=module_kind(layer), groups=groups)
    fused.requires_grad_(trained)
    _set_weight(layer, fused)
    layer.bias = shift.requires_grad_(trained)  # torch freezes a bias that the layer did not have
