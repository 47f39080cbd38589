"""Layer norms, batch norms and global response norms as one module with the quantizer after them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.ops import asks_shape, called_module, node_kind, node_module
from compress.kernels.triton import batch_norm as triton_batch_norm
from compress.kernels.triton import squeeze as triton_squeeze
from compress.kernels.triton.batch_norm import Running, batch_norm_again, batch_norm_quantize
from compress.kernels.triton.launch import Kernels, use_triton, use_triton_eager
from compress.kernels.triton.layer_norm import WIDEST, norm_again, norm_quantize
from compress.kernels.triton.squeeze import response_again, response_quantize
from compress.qat_fusion.chain import (
    ACTIVATIONS,
    activation_of,
    adds_alike,
    fuse_nodes,
    grid_of,
    has_one_consumer,
    is_live,
    product,
    quantizer_of,
    weight_dtype,
)
from compress.qat_fusion.recompute import Recipe, recomputed, uses_recipes


class FusedNormModule(nn.Module):
    """(add) -> layer norm over the last axis -> quantizer; weight and bias are read from the graph.

    `keep_sum`: the sum is a result too; `feeds_only_matmuls`: every consumer is a matrix product, in autocast's type;
    `can_recompute`: the result has the type in which a layer keeps it; `gives_recipe`: the recipe is the last result.
    """

    def __init__(
        self, eps: float, quantize: nn.Module, keep_sum: bool, feeds_only_matmuls: bool, kernels: Kernels | None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.quantize = quantize
        self.keep_sum = keep_sum
        self.feeds_only_matmuls = feeds_only_matmuls
        self.kernels: Kernels | None = kernels
        self.can_recompute, self.gives_recipe = feeds_only_matmuls, False

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None
    ) -> Tensor | tuple[Tensor | Recipe | None, ...]:
        quantizer = quantizer_of(self.quantize)
        if is_live(quantizer) and self._takes(x, added):
            grid, dtype = grid_of(quantizer), self._dtype(x, added)
            again = self.gives_recipe and (added is None or self.keep_sum) and uses_recipes(x, self.kernels)
            options: dict[str, Any] = {"eps": self.eps, "dtype": dtype, "added": added}
            found = norm_quantize(x, weight, bias, grid, **options, keep_sum=self.keep_sum, keep_statistics=again)
            y, total = found[0], found[1] if self.keep_sum else x
            compute = partial(norm_again, low=grid.low, high=grid.high, dtype=dtype)
            statistics = found[-2:]  # by index: to the compiler of torch 2.11 `*rest` is a tuple, that has no pop
            recipe = Recipe.of(y, compute, total, *statistics, weight, grid.amax, bias) if again else None
            return self._results(y, total, recipe)
        x = x if added is None else x + added
        y = self.quantize(F.layer_norm(x, weight.shape, weight, bias, self.eps))
        return self._results(y, x, None)

    def _results(self, y: Tensor, total: Tensor, recipe: Recipe | None) -> Tensor | tuple[Tensor | Recipe | None, ...]:
        results = (y, *([total] if self.keep_sum else []), *([recipe] if self.gives_recipe else []))
        return results if len(results) > 1 else y

    def _dtype(self, x: Tensor, added: Tensor | None) -> torch.dtype:
        """Float32 under autocast, as of torch's norm, unless products alone consume it."""
        if torch.is_autocast_enabled(x.device.type):
            return weight_dtype(x) if self.feeds_only_matmuls else torch.float32
        return x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)

    def _takes(self, x: Tensor, added: Tensor | None) -> bool:
        both = [x] if added is None else [x, added]
        fits = all(t.is_contiguous() and t.dtype in _FLOATS and t.shape == x.shape for t in both)
        return fits and x.numel() > 0 and use_triton(x, self.kernels)


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def fuse_norms(
    graph_module: fx.GraphModule, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    """Replace every quantized layer norm, and the add before it, in place; return the fused nodes by quantizer."""
    found: dict[nn.Module, tuple[str, ...]] = {}
    for node, quantize in quantizing.items():
        quantizer = quantizer_of(quantize)
        norm = _norm_of(node)
        if norm is not None and quantizer.format.axis is None:
            found[quantizer] = _fuse(graph_module, node, norm, quantize, kernels)
    return found


class _Norm(NamedTuple):
    """A layer norm over the last axis, `width` wide; weight and bias are paths, "" = there is none."""

    node: fx.Node
    width: int
    eps: float
    weight: str
    bias: str


def _norm_of(quantize: fx.Node) -> _Norm | None:
    """The norm that a node quantizes, if other nodes read its shape at most."""
    node = quantize.all_input_nodes[0]
    if node_kind(node) != "layer_norm" or any(user is not quantize and not asks_shape(user) for user in node.users):
        return None
    found = _of_module(node) if node.op == "call_module" else _of_call(node)
    return found if found is not None and found.weight and found.width <= WIDEST else None


def _of_module(node: fx.Node) -> _Norm | None:
    module, path = node_module(node), str(node.target)
    if type(module) is not nn.LayerNorm or module._forward_hooks or module._forward_pre_hooks:
        return None
    names = [f"{path}.{name}" if getattr(module, name) is not None else "" for name in ("weight", "bias")]
    shape = module.normalized_shape
    return _Norm(node, shape[0], module.eps, *names) if len(shape) == 1 else None


def _of_call(node: fx.Node) -> _Norm | None:
    if node.target is not F.layer_norm:
        return None
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given: dict[str, Any] = {"eps": 1e-5, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    shape, eps, tensors = given["normalized_shape"], given["eps"], [given.get("weight"), given.get("bias")]
    if any(tensor is not None and tensor.op != "get_attr" for tensor in tensors) or not isinstance(eps, float):
        return None
    if not isinstance(shape, (tuple, list)) or len(shape) != 1 or not isinstance(shape[0], int):
        return None
    return _Norm(node, shape[0], eps, *("" if tensor is None else str(tensor.target) for tensor in tensors))


def _fuse(
    graph_module: fx.GraphModule, node: fx.Node, norm: _Norm, quantize: nn.Module, kernels: Kernels | None
) -> tuple[str, ...]:
    graph, first = graph_module.graph, norm.node
    source = norm.node.all_input_nodes[0]
    inputs: tuple[fx.Node, ...] = (source,)
    if adds_alike(source):
        first, inputs = source, tuple(source.all_input_nodes)
    keep_sum = first is source and len(source.users) > 1
    matmuls = all(getattr(called_module(consumer), "layer", None) is not None for consumer in node.users)
    name = f"fused_norms.{node.name}"
    graph_module.add_submodule(name, FusedNormModule(norm.eps, quantize, keep_sum, matmuls, kernels))
    with graph.inserting_before(first):
        weight = graph.get_attr(norm.weight)
        bias = graph.get_attr(norm.bias) if norm.bias else None
        fused = graph.call_module(name, (inputs[0], weight, bias, *inputs[1:]))
        value = graph.call_function(operator.getitem, (fused, 0)) if keep_sum else fused
        total = graph.call_function(operator.getitem, (fused, 1)) if keep_sum else None
    value.meta.update(node.meta)
    for user in list(norm.node.users):
        user.replace_input_with(norm.node, value)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    graph.erase_node(norm.node)
    names = [norm.node.name]
    if first is source:
        if total is not None:
            total.meta.update(source.meta)
            source.replace_all_uses_with(total)
        graph.erase_node(source)
        names.insert(0, source.name)
    return tuple(names)


class FusedBatchNormModule(nn.Module):
    """Batch norm -> (clipping activation) -> quantizer; batch norm and quantizer are the model's own."""

    is_quantizer = True

    def __init__(self, norm: nn.BatchNorm2d, chain: nn.Module, kernels: Kernels | None) -> None:
        super().__init__()
        self.norm, self.chain = norm, chain
        self.kernels: Kernels | None = kernels
        self.can_recompute, self.gives_recipe = True, False

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Recipe | None]:
        norm = self.norm
        chain: Any = self.chain
        if not self._takes(x):
            y: Tensor = chain(norm(x))
            return (y, None) if self.gives_recipe else y
        assert norm.running_mean is not None and norm.running_var is not None
        if norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        running = Running(norm.running_mean, norm.running_var, norm.momentum if norm.training else None)
        kept = (norm.weight, norm.bias, chain.quantizer.amax)
        y, mean, deviation = batch_norm_quantize(x, *kept, running, norm.eps, chain.epilogue)
        if not self.gives_recipe:
            return y
        compute = partial(batch_norm_again, epilogue=chain.epilogue)
        return y, Recipe.of(y, compute, x, mean, deviation, *kept) if uses_recipes(x, self.kernels) else None

    def _takes(self, x: Tensor) -> bool:
        """True if the kernels run: eagerly, where type and layout fit, unless torch averages all batches."""
        norm = self.norm
        chain: Any = self.chain
        whole = norm.momentum is not None and norm.weight.dtype == torch.float32
        return whole and is_live(chain.quantizer) and use_triton_eager(x, self.kernels) and triton_batch_norm.fits(x)


def fuse_batch_norms(
    graph_module: fx.GraphModule, chains: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    """Replace every batch norm that only a chain without a layer reads, and the chain, by one module, in place."""
    found: dict[nn.Module, tuple[str, ...]] = {}
    for node, module in chains.items():
        chain: Any = module
        before = node.all_input_nodes
        plain = chain.layer is None and not chain.smooth and chain.window is None and chain.epilogue.axis is None
        if len(before) != 1 or not plain or not _is_norm(before[0]):
            continue
        (norm,) = before
        name = f"fused_batch_norms.{node.name}"
        own = called_module(norm)
        graph_module.add_submodule(name, FusedBatchNormModule(own, chain, kernels))
        node.target = name
        node.replace_input_with(norm, norm.all_input_nodes[0])
        graph_module.graph.erase_node(norm)
        found[chain.quantizer] = (norm.name,)
    return found


def _is_norm(node: fx.Node) -> bool:
    """True for an affine batch norm with running statistics, without hooks, that one node alone reads."""
    module = called_module(node)
    if type(module) is not nn.BatchNorm2d or len(node.users) != 1 or len(node.all_input_nodes) != 1:
        return False
    return module.affine and module.track_running_stats and not (module._forward_hooks or module._forward_pre_hooks)


_PIXELS = (1, 2)  # axes of (N, H, W, C)
_LAST, _FIRST = (0, 3, 1, 2), (0, 2, 3, 1)


class FusedResponseModule(nn.Module):
    """layer -> activation -> (dropout) -> global response norm -> quantizer, on (N, H, W, C); the model's own."""

    def __init__(
        self,
        layer: nn.Module,
        activation: str,
        dropout: nn.Dropout | None,
        eps: float,
        quantize: nn.Module,
        kernels: Kernels | None,
    ) -> None:
        super().__init__()
        self.layer, self.activation, self.dropout, self.eps = layer, activation, dropout, eps
        self.quantize = quantize
        self.kernels: Kernels | None = kernels
        self.can_recompute, self.gives_recipe = True, False

    def forward(
        self, x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None = None, recipe: Recipe | None = None
    ) -> Tensor | tuple[Tensor, Recipe | None]:
        """Scale and shift are (C,), other arguments and the results as of `FusedChainModule`."""
        layer: Any = self.layer
        dropping = self.dropout is not None and self.dropout.training and self.dropout.p > 0
        fused = is_live(quantizer_of(self.quantize)) and not dropping and use_triton(x, self.kernels)
        with recomputed(x, recipe):
            made = product(layer, x, weight, None if fused else layer.bias, self.kernels)
        if fused and triton_squeeze.fits(made.permute(_LAST)):
            return self._fused(made, scale, shift)
        made = made if not fused or layer.bias is None else made + layer.bias.to(made.dtype)
        y = ACTIVATIONS[self.activation](made)
        y = y if self.dropout is None else self.dropout(y)
        norms = y.norm(p=2, dim=_PIXELS, keepdim=True)
        ratios = norms / (norms.mean(dim=-1, keepdim=True) + self.eps)
        y = y + torch.addcmul(shift.view(1, 1, 1, -1), scale.view(1, 1, 1, -1), y * ratios)
        y = self.quantize(y)
        return (y, None) if self.gives_recipe else y

    def _fused(self, made: Tensor, scale: Tensor, shift: Tensor) -> Tensor | tuple[Tensor, Recipe | None]:
        grid, bias, activation = grid_of(quantizer_of(self.quantize)), self.layer.bias, self.activation
        assert bias is None or isinstance(bias, Tensor)
        images = made.permute(_LAST)
        y, gain = response_quantize(images, scale, shift, grid, bias=bias, activation=activation, eps=self.eps)
        y = y.permute(_FIRST)
        if not self.gives_recipe:
            return y
        compute = partial(_again, low=grid.low, high=grid.high, activation=activation)
        kept = (made, gain, shift, grid.amax, bias)
        return y, Recipe.of(y, compute, *kept) if uses_recipes(made, self.kernels) else None


def _again(made: Tensor, gain: Tensor, *tensors: Tensor, low: int, high: int, activation: str) -> Tensor:
    numbers: dict[str, Any] = {"low": low, "high": high, "activation": activation}
    return response_again(made.permute(_LAST), gain, *tensors, **numbers).permute(_FIRST)


def fuse_responses(
    graph_module: fx.GraphModule, quantizing: Mapping[fx.Node, nn.Module], kernels: Kernels | None
) -> dict[nn.Module, tuple[str, ...]]:
    found: dict[nn.Module, tuple[str, ...]] = {}
    for node, quantize in quantizing.items():
        norm = _response_of(node)
        if norm is not None and quantizer_of(quantize).format.axis is None:
            found[quantizer_of(quantize)] = _fuse_response(graph_module, node, norm, quantize, kernels)
    return found


class _Response(NamedTuple):
    """`nodes` from the last one back to the layer; `scale`, `shift`: the (C,) tensors of the graph."""

    nodes: list[fx.Node]
    dropout: nn.Dropout | None
    activation: str
    eps: float
    scale: fx.Node
    shift: fx.Node


def _response_of(quantize: fx.Node) -> _Response | None:
    """The norm whose sum with its input a node quantizes, as timm writes it."""
    layers = [getattr(called_module(user), "layer", None) for user in quantize.users]
    source, last = quantize.args if len(quantize.args) == 2 else (None, None)
    if not all(layers) or not isinstance(source, fx.Node) or not isinstance(last, fx.Node):
        return None  # with other readers than products, it would have another type
    if last.target is not torch.addcmul or last.kwargs or len(last.args) != 3:
        return None
    shift, scale, scaled = last.all_input_nodes
    if node_kind(scaled) != "mul" or scaled.all_input_nodes[0] is not source or len(scaled.all_input_nodes) != 2:
        return None
    ratio = scaled.all_input_nodes[1]
    if node_kind(ratio) != "div" or len(ratio.all_input_nodes) != 2:
        return None
    norm, add = ratio.all_input_nodes
    mean = add.all_input_nodes[0] if len(add.all_input_nodes) == 1 else None
    if mean is None or node_kind(add) != "add" or not isinstance(add.args[1], float) or mean.args[0] is not norm:
        return None
    if mean.target != "mean" or dict(mean.kwargs) != {"dim": -1, "keepdim": True} or norm.target != "norm":
        return None
    if norm.args != (source,) or dict(norm.kwargs) != {"p": 2, "dim": _PIXELS, "keepdim": True}:
        return None
    values = [_channels(node, source) for node in (scale, shift)]
    inner = _before_response(source)
    alone = len(source.users) == 3 and len(norm.users) == 2 and all(map(has_one_consumer, (last, scaled, ratio, add)))
    if inner is None or None in values or not alone or not has_one_consumer(mean):
        return None
    nodes = [last, scaled, ratio, add, mean, norm, *inner]
    dropout = called_module(source) if len(inner) == 3 else None
    return _Response(nodes, dropout, activation_of(inner[-2]), add.args[1], *(value for value in values if value))


def _channels(view: fx.Node, source: fx.Node) -> fx.Node | None:
    """The (C,) parameter that a node shows as (1, 1, 1, C)."""
    shape = tuple(source.meta.get("shape") or ())
    tensor = view.all_input_nodes[0] if view.target in ("view", "reshape") else None
    if tensor is None or tensor.op != "get_attr" or len(shape) != 4:
        return None
    return tensor if tuple(view.meta.get("shape") or ()) == (1, 1, 1, shape[-1]) else None


def _before_response(source: fx.Node) -> list[fx.Node] | None:
    """[(dropout), activation, linear layer whose weight is quantized with others]."""
    found = []
    if node_kind(source) in {"dropout", "identity"} and type(called_module(source)) is nn.Dropout:
        found, source = [source], source.all_input_nodes[0]
        if not has_one_consumer(source):
            return None
    layer = source.all_input_nodes[0] if activation_of(source) else None
    module = None if layer is None else called_module(layer)
    if layer is None or getattr(module, "is_quantizer", False) or not has_one_consumer(layer):
        return None
    return [*found, source, layer] if isinstance(getattr(module, "layer", None), nn.Linear) else None


def _fuse_response(
    graph_module: fx.GraphModule, node: fx.Node, norm: _Response, quantize: nn.Module, kernels: Kernels | None
) -> tuple[str, ...]:
    layer = norm.nodes[-1]
    module = FusedResponseModule(called_module(layer).layer, norm.activation, norm.dropout, norm.eps, quantize, kernels)
    call = (layer.all_input_nodes[0], norm.scale, norm.shift), dict(layer.kwargs)
    fuse_nodes(graph_module, f"fused_responses.{node.name}", module, (node, *norm.nodes), call)
    return tuple(old.name for old in norm.nodes[::-1])
