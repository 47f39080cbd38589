"""A recipe's rules meet a graph's layers: ordered, the last match wins, and a rule that matches nothing is an error."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from torch import fx

from compress.errors import QuantizationError, near_misses
from compress.graph.ops import layer_name, node_kind
from compress.graph.trace import leaves_of
from compress.quantization.spec import ActivationSpec, QuantSpec, Rule, WeightSpec

_SILENT = frozenset({"input", "output", "constant", "shape", "assert", "compare", "floordiv"})


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What holds for one layer after all rules.

    Attributes:
        enable: whether it is quantized.
        weights, activations: how.
        rule: `match` of the rule that decided; "" = the section's defaults.
    """

    enable: bool
    weights: WeightSpec
    activations: ActivationSpec
    rule: str = ""


def resolve_rules(nodes: list[fx.Node], spec: QuantSpec) -> dict[fx.Node, LayerSettings]:
    """Settings of every node.

    Raises:
        QuantizationError: a rule matches no layer; names the nearest layers.
    """
    names = {node: {layer_name(node), node.name} for node in nodes if node_kind(node) not in _SILENT}
    for rule in spec.rules:
        if not any(_matches(rule, own) for own in names.values()):
            known = sorted(set().union(*names.values()))
            kept = _kept_whole(rule.match, nodes)
            raise QuantizationError(
                f"quantization.rules: match {rule.match!r} matches no layer{kept or _hint(rule.match, known)}; "
                "`python -m compress inspect` lists the names, and globs such as 'layer1.*' are allowed"
            )
    return {node: _settings(names.get(node, set()), spec) for node in nodes}


def _settings(names: set[str], spec: QuantSpec) -> LayerSettings:
    last: Rule | None = None
    for rule in spec.rules:
        if _matches(rule, names):
            last = rule
    if last is None:
        return LayerSettings(enable=True, weights=spec.weights, activations=spec.activations)
    return LayerSettings(
        enable=last.enable,
        weights=last.weights or spec.weights,
        activations=last.activations or spec.activations,
        rule=last.match,
    )


def _matches(rule: Rule, names: set[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, rule.match) for name in names)


def _hint(match: str, known: list[str]) -> str:
    inside = [name for name in known if name.startswith(f"{match}.")]
    return f", did you mean '{match}.*' ({len(inside)} layers)?" if inside else near_misses(match, known)


def _kept_whole(match: str, nodes: list[fx.Node]) -> str:
    """That the rule is for something inside a module that the trace kept whole."""
    graph_module = nodes[0].graph.owning_module if nodes else None
    leaves = leaves_of(graph_module) if graph_module is not None else ()
    inside = next((leaf for leaf in leaves if match.startswith(f"{leaf.path}.")), None)
    return f" ({inside.path} is kept whole and stays float: {inside.reason})" if inside else ""
