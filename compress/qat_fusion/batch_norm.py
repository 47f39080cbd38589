"""Batch norm -> (clipping activation) -> quantizer as one operation, of batch norms that no convolution takes in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.kernels.triton.batch_norm import Running, batch_norm_again, batch_norm_quantize, fits
from compress.kernels.triton.launch import Kernels, use_triton_eager
from compress.qat_fusion.chain import called_module
from compress.qat_fusion.recompute import Recipe, uses_recipes
from compress.qat_fusion.weights import is_live


class FusedBatchNormModule(nn.Module):
    """Batch norm -> (clipping activation) -> quantizer; batch norm and quantizer are the model's own.

    The norm is affine, with running statistics; the chain has `quantizer` and `epilogue`, and one range;
    `gives_recipe`: the recipe of the result is a result too.
    """

    is_quantizer = True

    def __init__(self, norm: nn.BatchNorm2d, chain: nn.Module, kernels: Kernels | None) -> None:
        super().__init__()
        self.norm, self.chain = norm, chain
        self.kernels: Kernels | None = kernels
        self.can_recompute, self.gives_recipe = True, False

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Recipe | None]:
        """The quantized result, (N, C, H, W), and its recipe if it is a result."""
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
        return whole and is_live(chain.quantizer) and use_triton_eager(x, self.kernels) and fits(x)


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
