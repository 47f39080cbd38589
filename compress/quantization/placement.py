"""Placement: which tensors of a traced graph get a quantizer, which do not, and why.

The table of the target (`targets`) says which operations want their inputs or results quantized. From those wishes:

1. each wish is carried back through what Q/DQ commute with (max pool, flatten, split, ...) to the tensor's origin,
   and through a concat to all of its inputs, which then share one scale;
2. wishes for one tensor become one quantizer, however many readers ask for it;
3. a residual add asks for its identity branch only, so that layer + add + activation stay one kernel.

Every wish, granted or refused, is a row of the result. Nothing here changes the graph; `insert` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx

from compress.errors import QuantizationError
from compress.graph.layers import tensor_args
from compress.graph.ops import WEIGHTED, layer_name, node_kind, node_module
from compress.graph.trace import leaves_of
from compress.quantization.decisions import ActivationSite, Decision, Placement, WeightSite
from compress.quantization.modules import can_quantize, weight_axis
from compress.quantization.numerics import QuantFormat
from compress.quantization.quantizer import quantizer_path
from compress.quantization.residual import depths, fused_branch, is_residual_add
from compress.quantization.rules import LayerSettings, resolve_rules
from compress.quantization.signs import never_negative
from compress.quantization.spec import ActivationSpec, QuantSpec, WeightSpec
from compress.quantization.targets import TABLES, TAKES_APART, TargetTable

_PRODUCTS = WEIGHTED | {"matmul"}
_OWN_SCALE = "; a scale of its own, apart from the other parts of the tensor (such as query, key and value)"

_FLOAT32_PRODUCT = (
    "the model casts what it multiplies to float32 (`.float()`), as linear attention does where values and their "
    "normalizers stand in one tensor; a rule that enables it quantizes it"
)


@dataclass
class _Wish:
    """An operation's wish for a quantized tensor, carried to its origin."""

    origin: fx.Node
    reader: fx.Node
    layer: fx.Node
    rule: str
    reason: str
    spec: ActivationSpec


@dataclass
class _Wishes:
    """What has been asked so far, and which origins must share a scale (a union-find over node names)."""

    items: list[_Wish] = field(default_factory=list)
    parent: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[int, Decision]] = field(default_factory=list)

    def group(self, name: str) -> str:
        """Representative of the tensors that share a scale with `name`."""
        while self.parent.setdefault(name, name) != name:
            name = self.parent[name]
        return name

    def unite(self, names: list[str]) -> None:
        """Make tensors share one scale."""
        for name in names[1:]:
            self.parent[self.group(name)] = self.group(names[0])


def place(graph_module: fx.GraphModule, spec: QuantSpec) -> Placement:
    """Decide where quantizers stand.

    Args:
        graph_module: from `trace` (nodes carry shapes), BatchNorm folded or kept.
        spec: target, defaults and rules.

    Returns:
        The placement, each decision with its reason.

    Raises:
        QuantizationError: a rule matches nothing, the graph is quantized already, or nothing in it can be quantized.
    """
    nodes = list(graph_module.graph.nodes)
    if any(node_kind(n) == "quantizer" for n in nodes):
        raise QuantizationError("the model is quantized already; quantize the float model, or train this one as it is")
    table = TABLES[spec.target]
    if spec.residual is not None:
        table = replace(table, residual=spec.residual)
    settings = resolve_rules(nodes, spec)
    order = {node: i for i, node in enumerate(nodes)}
    depth = depths(nodes)
    wishes = _Wishes()
    weights: list[WeightSite] = []
    for node in nodes:
        wanted, site = _visit(node, table, settings[node], depth, settings)
        if site is not None and site.path not in {other.path for other in weights}:  # a layer may be called twice
            weights.append(site)
        for row in wanted.refused:
            wishes.rows.append((order[node], row))
        for wanted_tensor in wanted.tensors:
            _carry_back(wishes, table, wanted_tensor, settings[wanted_tensor.layer].activations, order)
    gains = any(node_kind(node) in _PRODUCTS for node in nodes)
    if not gains or not (weights or wishes.items):
        reasons = [f"{row.layer}: {row.reason}" for _, row in wishes.rows if row.rule == "cannot quantize"]
        raise QuantizationError(
            "the model has no layer that can be quantized (convolution, linear or matmul); "
            + ("; ".join(reasons[:3]) or "see the rows of `python -m compress inspect` for what stands in it")
        )
    sites, rows = _sites(wishes, table, order)
    for site in weights:
        rows.append((order[_by_name(nodes, site.path)], _weight_row(site)))
    rows += wishes.rows
    decisions = tuple(row for _, row in sorted(rows, key=lambda item: item[0]))
    return Placement(target=spec.target, decisions=decisions, activations=tuple(sites), weights=tuple(weights))


@dataclass(frozen=True)
class _WantedTensor:
    """A tensor that `layer` wants quantized where `reader` reads it."""

    tensor: fx.Node
    reader: fx.Node
    layer: fx.Node
    rule: str
    reason: str


@dataclass
class _Wanted:
    tensors: list[_WantedTensor] = field(default_factory=list)
    refused: list[Decision] = field(default_factory=list)

    def refuse(self, node: fx.Node, rule: str, reason: str) -> None:
        """Write down that `node` stays float."""
        self.refused.append(
            Decision(tensor=node.name, layer=layer_name(node), decision="float", rule=rule, reason=reason)
        )


def _visit(
    node: fx.Node,
    table: TargetTable,
    own: LayerSettings,
    depth: dict[fx.Node, int],
    settings: dict[fx.Node, LayerSettings],
) -> tuple[_Wanted, WeightSite | None]:
    """What one operation asks for: tensors to quantize, its weight, or nothing and why."""
    wanted, kind = _Wanted(), node_kind(node)
    residual = is_residual_add(node, table.residual_after)
    if kind not in table.inputs and kind not in table.outputs and not residual:
        if kind in table.stays_float and (node.meta.get("shape") is not None or node.op == "call_module"):
            wanted.refuse(node, f"{kind} stays float", _why_float(node, table.stays_float[kind]))
        return wanted, None
    if kind == "mean" and not _is_spatial_mean(node):
        return wanted, None
    if not own.enable:
        wanted.refuse(node, f"rule: {own.rule}", "left float by the recipe")
        return wanted, None
    if kind == "matmul" and not own.rule and any(_cast_to_float32(a, table) for a in tensor_args(node)):
        wanted.refuse(node, "float32 product", _FLOAT32_PRODUCT)
        return wanted, None
    site = None
    if kind in WEIGHTED:
        function = f"is a function that cannot become a layer: {node.meta.get('whole', 'its weight is of no module')}"
        reason = can_quantize(node_module(node)) if node.op == "call_module" else function
        if reason:
            wanted.refuse(node, "cannot quantize", f"{layer_name(node)} {reason}")
            return wanted, None
        site = _weight_site(node, own.weights)
    if residual:
        _ask_residual(wanted, node, table, depth, settings)
    elif kind in table.inputs:
        for source in tensor_args(node)[: 1 if kind in WEIGHTED else None]:
            wanted.tensors.append(_WantedTensor(source, node, node, f"{kind} input", table.inputs[kind]))
    if kind in table.outputs and (kind != "add" or residual):
        _ask_output(wanted, node, table)
    return wanted, site


def _why_float(node: fx.Node, reason: str) -> str:
    """Why an operation stays float; of a module that the trace kept whole, what stopped the trace."""
    graph_module = node.graph.owning_module
    leaves = leaves_of(graph_module) if node.op == "call_module" and graph_module is not None else ()
    for leaf in leaves:
        if leaf.path == node.target:
            return f"{leaf.kind} is kept whole, with all that is in it: torch.fx cannot trace it ({leaf.reason})"
    return reason + (f" ({node.meta['whole']})" if "whole" in node.meta else "")


def _ask_residual(
    wanted: _Wanted,
    node: fx.Node,
    table: TargetTable,
    depth: dict[fx.Node, int],
    settings: dict[fx.Node, LayerSettings],
) -> None:
    """Quantize the identity branch of an add (or both), if an INT8 layer fuses with it."""
    fused = fused_branch(node, table.residual_after, depth)
    if fused is None:
        wanted.refuse(node, "add stays float", "no branch comes from a layer that the add could fuse with")
        return
    branch, layer = fused
    if table.residual == "none":
        wanted.refuse(node, "add stays float", "the recipe leaves both branches of residual sums float")
        return
    if not settings[layer].enable or can_quantize(node_module(layer)):
        wanted.refuse(node, "add stays float", f"the layer it would fuse with, {layer_name(layer)}, is float")
        return
    for source in tensor_args(node):
        if source is not branch or table.residual == "both":
            text = f"the branch beside {layer_name(layer)} is INT8, so that layer, add and activation are one kernel"
            wanted.tensors.append(_WantedTensor(source, node, node, "residual add", text))


def _ask_output(wanted: _Wanted, node: fx.Node, table: TargetTable) -> None:
    """Quantize a result where its fused chain ends, unless it is what the model returns."""
    end = node
    while len(end.users) == 1:
        (user,) = end.users
        kind = node_kind(user)
        if (
            kind not in table.fuses
            and kind not in {"batch_norm", "dropout"}
            and not _absorbs_add(node, end, user, table)
        ):
            break
        end = user
        if node_kind(end) == "add":
            return  # the add asks for its own result
    if _is_model_output(end, table):
        wanted.refuse(node, "output stays float", "the model's result and what follows it are not quantized")
        return
    rule, reason = f"{node_kind(node)} output", table.outputs[node_kind(node)]
    readers = [user for user in end.users if node_kind(user) not in {"output", "shape"}]
    wanted.tensors += [_WantedTensor(end, reader, node, rule, reason) for reader in readers]


def _absorbs_add(node: fx.Node, end: fx.Node, user: fx.Node, table: TargetTable) -> bool:
    """Whether `user` is the add that the layer `node` fuses with where only one branch is quantized."""
    return table.residual == "identity" and node is end and is_residual_add(user, table.residual_after)


def _is_model_output(node: fx.Node, table: TargetTable) -> bool:
    """Whether all readers of a tensor, through what commutes, are the graph's output."""
    return all(
        node_kind(user) == "output" or (node_kind(user) in table.commutes and _is_model_output(user, table))
        for user in node.users
    )


def _cast_to_float32(tensor: fx.Node, table: TargetTable) -> bool:
    """Whether the model says `.float()` of a tensor, or of one that only has its values moved."""
    while (tensor.op, tensor.target) != ("call_method", "float"):
        if node_kind(tensor) not in table.commutes or not tensor_args(tensor):
            return False
        tensor = tensor_args(tensor)[0]
    return True


def _is_spatial_mean(node: fx.Node) -> bool:
    """Whether a mean is over the last two axes of an image: a global average pool by another name."""
    source = tensor_args(node)[0]
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    rank = len(source.meta["shape"])
    return rank == 4 and isinstance(dims, (list, tuple)) and {int(d) % rank for d in dims} == {2, 3}


def _carry_back(
    wishes: _Wishes,
    table: TargetTable,
    wanted: _WantedTensor,
    spec: ActivationSpec,
    order: dict[fx.Node, int],
) -> None:
    """Find the origins of a wished tensor and note the wish at each; origins behind one concat share a scale."""
    layer = wanted.layer
    commutes = table.commutes - TAKES_APART if node_kind(layer) in table.apart else table.commutes
    origins = _origins(wanted.tensor, wanted.reader, commutes)
    floats = [(o, r) for o, r in origins if node_kind(o) != "constant" and _is_float(o)]
    for origin, _ in origins:
        if node_kind(origin) == "constant":
            row = Decision(
                tensor=origin.name,
                layer=layer_name(layer),
                decision="float",
                rule="constant",
                reason="a constant of the graph, not an activation",
            )
            wishes.rows.append((order[layer], row))
    wishes.unite([origin.name for origin, _ in floats])
    shared = f"; shares one scale with {len(floats) - 1} more inputs of a concat" if len(floats) > 1 else ""
    for origin, reader in floats:
        own = _OWN_SCALE if node_kind(origin) in TAKES_APART and commutes != table.commutes else ""
        wishes.items.append(_Wish(origin, reader, layer, wanted.rule, wanted.reason + shared + own, spec))


def _origins(tensor: fx.Node, reader: fx.Node, commutes: frozenset[str]) -> list[tuple[fx.Node, fx.Node]]:
    """(origin, its reader on the way) pairs of a tensor, back through commuting operations and concats."""
    kind = node_kind(tensor)
    if kind == "concat":
        return [pair for source in tensor_args(tensor) for pair in _origins(source, tensor, commutes)]
    if kind in commutes and tensor_args(tensor):
        return _origins(tensor_args(tensor)[0], tensor, commutes)
    return [(tensor, reader)]


def _is_float(node: fx.Node) -> bool:
    dtype = node.meta.get("dtype")
    return dtype is not None and dtype.is_floating_point


def _sites(
    wishes: _Wishes, table: TargetTable, order: dict[fx.Node, int]
) -> tuple[list[ActivationSite], list[tuple[int, Decision]]]:
    """One site a group of tensors, and a row a tensor."""
    groups: dict[str, list[_Wish]] = {}
    for wish in wishes.items:
        groups.setdefault(wishes.group(wish.origin.name), []).append(wish)
    sites, rows = [], []
    for members in groups.values():
        members.sort(key=lambda wish: order[wish.origin])
        name = quantizer_path(members[0].origin.name)
        signed = not (table.unsigned and all(never_negative(w.origin) for w in members))
        spec = max((w.spec for w in members), key=lambda s: s.num_bits)  # readers that ask for more bits are heard
        if any(node_kind(w.origin) == "input" for w in members):
            spec = replace(spec, calibrator="max")  # pixels are bounded; clipping them throws away what is there
        floating = spec.kind == "e4m3"
        if any(w.spec.kind != spec.kind for w in members):
            readers = ", ".join(dict.fromkeys(f"{layer_name(w.layer)} ({w.spec.kind})" for w in members))
            raise QuantizationError(
                f"{members[0].origin.name} is read as integers and as FP8, and has one quantizer: {readers}; give "
                "these layers one kind in quantization.rules, or leave one of them float"
            )
        quant_format = QuantFormat(
            num_bits=spec.num_bits,
            signed=signed or floating,
            offset=signed and not floating and any(node_kind(w.layer) in table.offset for w in members),
            kind=spec.kind,
        )
        edges = tuple(dict.fromkeys((w.origin.name, w.reader.name) for w in members))
        sites.append(ActivationSite(name=name, edges=edges, format=quant_format, spec=spec))
        for origin in dict.fromkeys(w.origin for w in members):
            asked = [w for w in members if w.origin is origin]
            rows.append((order[origin], _activation_row(origin, asked, name, quant_format)))
    return sites, rows


def _activation_row(origin: fx.Node, asked: list[_Wish], name: str, quant_format: QuantFormat) -> Decision:
    return Decision(
        tensor=origin.name,
        layer=" ".join(dict.fromkeys(layer_name(w.layer) for w in asked)),
        decision="quantize",
        quantizer=name,
        num_bits=quant_format.num_bits,
        axis=None,
        signed=quant_format.signed,
        rule=", ".join(dict.fromkeys(w.rule for w in asked)),
        reason="; ".join(dict.fromkeys(w.reason for w in asked)) + _floating(quant_format),
    )


def _weight_site(node: fx.Node, spec: WeightSpec) -> WeightSite:
    module = node_module(node)
    axis = weight_axis(module) if spec.axis is not None else None
    if axis == 1 and getattr(module, "groups", 1) != 1:
        axis = None  # the axis holds the outputs of one group only; a scale for each does not exist in ONNX
    return WeightSite(
        path=str(node.target),
        format=QuantFormat(num_bits=spec.num_bits, axis=axis, narrow=True, kind=spec.kind),
        spec=spec,
    )


def _weight_row(site: WeightSite) -> Decision:
    return Decision(
        tensor=f"{site.path}.weight",
        layer=site.path,
        decision="quantize",
        quantizer=f"{site.path}.weight_quantizer",
        num_bits=site.format.num_bits,
        axis=site.format.axis,
        signed=True,
        rule="weight",
        reason=("per output channel, symmetric" if site.format.axis is not None else "per tensor, symmetric")
        + _floating(site.format),
    )


def _by_name(nodes: list[fx.Node], path: str) -> fx.Node:
    return next(n for n in nodes if n.op == "call_module" and n.target == path)


def _floating(quant_format: QuantFormat) -> str:
    return "; FP8 E4M3" if quant_format.kind == "e4m3" else ""
