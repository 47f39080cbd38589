"""Placement: which tensors of a graph get a quantizer, which do not, and why.

The table of the target (`targets`) names the operations whose inputs or results are to be quantized. Each such request
(`requests`) is handled in three steps:

1. it is traced back through operations that commute with quantization (max pool, flatten, ...) to the origin of the
   tensor, and through a concat to all of its inputs, which then share one scale;
2. requests for one tensor become one quantizer, however many consumers ask for it;
3. a residual add requests its identity branch only, so that layer, add and activation stay one kernel.

Every request, granted or refused, is a row of the result. Nothing here changes a graph; `insert` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace

from scipy.cluster.hierarchy import DisjointSet

from compress.errors import QuantizationError
from compress.graph.traits import kinds
from compress.quantization import MOST_BITS, ActivationSpec, QuantSpec
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.decisions import ActivationSite, Decision, Placement, WeightSite
from compress.quantization.placement.heads import head_parts
from compress.quantization.placement.requests import (
    LayerSettings,
    Request,
    depths,
    float_row,
    requests_of,
    resolve_rules,
    scaled_layers,
)
from compress.quantization.placement.targets import TABLES, TAKES_APART, TargetTable
from compress.quantization.placement.view import GraphView, Node, lowest_values, never_negative, of_inputs
from compress.quantization.quantizer import quantizer_path

_PRODUCTS = kinds(lambda t: t.category in {"weighted", "product"})
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
    table = TABLES[target]
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
            floats.append((order[node], float_row(node, heads[node].rule, heads[node].reason)))
            continue
        if node.kind in _PRODUCTS and node not in computed:
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
    sites, rows = _sites(view, traced, scales, table, positive, lowest, settings, smoothed=spec.smooth == "auto")
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
    if anything and any(node.kind in _PRODUCTS & table.inputs.keys() for node in view.nodes):
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
    if tensor.kind in commutes and tensor.kind != "concat" and tensor.tensors and not filled and not tensor.converts:
        return _origins(tensor.tensors[0], tensor, commutes, joined, apart)
    split = _split_of(tensor) if joined and tensor.kind in commutes else None
    if split is not None and _is_joined(split.tensors[0], commutes):
        return _origins(split.tensors[0], split, commutes, joined, apart)
    return [(tensor, consumer)]


def _takes_joined(tensor: Node, commutes: frozenset[str], taken: bool = False) -> bool:
    """True if a tensor is a part of a concat's result, of a roll's, or of a concat along another axis than channels."""
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
    view: GraphView,
    traced: list[Request],
    scales: DisjointSet,
    table: TargetTable,
    positive: set[Node],
    lowest: Mapping[Node, float],
    settings: Mapping[Node, LayerSettings],
    *,
    smoothed: bool,
) -> tuple[list[ActivationSite], list[tuple[int, Decision]]]:
    """One site for the tensors that share a scale, and a row for each tensor."""
    order = {node: i for i, node in enumerate(view.nodes)}
    groups: dict[Node, list[Request]] = {}
    for item in traced:
        groups.setdefault(scales[item.tensor], []).append(item)
    sites, rows = [], []
    for members in groups.values():
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


def _weight_row(site: WeightSite) -> Decision:
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
        reason=scales + _number_type(site.format),
    )


def _number_type(quant_format: QuantFormat) -> str:
    if quant_format.lowest:
        return f"; nothing below {quant_format.lowest:.3g}: unsigned integers from there, with a zero point"
    return "; FP8 E4M3" if quant_format.kind == "e4m3" else ""
