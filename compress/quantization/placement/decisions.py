"""What placement decided, and what calibration images decide beyond the rules of a specification.

A branch that no image opens, and a concat whose inputs have ranges far apart, are quantized in another way: the network
is quantized again with rules for them.
"""

from __future__ import annotations

import csv
import glob
import io
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from compress.errors import CompressWarning, DeadTensorError
from compress.quantization import ActivationSpec, QuantSpec, Rule, Target, WeightSpec
from compress.quantization.numerics import QuantFormat
from compress.quantization.placement.targets import TABLES, TAKES_APART
from compress.quantization.placement.view import GraphView, Node

# Beginning of the reason of a concat whose inputs do not share a scale.
FAR_APART = "its inputs have scales of their own: on calibration images their ranges are far apart"
# Reason of a layer that stays float for that.
CLOSED = "its branch is zero on every calibration image"
MASKED = "it consumes infinity, as masks have it"
# Beginning of the reason of a product that stays float for that.
POOR_PRODUCT = "in 8 bits its result has"
# Beginnings of the reasons of what calibration images decided, beyond the rules of a specification.
MEASURED = (CLOSED, MASKED, FAR_APART, POOR_PRODUCT)
# Reason of a rule with `channel_scales`.
SCALED = "its input is multiplied by a factor for each channel"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One row of the table of decisions.

    Attributes:
        tensor: name of the graph node that computes it; `<layer>.weight` for a weight.
        layer: the operation that requested the decision.
        decision: `quantize` or `float`.
        quantizer: module path of the quantizer; "" if float.
        num_bits, axis, signed: format of the quantizer; None if float (`axis` None also means per tensor).
        rule: the rule that decided.
        reason: the reason as a sentence.
    """

    tensor: str
    layer: str
    decision: str
    quantizer: str = ""
    num_bits: int | None = None
    axis: int | None = None
    signed: bool | None = None
    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ActivationSite:
    """A quantizer to insert after nodes; it is one module, also if several tensors share its scale.

    `edges` are (tensor, consumer) pairs of node names: these consumers get the quantized tensor.
    """

    name: str
    edges: tuple[tuple[str, str], ...]
    format: QuantFormat
    spec: ActivationSpec


@dataclass(frozen=True, kw_only=True)
class WeightSite:
    """A layer whose weight is quantized."""

    path: str
    format: QuantFormat
    spec: WeightSpec


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All decisions for one graph.

    Attributes:
        target: the target whose rules were followed.
        decisions: the table, in graph order.
        activations, weights: the quantizers to insert.
        scaled: layers whose input is multiplied by a factor for each channel.

    Examples:
        >>> first = compress.insert_quantizers(model, images[:1]).placement.decisions[0]
        >>> first.tensor, first.decision, first.rule
        ('input_1', 'quantize', 'conv input')
    """

    target: Target
    decisions: tuple[Decision, ...]
    activations: tuple[ActivationSite, ...]
    weights: tuple[WeightSite, ...]
    scaled: tuple[str, ...] = ()

    @property
    def measured_rules(self) -> tuple[Rule, ...]:
        """Rules for what calibration images decided; with them `insert_quantizers` makes the same network."""
        found = {row.layer: row.reason for row in self.decisions if row.reason.startswith(MEASURED)}
        found |= dict.fromkeys(self.scaled, SCALED)
        return tuple(measured_rule(glob.escape(name), reason) for name, reason in found.items())

    def to_csv(self) -> str:
        """The table of decisions with a header line."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(Decision.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.decisions)
        return text.getvalue()


def measured_rule(match: str, reason: str) -> Rule:
    """The rule of a decision by calibration images, from its reason."""
    return Rule(match=match, enable=reason == SCALED, reason=reason, channel_scales=reason == SCALED)


T = TypeVar("T")
# Largest over smallest range of tensors with one scale, of which the smallest has another consumer.
_APART = 3.0


class ClosedError(DeadTensorError):
    """A tensor that is always zero or infinite, with rules that leave its consumers float, and a warning about it."""

    def __init__(self, error: DeadTensorError, consumers: list[str]) -> None:
        super().__init__(error.quantizers, infinite=error.infinite)
        reason, way = CLOSED, "calibrate with images that reach them, if there are any"
        if error.infinite:
            reason, way = MASKED, "a mask of -inf may be written as the lowest finite number that matters"
        self.rules = tuple(Rule(match=name, enable=False, reason=reason) for name in consumers)
        self.warning = (
            f"{', '.join(error.quantizers)} {'hold infinity' if error.infinite else 'are zero'} on calibration images, "
            f"and {', '.join(consumers)}, which consume them, stay float: {way}"
        )


@contextmanager
def closed_branches(inputs: Collection[str], *placements: Placement) -> Iterator[None]:
    """Turn a `DeadTensorError` into a `ClosedError`, with rules for the consumers in these placements.

    An input of the network that is always zero or infinite stays an error: its images are black.
    """
    try:
        yield
    except DeadTensorError as error:
        if isinstance(error, ClosedError):
            raise
        sites = [site for placement in placements for site in placement.activations if site.name in error.quantizers]
        if any(tensor in inputs for site in sites for tensor, _ in site.edges):
            raise
        names = dict.fromkeys(consumer for site in sites for _, consumer in site.edges)
        rows = [row for placement in placements for row in placement.decisions if row.quantizer in error.quantizers]
        paths = {weight.path.replace(".", "_"): weight.path for p in placements for weight in p.weights}
        # An operation that needs a pair at its output, as on ONNX Runtime, is float with the consumers of that pair.
        names |= dict.fromkeys(name for row in rows for name in row.layer.split())
        raise ClosedError(error, [paths.get(name, name) for name in names]) from None


def around_closed(quantize: Callable[[QuantSpec], T], spec: QuantSpec, batches: Iterable[Any]) -> T:
    """Quantize, again with the consumers float where branches are closed; each time a warning says so."""
    while True:
        try:
            return quantize(spec)
        except ClosedError as error:
            if iter(batches) is batches or set(error.rules) <= set(spec.rules):
                raise DeadTensorError(error.quantizers, infinite=error.infinite) from None
            warnings.warn(error.warning, CompressWarning, stacklevel=2)
            spec = replace(spec, rules=(*spec.rules, *error.rules))


def concats_apart(view: GraphView, placement: Placement, ranges: Mapping[str, float]) -> tuple[Rule, ...]:
    """Rules for concats whose one scale would cost another consumer of an input most of its resolution.

    `ranges`: largest magnitudes, on some images, of the tensors that `shared_tensors` names.
    """
    nodes, found = {node.name: node for node in view.nodes}, dict[str, float]()
    layers = TABLES[placement.target].inputs.keys()
    for site in placement.activations:
        most = max((ranges.get(tensor, 0.0) for tensor, _ in site.edges), default=0.0)
        tensors = {tensor: [nodes[c] for t, c in site.edges if t == tensor] for tensor, _ in site.edges}
        others = [t for t, users in tensors.items() if not all(_shares(user, layers) for user in users)]
        least = min((ranges[tensor] for tensor in others if ranges.get(tensor)), default=most)
        if least and most > _APART * least:
            for user in (user for users in tensors.values() for user in users if _shares(user, layers)):
                found[_concat_after(user).layer] = most / least
    return tuple(
        Rule(match=glob.escape(name), enable=False, reason=f"{FAR_APART}: {times:.0f} times")
        for name, times in found.items()
    )


def shared_tensors(placement: Placement) -> list[str]:
    sites = [dict.fromkeys(tensor for tensor, _ in site.edges) for site in placement.activations]
    return [tensor for site in sites if len(site) > 1 for tensor in site]


def _concat_after(node: Node) -> Node:
    """The concat that a tensor goes to through operations with one consumer, or the last operation."""
    while node.kind != "concat" and node.traits.commutes_with_quantization and len(node.consumers) == 1:
        node = node.consumers[0]
    return node


def _shares(node: Node, layers: Collection[str]) -> bool:
    """True if a tensor goes through this node to a concat that a layer in 8 bits reads, which has one scale."""
    concat = _concat_after(node)
    return concat.kind == "concat" and _is_read_by(concat, layers)


def _is_read_by(node: Node, layers: Collection[str]) -> bool:
    """True if a layer reads a result, as it is or moved."""
    moves = ("concat", *TAKES_APART)
    return any(
        user.kind in layers
        or ((user.traits.commutes_with_quantization or user.kind in moves) and _is_read_by(user, layers))
        for user in node.consumers
    )
