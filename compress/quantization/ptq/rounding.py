"""Learned rounding: of each layer (AdaRound), or of blocks with their ranges (reconstruction).

AdaRound (Nagel et al., arXiv 2004.10568, sections 3.2 and 3.3) relaxes the choice of each weight to h(v) in [0, 1],
fits it by gradient descent to the layer's float outputs, and drives it to 0 or 1 by a term whose exponent falls. Inputs
are those of the quantized network with all layers before already rounded, targets those of the float network, both
after the activation that follows. A layer is a matrix product over a few thousand sampled output positions of all
images. Rounded values replace the float weights.

BRECQ (Li et al., arXiv 2102.05426, section 3.2) learns the roundings of a whole block; QDrop (Wei et al., arXiv
2203.05740, section 3.3) leaves random elements of the activations unquantized meanwhile. Ranges of activations and
weights are learned as in LSQ (arXiv 1902.08153). The input of a block is that of the quantized
network with all blocks before it finished, mixed with the float network's; the target is the float network's.

A layer or block whose error on the calibration images does not fall stays as it was.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import QuantizationError
from compress.files import write_bytes
from compress.graph.layers import alive_after
from compress.graph.modules import stored_name
from compress.graph.ops import called_module, module_kind, node_kind, value_users
from compress.kernels.memory_format import along_axis
from compress.quantization import AdaRoundSpec, ReconstructSpec
from compress.quantization.learned import learned_fake_quantize
from compress.quantization.numerics import scale_from_amax
from compress.quantization.ptq.walk import Visit, calibration_inputs
from compress.quantization.quantizer import Quantizer, _QuantWeight, quantizers, switched_off, weight_quantizer_of
from compress.quantization.report import Reconstruction, Rounding
from compress.support.progress import NoProgress, Progress

# Images that are gathered from at a time.
_IMAGES = 16


@dataclass(frozen=True)
class Rows:
    """Sampled positions of a layer.

    Attributes:
        inputs: (groups, rows, inputs of an output).
        targets: (rows, outputs), before the activation.
        bias: (outputs,) or None.
    """

    inputs: Tensor
    targets: Tensor
    bias: Tensor | None

    def outputs(self, weight: Tensor, chosen: Tensor) -> Tensor:
        groups, _, size = self.inputs.shape
        products = self.inputs[:, chosen] @ weight.reshape(groups, -1, size).mT
        flat = products.transpose(0, 1).flatten(1)
        return flat if self.bias is None else flat + self.bias


def sampled_rows(
    layer: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, count: int, generator: torch.Generator
) -> Rows | None:
    """Sample `count` output positions of a linear layer or a convolution of images, evenly over the images.

    None for another kind of layer, or padding that is not of zeros by numbers. All positions are taken where there are
    no more. `generator` is on the CPU.
    """
    found: Any = layer
    bias = None if found.bias is None else found.bias.detach()
    if module_kind(layer) == "linear":
        x, y = (torch.cat([part.flatten(0, -2) for part in parts]) for parts in (inputs, targets))
        if len(x) > count:
            chosen = torch.randperm(len(x), generator=generator)[:count].to(x.device)
            x, y = x[chosen], y[chosen]
        return Rows(x[None], y, bias)
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    channels, height, width = targets[0].shape[1:]
    each = min(height * width, -(-count // sum(len(part) for part in inputs)))
    windows, outputs = [], []
    for few, expected in zip(_split(inputs), _split(targets), strict=True):
        orders = [torch.randperm(height * width, generator=generator)[:each] for _ in few]
        places = torch.stack(orders).to(few.device)
        windows.append(_gathered(layer, few, places, width))
        flat = expected.flatten(2).gather(2, places[:, None].expand(-1, channels, -1))  # (N, outputs, each)
        outputs.append(flat.transpose(1, 2).flatten(0, 1))
    grouped = torch.cat(windows).unflatten(1, (layer.groups, -1)).flatten(2)  # (rows, groups, inputs of an output)
    return Rows(grouped.transpose(0, 1).contiguous(), torch.cat(outputs), bias)


def _split(parts: Sequence[Tensor]) -> list[Tensor]:
    return [few for part in parts for few in part.split(_IMAGES)]


def _gathered(layer: nn.Conv2d, x: Tensor, places: Tensor, width: int) -> Tensor:
    """The windows of a convolution at output places (N, each): (N * each, channels, kernel height, width)."""
    down, right = (int(side) for side in layer.padding)  # no text: refused before
    padded = nn.functional.pad(x, (right, right, down, down))
    starts = (places // width * layer.stride[0], places % width * layer.stride[1])
    rows, columns = (
        start[:, :, None] + torch.arange(size, device=x.device) * dilation
        for start, size, dilation in zip(starts, layer.kernel_size, layer.dilation, strict=True)
    )
    image = torch.arange(len(x), device=x.device)[:, None, None, None]
    windows = padded[image, :, rows[:, :, :, None], columns[:, :, None, :]]  # (N, each, height, width, channels)
    return windows.flatten(0, 1).permute(0, 3, 1, 2)


# Steps between looks at whether all roundings are decided.
CHECK_EVERY = 50
_STRETCH, _SHIFT = 1.2, -0.1  # zeta - gamma and gamma of the paper's rectified sigmoid


def soft_rounding(v: Tensor) -> Tensor:
    """The rectified sigmoid h(v) in [0, 1] (arXiv 2004.10568, eq. 23), which reaches 0 and 1."""
    return (torch.sigmoid(v) * _STRETCH + _SHIFT).clamp(0, 1)


def inverse_rounding(h: Tensor) -> Tensor:
    """The v with soft_rounding(v) = h, for h in [0, 1]."""
    return torch.logit((h - _SHIFT) / _STRETCH)


def regularizer_gradient(h: Tensor, beta: float) -> Tensor:
    """The derivative of the sum of 1 - |2h - 1|^beta (eq. 24); 0 where every h is 0 or 1."""
    distance = 2 * h - 1
    return distance.abs().pow_(beta - 1).mul_(distance.sign()).mul_(-2 * beta)


def beta_at(step: int, spec: AdaRoundSpec) -> float:
    """The exponent after `step` of `spec.steps` steps: cosine from start to end after the warm start."""
    start = spec.warm_start * spec.steps
    share = min(1.0, max(0.0, (step - start) / max(1.0, spec.steps - start)))
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * share)).item())
    return spec.beta_end + (spec.beta_start - spec.beta_end) * cosine


@torch.no_grad()
def learn_rounding(
    layer: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    spec: AdaRoundSpec,
    *,
    activation: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return rounded weights with which a layer reproduces `targets` from `inputs`.

    `inputs` (quantized network) and `targets` (float network, before `activation`: `relu`, `relu6` or ""), (N,
    ...), are given for each batch, `settings` are further arguments of the call. The weights are on the grid of the
    layer's `weight_quantizer`.
    """
    own = _Weight.of(layer)
    quantizer, base, free, v = weight_quantizer_of(layer), own.base, own.free, own.v.detach()
    scale = along_axis(quantizer.scale.detach(), base, quantizer.format.axis)
    generator = torch.Generator().manual_seed(spec.seed)
    images, batch_size = sum(len(part) for part in inputs), spec.batch_size
    rows = sampled_rows(layer, inputs, targets, count=spec.positions, generator=generator)
    x = torch.cat(list(inputs)) if rows is None else rows.inputs[0]
    expected = _activated(torch.cat(list(targets)) if rows is None else rows.targets, activation)
    if rows is not None:
        batch_size = max(spec.batch_size, len(x) * spec.batch_size // images)
    optimizer = torch.optim.Adam([v], lr=spec.lr, fused=v.dtype == torch.float32)
    for step in range(spec.steps):
        chosen = torch.randint(len(x), (min(batch_size, len(x)),), generator=generator).to(x.device)
        sigmoid = torch.sigmoid(v)
        h = (sigmoid * _STRETCH + _SHIFT).clamp_(0, 1)
        rounded = torch.addcmul(base, h, free).mul_(scale).requires_grad_()
        with torch.enable_grad():
            part = rows.outputs(rounded, chosen) if rows else _outputs(layer, rounded, x[chosen], settings)
            outputs = _activated(part, activation)
            (outputs - expected[chosen]).square().sum(1).mean().backward()
        gradient = cast(Tensor, rounded.grad).mul_(scale)
        if step >= spec.warm_start * spec.steps:
            gradient.add_(regularizer_gradient(h, beta_at(step, spec)), alpha=spec.regularization)
        # The chain rule through h(v), whose slope is the sigmoid's where it is not clamped, is written out, because
        # autograd would read and write the weight a dozen times more
        slope = sigmoid.mul_(1 - sigmoid).mul_(_STRETCH).mul_((h > 0) & (h < 1))
        v.grad = gradient.mul_(slope).mul_(free)
        if step % CHECK_EVERY == 0 and step and not bool(v.grad.any()):
            break  # every rounding has reached 0 or 1
        optimizer.step()
    return own.value(hard=True)


class Rounder:
    """Learns the rounding of each visited layer."""

    def __init__(
        self, spec: AdaRoundSpec, *, folder: Path | None = None, progress: Progress | None = None, total: int = 0
    ) -> None:
        self.spec = spec
        self.folder = folder
        self.progress = progress or NoProgress()
        self.rows: dict[str, Rounding] = {}
        self.progress.start("adaround", total)

    def finish(self) -> tuple[Rounding, ...]:
        self.progress.finish("adaround")
        return tuple(self.rows.values())

    def visit(self, this: Visit) -> None:
        if this.path in self.rows:
            return  # a second call of the layer, whose weights were rounded at the first
        reason, nothing = _refusal(this), {"error_nearest": 0.0, "error_learned": 0.0, "changed": 0.0}
        row = Rounding(layer=this.path, reason=reason, **nothing) if reason else self._round(this)
        self.rows[this.path] = row
        self.progress.advance("adaround", 1, error_nearest=row.error_nearest, error_learned=row.error_learned)

    def _round(self, this: Visit) -> Rounding:
        layer: Any = this.layer
        call: dict[str, Any] = {"activation": _activation_after(this.node), "settings": this.settings}
        nearest = layer.quantized_weight.detach().clone()
        path, digest = self._file(this)
        learned = _read(path, digest, nearest)
        if learned is None:
            learned = learn_rounding(layer, this.inputs, this.targets, self.spec, **call)
        errors = self._errors(this, (nearest, learned), call)
        best = learned if errors[1] < errors[0] else nearest
        if path is not None:
            _write(path, digest, best)
        layer.weight.copy_(best)
        changed = (best != nearest).float().mean().item()
        return Rounding(layer=this.path, error_nearest=errors[0], error_learned=min(errors), changed=changed)

    def _errors(self, this: Visit, weights: tuple[Tensor, Tensor], call: dict[str, Any]) -> list[float]:
        """The error of each weight, at positions drawn apart from those that it was learned on."""
        generator = torch.Generator().manual_seed(self.spec.seed + 1)
        rows = sampled_rows(this.layer, this.inputs, this.targets, count=self.spec.positions, generator=generator)
        if rows is None:
            inputs, targets = torch.cat(this.inputs), torch.cat(this.targets)
            return [reconstruction_error(this.layer, weight, inputs, targets, **call) for weight in weights]
        every = torch.arange(len(rows.targets), device=rows.targets.device)
        expected = _activated(rows.targets, call["activation"])
        found = (_activated(rows.outputs(weight, every), call["activation"]) for weight in weights)
        return [(outputs - expected).double().square().mean().item() for outputs in found]

    def _file(self, this: Visit) -> tuple[Path | None, str]:
        """The file for a layer's rounding, and a digest of the values that it is learned from."""
        if self.folder is None:
            return None, ""
        layer: Any = this.layer
        digest = hashlib.sha256(repr(sorted(asdict(self.spec).items())).encode())
        for tensor in (layer.weight, layer.weight_quantizer.scale, *this.inputs):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return self.folder / f"{this.path}.safetensors", digest.hexdigest()


@torch.no_grad()
def reconstruction_error(
    layer: nn.Module,
    weight: Tensor,
    inputs: Tensor,
    targets: Tensor,
    *,
    activation: str = "",
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 64,
) -> float:
    """The mean squared error of a layer's outputs with `weight` against `targets`, both after the activation."""
    total = 0.0
    for x, target in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        difference = _activated(_outputs(layer, weight, x, settings), activation) - _activated(target, activation)
        total += difference.double().square().sum().item()
    return total / targets.numel()


def _outputs(layer: nn.Module, weight: Tensor, x: Tensor, settings: Mapping[str, Any] | None = None) -> Tensor:
    with switched_off([weight_quantizer_of(layer)]):
        return torch.func.functional_call(layer, {stored_name(layer, "weight"): weight}, (x,), dict(settings or {}))


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu6":
        return F.relu6(x)
    return F.relu(x) if activation == "relu" else x


def _activation_after(node: fx.Node) -> str:
    """`relu` or `relu6` if it is the only consumer of the layer's output, else ""."""
    users = value_users(node)
    if len(users) != 1:
        return ""
    kind = node_kind(users[0])
    return kind if kind in {"relu", "relu6"} else ""


def _refusal(this: Visit) -> str:
    if weight_quantizer_of(this.layer).format.kind != "int":
        return "FP8 steps are not evenly spaced: rounded to nearest"
    if parametrize.is_parametrized(this.layer):
        return "has a parametrized weight (a sparsity mask): squash it first"
    return ""


def _read(path: Path | None, digest: str, like: Tensor) -> Tensor | None:
    if path is None or not path.is_file():
        return None
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise QuantizationError(f"{path} is no rounding that AdaRound saved ({error}); remove it") from error
    weight = found.get(digest)
    return None if weight is None else weight.to(like)


def _write(path: Path, digest: str, weight: Tensor) -> None:
    content = save({digest: weight.detach().cpu().contiguous()})  # written by us, so that a full disk is an OSError
    write_bytes(path, content)


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
        layers = tuple(dict.fromkeys(str(n.target) for n in part if isinstance(called_module(n), _QuantWeight)))
        if not layers:
            if waiting or not found or isinstance(called_module(part[-1]), Quantizer):
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


# Images of a step, however many positions each has.
LEAST_IMAGES = 4
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
            with switched_off(quantizer for _, quantizer in quantizers(module)):
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
        # A weight that saturates has one rounding only, and a zero stays zero, so that a sparsity pattern survives
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
    held: dict[str, Any] = {path: module.get_submodule(path) for path in block.layers}
    new = {path: layer for path, layer in held.items() if f"{path}.weight_quantizer" not in finished}
    layers = {path: layer for path, layer in new.items() if layer.weight_quantizer.format.kind == "int"}
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
            names = {f"{path}.{stored_name(w.layer, 'weight')}": w.value() for path, w in weights.items()}
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


@contextmanager
def _replaced(
    module: fx.GraphModule, weights: dict[str, _Weight], learning: dict[str, _DroppingQuantizer]
) -> Iterator[None]:
    """Let weights pass as given, and activations the quantizers that learn."""
    for path, dropping in learning.items():
        module.set_submodule(path, dropping)
    try:
        with switched_off(weight_quantizer_of(weight.layer) for weight in weights.values()):
            yield
    finally:
        for path, dropping in learning.items():
            module.set_submodule(path, dropping.inner)


@torch.no_grad()
def _run(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([module(part.clone()) for part in x.split(_CHUNK)])  # an operation in place may write on its input


@torch.no_grad()
def _error(module: nn.Module, x: Tensor, target: Tensor) -> float:
    return (_run(module, x) - target).double().square().mean().item()
