"""Cross-layer equalization: two consecutive layers trade scale, channel by channel, until both have equal ranges.

Between two layers joined by a function with f(s x) = s f(x) for s > 0 (ReLU, pooling, nothing), a channel may be
divided by s in the first layer and multiplied by s in the second without a change of the outputs (Nagel et al.,
"Data-Free Quantization", arXiv 1906.04721, section 4.1). The choice s = sqrt(r1 / r2), r1 and r2 being the ranges of
the weights on both sides, makes both sqrt(r1 r2), the best for both layers when a tensor has one scale. With a scale
for every output channel the gain is small.

ReLU6 does not scale with its input, so a pair that it joins is refused; `replace_relu6` puts ReLU in its place, as the
paper does. The trade changes the ranges of activations, which are therefore calibrated after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import QuantizationError
from compress.graph.layers import tensor_args
from compress.graph.ops import node_kind, node_module
from compress.graph.traits import WEIGHTED, kinds
from compress.quantization.ptq.ranges import (
    input_ranges,
    output_ranges,
    scale_inputs,
    scale_outputs,
    shared_parameters,
)
from compress.quantization.report import Equalization, Pair

_POINTWISE = kinds(lambda t: t.scales_linearly and t.elementwise and t.data_inputs == 1)
_SPATIAL = kinds(lambda t: t.scales_linearly and t.passes_channels) | {"mean", "flatten"}
"""Functions with f(s x) = s f(x) for s > 0; those of the second line work on images, with channels on axis 1."""

_ROUNDS, _CONVERGED = 200, 1e-4


def equalizing_scale(outgoing: Tensor, incoming: Tensor) -> Tensor:
    """The s that makes two ranges (C,) equal: s = sqrt(r1 / r2) (1906.04721, eq. 11); 1 where one is zero.

    >>> equalizing_scale(torch.tensor([4.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor([2., 1.])
    """
    live = (outgoing > 0) & (incoming > 0)
    ratio = torch.where(live, outgoing, 1.0) / torch.where(live, incoming, 1.0)
    return ratio.sqrt()


def find_pairs(graph_module: fx.GraphModule) -> tuple[tuple[Pair, ...], dict[str, str]]:
    """The pairs of layers that can trade scale, and for each other layer the reason why it cannot."""
    calls: dict[str, int] = {}
    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    fixed = {path: f"is called {count} times" for path, count in calls.items() if count > 1}
    fixed |= shared_parameters(graph_module)
    pairs, refused = [], {}
    for node in graph_module.graph.nodes:
        if node.op != "call_module" or node_kind(node) not in WEIGHTED:
            continue
        found = _partner(node, fixed)
        if isinstance(found, Pair):
            pairs.append(found)
        elif found:
            refused[str(node.target)] = found
    return tuple(pairs), refused


@torch.no_grad()
def equalize(graph_module: fx.GraphModule) -> Equalization:
    """Equalize the ranges of all pairs, in passes until no scale changes; in place.

    Raises:
        QuantizationError: no pair can be equalized.
    """
    pairs, refused = find_pairs(graph_module)
    if not pairs:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(refused.items())[:3])
        raise QuantizationError(
            f"equalize: no two layers can trade scale ({reasons or 'none feeds another'}); take quantization.equalize "
            "out of the recipe, or set quantization.relu6: relu if ReLU6 joins them"
        )
    divided: dict[str, Tensor] = {}
    rounds, moved = 0, 1.0
    while moved > _CONVERGED and rounds < _ROUNDS:
        rounds, moved = rounds + 1, 0.0
        for pair in pairs:
            scale = _equalize_pair(graph_module, pair)
            divided[pair.first] = divided.get(pair.first, torch.ones_like(scale)) * scale
            moved = max(moved, scale.log().abs().max().item())
    return Equalization(pairs=pairs, refused=refused, divided=divided, rounds=rounds)


def replace_relu6(graph_module: fx.GraphModule) -> tuple[str, ...]:
    replaced = []
    for node in list(graph_module.graph.nodes):
        if node_kind(node) != "relu6":
            continue
        with graph_module.graph.inserting_before(node):
            relu = graph_module.graph.call_function(torch.relu, (tensor_args(node)[0],))
        relu.meta = dict(node.meta)
        node.replace_all_uses_with(relu)
        graph_module.graph.erase_node(node)
        replaced.append(node.name)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return tuple(replaced)


def _equalize_pair(graph_module: fx.GraphModule, pair: Pair) -> Tensor:
    first, second = graph_module.get_submodule(pair.first), graph_module.get_submodule(pair.second)
    incoming = input_ranges(second).unflatten(0, (-1, pair.repeat)).amax(1)
    scale = equalizing_scale(output_ranges(first), incoming)
    scale_outputs(first, 1 / scale)
    scale_inputs(second, scale.repeat_interleave(pair.repeat))
    return scale


def _partner(first: fx.Node, fixed: Mapping[str, str]) -> Pair | str:
    """The only layer that consumes `first` through functions that scale, or why there is none ("": an output)."""
    reason = _fixed(first, fixed)
    if reason:
        return reason
    node, repeat, image = first, 1, node_kind(first) != "linear"
    if image and not _on_axis_1(first, first):
        return "its input has no batch dimension"
    while True:
        if len(node.users) != 1:
            return f"{len(node.users)} operations consume it, and all would have to scale alike"
        before, node = node, next(iter(node.users))
        kind = node_kind(node)
        if kind in WEIGHTED and node.op == "call_module":
            break
        if kind == "output":
            return ""
        if kind == "relu6":
            return "ReLU6 follows, which does not scale with its input (quantization.relu6: relu replaces it)"
        if kind not in _POINTWISE and not (kind in _SPATIAL and image):
            return f"{kind} follows, which does not scale with its input"
        if kind in _SPATIAL and kind != "flatten" and len(before.meta["shape"]) < 3:
            return f"{kind} follows, which works on another axis than its channels"
        if kind == "mean" and not _spatial(node, len(before.meta["shape"])):
            return "a mean follows that is not over the pixels"
        if kind == "flatten":
            whole, flat = before.meta["shape"], node.meta["shape"]
            if len(flat) != 2 or flat[1] != prod(whole[1:]):
                return "a flatten follows that joins images"
            repeat *= prod(whole[2:])
    reason = _fixed(node, fixed)
    if reason:
        return f"{node.target}, which consumes it, {reason}"
    source = tensor_args(node)[0]
    if node_kind(node) == "linear":
        fits = not image or len(source.meta["shape"]) == 2
    else:
        fits = image and _on_axis_1(node, source)
    if not fits:
        return f"{node.target}, which consumes it, works on another axis than its channels"
    return Pair(first=str(first.target), second=str(node.target), repeat=repeat)


def _on_axis_1(layer: fx.Node, tensor: fx.Node) -> bool:
    """True if a tensor has the rank of a convolution's weight: its channels are on axis 1."""
    return len(tensor.meta["shape"]) == len(node_module(layer).weight.shape)  # type: ignore[arg-type]


def _fixed(node: fx.Node, fixed: Mapping[str, str]) -> str:
    module: nn.Module = node_module(node)
    if str(node.target) in fixed:
        return fixed[str(node.target)]
    return "has a parametrized weight (a sparsity mask): squash it first" if parametrize.is_parametrized(module) else ""


def _spatial(mean: fx.Node, rank: int) -> bool:
    """True if a mean is over axes after the channels only."""
    dims = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    axes = (dims,) if isinstance(dims, int) else dims
    return isinstance(axes, (tuple, list)) and all(isinstance(d, int) and d % rank >= 2 for d in axes)
