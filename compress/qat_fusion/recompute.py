"""Layers that compute their quantized input again in the backward pass, from what is kept for it anyway."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from compress.graph.ops import asks_shape, called_module, node_kind
from compress.kernels.triton.launch import Kernels, use_triton_eager


class Recipe(NamedTuple):
    """How a tensor is computed again, to the last bit, from `tensors` that are kept for the backward pass anyway.

    `result` holds address and version of the tensor: an active dropout makes another one of it.
    """

    result: tuple[int, int]
    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, result: Tensor, compute: Callable[..., Tensor], *tensors: Tensor | None) -> Recipe:
        kept = tuple(t if t.is_leaf else t.detach() for t in tensors if t is not None)
        return cls((result.data_ptr(), result._version), compute, kept)


def uses_recipes(x: Tensor, kernels: Kernels | None) -> bool:
    return torch.is_grad_enabled() and use_triton_eager(x, kernels)


class _Kept(NamedTuple):
    """A recipe as an operation keeps it: tensors as surrounding hooks keep them, shape of the tensor it replaces."""

    compute: Callable[..., Tensor]
    tensors: tuple[Any, ...]
    shape: torch.Size


def recomputed(x: Tensor, recipe: Recipe | None) -> AbstractContextManager[object]:
    """Within, operations on `x` keep its recipe for backward in its place; without a recipe of `x` they keep `x`."""
    if recipe is None or recipe.result != (x.data_ptr(), x._version):
        return nullcontext()
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()  # as within torch.func
    address, count, dtype = x.data_ptr(), x.numel(), x.dtype
    surrounding = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = (_same, _same) if surrounding is None else surrounding

    def keep(tensor: Tensor) -> object:
        if tensor.data_ptr() != address or tensor.numel() != count or tensor.dtype != dtype:
            return pack(tensor)
        return _Kept(recipe.compute, tuple(pack(each) for each in recipe.tensors), tensor.shape)

    def restore(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return unpack(kept)
        with torch.no_grad():
            return kept.compute(*[unpack(each) for each in kept.tensors]).view(kept.shape)

    return torch.autograd.graph.saved_tensors_hooks(keep, restore)


def _same(kept: Any) -> object:
    return kept


def recompute_inputs(graph_module: fx.GraphModule, producers: tuple[type, ...], layers: tuple[type, ...]) -> None:
    """Give layers the recipes of their inputs, as the keyword argument `recipe`; the graph is changed in place.

    Producers have `can_recompute` and `gives_recipe`, and return their recipe last; `layers` compute a layer's product
    of their first argument.
    """
    for node in list(graph_module.graph.nodes):
        module = called_module(node)
        if not isinstance(module, producers):
            continue
        producer: Any = module
        if not producer.can_recompute:
            continue
        results = [user for user in node.users if user.target is operator.getitem]
        several = len(results) > 0
        value = next((user for user in results if user.args[1] == 0), None) if several else node
        if value is None:
            continue
        consumers = _layers_after(value, layers)
        if not consumers:
            continue
        producer.gives_recipe = True
        with graph_module.graph.inserting_after(value):
            recipe = graph_module.graph.call_function(operator.getitem, (node, 2 if several else 1))
        if not several:
            with graph_module.graph.inserting_after(node):
                value = graph_module.graph.call_function(operator.getitem, (node, 0))
            value.meta.update(node.meta)
            node.replace_all_uses_with(value, delete_user_cb=lambda user: user.target is not operator.getitem)
        for consumer in consumers:
            consumer.update_kwarg("recipe", recipe)


def _layers_after(value: fx.Node, layers: tuple[type, ...]) -> list[fx.Node]:
    """The layers that read a value, directly or after a dropout; none if anything else reads more than its shape."""
    found: list[fx.Node] = []
    for user in value.users:
        if asks_shape(user):
            continue
        if node_kind(user) in {"dropout", "identity"} and user.all_input_nodes == [value]:
            after = _layers_after(user, layers)
        else:
            after = [user] if _reads_input(user, value, layers) else []
        if not after:
            return []
        found += after
    return found


def _reads_input(node: fx.Node, value: fx.Node, layers: tuple[type, ...]) -> bool:
    module: nn.Module | None = called_module(node)
    if not isinstance(module, layers) or getattr(module, "layer", None) is None:
        return False
    read = [arg for arg in (*node.args, *node.kwargs.values()) if arg is value]
    return len(read) == 1 and node.args[0] is value
