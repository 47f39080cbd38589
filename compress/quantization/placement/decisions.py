"""The parts of a placement: the table of decisions, and the sites where quantizers are inserted."""

from __future__ import annotations

import csv
import glob
import io
from dataclasses import asdict, dataclass

from compress.quantization.numerics import QuantFormat
from compress.quantization.spec import ActivationSpec, Rule, Target, WeightSpec

FAR_APART = "its inputs have scales of their own: on calibration images their ranges are far apart"
"""Beginning of the reason of a concat whose inputs do not share a scale."""
CLOSED = "its branch is zero on every calibration image"
"""Reason of a layer that stays float for that."""
POOR_PRODUCT = "in 8 bits its result has"
"""Beginning of the reason of a product that stays float for that."""
MEASURED = (CLOSED, FAR_APART, POOR_PRODUCT)
"""Beginnings of the reasons of what calibration images decided, beyond the rules of a specification."""


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

    Examples:
        >>> first = compress.insert_quantizers(model, images[:1]).placement.decisions[0]
        >>> first.tensor, first.decision, first.rule
        ('input_1', 'quantize', 'conv input')
    """

    target: Target
    decisions: tuple[Decision, ...]
    activations: tuple[ActivationSite, ...]
    weights: tuple[WeightSite, ...]

    @property
    def measured_rules(self) -> tuple[Rule, ...]:
        """Rules for what calibration images left float; with them `insert_quantizers` makes the same network."""
        found = {row.layer: row.reason for row in self.decisions if row.reason.startswith(MEASURED)}
        return tuple(Rule(match=glob.escape(name), enable=False, reason=reason) for name, reason in found.items())

    def to_csv(self) -> str:
        """The table of decisions with a header line."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(Decision.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.decisions)
        return text.getvalue()
