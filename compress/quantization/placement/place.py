"""Placement: which tensors of a graph get a quantizer, which do not, and why.

The table of the target (`targets`) names the operations whose inputs or results are to be quantized. Each such request
(`requests`) is handled in three steps:

1. it is traced back through operations that commute with quantization (max pool, flatten, ...) to the origin of the
   tensor, and through a concat to all of its inputs, which then share one scale;
2. requests for one tensor become one quantizer, however many consumers ask for it;
3. a residual add requests its identity branch only, so that layer, add and activation stay one kernel.

Every request, granted or refused, is a row of the result. Nothing here changes a graph; `insert` does.

A detection head is found from the graph, and the parts of it that 8 bits harm more than they gain in time stay float.
A layer is final if no other layer follows it. A graph has a detection head if final convolutions at one resolution
lead to different results (boxes and classes), if a convolution follows a softmax, or if results of final convolutions
are computed with tensors that do not depend on the image (anchors, grids, strides). Final convolutions that are summed,
as in segmentation, lead to one result.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from scipy.cluster.hierarchy import DisjointSet

from compress.errors import QuantizationError, near_misses
from compress.graph.ops import PASSING, WEIGHTED, kinds
from compress.quantization import MOST_BITS, ActivationSpec, Head, QuantSpec, Rule, WeightSpec
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.decisions import ActivationSite, Decision, Placement, WeightSite
from compress.quantization.placement.targets import TABLES, TAKES_APART, TargetTable
from compress.quantization.placement.view import GraphView, Node, lowest_values, never_negative, of_inputs
from compress.quantization.quantizer import quantizer_path

_LAYERS = kinds(lambda t: t.category in {"weighted", "product"})
_MOVED = PASSING | kinds(lambda t: t.category == "movement")
_DECODING = kinds(lambda t: t.category == "arithmetic") | {"sigmoid", "softmax", "softplus", "tanh"}
_CONVOLUTIONS = frozenset({"conv", "conv_transpose"})

# Share of the multiply-accumulates from which on last convolutions at one resolution are no head of the network.
_MOST_OF_A_HEAD = 0.5
_EXPECTATION = (
    "a product with a softmax's result takes the mean of a distribution (DFL of YOLO's boxes): small probabilities "
    "that 8 bits drop move the box"
)
_BOXES = "decoding of boxes and scores: exp, sigmoid, anchors and strides have ranges that 256 steps do not hold"
_NMS = "non-maximum suppression sorts and compares boxes, which no engine does in 8 bits"


def head_parts(view: GraphView, head: Head) -> Mapping[Node, tuple[str, str]]:
    """(Rule, reason) of the operations of a detection head that stay float; see `QuantSpec.head`."""
    found = {node: ("NMS stays float", _NMS) for node in view.nodes if node.kind == "nms"}
    if head == "quantize":
        return found
    means = {node for node in view.nodes if _is_expectation(node)}
    tail = _tail(view, means)
    finals = [node for node in view.nodes if node.kind in _CONVOLUTIONS and node in tail and node not in means]
    inner = {node.path for node in view.nodes if node.path and node not in tail}
    finals = [node for node in finals if node.path and node.path not in inner]  # others are called before layers too
    found |= dict.fromkeys(means, ("expectation stays float", _EXPECTATION))
    sources = _sources(view, finals, tail)
    detects = bool(means) or _leads_apart(finals, sources) or _uses_anchors(view, finals, sources)
    if detects:
        decoding = [node for node in sources if node.kind in _DECODING and node.floating and node not in means]
        found |= dict.fromkeys(decoding, ("box decoding stays float", _BOXES))
    price = sum(map(_macs, finals)) / (sum(map(_macs, view.nodes)) or 1)
    levels = {(node.shape or ())[2:] for node in finals}
    small = price < _MOST_OF_A_HEAD or len(levels) > 1
    if head == "float" or (detects and small and _has_trunk(view, finals)):
        reason = (
            f"a last convolution of a head, whose errors no layer makes up for; all {len({n.path for n in finals})} "
            f"together have {price:.1%} of the network's multiply-accumulates (head: quantize takes them in)"
        )
        found |= dict.fromkeys(finals, ("last convolution of a head", reason))
    return found


def _has_trunk(view: GraphView, finals: list[Node]) -> bool:
    last, leads = set(finals), dict[Node, bool]()
    for node in view.nodes:
        leads[node] = any(leads.get(source, False) or source.kind in _LAYERS for source in node.inputs)
    return any(leads[node] for node in last)


def _is_expectation(node: Node) -> bool:
    """True for a product of a softmax's result with constants: DFL."""
    if node.kind not in _LAYERS or not node.tensors:
        return False
    activations = [source for source in node.tensors if source.kind != "constant"]
    if len(activations) != 1:
        return False  # attention multiplies two activations
    source = activations[0]
    while source.kind in _MOVED and source.tensors:
        source = source.tensors[0]
    # Talking heads mix probabilities, and have as many afterwards.
    return source.kind == "softmax" and math.prod(node.shape or ()) < math.prod(source.shape or (math.inf,))


def _tail(view: GraphView, means: set[Node]) -> set[Node]:
    """The nodes that no layer follows, expectations aside."""
    leads: dict[Node, bool] = {}
    for node in reversed(view.nodes):
        leads[node] = any((user.kind in _LAYERS and user not in means) or leads[user] for user in node.consumers)
    return {node for node in view.nodes if not leads[node]}


def _sources(view: GraphView, finals: list[Node], tail: set[Node]) -> dict[Node, frozenset[str]]:
    """The final layers that each node of the tail depends on; nodes that depend on none are left out."""
    sources = {node: frozenset({node.path}) for node in finals}
    for node in view.nodes:
        if node in tail and node not in sources:
            found = frozenset[str]().union(*(sources.get(source, frozenset()) for source in node.inputs))
            if found:
                sources[node] = found
    return sources


def _leads_apart(finals: list[Node], sources: Mapping[Node, frozenset[str]]) -> bool:
    """True if final layers at one resolution lead to different results."""
    groups = DisjointSet({node.path for node in finals})
    for node in sources:
        if node.traits.category == "arithmetic":
            apart = {sources[source] for source in node.inputs if source in sources}
            together = sorted(frozenset[str]().union(*apart)) if len(apart) > 1 else []
            for path in together[1:]:
                groups.merge(together[0], path)
    by_size: dict[tuple[int, ...], set[str]] = {}
    for node in finals:
        by_size.setdefault((node.shape or ())[2:], set()).add(groups[node.path])
    return any(len(found) > 1 for found in by_size.values())


def _uses_anchors(view: GraphView, finals: list[Node], sources: Mapping[Node, frozenset[str]]) -> bool:
    """True if results of final layers are computed with tensors that do not depend on the image."""
    of_image = of_inputs(view)
    return any(
        node.traits.category == "arithmetic"
        and node.kind != "where"  # which takes zeros where a descriptor has no length
        and any(s not in of_image and s.shape and not _is_affine(s, node) for s in node.tensors)
        for node in sources
        if node not in finals
    )


def _is_affine(constant: Node, node: Node) -> bool:
    """True for one number a channel of an image, as a frozen BatchNorm has them; anchors differ by position."""
    rank, shape = len(node.shape or ()), constant.shape or ()
    return rank >= 4 and len(shape) in {rank - 1, rank} and math.prod(shape[2 - rank :]) == 1


def _macs(node: Node) -> int:
    weight = node.parameters.weight() if node.parameters is not None and node.kind in _LAYERS else None
    if weight is None or not node.tensors:
        return 0
    whole = node.tensors[0].shape if node.kind == "conv_transpose" else node.shape
    places = (whole or ())[:1] + ((whole or ())[2:] if node.kind in _CONVOLUTIONS else (whole or ())[1:-1])
    return math.prod(places) * math.prod(weight.shape)


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings of one layer after all rules; `rule` is the `match` of the one that decided, "" = the defaults."""

    enable: bool
    weights: WeightSpec
    activations: ActivationSpec
    rule: str = ""
    reason: str = ""


def resolve_rules(view: GraphView, spec: QuantSpec) -> dict[Node, LayerSettings]:
    spec = replace(spec, rules=_rules_of(spec))
    named = [node for node in view.nodes if node.traits.category not in {"graph", "shape"}]
    names = {node: {node.layer, node.name} for node in named}
    for rule in spec.rules:
        if not any(_matches(rule, own) for own in names.values()):
            known = sorted(set().union(*names.values()))
            raise QuantizationError(
                f"quantization.rules: match {rule.match!r} matches no layer{_hint(rule.match, view, known)}; "
                "`python -m compress inspect model` lists the names, and globs such as 'layer1.*' are allowed"
            )
    weighted = [node for node in named if node.kind in WEIGHTED] if spec.first_last_bits is not None else []
    ends = {*weighted[:1], *weighted[-1:]}
    return {node: _settings(names.get(node, set()), spec, end=node in ends) for node in view.nodes}


def _settings(names: set[str], spec: QuantSpec, *, end: bool) -> LayerSettings:
    last: Rule | None = None
    for rule in spec.rules:
        if _matches(rule, names) and not rule.channel_scales:
            last = rule
    weights, activations = (last and last.weights) or spec.weights, (last and last.activations) or spec.activations
    if last is None and end and spec.first_last_bits is not None:
        bits = spec.first_last_bits
        weights, activations = replace(weights, num_bits=bits), replace(activations, num_bits=bits)
    return LayerSettings(
        enable=last is None or last.enable,
        weights=weights,
        activations=activations,
        rule=last.match if last else "",
        reason=last.reason if last else "",
    )


def scaled_layers(view: GraphView, spec: QuantSpec) -> list[Node]:
    """The linear layers whose input has a factor for each channel, as rules say."""
    rules = [rule for rule in _rules_of(spec) if rule.channel_scales]
    linear = [node for node in view.nodes if node.kind == "linear"] if rules else []
    return [node for node in linear if any(_matches(rule, {node.layer, node.name}) for rule in rules)]


def _rules_of(spec: QuantSpec) -> tuple[Rule, ...]:
    return tuple(rule for rule in spec.rules if rule.target in (None, spec.only_target))


def _matches(rule: Rule, names: set[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, rule.match) for name in names)


def _hint(match: str, view: GraphView, known: list[str]) -> str:
    leaf = next((leaf for leaf in view.leaves if match.startswith(f"{leaf.path}.")), None)
    if leaf is not None:
        return f" ({leaf.path} is kept whole and stays float: {leaf.reason})"
    inside = [name for name in known if name.startswith(f"{match}.")]
    return f", did you mean '{match}.*' ({len(inside)} layers)?" if inside else near_misses(match, known)


_FLOAT32_PRODUCT = (
    "the model casts what it multiplies to float32 (`.float()`), as linear attention does where values and their "
    "normalizers are in one tensor; a rule that enables it quantizes it"
)
_MULTIPLYING = WEIGHTED | {"matmul", "addmm"}
_ON_THE_WAY = frozenset({"mul", "div", "add", "sub", "neg", "concat", "stack", "identity"})
_PHASE = "sines and cosines alone consume it, and a step of 8 bits is a large part of their period"
_CONSTANT_FACTOR = (
    "a factor is a parameter or constant that is no layer's weight, and an engine computes in 8 bits only where both "
    "have them; write it as a linear layer"
)


@dataclass(frozen=True)
class Request:
    """A tensor that `layer` wants quantized where `consumer` consumes it; with `signed`, as int8 without zero point."""

    tensor: Node
    consumer: Node
    layer: Node
    rule: str
    reason: str
    signed: bool = False


@dataclass
class Requests:
    """The requests of one operation; `weight` is None if none is quantized, `refused` are rows of what is not."""

    tensors: list[Request] = field(default_factory=list)
    weight: WeightSite | None = None
    refused: list[Decision] = field(default_factory=list)

    def refuse(self, node: Node, rule: str, reason: str) -> None:
        self.refused.append(float_row(node, rule, reason))


def float_row(node: Node, rule: str, reason: str) -> Decision:
    return Decision(tensor=node.name, layer=node.layer, decision="float", rule=rule, reason=reason)


def requests_of(
    node: Node, table: TargetTable, settings: Mapping[Node, LayerSettings], depth: Mapping[Node, int]
) -> Requests:
    """The requests of one operation, from the target's table, the settings after the rules and the `depths`."""
    found, own = Requests(), settings[node]
    limit, larger = table.windows.get(node.kind, (node.window, ""))
    if node.window > limit:
        found.refuse(node, "float on the engine", f"its window of {node.window} is larger than {limit}, {larger}")
        return found
    residual = is_residual_add(node, table.residual_after)
    if node.kind not in table.inputs and node.kind not in table.outputs and not residual:
        if node.kind in table.stays_float and (node.shape is not None or node.path):
            found.refuse(node, f"{node.kind} stays float", _why_float(node, table.stays_float[node.kind]))
        return found
    over_image = bool(node.tensors) and len(node.tensors[0].shape or ()) == 4 and node.axes == frozenset({2, 3})
    if node.kind == "mean" and not over_image:  # else a global average pool by another name
        return found
    if node.kind in table.fuses | {"batch_norm"} and _is_fused(node, table):
        return found
    if not own.enable:
        found.refuse(node, f"rule: {own.rule}", own.reason or "left float by the recipe")
        return found
    if node.kind == "matmul" and not own.rule and any(_cast_to_float32(a, table) for a in node.tensors):
        found.refuse(node, "float32 product", _FLOAT32_PRODUCT)
        return found
    if not own.rule and node.kind in _MULTIPLYING and _is_phase(node):
        found.refuse(node, "phase", _PHASE)
        return found
    if node.kind in _MULTIPLYING - WEIGHTED and any(_is_constant(factor) for factor in _factors(node)):
        found.refuse(node, "constant factor", _CONSTANT_FACTOR)
        return found
    if node.refusal:
        found.refuse(node, "cannot quantize", f"{node.layer} {node.refusal}")
        return found
    if not own.rule and node.kind in table.grouped_float and node.parameters and node.parameters.groups != 1:
        found.refuse(node, "float on the engine", table.grouped_float[node.kind])
        return found
    if node.kind in table.wide and own.activations.num_bits <= MOST_BITS:
        found.refuse(node, f"{node.kind} stays float", _why_float(node, table.wide[node.kind]))
        return found
    if node.kind in WEIGHTED:
        found.weight = _weight_site(node, own.weights, table)
    if residual and "add" not in table.inputs:
        _request_residual(found, node, table, settings, depth)
    elif node.kind in table.inputs:
        for place, source in enumerate(_factors(node)):
            signed = place == 1 and table.signed_second
            found.tensors.append(Request(source, node, node, f"{node.kind} input", table.inputs[node.kind], signed))
    asked = residual or "add" in table.inputs
    if node.kind in table.outputs and (node.kind != "add" or (asked and not found.refused)):
        _request_output(found, node, table)
    return found


def _factors(node: Node) -> list[Node]:
    """The tensors that an operation multiplies, without the matrix that `addmm` adds."""
    return node.tensors[:1] if node.kind in WEIGHTED else node.tensors[1:] if node.kind == "addmm" else node.tensors


def _is_constant(node: Node) -> bool:
    """True for a constant, also one that was moved about or repeated for each image."""
    moved = node.traits.category == "movement" and bool(node.inputs)
    fixed = node.kind == "constant" or node.traits.category == "shape"
    return fixed or (moved and all(map(_is_constant, node.inputs)))


def _is_phase(node: Node) -> bool:
    """True if nothing but sines and cosines consumes a tensor, times a constant or moved about."""
    found = [user for user in node.consumers if user.traits.category != "shape"]
    return bool(found) and all(
        user.kind in ("sin", "cos")
        or ((user.kind in _ON_THE_WAY or user.traits.category == "movement") and _is_phase(user))
        for user in found
    )


def _why_float(node: Node, reason: str) -> str:
    if node.leaf is not None:
        return f"{node.leaf.kind} is kept whole, with all that is in it: torch.fx cannot trace it ({node.leaf.reason})"
    return reason + (f" ({node.note})" if node.note else "")


def _request_residual(
    found: Requests,
    node: Node,
    table: TargetTable,
    settings: Mapping[Node, LayerSettings],
    depth: Mapping[Node, int],
) -> None:
    """Request the identity branch of an add (or both), if an INT8 layer fuses with it."""
    fused = fused_branch(node, table.residual_after, depth)
    if fused is None:
        found.refuse(node, "add stays float", "no branch comes from a layer that the add could fuse with")
        return
    branch, layer = fused
    if table.residual == "none":
        found.refuse(node, "add stays float", "the recipe leaves both branches of residual sums float")
        return
    if not settings[layer].enable or layer.refusal:
        found.refuse(node, "add stays float", f"the layer it would fuse with, {layer.layer}, is float")
        return
    if table.residual == "both" and not table.results and not settings[node].rule and _ends_float(node, table):
        found.refuse(node, "add stays float", "only norms or the network's output take its result")
        return
    for source in node.tensors:
        if source is not branch or table.residual == "both":
            text = f"the branch beside {layer.layer} is INT8, so that layer, add and activation are one kernel"
            if layer.kind not in WEIGHTED:
                text = f"{layer.layer} and the sum are computed in integers between pairs"
            found.tensors.append(Request(source, node, node, "residual add", text))


def _ends_float(node: Node, table: TargetTable) -> bool:
    # True if a tensor goes to norms in float and to the outputs alone, also moved or through activations and sums.
    moves = ("activation", "movement", "passing")
    return all(
        user.kind == "output"
        or user.traits.category == "shape"
        or (user.traits.category == "normalization" and user.kind in table.stays_float)
        or ((user.traits.category in moves or is_residual_add(user, table.residual_after)) and _ends_float(user, table))
        for user in node.consumers
    )


def _request_output(found: Requests, node: Node, table: TargetTable) -> None:
    """Request a result where its fused chain ends, unless the model returns it."""
    end = _end_of_chain(node, table)
    if end is None:
        return
    if _is_model_output(end, table) and not table.results:
        found.refuse(node, "output stays float", "the model's result and what follows it are not quantized")
        return
    rule, reason = f"{node.kind} output", table.outputs[node.kind]
    consumers = [
        consumer
        for consumer in end.consumers
        if consumer.kind != "shape" and (table.results or consumer.kind != "output")
    ]
    found.tensors += [Request(end, consumer, node, rule, reason) for consumer in consumers]


def _end_of_chain(node: Node, table: TargetTable) -> Node | None:
    """The last operation that fuses with one; None if that is an add, which requests its own result."""
    # A BatchNorm after an activation is not folded into the layer before, and does not fuse.
    end, activated = node, False
    while len(end.consumers) == 1:
        (consumer,) = end.consumers
        # a BatchNorm over the channels: that of a linear layer's tokens is over the tokens
        of_channels = node.kind != "linear" or len(node.shape or ()) == 2
        norm = consumer.kind == "batch_norm" and not activated and of_channels
        clips = consumer.kind != "clamp" or consumer.low == 0.0 or not table.clips_at_zero
        fuses = (consumer.kind in table.fuses and clips) or (consumer.kind in PASSING and not consumer.converts) or norm
        absorbs = table.residual == "identity" and node is end and is_residual_add(consumer, table.residual_after)
        if not fuses and not absorbs:
            break
        end, activated = consumer, activated or consumer.kind in table.fuses
        if end.kind == "add":
            return None
    return end


def _is_fused(node: Node, table: TargetTable) -> bool:
    """True if an activation or a BatchNorm is part of the operation before it, which asks for its result."""
    source, fusing = node, table.fuses | {"batch_norm"} | PASSING
    while source.tensors and len(source.tensors[0].consumers) == 1:
        source = source.tensors[0]
        if source.kind not in fusing:
            break
    end = (_end_of_chain(source, table) if source.kind in table.outputs else None) or source
    while end not in (node, source):
        end = end.tensors[0]
    return end is node and source is not node


def _is_model_output(node: Node, table: TargetTable) -> bool:
    """True if all consumers of a tensor, through operations that commute, are the graph's output."""
    return all(
        consumer.kind == "output" or (consumer.kind in table.commutes and _is_model_output(consumer, table))
        for consumer in node.consumers
    )


def _cast_to_float32(tensor: Node, table: TargetTable) -> bool:
    """True if the model calls `.float()` on a tensor, or on one whose elements this one moves."""
    while tensor.cast != "float32":
        if tensor.kind not in table.commutes or not tensor.tensors:
            return False
        tensor = tensor.tensors[0]
    return True


def _weight_site(node: Node, spec: WeightSpec, table: TargetTable) -> WeightSite:
    parameters = node.parameters
    axis = parameters.axis if parameters is not None and spec.axis is not None else None
    if axis == 1 and parameters is not None and parameters.groups != 1:
        axis = None  # the axis holds the outputs of one group only; a scale for each does not exist in ONNX
    automatic = table.auto_bits if spec.kind == "int" else 8
    bits = automatic if spec.num_bits == "auto" else spec.num_bits
    narrow = not table.all_integers or bits == MOST_BITS
    quant_format = QuantFormat(num_bits=bits, axis=axis, narrow=narrow, kind=spec.kind)
    return WeightSite(path=node.path, format=quant_format, spec=spec)


# Operations that do not keep a layer and the add apart.
_PASSED = PASSING | {"batch_norm"}


def depths(nodes: Iterable[Node]) -> dict[Node, int]:
    """Number of weighted layers on the longest path from the input to each node."""
    depth: dict[Node, int] = {}
    for node in nodes:
        depth[node] = max((depth[source] for source in node.inputs), default=0) + (node.kind in WEIGHTED)
    return depth


def is_residual_add(node: Node, kinds: frozenset[str]) -> bool:
    """True if `node` adds two feature maps of one shape, one of which may come from a layer of `kinds`."""
    if node.kind != "add":
        return False
    sources = node.tensors
    shapes = {source.shape for source in sources}
    return len(sources) == 2 and len(shapes) == 1 and len(sources[0].shape or ()) >= 4


def fused_branch(node: Node, kinds: frozenset[str], depth: Mapping[Node, int]) -> tuple[Node, Node] | None:
    """(branch, layer of `kinds`) that an add fuses with: of branches that end in a layer, the longest.

    In a ResNet's downsampling block both branches end in a convolution.
    """
    found = []
    for source in node.tensors:
        layer, alone = source, len(source.consumers) == 1
        while layer.kind in _PASSED and layer.tensors:
            layer = layer.tensors[0]
            alone = alone and len(layer.consumers) == 1
        if layer.kind in kinds and (layer.parameters is not None or layer.kind not in WEIGHTED) and alone:
            found.append((source, layer))
    return max(found, key=lambda pair: depth[pair[1]], default=None)


_MATRIX_PRODUCTS = frozenset({"linear", "matmul", "addmm"})
_UNKNOWN = "unknown stays float"  # says something only where no product has a reason of its own
_REFUSALS = {
    "cannot quantize",
    "constant factor",
    "last convolution of a head",
    "float on the engine",
    "conv_transpose stays float",
    "attention stays float",
    "window_attention stays float",
    "einsum stays float",
    "contraction stays float",
    "recurrent stays float",
    "deform_conv stays float",
}
_APART = "the recipe gives its inputs scales of their own"
_OF_CONSTANTS = "it computes with constants and sizes alone, once for all images"
_WITH_A_CONSTANT = "its other operand is a number or a constant, which has no scale: the fallback computes it"
_OWN_SCALE = "; a scale of its own, apart from the other parts of the tensor (such as query, key and value)"


def place(view: GraphView, spec: QuantSpec, seen: Mapping[str, float] | None = None) -> Placement:
    """Decide where quantizers are placed.

    `view` has shapes; BatchNorm is folded or kept. `seen` has values, below 0, that tensors are not expected below.
    """
    if any(node.kind == "quantizer" for node in view.nodes):
        raise QuantizationError("the model is quantized already; quantize the float model, or train this one as it is")
    target = spec.only_target
    table = replace(TABLES[target], auto_bits=WeightSpec().bits_for(target))
    if spec.residual is not None:
        table = replace(table, residual=spec.residual)
    settings, depth = resolve_rules(view, spec), depths(view.nodes)
    heads, computed = head_parts(view, spec.head), of_inputs(view)
    order = {node: i for i, node in enumerate(view.nodes)}
    positive = never_negative(view) if table.unsigned else set()
    scales = DisjointSet()
    weights: dict[str, WeightSite] = {}  # a layer may be called twice
    traced: list[Request] = []
    floats: list[tuple[int, Decision]] = []
    apart = {node for node in view.nodes if node.kind == "concat" and not settings[node].enable}
    floats += [(order[node], float_row(node, "concat", settings[node].reason or _APART)) for node in apart]
    for node in view.nodes:
        if node in heads and not settings[node].rule:
            floats.append((order[node], float_row(node, *heads[node])))
            continue
        if node.kind in _LAYERS and node not in computed:
            floats.append((order[node], float_row(node, "constant", _OF_CONSTANTS)))
            continue
        alone = node.traits.category == "arithmetic" and len(computed.intersection(node.tensors)) < 2
        if alone and node.kind in table.inputs and node.shape is not None:
            floats.append((order[node], float_row(node, f"{node.kind} stays float", _WITH_A_CONSTANT)))
            continue
        found = requests_of(node, table, settings, depth)
        floats += [(order[node], row) for row in found.refused]
        if found.weight is not None:
            weights.setdefault(found.weight.path, found.weight)
        first = len(traced)
        for request in found.tensors:
            origins, constants = _trace_back(request, table, positive, apart, computed)
            floats += [(order[request.layer], row) for row in constants]
            traced += _share_scale(request, origins, scales, table)
        for item in traced[first:] if node.kind in table.one_scale else ():
            scales.merge(traced[first].tensor, item.tensor)
    _check_anything(view, table, bool(weights or traced), [row for _, row in floats])
    lowest = _lowest_values(view, positive, seen or {}) if table.zero_points else {}
    groups: dict[Node, list[Request]] = {}
    for item in traced:
        groups.setdefault(scales[item.tensor], []).append(item)
    smoothed = spec.smooth == "auto"
    sites, rows = _sites(order, [*groups.values()], table, positive, lowest, settings, smoothed=smoothed)
    first_call = {node.path: order[node] for node in reversed(view.nodes)}
    rows += [(first_call[site.path], _weight_row(site)) for site in weights.values()]
    decisions = tuple(row for _, row in sorted(rows + floats, key=lambda item: item[0]))
    scaled = tuple(dict.fromkeys(node.layer for node in scaled_layers(view, spec)))
    return Placement(
        target=target, decisions=decisions, activations=tuple(sites), weights=tuple(weights.values()), scaled=scaled
    )


def _lowest_values(view: GraphView, positive: set[Node], seen: Mapping[str, float]) -> dict[Node, float]:
    known = lowest_values(view, positive)
    expected = {node: max(known.get(node, -math.inf), seen[node.name]) for node in view.nodes if node.name in seen}
    return known | expected


def _check_anything(view: GraphView, table: TargetTable, anything: bool, rows: list[Decision]) -> None:
    if anything and any(node.kind in _LAYERS & table.inputs.keys() for node in view.nodes):
        return
    told = [row for row in rows if row.rule in _REFUSALS] or [row for row in rows if row.rule == _UNKNOWN]
    reasons = [f"{row.layer}: {row.reason}" for row in told]
    raise QuantizationError(
        "the model has no layer that can be quantized (convolution, linear or matmul); "
        + ("; ".join(reasons[:3]) or "see the rows of `python -m compress inspect model` for its operations")
    )


def _trace_back(
    request: Request, table: TargetTable, positive: set[Node], apart: Set[Node], computed: Set[Node]
) -> tuple[list[tuple[Node, Node]], list[Decision]]:
    """((origin, its consumer on the way) pairs to quantize, rows for constants, which are not).

    `computed` are the nodes that depend on the network's inputs; all others are constants, such as a grid of positions.
    """
    commutes, joined = _commuting(request, table), table.joined_parts
    origins = _origins(request.tensor, request.consumer, commutes, joined, apart)
    signed = any(origin not in positive for origin, _ in origins)
    kind = request.layer.kind
    if signed and (kind in table.symmetric or (kind in table.plain_paths and _takes_joined(request.tensor, commutes))):
        origins = [(request.tensor, request.consumer)]
    elif len(origins) > 1 and any(origin not in computed for origin, _ in origins):  # which get no pair themselves
        origins = _origins(request.tensor, request.consumer, commutes, joined, apart | _concats(request.tensor))
    elif len({origin in positive for origin, _ in origins}) > 1:
        if not table.concat_shares:
            every = apart | _concats(request.tensor)
            origins = _origins(request.tensor, request.consumer, commutes, joined, every)
        elif joined:  # some could hold no sign
            origins = _origins(request.tensor, request.consumer, commutes, False, apart)
    constants = [
        Decision(
            tensor=origin.name,
            layer=request.layer.layer,
            decision="float",
            rule="constant",
            reason="a constant of the graph, not an activation",
        )
        for origin, _ in origins
        if origin not in computed
    ]
    return [pair for pair in origins if pair[0] in computed and pair[0].floating], constants


def _commuting(request: Request, table: TargetTable) -> frozenset[str]:
    return table.commutes - TAKES_APART if request.layer.kind in table.apart else table.commutes


def _origins(
    tensor: Node, consumer: Node, commutes: frozenset[str], joined: bool, apart: Set[Node]
) -> list[tuple[Node, Node]]:
    """(origin, its consumer on the way) pairs of a tensor, back through commuting operations and concats.

    With `joined`, a part of a concat's result goes back to the concat. Concats that are `apart` are origins themselves.
    """
    if tensor.kind == "concat" and tensor not in apart:
        return [pair for source in tensor.tensors for pair in _origins(source, tensor, commutes, joined, apart)]
    filled = bool(tensor.tensors) and tensor.tensors[0].filling != 0  # a maximum of -1e9 and x holds x alone
    moved = tensor.kind in commutes and tensor.kind != "concat" and tensor.tensors and not tensor.converts
    if moved and not filled and not _has_uneven_windows(tensor):
        return _origins(tensor.tensors[0], tensor, commutes, joined, apart)
    split = _split_of(tensor) if joined and tensor.kind in commutes else None
    if split is not None and _is_joined(split.tensors[0], commutes):
        return _origins(split.tensors[0], split, commutes, joined, apart)
    return [(tensor, consumer)]


def _has_uneven_windows(node: Node) -> bool:
    # True for an adaptive maximum that files have as maxima of slices, through which engines take no pair.
    source = node.tensors[0].shape if node.kind == "adaptive_max_pool" else None
    return any(before % after for before, after in zip(source or (), node.shape or (), strict=False))


def _takes_joined(tensor: Node, commutes: frozenset[str], taken: bool = False) -> bool:
    # True if a tensor is a part of a concat's result, of a roll's, or of a concat along another axis than channels.
    if tensor.kind == "roll":  # two parts joined along its axis
        return True
    if tensor.kind == "concat":
        along = [source.shape[1:2] == (tensor.shape or ())[1:2] for source in tensor.tensors if source.shape]
        return taken or all(along) or any(_takes_joined(source, commutes) for source in tensor.tensors)
    taken = taken or tensor.kind in TAKES_APART
    return tensor.kind in commutes and any(_takes_joined(source, commutes, taken) for source in tensor.inputs)


def _concats(tensor: Node) -> set[Node]:
    if tensor.kind == "concat":
        return {tensor}
    moves = tensor.traits.commutes_with_quantization or tensor.kind in TAKES_APART
    return {found for source in tensor.inputs for found in _concats(source)} if moves else set()


def _split_of(part: Node) -> Node | None:
    """The operation, with a tuple as its result, that a tensor is a part of."""
    split = part.inputs[0] if part.kind in TAKES_APART and part.inputs else None
    return split if split is not None and split.kind in TAKES_APART and split.shape is None and split.tensors else None


def _is_joined(tensor: Node, commutes: frozenset[str]) -> bool:
    while tensor.kind in commutes and tensor.tensors:
        tensor = tensor.tensors[0]
    return tensor.kind == "concat"


def _share_scale(
    request: Request, origins: list[tuple[Node, Node]], scales: DisjointSet, table: TargetTable
) -> list[Request]:
    """The request at each of its origins; more than one are inputs of a concat and share one scale."""
    for origin, _ in origins:
        scales.add(origin)
        scales.merge(origins[0][0], origin)
    shared = f"; shares one scale with {len(origins) - 1} more inputs of a concat" if len(origins) > 1 else ""
    apart = _commuting(request, table) != table.commutes
    found = []
    for origin, consumer in origins:
        reason = request.reason + shared + (_OWN_SCALE if apart and origin.kind in TAKES_APART else "")
        found.append(replace(request, tensor=origin, consumer=consumer, reason=reason))
    return found


def _sites(
    order: Mapping[Node, int],
    groups: list[list[Request]],
    table: TargetTable,
    positive: set[Node],
    lowest: Mapping[Node, float],
    settings: Mapping[Node, LayerSettings],
    *,
    smoothed: bool,
) -> tuple[list[ActivationSite], list[tuple[int, Decision]]]:
    """One site for the tensors that share a scale, and a row for each tensor."""
    sites, rows = [], []
    for members in groups:
        members.sort(key=lambda item: order[item.tensor])
        name = quantizer_path(members[0].tensor.name)
        products = smoothed and all(item.layer.kind in _MATRIX_PRODUCTS for item in members)
        spec = _common_spec(members, settings).resolved(whole=products)  # clipping outliers costs more
        second, integers = any(item.signed for item in members), spec.kind == "int"
        plain = table.wide_symmetric and spec.num_bits > MOST_BITS
        signed = second or plain or not positive.issuperset(item.tensor for item in members)
        kinds = {item.layer.kind for item in members}
        shifts = signed and integers and not second and not plain and not kinds & table.symmetric
        least = _lowest(members, table, positive, lowest) if shifts else 0.0
        quant_format = QuantFormat(
            num_bits=spec.num_bits,
            signed=signed or not integers,
            offset=shifts and (bool(kinds & table.offset) or least < 0),
            lowest=least,
            kind=spec.kind,
        )
        edges = tuple(dict.fromkeys((item.tensor.name, item.consumer.name) for item in members))
        sites.append(ActivationSite(name=name, edges=edges, format=quant_format, spec=spec))
        for origin in dict.fromkeys(item.tensor for item in members):
            asked = [item for item in members if item.tensor is origin]
            wide = {item.layer.layer for item in members if settings[item.layer].activations.num_bits == spec.num_bits}
            said = [part for item in asked if (part := settings[item.layer].reason)]
            rows.append((order[origin], _activation_row(origin, asked, name, quant_format, wide, said)))
    return sites, rows


def _lowest(members: list[Request], table: TargetTable, positive: set[Node], lowest: Mapping[Node, float]) -> float:
    """The lowest value of tensors that share a scale, where the layers that read them take any zero point; else 0.0."""
    origins, kinds = {item.tensor for item in members}, {item.layer.kind for item in members}
    if not all(origin in positive or origin in lowest for origin in origins):
        return 0.0
    if not kinds & table.offset and not (kinds <= table.zero_points and len(origins) == 1):
        return 0.0
    return min(lowest.get(origin, 0.0) for origin in origins)


def _common_spec(members: list[Request], settings: Mapping[Node, LayerSettings]) -> ActivationSpec:
    specs = [settings[item.layer].activations for item in members]
    spec = max(specs, key=lambda own: own.num_bits)
    if any(own.kind != spec.kind for own in specs):
        named = zip(members, specs, strict=True)
        consumers = ", ".join(dict.fromkeys(f"{item.layer.layer} ({own.kind})" for item, own in named))
        raise QuantizationError(
            f"{members[0].tensor.name} is read as integers and as FP8, and has one quantizer: {consumers}; give "
            "these layers one kind in quantization.rules, or leave one of them float"
        )
    if any(item.tensor.kind == "input" for item in members):
        return replace(spec, calibrator="max")  # pixels are bounded, and clipping them loses information
    return spec


def _activation_row(
    origin: Node, asked: list[Request], name: str, quant_format: QuantFormat, wide: Set[str], said: list[str]
) -> Decision:
    return Decision(
        tensor=origin.name,
        layer=" ".join(dict.fromkeys(item.layer.layer for item in asked)),
        decision="quantize",
        quantizer=name,
        num_bits=quant_format.num_bits,
        axis=None,
        signed=quant_format.signed,
        rule=", ".join(dict.fromkeys(item.rule for item in asked)),
        reason="; ".join(dict.fromkeys([*(part for item in asked for part in item.reason.split("; ")), *said]))
        + _number_type(quant_format)
        + (f"; {quant_format.num_bits} bits for {', '.join(sorted(wide))}" if quant_format.wide else ""),
    )


_NARROWED = "; 7 bits, which no sum of this processor saturates (it has no VNNI); weights.num_bits: 8 for others alone"


def _weight_row(site: WeightSite) -> Decision:
    seven = site.format.num_bits == 7
    scales = ("per output channel" if site.format.axis is not None else "per tensor") + (
        ", symmetric" if site.format.narrow else f", {site.format.low} to {site.format.high}"
    )
    return Decision(
        tensor=f"{site.path}.weight",
        layer=site.path,
        decision="quantize",
        quantizer=f"{site.path}.weight_quantizer",
        num_bits=site.format.num_bits,
        axis=site.format.axis,
        signed=True,
        rule="weight",
        reason=scales + _number_type(site.format) + (_NARROWED if site.spec.num_bits == "auto" and seven else ""),
    )


def _number_type(quant_format: QuantFormat) -> str:
    if quant_format.lowest:
        return f"; nothing below {quant_format.lowest:.3g}: unsigned integers from there, with a zero point"
    return "; FP8 E4M3" if quant_format.kind == "e4m3" else ""
