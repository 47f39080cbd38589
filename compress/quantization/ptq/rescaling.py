"""Scales that move between layers: cross-layer equalization, SmoothQuant; and moments that follow from BatchNorm.

Between two layers joined by a function with f(s x) = s f(x) for s > 0 (ReLU, pooling, nothing), a channel may be
divided by s in the first layer and multiplied by s in the second without a change of the outputs (Nagel et al., arXiv
1906.04721, section 4.1). With s = sqrt(r1 / r2), r1 and r2 being the ranges of the weights on both sides, both become
sqrt(r1 r2). ReLU6 does not scale with its input.

A weight has the shape (out, in / groups, k...) in convolutions and linear layers and (in, out / groups, k...) in
transposed ones: one side is its first axis, the other is repeated for each group.

SmoothQuant (Xiao et al., arXiv 2211.10438, section 4, equation 4) divides channel j of a LayerNorm's output by s_j in
its affine parameters, and multiplies the consumers' weights of that channel by s_j = max|X_j|^a / max|W_j|^(1 - a); a =
0.5 is usual.

A BatchNorm with shift beta and factor gamma returns values of mean beta and deviation |gamma|, taken as normal (arXiv
1906.04721, section 4.2.1). A ReLU or ReLU6 clips the normal distribution, sums add means (and variances, as if
independent), and average pooling preserves means. After any other operation the moments are unknown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import CalibrationError, QuantizationError
from compress.graph.fold import foldable_pair
from compress.graph.inputs import model_inputs
from compress.graph.layers import tensor_args
from compress.graph.ops import (
    AVERAGES,
    PASSING,
    WEIGHTED,
    Watching,
    consumers_past,
    kinds,
    layer_name,
    module_kind,
    node_kind,
    node_module,
    replace_node,
    tensor_of,
    value_users,
)
from compress.quantization.report import Equalization, Moments, Norm, Pair, Smoothing
from compress.support.progress import NoProgress, Progress


def output_ranges(layer: nn.Module) -> Tensor:
    """The largest magnitude of the weights of each output channel, (out,)."""
    return _ranges(layer, rows=not _transposed(layer))


def input_ranges(layer: nn.Module) -> Tensor:
    """The largest magnitude of the weights of each input channel, (in,)."""
    return _ranges(layer, rows=_transposed(layer))


@torch.no_grad()
def scale_outputs(layer: nn.Module, factor: Tensor) -> None:
    """Multiply each output channel, bias included, by `factor` (out,); in place."""
    tensor_of(layer).mul_(_factor(layer, factor, rows=not _transposed(layer)))
    bias = getattr(layer, "bias", None)
    if bias is not None:
        bias.mul_(factor)


@torch.no_grad()
def scale_inputs(layer: nn.Module, factor: Tensor) -> None:
    """Multiply the weights of each input channel by `factor` (in,); in place."""
    tensor_of(layer).mul_(_factor(layer, factor, rows=_transposed(layer)))


def multiply_inputs(graph_module: fx.GraphModule, tensor: fx.Node, paths: Sequence[str], factor: Tensor) -> None:
    """Multiply the channels of a tensor (..., C) by `factor` (C,) where it goes into layers; in place."""
    name = f"{paths[0].replace('.', '_')}_channel_scale"
    graph_module.register_buffer(name, factor)
    with graph_module.graph.inserting_after(tensor):
        constant = graph_module.graph.get_attr(name)
    with graph_module.graph.inserting_after(constant):
        product = graph_module.graph.call_function(torch.mul, (tensor, constant))
    product.meta.update(tensor.meta)
    constant.meta.update(shape=tuple(factor.shape), dtype=factor.dtype)
    tensor.replace_all_uses_with(product, delete_user_cb=lambda user: user.target in paths)
    graph_module.recompile()


def shared_parameters(graph_module: fx.GraphModule) -> dict[str, str]:
    """Why a module cannot be rescaled alone, by path: its parameters are used elsewhere too, or read by the graph."""
    paths: dict[int, list[str]] = {}
    for name, parameter in graph_module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(name)
    called = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"}
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    found: dict[str, str] = {}
    for names in paths.values():
        for name in names:
            path, others = name.rpartition(".")[0], [other for other in names if other != name]
            if others:
                found[path] = f"shares its {name.rpartition('.')[2]} with {others[0]}"
            elif path in called and name in read:
                found[path] = f"has a {name.rpartition('.')[2]} that the model also reads by itself"
    return found


def ensure_biases(graph_module: nn.Module, paths: Iterable[str]) -> None:
    for path in paths:
        layer: Any = graph_module.get_submodule(path)
        if layer.bias is None:
            weight = layer.weight
            channels = weight.shape[1] * channel_groups(layer) if _transposed(layer) else weight.shape[0]
            layer.bias = nn.Parameter(weight.new_zeros(channels), requires_grad=layer.weight.requires_grad)


def channel_groups(layer: nn.Module) -> int:
    return int(getattr(layer, "groups", 1))


def _transposed(layer: nn.Module) -> bool:
    return module_kind(layer) == "conv_transpose"


def _ranges(layer: nn.Module, *, rows: bool) -> Tensor:
    weight = tensor_of(layer).detach()
    return weight.abs().flatten(1).amax(1) if rows else column_ranges(weight, channel_groups(layer))


def _factor(layer: nn.Module, factor: Tensor, *, rows: bool) -> Tensor:
    weight = tensor_of(layer)
    return (
        factor.reshape(-1, *[1] * (weight.dim() - 1)) if rows else column_factor(weight, factor, channel_groups(layer))
    )


def column_ranges(weight: Tensor, groups: int) -> Tensor:
    """The largest magnitude of each second index of a weight (rows, columns, k...), (groups * columns,)."""
    flat = weight.abs().reshape(*weight.shape[:2], -1).amax(2)
    return flat.unflatten(0, (groups, -1)).amax(1).flatten()


def column_factor(weight: Tensor, factor: Tensor, groups: int) -> Tensor:
    """A factor (groups * columns,) as a weight (rows, columns, k...) is multiplied by it."""
    columns = factor.reshape(groups, 1, -1).expand(-1, len(weight) // groups, -1)
    return columns.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))


# Functions with f(s x) = s f(x) for s > 0; those of the second line work on images, with channels on axis 1.
_POINTWISE = kinds(lambda t: t.scales_linearly and t.elementwise and t.data_inputs == 1)
_SPATIAL = kinds(lambda t: t.scales_linearly and t.passes_channels) | {"mean", "flatten"}

_ROUNDS, _CONVERGED = 200, 1e-4


def equalizing_scale(outgoing: Tensor, incoming: Tensor) -> Tensor:
    """The s that makes two ranges (C,) equal: s = sqrt(r1 / r2) (1906.04721, eq. 11); 1 where one is zero.

    >>> equalizing_scale(torch.tensor([4.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor([2., 1.])
    """
    live = (outgoing > 0) & (incoming > 0)
    return (torch.where(live, outgoing, 1.0) / torch.where(live, incoming, 1.0)).sqrt()


def find_pairs(graph_module: fx.GraphModule) -> tuple[tuple[Pair, ...], dict[str, str]]:
    """The pairs of layers that can trade scale, and for each other layer the reason why it cannot."""
    calls = Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_module")
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
    """Equalize the ranges of all pairs, in passes until no scale changes; in place."""
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


def replace_activations(graph_module: fx.GraphModule, kind: str) -> tuple[str, ...]:
    """Replace ReLU6 by ReLU, or SiLU by x * sigmoid(x), in place."""
    replaced = []
    for node in list(graph_module.graph.nodes):
        if node_kind(node) != kind:
            continue
        x = tensor_args(node)[0]
        with graph_module.graph.inserting_before(node):
            made = graph_module.graph.call_function(torch.relu if kind == "relu6" else torch.sigmoid, (x,))
            if kind == "silu":
                made.meta.update(node.meta)
                made = graph_module.graph.call_function(torch.mul, (x, made))
        replaced.append(node.name)
        replace_node(node, made)
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
        users = value_users(node)
        if len(users) != 1:
            return f"{len(users)} operations consume it, and all would have to scale alike"
        before, node = node, users[0]
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
    dims = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    axes = (dims,) if isinstance(dims, int) else dims
    return isinstance(axes, (tuple, list)) and all(isinstance(d, int) and d % rank >= 2 for d in axes)


_PRESERVES = PASSING | {"quantizer"}
_ROOT_2PI = math.sqrt(2 * math.pi)


def clipped_normal(mean: Tensor, deviation: Tensor, high: float = math.inf) -> Moments:
    """Mean and deviation (at least 0) of min(max(x, 0), high) for normal x (arXiv 1906.04721, appendix C)."""
    mean, deviation = mean.double(), deviation.double().clamp_min(1e-12)
    low = -mean / deviation
    top = (high - mean) / deviation
    inside = _cdf(top) - _cdf(low)
    above = 1 - _cdf(top)
    first = mean * inside + deviation * (_pdf(low) - _pdf(top))
    square = (mean.square() + deviation.square()) * inside + 2 * deviation * mean * (_pdf(low) - _pdf(top))
    square += deviation.square() * (_tail(low) - _tail(top))
    if math.isfinite(high):
        first, square = first + high * above, square + high**2 * above
    variance = (square - first.square()).clamp_min(0)
    return first.float(), variance.sqrt().float()


def batchnorm_moments(graph_module: fx.GraphModule) -> dict[str, Moments]:
    """The moments of each layer's output after its BatchNorm, by the layer's path; to call before folding."""
    found = {}
    for node in graph_module.graph.nodes:
        pair = foldable_pair(node)
        if pair is None:
            continue
        norm: Any = node_module(pair[1])
        shift, factor, like = norm.bias, norm.weight, norm.running_mean
        mean = torch.zeros_like(like) if shift is None else shift.detach().clone()
        deviation = torch.ones_like(like) if factor is None else factor.detach().abs()
        found[str(pair[0].target)] = (mean, deviation)
    return found


def propagate_moments(graph_module: fx.GraphModule, layers: dict[str, Moments]) -> dict[fx.Node, Moments]:
    """The moments of every tensor for which they follow from `layers` (`batchnorm_moments`); BatchNorm is folded."""
    known: dict[fx.Node, Moments] = {}
    for node in graph_module.graph.nodes:
        kind = node_kind(node)
        if kind in WEIGHTED and node.op == "call_module":
            moments = layers.get(str(node.target))
        else:
            moments = _through(node, kind, [known.get(source) for source in tensor_args(node)])
        if moments is not None:
            known[node] = moments
    return known


def _through(node: fx.Node, kind: str, sources: list[Moments | None]) -> Moments | None:
    inputs = [source for source in sources if source is not None]
    if not inputs or len(inputs) < len(sources):
        return None
    mean, deviation = inputs[0]
    if kind in _PRESERVES:
        return mean, deviation
    if kind == "relu":
        return clipped_normal(mean, deviation)
    if kind == "relu6":
        return clipped_normal(mean, deviation, 6.0)
    if kind == "add" and len(inputs) == 2 and inputs[1][0].shape == mean.shape:
        return mean + inputs[1][0], (deviation.square() + inputs[1][1].square()).sqrt()
    if kind == "concat":
        return torch.cat([m for m, _ in inputs]), torch.cat([d for _, d in inputs])
    if kind in AVERAGES and _padding(node) == 0:
        return mean, torch.zeros_like(deviation)  # only the mean of a pixel average is used
    if kind == "flatten" and node.meta.get("shape") is not None:
        repeat = node.meta["shape"][-1] // len(mean)
        return mean.repeat_interleave(repeat), deviation.repeat_interleave(repeat)
    return None


def _padding(node: fx.Node) -> int:
    module = node_module(node) if node.op == "call_module" else None
    padding: Any = node.kwargs.get("padding", 0) if module is None else getattr(module, "padding", 0)
    return max(padding) if isinstance(padding, (tuple, list)) else int(padding)


def _pdf(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / _ROOT_2PI


def _cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def _tail(x: Tensor) -> Tensor:
    """The x pdf(x) of a truncated normal's second moment; 0 at infinity."""
    return torch.where(x.isfinite(), x * _pdf(x), 0.0)


_POSITIONS = ((2, "weight"), (3, "bias"))  # of layer_norm and rms_norm as functions


def smoothing_scale(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Return s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), (C,), of arXiv 2211.10438, equation 4.

    It is 1 where a channel or its weights are all zero.

    >>> smoothing_scale(torch.tensor([16.0, 0.0]), torch.tensor([4.0, 1.0]), 0.5)
    tensor([2., 1.])
    """
    live = (activations > 0) & (weights > 0)
    scale = torch.where(live, activations, 1.0) ** alpha / torch.where(live, weights, 1.0) ** (1 - alpha)
    return torch.where(live, scale, 1.0)


def find_norms(graph_module: fx.GraphModule) -> tuple[tuple[Norm, ...], dict[str, str]]:
    """The norms that can be smoothed, and for each other norm the reason why it cannot."""
    calls = Counter(
        str(node.target)
        for node in graph_module.graph.nodes
        for _ in range(len(node.users) if node.op == "get_attr" else 1)
        if node.op in {"call_module", "get_attr"}
    )
    shared = shared_parameters(graph_module)
    norms, refused = [], {}
    for node in graph_module.graph.nodes:
        if node_kind(node) != "layer_norm":
            continue
        parameters = _parameters(node)
        path = parameters[0].rpartition(".")[0] if parameters else layer_name(node)
        reason = shared.get(path) or _refusal(node, parameters, calls, shared)
        if reason:
            refused[path] = reason
        else:
            consumers = tuple(dict.fromkeys(str(user.target) for user in consumers_past(node, PASSING)))
            norms.append(Norm(path=path, node=node.name, parameters=parameters, consumers=consumers))
    return tuple(norms), refused


@torch.no_grad()
def smooth(
    graph_module: fx.GraphModule,
    batches: Iterable[Any],
    *,
    alpha: float = 0.5,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> Smoothing:
    """Move outliers of the norms' outputs into the linear layers that consume them; in place, with the same outputs."""
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"smooth is {alpha}: it is a share, from 0 to 1; 0.5 is usual")
    norms, refused = find_norms(graph_module)
    if not norms:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(refused.items())[:3])
        raise QuantizationError(
            f"smooth: no LayerNorm feeds linear layers only ({reasons or 'the model has none'}); take "
            "quantization.smooth out of the recipe"
        )
    largest = _largest(graph_module, [norm.node for norm in norms], batches, progress or NoProgress())
    divided = {}
    for norm in norms:
        amax = largest[norm.node]
        if all_reduce:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX)
        if not bool(amax.isfinite().all()):
            raise CalibrationError(f"smooth: {norm.path} returned NaN or Inf: look at the calibration images")
        consumers = [graph_module.get_submodule(path) for path in norm.consumers]
        weights = torch.stack([input_ranges(consumer) for consumer in consumers]).amax(0)
        scale = smoothing_scale(amax, weights, alpha)
        for parameter in norm.parameters:
            graph_module.get_parameter(parameter).div_(scale)
        for consumer in consumers:
            scale_inputs(consumer, scale)
        divided[norm.path] = scale
    return Smoothing(norms=norms, refused=refused, divided=divided)


def _parameters(node: fx.Node) -> tuple[str, ...]:
    if node.op == "call_module":
        module: nn.Module = node_module(node)
        names = [name for name in ("weight", "bias") if getattr(module, name, None) is not None]
        return tuple(f"{node.target}.{name}" for name in names) if "weight" in names else ()
    given = {name: node.kwargs.get(name, node.args[i] if len(node.args) > i else None) for i, name in _POSITIONS}
    if not isinstance(given["weight"], fx.Node):
        return ()
    return tuple(str(p.target) if p.op == "get_attr" else "" for p in given.values() if isinstance(p, fx.Node))


def _refusal(node: fx.Node, parameters: tuple[str, ...], calls: Counter[str], shared: Mapping[str, str]) -> str:
    if not parameters:
        return "has no affine parameters to rescale"
    if "" in parameters:
        return "has parameters that are computed"
    shape: Any
    if node.op == "call_module":
        shape, times = node_module(node).normalized_shape, calls[str(node.target)]
    else:
        shape, times = node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"], calls[parameters[0]]
    if len(shape) != 1:
        return "normalizes more than the channel axis"
    if times != 1:
        return "is called twice"
    for user in consumers_past(node, PASSING):
        if node_kind(user) != "linear" or user.op != "call_module":
            return f"{user.target if user.op == 'call_module' else user.name} ({node_kind(user)}) consumes it too"
        if calls[str(user.target)] != 1 or parametrize.is_parametrized(node_module(user)):
            return f"{user.target}, which consumes it, is called twice or has a parametrized weight"
        if str(user.target) in shared:
            return f"{user.target}, which consumes it, {shared[str(user.target)]}"
    return ""


def _largest(
    graph_module: fx.GraphModule, names: list[str], batches: Iterable[Any], progress: Progress
) -> dict[str, Tensor]:
    largest: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        amax = x.detach().abs().flatten(0, -2).amax(0)
        largest[name] = torch.maximum(largest[name], amax) if name in largest else amax

    watch, task = Watching(graph_module.eval(), frozenset(names), note), "smooth"
    progress.start(task, length_hint(batches))
    for batch in batches:
        watch.run(*model_inputs(graph_module, batch))
        progress.advance(task)
    progress.finish(task)
    if not largest:
        raise CalibrationError("smooth got no images: `batches` was empty; give at least one batch")
    return largest
