"""Reconstruction of blocks: roundings of weights and ranges learned together, so that a block's output changes least.

BRECQ (Li et al., arXiv 2102.05426, section 3.2) learns the roundings of a whole block; QDrop (Wei et al., arXiv
2203.05740, section 3.3) leaves random elements of the activations unquantized meanwhile. Ranges of activations and
weights are learned as in LSQ (arXiv 1902.08153). No labels are used. The input of a block is that of the quantized
network with all blocks before it finished, mixed with the float network's; the target is the float network's. A block
whose error on the calibration images does not fall stays as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import QuantizationError
from compress.graph.layers import alive_after
from compress.graph.modules import stored_name
from compress.graph.ops import node_module
from compress.kernels.memory_format import along_axis
from compress.quantization.learned import learned_fake_quantize
from compress.quantization.numerics import scale_from_amax
from compress.quantization.ptq.adaround import CHECK_EVERY, beta_at, inverse_rounding, soft_rounding
from compress.quantization.ptq.walk import calibration_inputs
from compress.quantization.quantizer import Quantizer, _QuantWeight, quantizers, weight_quantizer_of
from compress.quantization.report import Reconstruction
from compress.quantization.spec import AdaRoundSpec, ReconstructSpec
from compress.support.progress import NoProgress, Progress


@dataclass(frozen=True)
class Block:
    """A part of a graph; only `source` and parameters enter it, and the value of its last node is the result."""

    source: fx.Node
    nodes: tuple[fx.Node, ...]
    layers: tuple[str, ...]


def blocks(graph_module: fx.GraphModule, *, most: int) -> tuple[Block, ...]:
    """Cut a quantized graph wherever a single tensor is alive, and join the parts to blocks with quantized layers.

    Operations after a layer belong to its block, and a quantizer to that of its consumer. What follows the last
    quantized layer is in no block. Up to `most` parts of a single layer are joined; a residual block stays whole.
    """
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise QuantizationError(
            f"the network has {len(inputs)} inputs, and reconstruction of blocks knows networks of one: take "
            "quantization.reconstruct out, or use quantization.adaround"
        )
    found: list[Block] = []
    waiting: tuple[fx.Node, ...] = ()
    source, joined = inputs[0], 0
    for part in _parts(graph_module, inputs[0]):
        layers = _layers(part)
        if not layers:
            if waiting or not found or isinstance(_module(part[-1]), Quantizer):
                waiting += part
            else:
                last = found[-1]
                found[-1] = Block(last.source, last.nodes + part, last.layers)
                source = part[-1]
            continue
        nodes, waiting = waiting + part, ()
        joins = len(layers) == 1 and 0 < joined < most
        if joins:
            last = found[-1]
            found[-1] = Block(last.source, last.nodes + nodes, tuple(dict.fromkeys(last.layers + layers)))
        else:
            found.append(Block(source, nodes, layers))
        joined = (joined + 1 if joins else 1) if len(layers) == 1 else 0
        source = nodes[-1]
    return tuple(found)


def block_module(graph_module: fx.GraphModule, block: Block) -> fx.GraphModule:
    """A block as a network of its own, with the very modules of the whole."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, values = next(iter(graph_module.graph.nodes)), {block.source: x}

    def brought(node: fx.Node) -> fx.Node:
        """A constant of the graph, or the number of images, which the block's input has too."""
        if node not in values:
            values[node] = graph.node_copy(node, lambda n: x if n is first else brought(n))
        return values[node]

    for node in block.nodes:
        values[node] = graph.node_copy(node, brought)
    graph.output(values[block.nodes[-1]])
    return fx.GraphModule(graph_module, graph)


def _batch_sizes(first: fx.Node) -> set[fx.Node]:
    """The nodes that read the number of images from the network's input, which would keep it alive throughout."""
    found: set[fx.Node] = set()
    for node in first.users:
        whole = (node.target, node.args[1:]) in (("size", ()), (getattr, ("shape",)))
        if node.op == "call_method" and node.target == "size" and node.args[1:] == (0,):
            found.add(node)
        elif whole and all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
            found |= {node, *node.users}
    return found


def _parts(graph_module: fx.GraphModule, first: fx.Node) -> Iterator[tuple[fx.Node, ...]]:
    """Yield the nodes between cuts, without constants; the last part ends before the graph's output."""
    left_out = {first, *_batch_sizes(first)}
    nodes = [node for node in graph_module.graph.nodes if node.op != "get_attr" and node not in left_out]
    part: list[fx.Node] = []
    for node, alive in alive_after([first, *nodes]):
        if node.op == "output":
            break
        if node is not first:
            part.append(node)
        if part and alive == {node}:
            yield tuple(part)
            part = []


def _layers(part: tuple[fx.Node, ...]) -> tuple[str, ...]:
    found = (str(node.target) for node in part if isinstance(_module(node), _QuantWeight))
    return tuple(dict.fromkeys(found))


def _module(node: fx.Node) -> nn.Module | None:
    return node_module(node) if node.op == "call_module" else None


LEAST_IMAGES = 4
"""Images of a step, however many positions each has."""
_CHUNK = 64
_HARD = 1e-3


def reconstruct(
    qmodel: fx.GraphModule, batches: Iterable[Any], spec: ReconstructSpec, *, progress: Progress | None = None
) -> tuple[Reconstruction, ...]:
    """Learn roundings and ranges of a calibrated network of one input block by block, in graph order; in place."""
    progress, rows = progress or NoProgress(), []
    qmodel.eval()
    found = blocks(qmodel, most=spec.layers)
    x = torch.cat([inputs[0] for inputs in calibration_inputs(qmodel, batches, spec.images)])
    exact = {found[0].source: x} if found else {}
    rounded = dict(exact)
    finished: set[str] = set()
    progress.start("reconstruct", len(found))
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(spec.seed)
        for block in found:
            module = block_module(qmodel, block)
            before, quantized = exact.pop(block.source), rounded.pop(block.source)
            with _disabled(module):
                target = _run(module, before)
            row = _learn_block(block, module, before, quantized, target, spec, finished)
            finished.update(name for name, _ in quantizers(module))
            rows.append(row)
            exact[block.nodes[-1]], rounded[block.nodes[-1]] = target, _run(module, quantized)
            progress.advance("reconstruct", 1, error_before=row.error_before, error_after=row.error_after)
    progress.finish("reconstruct")
    return tuple(rows)


@dataclass
class _Weight:
    """A weight: integers rounded down, 1 where one may be rounded up, and v and log (of the range) that are learned."""

    layer: Any
    base: Tensor
    free: Tensor
    v: Tensor
    log: Tensor

    @classmethod
    def of(cls, layer: Any) -> _Weight:
        quantizer, weight = weight_quantizer_of(layer), layer.weight.detach()
        f = quantizer.format
        steps = weight / along_axis(quantizer.scale.detach(), weight, f.axis)
        floor = steps.floor()
        free = ((floor >= f.low) & (floor < f.high) & (weight != 0)).to(weight.dtype)
        v = inverse_rounding((steps - floor).clamp(0, 1)).requires_grad_()
        log = torch.zeros_like(quantizer.amax).requires_grad_()
        return cls(layer, floor.clamp(f.low, f.high), free, v, log)

    def value(self, *, hard: bool = False) -> Tensor:
        h = soft_rounding(self.v)
        integers = torch.addcmul(self.base, (h >= 0.5).to(h.dtype) if hard else h, self.free)
        quantizer = weight_quantizer_of(self.layer)
        scale = scale_from_amax(quantizer.amax.detach() * self.log.exp(), quantizer.format)
        return integers * along_axis(scale, integers, quantizer.format.axis)

    def regularizer(self, beta: float) -> Tensor:
        """The sum of 1 - |2h - 1|^beta over the weights that may go up or down."""
        return ((1 - (2 * soft_rounding(self.v) - 1).abs().pow(beta)) * self.free).sum()

    def hard(self) -> Tensor:
        h = soft_rounding(self.v.detach())
        return (((h < _HARD) | (h > 1 - _HARD)) | (self.free == 0)).all()

    @torch.no_grad()
    def keep(self) -> None:
        value = self.value(hard=True)
        self.layer.weight_quantizer.set_amax(self.layer.weight_quantizer.amax * self.log.exp())
        self.layer.weight.copy_(value)


class _DroppingQuantizer(nn.Module):
    """A quantizer whose range is learned, and which leaves a random share of the elements as they are."""

    def __init__(self, quantizer: Quantizer, drop: float) -> None:
        super().__init__()
        self.inner, self.drop = quantizer, drop
        self.log = nn.Parameter(torch.zeros_like(quantizer.amax))

    def forward(self, x: Tensor) -> Tensor:
        amax = self.inner.amax.detach() * self.log.exp()
        y = learned_fake_quantize(x, amax, self.inner.format, elements=x.numel() // len(x))
        return torch.where(torch.rand_like(x) < self.drop, x, y) if self.drop else y


def _learn_block(
    block: Block,
    module: fx.GraphModule,
    before: Tensor,
    quantized: Tensor,
    target: Tensor,
    spec: ReconstructSpec,
    finished: set[str],
) -> Reconstruction:
    layers: dict[str, Any] = {path: module.get_submodule(path) for path in block.layers}
    layers = {path: layer for path, layer in layers.items() if f"{path}.weight_quantizer" not in finished}
    layers = {p: la for p, la in layers.items() if la.weight_quantizer.format.kind == "int"}
    reason = "" if layers else "no weight of integers that an earlier block has not fitted"
    masked = next((path for path, layer in layers.items() if parametrize.is_parametrized(layer)), None)
    if masked is not None:
        reason = f"{masked} has a parametrized weight (a sparsity mask): squash it first"
    error = _error(module, quantized, target)
    name = block.layers[0] if len(block.layers) == 1 else f"{block.layers[0]} to {block.layers[-1]}"
    if reason:
        return Reconstruction(block=name, error_before=error, error_after=error, steps=0, reason=reason)
    saved = {key: value.clone() for key, value in module.state_dict().items()}
    weights = {path: _Weight.of(layer) for path, layer in layers.items()}
    learning = {
        path: _DroppingQuantizer(q, spec.drop)
        for path, q in quantizers(module)
        if path not in finished and not path.endswith(".weight_quantizer") and q.format.kind == "int" and q.enabled
    }
    steps = _learn(module, weights, learning, before, quantized, target, spec)
    for weight in weights.values():
        weight.keep()
    for dropping in learning.values():
        dropping.inner.set_amax(dropping.inner.amax * dropping.log.detach().exp())
    after = _error(module, quantized, target)
    if not after < error:
        module.load_state_dict(saved)
        after = error
    return Reconstruction(block=name, error_before=error, error_after=after, steps=steps)


@torch.enable_grad()
def _learn(
    module: fx.GraphModule,
    weights: dict[str, _Weight],
    learning: dict[str, _DroppingQuantizer],
    before: Tensor,
    quantized: Tensor,
    target: Tensor,
    spec: ReconstructSpec,
) -> int:
    """Learn roundings and ranges; return the number of steps."""
    ranges = [w.log for w in weights.values()] + [d.log for d in learning.values()] if spec.learn_ranges else []
    groups: list[dict[str, Any]] = [{"params": [w.v for w in weights.values()], "lr": spec.lr}]
    groups += [{"params": ranges, "lr": spec.range_lr}] if ranges else []
    optimizer = torch.optim.Adam(groups)
    pace = AdaRoundSpec(steps=spec.steps, warm_start=spec.warm_start)
    axis = 1 if target.dim() == 4 else -1
    images = images_of_a_step(quantized, target, spec)
    with _replaced(module, weights, learning):
        for step in range(spec.steps):
            if ranges:
                optimizer.param_groups[1]["lr"] = spec.range_lr * (1 - step / spec.steps)
            chosen = torch.randint(len(target), (images,), device=target.device)
            x = quantized[chosen]
            if spec.drop:
                x = torch.where(torch.rand_like(x) < spec.drop, before[chosen], x)
            names = {_parameter(path, w.layer): w.value() for path, w in weights.items()}
            outputs = torch.func.functional_call(module, names, (x,))
            loss = (outputs - target[chosen]).square().sum(axis).mean()
            if step >= spec.warm_start * spec.steps:
                beta = beta_at(step, pace)
                loss = loss + spec.regularization * sum(w.regularizer(beta) for w in weights.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % CHECK_EVERY == 0 and bool(torch.stack([w.hard() for w in weights.values()]).all()):
                return step + 1
    return spec.steps


def images_of_a_step(x: Tensor, y: Tensor, spec: ReconstructSpec) -> int:
    """How many images a step takes: fewer where a block's input x or result y, (N, ...), has many positions."""
    positions = max(t[0].numel() // t.shape[1 if t.dim() == 4 else -1] for t in (x, y))
    return min(spec.batch_size, len(y), max(LEAST_IMAGES, spec.positions // positions))


def _parameter(path: str, layer: nn.Module) -> str:
    return f"{path}.{stored_name(layer, 'weight')}"


@contextmanager
def _replaced(
    module: fx.GraphModule, weights: dict[str, _Weight], learning: dict[str, _DroppingQuantizer]
) -> Iterator[None]:
    """Let weights pass as given, and activations the quantizers that learn."""
    for weight in weights.values():
        weight.layer.weight_quantizer.enabled = False
    for path, dropping in learning.items():
        module.set_submodule(path, dropping)
    try:
        yield
    finally:
        for weight in weights.values():
            weight.layer.weight_quantizer.enabled = True
        for path, dropping in learning.items():
            module.set_submodule(path, dropping.inner)


@contextmanager
def _disabled(module: nn.Module) -> Iterator[None]:
    states = [(quantizer, quantizer.enabled) for _, quantizer in quantizers(module)]
    for quantizer, _ in states:
        quantizer.enabled = False
    try:
        yield
    finally:
        for quantizer, enabled in states:
            quantizer.enabled = enabled


@torch.no_grad()
def _run(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([module(part.clone()) for part in x.split(_CHUNK)])  # an operation in place may write on its input


@torch.no_grad()
def _error(module: nn.Module, x: Tensor, target: Tensor) -> float:
    return (_run(module, x) - target).double().square().mean().item()
