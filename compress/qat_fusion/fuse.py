"""Quantization-aware training at less cost: chains of a quantized graph as one operation each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.ops import called_module, node_kind, node_module
from compress.graph.report import GraphReport, ReportedModule, attach_report, leaves_of
from compress.kernels.epilogue import LARGEST_WINDOW, Epilogue, Window, max_pool
from compress.kernels.fake_quantize import (
    SMOOTH_ACTIVATIONS,
    fused_quantize,
    learned_quantize,
    pooled_quantize,
    smooth_quantize,
)
from compress.kernels.triton.launch import HAS_TRITON, Kernels
from compress.qat_fusion.attention import fuse_attention
from compress.qat_fusion.chain import (
    ACTIVATIONS,
    LAYERS,
    Chain,
    epilogue_of,
    fuse_nodes,
    group_weights,
    is_live,
    is_plain,
    product,
)
from compress.qat_fusion.int8 import Forward, carry_codes
from compress.qat_fusion.norm import (
    FusedBatchNormModule,
    FusedNormModule,
    FusedResponseModule,
    fuse_batch_norms,
    fuse_norms,
    fuse_responses,
)
from compress.qat_fusion.recompute import Recipe, recompute_inputs, recomputed, uses_recipes
from compress.qat_fusion.squeeze import FusedExciteModule, fuse_squeezes
from compress.quantization.learned import LearnedQuantizer
from compress.quantization.quantizer import Quantizer


def is_learned(quantizer: nn.Module) -> bool:
    return type(quantizer) is LearnedQuantizer and not quantizer.format.wide


class FusedLearnedModule(nn.Module):
    """layer -> (add) -> (clipping activation) -> quantizer with a learned range; the model's own."""

    is_quantizer = True

    def __init__(
        self, layer: nn.Module | None, activation: str, quantizer: LearnedQuantizer, kernels: Kernels | None
    ) -> None:
        super().__init__()
        self.layer, self.activation, self.quantizer = layer, activation, quantizer
        self.kernels: Kernels | None = kernels
        self.epilogue: Epilogue = epilogue_of(layer, activation, quantizer)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        quantizer = self.quantizer
        layer: Any = self.layer
        if not (quantizer.enabled and quantizer.calibrator is None and quantizer.ready):
            y = x if layer is None else layer(x)
            y = y if residual is None else y + residual
            return quantizer(ACTIVATIONS[self.activation](y) if self.activation else y)
        bias = None
        if layer is not None:
            x, bias = product(layer, x, None, None, self.kernels), layer.bias
        factor = quantizer.gradient_factor(x)
        return learned_quantize(
            x, quantizer.amax, self.epilogue, factor, bias=bias, residual=residual, kernels=self.kernels
        )


# Operations that keep their input for backward, so that their result can be computed again.
_KEEP_THEIR_INPUT = ("mish", "layer_norm")
_QUANTIZED_FORWARDS = {layer.forward for layer in LAYERS if hasattr(layer, "quantized_weight")}


@dataclass(frozen=True, kw_only=True)
class FusedChain:
    """One quantizer of the graph, and the nodes that were fused with it.

    Attributes:
        reason: why it is not fused, or why its chain does not begin at a layer; "" when it does.
        int8: whether its layer is computed on INT8 tensor cores, where the device has them.
    """

    quantizer: str
    nodes: tuple[str, ...]
    reason: str
    int8: bool = False


@dataclass(frozen=True, kw_only=True)
class FusionReport(GraphReport):
    """The report of a graph that `fuse_for_training` returns, with a chain for every quantizer of the graph."""

    chains: tuple[FusedChain, ...] = ()


def fuse_for_training(
    qmodel: nn.Module, *, kernels: Kernels | None = None, forward: Forward = "float"
) -> fx.GraphModule:
    """A second graph over the same modules, cheaper to train; the same function and gradients, up to rounding.

    FP8, ranges with a zero point and quantizers of other classes are trained on the plain path.

    Args:
        qmodel: from `quantize` or `insert_quantizers`; not changed.
        kernels: `triton` or `torch` for all; None = Triton on a GPU where it fits and pays off.
        forward: `int8` = convolutions between quantizers are computed on INT8 tensor cores where Triton runs: equal but
            for values within float32's precision of a tie; `float` = as on the plain path.

    Returns:
        A module to call in place of `qmodel` in training steps. Its `report.chains` lists what was fused. It shares
        every parameter and buffer with `qmodel`, under other names: save and optimize `qmodel`.

    Raises:
        QuantizationError: `qmodel` is no graph with quantizers, or Triton is asked for and not installed.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches).train()
        >>> faster = compress.fuse_for_training(qmodel)
        >>> nn.functional.cross_entropy(faster(images), targets).backward()  # the gradients are those of `qmodel`
        >>> len(faster.report.chains)
        3
    """
    if kernels == "triton" and not HAS_TRITON:
        raise QuantizationError("kernels='triton', and Triton is not installed; install it, or leave kernels at None")
    if not is_fusible(qmodel):
        raise QuantizationError(
            f"{type(qmodel).__name__} is no graph with quantizers; call compress.quantize first, and fuse its result"
        )
    graph = fx.Graph()
    graph.output(graph.graph_copy(cast(fx.GraphModule, qmodel).graph, {}))
    fused = fx.GraphModule(qmodel, graph)
    chains = [_fuse(fused, node, kernels) for node in list(graph.nodes) if node_kind(node) == "quantizer"]
    attentions = fuse_attention(fused, _quantizing(fused), kernels)
    chains = [_attended(chain, attentions.get(qmodel.get_submodule(chain.quantizer))) for chain in chains]
    if kernels != "torch":
        _share_weights(fused, kernels)
    norms = fuse_norms(fused, _quantizing(fused), kernels)
    chains = [replace(c, nodes=norms.get(qmodel.get_submodule(c.quantizer), c.nodes)) for c in chains]
    if forward == "float" and kernels != "torch":
        blocks = fuse_squeezes(fused, _quantizing(fused), kernels)
        blocks |= fuse_responses(fused, _quantizing(fused, operands=2), kernels)
        chains = [replace(c, nodes=blocks.get(qmodel.get_submodule(c.quantizer), c.nodes)) for c in chains]
    if forward == "int8":
        coded = carry_codes(fused, _fused_chains(fused))
        chains = [replace(chain, int8=qmodel.get_submodule(chain.quantizer) in coded) for chain in chains]
    if kernels != "torch":
        batch_norms = fuse_batch_norms(fused, _fused_chains(fused), kernels)
        chains = [replace(c, nodes=(*batch_norms.get(qmodel.get_submodule(c.quantizer), ()), *c.nodes)) for c in chains]
        recompute_inputs(fused, _PRODUCERS, (FusedChainModule, FusedLayerModule, FusedResponseModule))
    graph.eliminate_dead_code()
    graph.lint()
    # A new GraphModule drops modules that are not called; deleting them here would delete them in `qmodel` too
    fused = _sharing_parameters(ReportedModule(fused, graph), qmodel)
    attach_report(fused, FusionReport(leaves=leaves_of(qmodel), chains=tuple(chains), for_training=True))
    return fused


def _sharing_parameters(fused: fx.GraphModule, qmodel: nn.Module) -> fx.GraphModule:
    # A module of the graph that holds a layer's parameters itself gets the layer's own dictionary of them: FSDP2, which
    # replaces parameters of the fused graph, then replaces them in `qmodel` too, which is optimized and saved.
    owners = {id(p): module._parameters for module in qmodel.modules() for p in module.parameters(recurse=False)}
    for module in fused.modules():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        shared = owners.get(id(next(iter(own.values()), None)), {})
        if own and all(shared.get(name) is p for name, p in own.items()):
            module._parameters = shared
    return fused


def is_fusible(model: nn.Module) -> bool:
    return isinstance(model, fx.GraphModule) and any(node_kind(node) == "quantizer" for node in model.graph.nodes)


def pays_off(device: torch.device) -> bool:
    """True if fused training is faster on `device`: on GPUs, if Triton is installed."""
    return device.type == "cuda" and HAS_TRITON


class FusedChainModule(nn.Module):
    """layer -> (add) -> (activation) -> quantizer -> (max pool); the layer and the quantizer are the model's own.

    `layer` None: the chain begins after another operation. `recompute_mask`: the producer keeps the input for backward
    anyway; `gives_recipe`: the recipe of the result is a result too.
    """

    is_quantizer = True

    def __init__(
        self,
        layer: nn.Module | None,
        activation: str,
        quantizer: Quantizer,
        kernels: Kernels | None,
        window: Window | None = None,
        recompute_mask: bool = False,
    ) -> None:
        super().__init__()
        self.window = window
        self.recompute_mask = recompute_mask
        self.layer = layer
        self.activation = activation
        self.smooth = activation in SMOOTH_ACTIVATIONS
        self.quantizer = quantizer
        self.kernels: Kernels | None = kernels
        self.epilogue = epilogue_of(layer, activation, quantizer)
        self.can_recompute, self.gives_recipe = self.smooth, False

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        recipe: Recipe | None = None,
    ) -> Tensor | tuple[Tensor, Recipe | None]:
        """Without `weight` the layer computes it; without `recipe` the layer keeps `x` for its backward pass."""
        quantizer, epilogue = self.quantizer, self.epilogue
        if not is_live(quantizer):
            y = self._plain(x, residual)
            return (y, None) if self.gives_recipe else y
        layer: Any = self.layer
        bias = None
        if layer is not None:
            bias = layer.bias
            with recomputed(x, recipe):
                x = product(layer, x, weight, None, self.kernels)
        kernels = self._kernels()
        if self.smooth:
            y = self._activated(x, quantizer.amax, bias)
            if not self.gives_recipe:
                return y
            again = uses_recipes(x, self.kernels)
            return y, Recipe.of(y, self._activated, x, quantizer.amax, bias) if again else None
        if self.window is not None:
            return pooled_quantize(x, quantizer.amax, epilogue, self.window, bias=bias, kernels=kernels)
        return fused_quantize(
            x,
            quantizer.amax,
            epilogue,
            bias=bias,
            residual=residual,
            kernels=kernels,
            recompute_mask=self.recompute_mask,
        )

    def _activated(self, y: Tensor, amax: Tensor, bias: Tensor | None = None) -> Tensor:
        return smooth_quantize(y, amax, self.epilogue, self.activation, bias=bias, kernels=self._kernels())

    def _kernels(self) -> Kernels | None:
        """Torch's without a layer in a compiled graph: the compiler fuses the operation before with the quantizer."""
        alone = self.layer is None and torch.compiler.is_compiling()
        return "torch" if self.kernels is None and alone else self.kernels

    def _plain(self, x: Tensor, residual: Tensor | None) -> Tensor:
        y = x if self.layer is None else self.layer(x)
        y = y if residual is None else y + residual
        y = ACTIVATIONS[self.activation](y) if self.activation else y
        y = self.quantizer(y)
        return y if self.window is None else max_pool(y, self.window)


class FusedLayerModule(nn.Module):
    """A quantized layer of the model without a chain, whose weight is quantized with others."""

    def __init__(self, layer: nn.Module, kernels: Kernels | None) -> None:
        super().__init__()
        self.layer = layer
        self.kernels: Kernels | None = kernels

    def forward(self, x: Tensor, weight: Tensor, recipe: Recipe | None = None) -> Tensor:
        layer: Any = self.layer
        with recomputed(x, recipe):
            return product(layer, x, weight, layer.bias, self.kernels)


_PRODUCERS = (FusedChainModule, FusedNormModule, FusedBatchNormModule, FusedExciteModule, FusedResponseModule)


def _fused_chains(graph_module: fx.GraphModule) -> dict[fx.Node, FusedChainModule]:
    called = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    modules = {node: graph_module.get_submodule(str(node.target)) for node in called}
    return {node: module for node, module in modules.items() if isinstance(module, FusedChainModule)}


def _quantizing(graph_module: fx.GraphModule, operands: int = 1) -> dict[fx.Node, FusedChainModule]:
    """Nodes that only quantize, or add two tensors and quantize the sum, each with its module."""
    chains = _fused_chains(graph_module)
    return {
        node: chain
        for node, chain in chains.items()
        if chain.layer is None
        and not chain.activation
        and chain.window is None
        and len(node.all_input_nodes) == operands
    }


def _attended(chain: FusedChain, found: tuple[tuple[str, ...], str] | None) -> FusedChain:
    if found is None:
        return chain
    nodes, reason = found
    return replace(chain, nodes=nodes or chain.nodes, reason="; ".join(filter(None, (reason and chain.reason, reason))))


def _share_weights(graph_module: fx.GraphModule, kernels: Kernels | None) -> None:
    consumers: dict[fx.Node, nn.Module] = {}
    for node in list(graph_module.graph.nodes):
        if node.op != "call_module":
            continue
        module = graph_module.get_submodule(str(node.target))
        layer = module.layer if isinstance(module, FusedChainModule) else module
        if layer is None or type(layer).forward not in _QUANTIZED_FORWARDS:
            continue
        if not isinstance(module, FusedChainModule):
            if layer._forward_hooks or layer._forward_pre_hooks:
                continue
            name = f"fused_layers.{node.name}"
            graph_module.add_submodule(name, FusedLayerModule(layer, kernels))
            node.target = name
        consumers[node] = layer
    group_weights(graph_module, consumers, kernels)


def _fuse(graph_module: fx.GraphModule, node: fx.Node, kernels: Kernels | None) -> FusedChain:
    quantizer, path = node_module(node), str(node.target)
    if not is_plain(quantizer) and not is_learned(quantizer):
        kind = type(quantizer).__name__
        if type(quantizer) is Quantizer:
            kind = "a range with a zero point" if quantizer.format.lowest else "FP8"
        if isinstance(quantizer, Quantizer) and quantizer.format.wide:
            kind = f"a quantizer of {quantizer.format.num_bits} bits"
        return FusedChain(quantizer=path, nodes=(), reason=f"{kind} is trained on the plain path")
    chain, pool = Chain(node), None
    layer = None if chain.layer is None else node_module(chain.layer)
    if is_learned(quantizer):
        if chain.activation in SMOOTH_ACTIVATIONS:
            return FusedChain(quantizer=path, nodes=(), reason=f"{chain.activation} before a learned range")
        module: nn.Module = FusedLearnedModule(layer, chain.activation, cast(LearnedQuantizer, quantizer), kernels)
    else:
        smooth = chain.activation in SMOOTH_ACTIVATIONS
        pool, window = (None, None) if len(chain.inputs) > 1 or smooth else _pool_after(node)
        kept = chain.layer is None and len(chain.inputs) == 1 and node_kind(chain.inputs[0]) in _KEEP_THEIR_INPUT
        module = FusedChainModule(layer, chain.activation, cast(Quantizer, quantizer), kernels, window, kept)
    names = [old.name for old in chain.nodes[:0:-1]] + ([pool.name] if pool else [])
    nodes = [pool, *chain.nodes] if pool else chain.nodes
    fuse_nodes(graph_module, f"fused_chains.{node.name}", module, nodes, (chain.inputs,))
    return FusedChain(quantizer=path, nodes=tuple(names), reason=chain.reason)


def _pool_after(quantizer: fx.Node) -> tuple[fx.Node, Window] | tuple[None, None]:
    """The max pool that is the only consumer of a quantizer, if `pooled_quantize` can compute it."""
    (pool, *others) = quantizer.users or [None]
    if pool is None or others or node_kind(pool) != "max_pool":
        return None, None
    module = called_module(pool)
    if module is not None:
        if type(module) is not nn.MaxPool2d or module._forward_hooks or module._forward_pre_hooks:
            return None, None
        found = {name: getattr(module, name) for name in _POOL_ARGUMENTS}
    elif pool.target in (F.max_pool2d, torch.max_pool2d):
        found = {**_POOL_ARGUMENTS, **dict(zip(_POOL_ARGUMENTS, pool.args[1:], strict=False)), **pool.kwargs}
    else:
        return None, None
    kernel = _pair(found["kernel_size"])
    if _pair(found["dilation"]) != (1, 1) or found["return_indices"] or math.prod(kernel) > LARGEST_WINDOW:
        return None, None
    stride = _pair(found["stride"] or kernel)  # F.max_pool2d treats an empty stride as none
    return pool, Window(kernel, stride, _pair(found["padding"]), bool(found["ceil_mode"]))


_POOL_ARGUMENTS: dict[str, Any] = {
    "kernel_size": None,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}


def _pair(numbers: Any) -> tuple[int, int]:
    one, other = (numbers, numbers) if isinstance(numbers, int) else numbers if len(numbers) > 1 else numbers * 2
    return int(one), int(other)
