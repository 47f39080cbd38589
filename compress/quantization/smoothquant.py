"""SmoothQuant: outliers of activations move into weights, where 8 bits hold them more easily.

What a LayerNorm returns often has a few channels far larger than the rest, and one scale for the tensor leaves the rest
few steps. Dividing channel j by s_j in the norm's affine parameters and multiplying the weights that read it by s_j
changes nothing that is computed, and s_j = max|X_j|^a / max|W_j|^(1 - a) shares the difficulty between both
(Xiao et al., arXiv 2211.10438, section 4, equation 4); a = 0.5 is usual, 1 moves all of it into the weights.

Only a norm whose readers are all linear layers can be smoothed, as in attention's projections and the first layer of
an MLP; every other norm is refused with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import CalibrationError, QuantizationError
from compress.graph.ops import node_kind, node_module
from compress.progress import NoProgress, Progress
from compress.quantization.ranges import input_ranges, scale_inputs


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalization and the linear layers that read it, as module paths."""

    path: str
    readers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """What was smoothed.

    Attributes:
        norms: in graph order.
        refused: why a norm could not be smoothed, by name.
        divided: what each channel of a norm's output was divided by, (C,), by path.
    """

    norms: tuple[Norm, ...]
    refused: dict[str, str]
    divided: dict[str, Tensor]


def smoothing_scale(activations: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """The s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) of arXiv 2211.10438, equation 4.

    Args:
        activations: (C,) largest magnitude of each channel.
        weights: (C,) largest magnitude of the weights that read it.
        alpha: 0 moves the weights' difficulty into activations, 1 the activations' into weights.

    Returns:
        (C,); 1 where a channel or its weights are all zero.

    >>> smoothing_scale(torch.tensor([16.0, 0.0]), torch.tensor([4.0, 1.0]), 0.5)
    tensor([2., 1.])
    """
    live = (activations > 0) & (weights > 0)
    scale = torch.where(live, activations, 1.0) ** alpha / torch.where(live, weights, 1.0) ** (1 - alpha)
    return torch.where(live, scale, 1.0)


def find_norms(graph_module: fx.GraphModule) -> tuple[tuple[Norm, ...], dict[str, str]]:
    """Norms that can be smoothed, and for the others why not."""
    calls = Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "call_module")
    norms, refused = [], {}
    for node in graph_module.graph.nodes:
        if node_kind(node) != "layer_norm":
            continue
        reason = _refusal(node, calls)
        if reason:
            refused[str(node.target) if node.op == "call_module" else node.name] = reason
        else:
            readers = tuple(dict.fromkeys(str(user.target) for user in _readers(node)))
            norms.append(Norm(path=str(node.target), readers=readers))
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
    """Move outliers of what norms return into the linear layers behind them; in place, what it computes stays.

    Args:
        graph_module: from `trace`, in float.
        batches: calibration data, tensors or (tensor, target); all of it is used.
        alpha: share of the difficulty that moves, 0 to 1.
        all_reduce: take the largest activations of all processes of torch.distributed's default group.
        progress: hears of each batch.

    Raises:
        QuantizationError: no norm can be smoothed; says why.
        CalibrationError: no batches, or NaN.
    """
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"smooth is {alpha}: it is a share, from 0 to 1; 0.5 is usual")
    norms, refused = find_norms(graph_module)
    if not norms:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(refused.items())[:3])
        raise QuantizationError(
            f"smooth: no LayerNorm feeds linear layers only ({reasons or 'the model has none'}); take "
            "quantization.smooth out of the recipe"
        )
    largest = _largest(graph_module, [norm.path for norm in norms], batches, progress or NoProgress())
    divided = {}
    for norm in norms:
        amax = largest[norm.path]
        if all_reduce:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX)
        if not bool(amax.isfinite().all()):
            raise CalibrationError(f"smooth: {norm.path} returned NaN or Inf: look at the calibration images")
        readers = [graph_module.get_submodule(path) for path in norm.readers]
        weights = torch.stack([input_ranges(reader) for reader in readers]).amax(0)
        scale = smoothing_scale(amax, weights, alpha)
        module = graph_module.get_submodule(norm.path)
        for parameter in (module.weight, getattr(module, "bias", None)):
            if parameter is not None:
                cast(Tensor, parameter).div_(scale)
        for reader in readers:
            scale_inputs(reader, scale)
        divided[norm.path] = scale
    return Smoothing(norms=norms, refused=refused, divided=divided)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a tensor, seen through dropout and identities."""
    found = []
    for user in node.users:
        found += _readers(user) if node_kind(user) in {"dropout", "identity"} else [user]
    return found


def _refusal(node: fx.Node, calls: Counter[str]) -> str:
    """Why a norm cannot be smoothed; "" when it can."""
    if node.op != "call_module":
        return "is a function, without parameters of its own that could be rescaled"
    module: nn.Module = node_module(node)
    if len(cast(Sequence[int], module.normalized_shape)) != 1:
        return "normalizes more than the channel axis"
    if module.weight is None:
        return "has no affine parameters to rescale"
    for user in _readers(node):
        if node_kind(user) != "linear" or user.op != "call_module":
            return f"{user.target if user.op == 'call_module' else user.name} ({node_kind(user)}) reads it too"
        if calls[str(user.target)] != 1 or parametrize.is_parametrized(node_module(user)):
            return f"{user.target}, which reads it, is called twice or has a parametrized weight"
    return "is called twice" if calls[str(node.target)] != 1 else ""


class _Watch(fx.Interpreter):
    """Runs a graph and keeps the largest magnitude of each channel (last axis) of some modules' results."""

    def __init__(self, module: fx.GraphModule, paths: Iterable[str]) -> None:
        super().__init__(module)
        self.paths = frozenset(paths)
        self.amax: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_module" and n.target in self.paths:
            path, amax = str(n.target), result.detach().abs().flatten(0, -2).amax(0)
            self.amax[path] = torch.maximum(self.amax[path], amax) if path in self.amax else amax
        return result


def _largest(
    graph_module: fx.GraphModule, paths: list[str], batches: Iterable[Any], progress: Progress
) -> dict[str, Tensor]:
    """(C,) by path, over all batches."""
    first = next(chain(graph_module.parameters(), graph_module.buffers()), None)
    device = first.device if first is not None else torch.device("cpu")
    watch, task = _Watch(graph_module.eval(), paths), "smooth"
    progress.start(task, len(batches) if isinstance(batches, Sized) else 0)
    for batch in batches:
        watch.run((batch[0] if isinstance(batch, (tuple, list)) else batch).to(device))
        progress.advance(task)
    progress.finish(task)
    if not watch.amax:
        raise CalibrationError("smooth got no images: `batches` was empty; give at least one batch")
    return watch.amax
