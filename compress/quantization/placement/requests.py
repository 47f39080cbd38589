"""The requests of each operation: tensors to be quantized where it consumes them, or the reason to stay float.

The rules of a recipe give each layer its settings: the last match wins, and a rule must match something.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from compress.errors import QuantizationError, near_misses
from compress.graph.traits import PASSING, WEIGHTED
from compress.quantization import MOST_BITS, ActivationSpec, QuantSpec, Rule, WeightSpec
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.decisions import Decision, WeightSite
from compress.quantization.placement.targets import TargetTable
from compress.quantization.placement.view import GraphView, Node


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
    if last is None and end and spec.first_last_bits is not None:
        bits = spec.first_last_bits
        weights, activations = replace(spec.weights, num_bits=bits), replace(spec.activations, num_bits=bits)
        return LayerSettings(enable=True, weights=weights, activations=activations)
    if last is None:
        return LayerSettings(enable=True, weights=spec.weights, activations=spec.activations)
    return LayerSettings(
        enable=last.enable,
        weights=last.weights or spec.weights,
        activations=last.activations or spec.activations,
        rule=last.match,
        reason=last.reason,
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
_PRODUCTS = WEIGHTED | {"matmul", "addmm"}
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
    if not own.rule and node.kind in _PRODUCTS and _is_phase(node):
        found.refuse(node, "phase", _PHASE)
        return found
    if node.kind in _PRODUCTS - WEIGHTED and any(_is_constant(factor) for factor in _factors(node)):
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
            found.tensors.append(Request(source, node, node, "residual add", text))


def _ends_float(node: Node, table: TargetTable) -> bool:
    """True if a tensor goes to norms in float and to the outputs alone, also moved or through activations and sums."""
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
    """The last operation that fuses with one; None if that is an add, which requests its own result.

    A BatchNorm after an activation is not folded into the layer before, and does not fuse.
    """
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
    narrow = not table.all_integers or spec.num_bits == MOST_BITS
    quant_format = QuantFormat(num_bits=spec.num_bits, axis=axis, narrow=narrow, kind=spec.kind)
    return WeightSite(path=node.path, format=quant_format, spec=spec)


_PASSED = PASSING | {"batch_norm"}
"""Operations that do not keep a layer and the add apart."""


def depths(nodes: Iterable[Node]) -> dict[Node, int]:
    """Number of weighted layers on the longest path from the input to each node."""
    depth: dict[Node, int] = {}
    for node in nodes:
        before = max((depth[source] for source in node.inputs), default=0)
        depth[node] = before + (node.kind in WEIGHTED)
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
        if layer.kind in kinds and layer.parameters is not None and alone:
            found.append((source, layer))
    return max(found, key=lambda pair: depth[pair[1]], default=None)
