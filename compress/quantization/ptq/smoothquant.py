"""SmoothQuant: outliers of activations move into weights, where 8 bits represent them with less error.

Dividing channel j of a LayerNorm's output by s_j in its affine parameters, and multiplying the consumers' weights of
that channel by s_j, does not change the outputs, and s_j = max|X_j|^a / max|W_j|^(1 - a) divides the difficulty between
both (Xiao et al., arXiv 2211.10438, section 4, equation 4); a = 0.5 is usual, 1 moves all of it into the weights. A
norm whose consumers are not all linear layers is refused with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import CalibrationError, QuantizationError
from compress.graph.inputs import model_inputs
from compress.graph.ops import Watching, layer_name, node_kind, node_module
from compress.graph.traits import PASSING
from compress.quantization.ptq.equalize import input_ranges, scale_inputs, shared_parameters
from compress.quantization.report import Norm, Smoothing
from compress.support.progress import NoProgress, Progress

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
            consumers = tuple(dict.fromkeys(str(user.target) for user in _consumers(node)))
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


def _consumers(node: fx.Node) -> list[fx.Node]:
    """The consumers of a tensor, past dropout and identities."""
    found = []
    for user in node.users:
        found += _consumers(user) if node_kind(user) in PASSING else [user]
    return found


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
    for user in _consumers(node):
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
