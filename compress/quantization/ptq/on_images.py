"""What some images decide (`smooth: auto`): scales of channels, clipped ranges, products in float, and zero points.

Where 8 bits cost the result of a layer much, its inputs are divided by s_j and its weights of channel j multiplied by
s_j, as in SmoothQuant (Xiao et al., arXiv 2211.10438, equation 4), in convolutions too. The strength is the one with
the smallest error on images that the ranges were not measured on. In torch models the division is in the parameters of
what makes the tensor, or a multiplication; `onnx_ptq.quantize` does the same to files.

Negative values that images have decide whether integers without a sign begin below zero.
"""

from __future__ import annotations

import glob
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.graph.canonical import canonical_graph
from compress.graph.compare import Reference
from compress.graph.functional import constant_value, is_constant
from compress.graph.inputs import Inputs
from compress.graph.ops import PASSING, Watching, node_kind, node_module, value_users
from compress.quantization import ActivationSpec, QuantSpec, Rule
from compress.quantization.calibration.calibrators import make_calibrator
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from compress.quantization.placement.decisions import POOR_PRODUCT, SCALED, Placement, measured_rule
from compress.quantization.placement.insert import read_fx
from compress.quantization.placement.place import place
from compress.quantization.placement.targets import TABLES
from compress.quantization.placement.view import GraphView, Node
from compress.quantization.ptq.rescaling import (
    column_factor,
    column_ranges,
    multiply_inputs,
    scale_inputs,
    scale_outputs,
    shared_parameters,
    smoothing_scale,
)
from compress.quantization.ptq.walk import on_images, tensors_of

T = TypeVar("T")
# Runs the float network on images and yields the tensors of these names, float32, of each.
Watch = Callable[[Sequence[str], Sequence[T]], Iterable[Mapping[str, Tensor]]]

# For linear layers and for convolutions: signal to noise of a result below which scales are tried, the gain that is
# worth one, and the strengths that are tried. More of them for convolutions gave PP-OCRv4 2 dB on OpenVINO and took 1
# dB on ONNX Runtime, which rounds the results of convolutions too.
POOR_DB, GAIN_DB = (45.0, 34.0), (0.5, 1.0)
STRENGTHS = ((0.4, 0.55, 0.7, 0.85, 0.95), (0.5, 0.7, 0.95))
# Signal to noise below which a product of two activations stays float: DINOv2's with a softmax have 16 to 26 dB, and
# its class token 19 dB with them in 8 bits, 26 in float; its other products have 32 to 46, and the poorest takes 0.6
# dB.
FLOAT_DB = 33.0
# Gain that is worth a multiplication, where nothing before a torch model's layer can be scaled, as after a GELU.
PRODUCT_DB = 2.0
_MULTIPLY = ("openvino", "onnxruntime")  # networks for GPUs are trained fused, which a multiplication would part
# Largest range of a channel over the median of all from which convolutions are tried.
OUTLIER = 3.0
# A channel counts as at least the median over this: images that were not seen may be louder there.
QUIET = 4.0
_CROP, _ROWS, _LOUD = 32, 1024, 2
# Sampled rows of the inputs of a linear layer from which its channels are scaled and its range is clipped: the largest
# of a few rows are no range of those to come (8 rows of 192 normal values: 41 dB on them, 19 on others; 31 without).
_LEAST_ROWS = 256
_PRODUCT_IMAGES = 8
# Bytes of the tensors of one image that are in memory at a time.
_BYTES = 1 << 30


def looks_at_layers(spec: QuantSpec) -> bool:
    """True if channels are scaled and products chosen by what they cost: of integers of 8 bits."""
    both = (spec.weights, spec.activations)
    return spec.smooth == "auto" and all(part.kind == "int" and part.num_bits in (8, "auto") for part in both)


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """A layer that consumes the tensor; `compute` is its result from inputs and a weight, without the bias."""

    weight: Tensor
    groups: int
    compute: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ChannelScale:
    """What a tensor is divided by, (C,), and the signals to noise of its consumers' results in 8 bits."""

    scale: Tensor
    before_db: float
    after_db: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """The quantized layers with weights that consume a tensor; `lowest` as of its `QuantFormat`."""

    tensor: str
    layers: tuple[Node, ...]
    lowest: float = 0.0

    @property
    def convolution(self) -> bool:
        return self.layers[0].kind == "conv"


def groups_of(view: GraphView, placement: Placement, plain: Callable[[Node], bool]) -> list[Group]:
    """The tensors that quantized layers of one kind consume; `plain` says whether a layer can be rescaled."""
    paths, found = {site.path for site in placement.weights}, dict[str, list[Node]]()
    for node in view.nodes:
        weighted = node.kind in ("linear", "conv") and node.path in paths
        if weighted and node.inputs[0].kind != "input" and len(node.inputs[0].shape or ()) > 1 and plain(node):
            found.setdefault(node.inputs[0].name, []).append(node)
    lowest = {tensor: site.format.lowest for site in placement.activations for tensor, _ in site.edges}
    groups = [Group(tensor=name, layers=tuple(layers), lowest=lowest.get(name, 0.0)) for name, layers in found.items()]
    return [group for group in groups if len({layer.kind for layer in group.layers}) == 1]


def products_of(view: GraphView, placement: Placement) -> list[Node]:
    stays = {row.layer for row in placement.decisions if row.decision == "float"}
    nodes = [node for node in view.nodes if node.kind == "matmul" and node.layer not in stays]
    return [node for node in nodes if len(node.inputs) == 2 and all(each.shape for each in node.inputs)]


def choose(
    groups: Sequence[Group],
    products: Sequence[Node],
    images: Sequence[T],
    spec: QuantSpec,
    *,
    watch: Watch[T],
    consumer: Callable[[Node], Consumer | None],
    least: Callable[[Group], float],
) -> tuple[dict[str, ChannelScale], tuple[Rule, ...]]:
    """Return scales by tensor, and rules: of linear layers that gain if their largest inputs are clipped, of products.

    `least` is the gain in dB that is worth scaling a group. The tensors of a part of the groups are computed at a time.
    """
    scales, rules = dict[str, ChannelScale](), list[Rule]()
    for part in parts_in_memory(groups, lambda group: _bytes(group.layers[0].inputs[0])):
        generator = torch.Generator().manual_seed(0)
        samples: dict[str, list[Sample]] = {group.tensor: [] for group in part}
        for found in watch([group.tensor for group in part], images):
            for group in part:
                x, convolution = found[group.tensor], group.convolution
                if not x.numel():
                    continue  # of this image nothing reaches the layer, such as an expert
                taken = sample_of(x, convolution=convolution, images=len(images), generator=generator)
                samples[group.tensor].append(taken)
        for group in part:
            known = [each for layer in group.layers if (each := consumer(layer)) is not None]
            seen, asked = samples[group.tensor], spec.activations.resolved(whole=not group.convolution)
            few = not group.convolution and sum(len(one.values) for one in seen) < _LEAST_ROWS
            if not seen or few or len(known) < len(group.layers):
                continue
            scale = channel_scale(seen, known, asked, lowest=group.lowest, least=least(group))
            scales |= {} if scale is None else {group.tensor: scale}
            undecided = not group.convolution and spec.activations.calibrator == "auto" and spec.first_last_bits is None
            gain = _clipping_gain(seen, known, asked, scale, group.lowest) if undecided else 0.0
            if gain >= GAIN_DB[0]:
                clipped = replace(spec.activations, calibrator="mse")
                reason = f"clipping its largest inputs (mse) gains {gain:.1f} dB on calibration images"
                rules += [Rule(match=glob.escape(la.layer), activations=clipped, reason=reason) for la in group.layers]
    return scales, (*rules, *poor_products(products, images, spec, watch=watch))


def poor_products(
    products: Sequence[Node], images: Sequence[T], spec: QuantSpec, *, watch: Watch[T]
) -> tuple[Rule, ...]:
    rules, asked = list[Rule](), spec.activations.resolved(whole=True)
    images = (images[1::2] or images)[:_PRODUCT_IMAGES]
    for part in parts_in_memory(products, lambda node: sum(map(_bytes, node.inputs))):
        found = list(watch(list(dict.fromkeys(each.name for node in part for each in node.inputs)), images))
        for node in part:
            left, right = (each.name for each in node.inputs)
            pairs = [(values[left], values[right]) for values in found if values[left].numel() * values[right].numel()]
            db = product_db(pairs, asked) if pairs else FLOAT_DB
            if db < FLOAT_DB:
                reason = f"{POOR_PRODUCT} {db:.0f} dB on calibration images"
                rules.append(Rule(match=glob.escape(node.layer), enable=False, reason=reason))
    return tuple(rules)


def scaling_note(used: Sequence[ChannelScale]) -> tuple[str, ...]:
    if not used:
        return ()
    worst = min(used, key=lambda scale: scale.before_db)
    return (
        f"channels with outliers are scaled before {len(used)} layers (smooth: auto); the poorest went from "
        f"{worst.before_db:.0f} to {worst.after_db:.0f} dB",
    )


def parts_in_memory(items: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items in parts, whose `size` in bytes together fits in memory."""
    part: list[T] = []
    total = 0
    for item in items:
        if part and total + size(item) > _BYTES:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part


def _bytes(node: Node) -> int:
    return 4 * math.prod(node.shape or ())


def convolve(stride: Sequence[int], dilation: Sequence[int], groups: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A convolution that pads its inputs so far that each tap meets a value."""

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        padding = [-(-d * (k - 1) // 2) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        run = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return run(x, weight, None, tuple(stride), tuple(padding), tuple(dilation), groups)

    return compute


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A part of an image's tensor that stands for all of it.

    Attributes:
        values: rows (N, C), or a crop (1, C, 32...) of a convolution's inputs; with the largest values, which decide
            about the range, and the quietest rows, which that range serves worst.
    """

    values: Tensor
    ranges: Tensor


def sample_of(x: Tensor, *, convolution: bool, images: int, generator: torch.Generator) -> Sample:
    """A sample of the inputs of a layer, (..., C) or (n, C, k...) of a convolution, for one of so many images."""
    if not convolution:
        rows = x.reshape(-1, x.shape[-1])
        count = max(4, _ROWS // images)
        largest = rows.abs().amax(1).topk(min(_LOUD, len(rows))).indices
        smallest = rows.norm(dim=1).topk(min(count // 3, len(rows)), largest=False).indices
        others = torch.randperm(len(rows), generator=generator)[: count - _LOUD - count // 3]
        return Sample(values=rows[torch.cat([largest, smallest, others])], ranges=rows.abs().amax(0))
    planes = x.flatten(2).abs().amax(2)  # (n, C)
    channel = int(planes[0].argmax())
    place = np.unravel_index(int(x[0, channel].abs().argmax()), x.shape[2:])
    for axis, middle in enumerate(place, start=2):
        spare = x.shape[axis] - _CROP
        if spare > 0:
            x = x.narrow(axis, min(max(int(middle) - _CROP // 2, 0), spare), _CROP)
    return Sample(values=x[:1].clone(), ranges=planes.amax(0))


def channel_scale(
    samples: Sequence[Sample],
    consumers: Sequence[Consumer],
    spec: ActivationSpec,
    *,
    lowest: float = 0.0,
    least: float = 0.0,
) -> ChannelScale | None:
    """Choose a scale for the channels of a tensor; None if 8 bits cost little, or scales gain less than `least` dB."""
    largest = torch.stack([sample.ranges for sample in samples]).amax(0)
    inner = torch.stack([column_ranges(consumer.weight, consumer.groups) for consumer in consumers]).amax(0)
    live = (largest > 0) & (inner > 0)
    if math.isinf(least) or not bool(live.any()) or not bool(largest.isfinite().all()):
        return None
    if float(largest[live].amax()) < OUTLIER * float(largest[live].median()) and samples[0].values.ndim > 2:
        return None  # no outliers: trying out convolutions takes time
    seen = torch.stack([sample.ranges for sample in samples[::2]]).amax(0)
    found = _measured(samples[1::2] or samples, consumers, lowest)
    before = found(torch.ones_like(largest), spec)
    convolution = samples[0].values.ndim > 2
    if before >= POOR_DB[convolution]:
        return None
    after, strength = max((found(_scale(seen, inner, live, alpha), spec), alpha) for alpha in STRENGTHS[convolution])
    if after < before + max(least, GAIN_DB[convolution]):
        return None
    return ChannelScale(scale=_scale(largest, inner, live, strength), before_db=before, after_db=after)


def _clipping_gain(
    samples: Sequence[Sample],
    consumers: Sequence[Consumer],
    spec: ActivationSpec,
    scale: ChannelScale | None,
    lowest: float,
) -> float:
    """How many dB the results of layers gain if the range of their scaled inputs is chosen by the squared error."""
    found = _measured(samples[1::2] or samples, consumers, lowest)
    factor = torch.ones_like(samples[0].ranges) if scale is None else scale.scale
    return found(factor, replace(spec, calibrator="mse")) - found(factor, spec)


def product_db(pairs: Sequence[tuple[Tensor, Tensor]], spec: ActivationSpec) -> float:
    """The signal to noise of a product of two activations in 8 bits, dB: the mean over the rows of its results."""
    left, right = (range_of([pair[side] for pair in pairs], spec) for side in (0, 1))
    noise = torch.stack([_noise(a @ b, _rounded(a, *left) @ _rounded(b, *right), (-1,)) for a, b in pairs])
    return float(-10 * torch.log10(noise.mean().clamp_min(1e-12)))


def range_of(values: Sequence[Tensor], spec: ActivationSpec) -> tuple[Tensor, bool]:
    """The range that calibration chooses for a tensor, and whether it has a sign."""
    signed = any(bool((x < 0).any()) for x in values)
    calibrator = make_calibrator(
        spec.calibrator, num_bits=spec.num_bits, axis=None, signed=signed, percentile=spec.percentile
    )
    for x in values:
        calibrator.collect(x.reshape(-1))
    return torch.ones(()) if calibrator.only_zeros else calibrator.compute_amax(), signed


def _measured(
    samples: Sequence[Sample], consumers: Sequence[Consumer], lowest: float
) -> Callable[[Tensor, ActivationSpec], float]:
    """The signal to noise of the consumers' results as a function of the scale and of how the range is chosen."""
    x = [sample.values for sample in samples]
    if x[0].ndim == 2 or len({values.shape for values in x}) == 1:
        x = [torch.cat(x)]
    wanted = [[consumer.compute(part, consumer.weight) for part in x] for consumer in consumers]
    axes = (-1,) if x[0].ndim == 2 else tuple(range(1, x[0].ndim))

    def found(scale: Tensor, spec: ActivationSpec) -> float:
        shape = (1, -1, *(1,) * (x[0].ndim - 2))
        inputs = [part / scale.reshape(shape) for part in x]
        amax, signed = range_of(inputs, spec)
        least = min(float(part.min()) for part in inputs) if signed and lowest else 0.0
        noise = []
        for consumer, results in zip(consumers, wanted, strict=True):
            weight = consumer.weight * column_factor(consumer.weight, scale, consumer.groups)
            rounded = _rounded(weight, weight.abs().flatten(1).amax(1).reshape(-1, *(1,) * (weight.ndim - 1)), True)
            noise += [
                _noise(y, consumer.compute(_rounded(part, amax, signed, least), rounded), axes)
                for y, part in zip(results, inputs, strict=True)
            ]
        return float(-10 * torch.log10(torch.stack(noise).mean().clamp_min(1e-12)))

    return found


def _scale(largest: Tensor, inner: Tensor, live: Tensor, strength: float) -> Tensor:
    quiet = largest.clamp_min(float(largest[live].median()) / QUIET)
    scale = smoothing_scale(torch.where(live, quiet, 0.0), inner, strength)
    return torch.where(live, scale / scale[live].log().mean().exp(), 1.0)


def _rounded(x: Tensor, amax: Tensor, signed: bool, lowest: float = 0.0) -> Tensor:
    quant_format = QuantFormat(signed=signed, narrow=signed and not lowest, offset=lowest < 0, lowest=lowest)
    return fake_quantize(x, scale_from_amax(amax, quant_format).clamp_min(1e-12), quant_format)


def _noise(wanted: Tensor, found: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mean over rows, or images, of the squared error over the squared result."""
    return ((found - wanted).pow(2).sum(axes) / wanted.pow(2).sum(axes).clamp_min(1e-12)).mean()


Image = TypeVar("Image")

# The other operand of a sum or product (first) with a tensor (second), if it is a constant.
Constant = Callable[[Node, Node], Tensor | None]

# Images whose values decide about zero points and biases.
LOOKED_AT = 16
# Share of the range that is left for images that were not looked at.
MARGIN = 1 / 16
# Largest share of the negative range in the positive one for which a zero point is worth it.
GAIN = 0.75


def place_on_images(
    graph_module: fx.GraphModule, spec: QuantSpec, batches: Sequence[Any], *, all_reduce: bool = False
) -> Placement:
    """Decide where quantizers are placed in a float graph (`place`), with zero points from images."""
    view = read_fx(graph_module)
    placement = place(view, spec)
    tensors = frozenset(signed_tensors(placement, spec))
    if not tensors or not batches:
        return placement
    nodes = {node.name: node for node in graph_module.graph.nodes}

    def ranges(images: Sequence[tuple[Tensor, ...]]) -> dict[str, tuple[float, float]]:
        found: dict[str, tuple[float, float]] = {}
        for image in spread(images):
            Watching(graph_module, tensors, partial(widen, found)).run(*image)
        return found

    def constant(user: Node, node: Node) -> Tensor | None:
        operands = nodes[user.name].args
        others = [each for each in operands if each is not nodes[node.name]]
        if len(operands) != 2 or len(others) != 1 or not is_constant(others[0]):
            return None
        value = constant_value(graph_module, others[0]) if isinstance(others[0], fx.Node) else others[0]
        return torch.as_tensor(value).detach().float().cpu()

    seen = on_images(ranges, graph_module, batches, all_reduce=all_reduce) or {}
    return place(view, spec, lowest_expected(view, seen, constant))


def widen(ranges: dict[str, tuple[float, float]], name: str, x: Tensor) -> None:
    if x.numel():
        low, high = ranges.get(name, (math.inf, -math.inf))
        ranges[name] = min(low, float(x.min())), max(high, float(x.max()))


def spread(images: Sequence[Image]) -> Sequence[Image]:
    return images[:: -(-len(images) // LOOKED_AT)]


def signed_tensors(placement: Placement, spec: QuantSpec) -> list[str]:
    """The tensors with a sign that may have a zero point: none where specification or target has none."""
    if not looks_at_layers(spec) or not TABLES[placement.target].zero_points:
        return []
    signed = [site for site in placement.activations if site.format.signed and not site.format.lowest]
    return list(dict.fromkeys(tensor for site in signed for tensor, _ in site.edges))


def lowest_expected(view: GraphView, seen: Mapping[str, tuple[float, float]], constant: Constant) -> dict[str, float]:
    """The value that each tensor is not expected below, if few integers are enough there, from (lowest, highest)."""
    flat = _flat_below(view, constant)
    lowest = {  # other images are not expected below it
        name: max(min(low - MARGIN * (high - low), -MARGIN * high), flat.get(name, -math.inf))
        for name, (low, high) in seen.items()
    }
    return {name: least for name, least in lowest.items() if 0 < -least < GAIN * seen[name][1]}


def _flat_below(view: GraphView, constant: Constant) -> dict[str, float]:
    """The tensors whose values below one, which is below 0, make no difference to any operation that consumes them."""
    flat = dict[Node, float]()
    for node in reversed(view.nodes):
        flat[node] = min((_flat_for(node, user, flat[user], constant) for user in node.consumers), default=-math.inf)
    return {node.name: least for node, least in flat.items() if -math.inf < least < 0}


def _flat_for(node: Node, user: Node, result: float, constant: Constant) -> float:
    """The value below which one consumer is flat; `result` is that of the consumer's own result."""
    if user.kind in PASSING or (user.traits.free and user.traits.category == "movement"):
        return result
    if user.kind not in ("add", "mul"):
        return user.traits.flat_below
    value = constant(user, node)
    if value is None or not value.numel() or not bool(value.isfinite().all()):
        return -math.inf
    if user.kind == "add":
        return float((result - value).min())
    return float((result / value).min()) if bool((value > 0).all()) else -math.inf


# Operations that a positive factor for each channel passes.
_THROUGH = PASSING | {"relu", "leaky_relu"}
# Those that it passes where channels are the second axis.
_POOLS = frozenset({"max_pool", "adaptive_max_pool", "avg_pool", "adaptive_avg_pool"})


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Result of `scale_channels`: the model (the caller's own if nothing was scaled), rules for products, and notes."""

    model: nn.Module
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()


@torch.no_grad()
def scale_channels(
    model: nn.Module, example_inputs: Inputs, batches: Sequence[Any], spec: QuantSpec, *, all_reduce: bool = False
) -> Scaled:
    """Scale channels of a copy of a float model, and choose products that stay float, as rank 0 does."""
    if not batches:
        return Scaled(model=model)
    graph_module = canonical_graph(model, example_inputs, fold=False)
    view = read_fx(graph_module)
    placement = place_on_images(graph_module, spec, batches, all_reduce=all_reduce)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    layers = _Layers(graph_module)
    groups = groups_of(view, placement, lambda node: layers.alone(node.path))
    products = products_of(view, placement)
    if not groups and not products:
        return Scaled(model=model)
    made = {group.tensor: layers.producer(nodes[group.tensor], group) for group in groups}

    def least(group: Group) -> float:
        multiplies = not group.convolution and spec.only_target in _MULTIPLY
        return 0.0 if made[group.tensor] else PRODUCT_DB if multiplies else math.inf

    chosen = partial(
        choose,
        groups,
        products,
        spec=spec,
        watch=lambda names, images: map(partial(tensors_of, graph_module, frozenset(names)), images),
        consumer=partial(_consumer, graph_module),
        least=least,
    )
    scales, rules = on_images(chosen, graph_module, batches, all_reduce=all_reduce) or ({}, ())
    if not scales:
        return Scaled(model=model, rules=rules)
    reference = Reference.of(model, example_inputs)
    for group in (group for group in groups if group.tensor in scales):
        paths, producer = [layer.path for layer in group.layers], made[group.tensor]
        factor = scales[group.tensor].scale.to(layers.module(paths[0]).weight.device)
        if producer is None:
            multiply_inputs(graph_module, nodes[group.tensor], paths, 1 / factor)
            rules += tuple(measured_rule(glob.escape(layer.layer), SCALED) for layer in group.layers)
        else:
            producer(1 / factor)
        for path in paths:
            scale_inputs(layers.module(path), factor)
    reference.check(graph_module, "scaling channels")
    return Scaled(model=graph_module, rules=rules, notes=scaling_note(list(scales.values())))


def _consumer(graph_module: fx.GraphModule, layer: Node) -> Consumer:
    module: Any = graph_module.get_submodule(layer.path)
    weight, groups = module.weight.detach().float().cpu(), getattr(module, "groups", 1)
    if layer.kind == "linear":
        return Consumer(weight=weight, groups=1, compute=lambda x, w: x @ w.T)
    return Consumer(weight=weight, groups=groups, compute=convolve(module.stride, module.dilation, groups))


class _Layers:
    """Which layers and normalizations of a graph can be rescaled."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.calls = Counter(str(n.target) for n in graph_module.graph.nodes if n.op == "call_module")
        self.shared = shared_parameters(graph_module)

    def module(self, path: str) -> Any:
        return self.graph_module.get_submodule(path)

    def alone(self, path: str) -> bool:
        own = self.calls[path] == 1 and path not in self.shared
        return own and not parametrize.is_parametrized(self.module(path))

    def producer(self, node: fx.Node, group: Group) -> Callable[[Tensor], None] | None:
        """What multiplies the channels of a tensor by factors (C,), where it is made; None if nothing can."""
        if len(value_users(node)) != len(group.layers):
            return None
        through = _THROUGH | _POOLS if group.convolution else _THROUGH
        while node_kind(node) in through:
            (node, *more) = node.all_input_nodes
            if more or len(value_users(node)) != 1:
                return None
        kind = node_kind(node)
        if node.op != "call_module" or not self.alone(str(node.target)):
            return None
        module: Any = node_module(node)
        if kind in (("conv", "conv_transpose") if group.convolution else ("linear",)):
            return partial(scale_outputs, module)
        rank = len(group.layers[0].inputs[0].shape or ())
        norms = {"batch_norm": group.convolution or rank == 2, "layer_norm": not group.convolution}
        one_axis = len(getattr(module, "normalized_shape", (1,))) == 1
        if norms.get(kind, False) and one_axis and isinstance(getattr(module, "weight", None), Tensor):
            return partial(_scale_norm, module)
        return None


def _scale_norm(module: Any, factor: Tensor) -> None:
    module.weight.mul_(factor)
    if getattr(module, "bias", None) is not None:
        module.bias.mul_(factor)
