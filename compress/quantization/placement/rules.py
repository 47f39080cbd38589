"""The rules of a recipe, applied to the layers of a graph: the last match wins, and a rule must match something."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace

from compress.errors import QuantizationError, near_misses
from compress.graph.traits import WEIGHTED
from compress.quantization.placement.view import GraphView, Node
from compress.quantization.spec import ActivationSpec, QuantSpec, Rule, WeightSpec


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings of one layer after all rules.

    Attributes:
        enable: True if it is quantized.
        weights, activations: formats and calibrators.
        rule: `match` of the rule that decided; "" = the section's defaults.
        reason: of that rule.
    """

    enable: bool
    weights: WeightSpec
    activations: ActivationSpec
    rule: str = ""
    reason: str = ""


def resolve_rules(view: GraphView, spec: QuantSpec) -> dict[Node, LayerSettings]:
    spec = replace(spec, rules=tuple(rule for rule in spec.rules if rule.target in (None, spec.only_target)))
    named = [node for node in view.nodes if node.traits.category not in {"graph", "shape"}]
    names = {node: {node.layer, node.name} for node in named}
    for rule in spec.rules:
        if not any(_matches(rule, own) for own in names.values()):
            known = sorted(set().union(*names.values()))
            hint = _inside_leaf(rule.match, view) or _hint(rule.match, known)
            raise QuantizationError(
                f"quantization.rules: match {rule.match!r} matches no layer{hint}; "
                "`python -m compress inspect model` lists the names, and globs such as 'layer1.*' are allowed"
            )
    ends = _ends(named) if spec.first_last_bits is not None else set()
    return {node: _settings(names.get(node, set()), spec, end=node in ends) for node in view.nodes}


def _ends(nodes: list[Node]) -> set[Node]:
    weighted = [node for node in nodes if node.kind in WEIGHTED]
    return {weighted[0], weighted[-1]} if weighted else set()


def _settings(names: set[str], spec: QuantSpec, *, end: bool) -> LayerSettings:
    last: Rule | None = None
    for rule in spec.rules:
        if _matches(rule, names):
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


def _matches(rule: Rule, names: set[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, rule.match) for name in names)


def _hint(match: str, known: list[str]) -> str:
    inside = [name for name in known if name.startswith(f"{match}.")]
    return f", did you mean '{match}.*' ({len(inside)} layers)?" if inside else near_misses(match, known)


def _inside_leaf(match: str, view: GraphView) -> str:
    inside = next((leaf for leaf in view.leaves if match.startswith(f"{leaf.path}.")), None)
    return f" ({inside.path} is kept whole and stays float: {inside.reason})" if inside else ""
