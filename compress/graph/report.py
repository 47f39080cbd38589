"""The typed report of a graph module: all that is known of it beside its graph, at the attribute `report`.

`trace` attaches a `GraphReport`; quantization replaces it by its subclass `QuantizationReport`. A report survives
`copy.deepcopy`, `pickle` and `torch.save` of the graph module.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx, nn


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A submodule that is one opaque node of the graph.

    Attributes:
        path: the module's path.
        kind: its class.
        reason: why torch.fx could not trace it, or "asked for".
    """

    path: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """Result of a trace beside the graph.

    Attributes:
        leaves: the submodules that are opaque, each with its reason.
        training: what training the graph leaves out of the model's own training; "" if nothing.
        bound: why the graph takes images of no other size, and which; "" if it does, or if that is not known.
    """

    leaves: tuple[Leaf, ...] = ()
    training: str = ""
    bound: str = ""


ATTRIBUTES = frozenset({"meta", "report", "placement"})
"""Attributes that torch.fx and `attach_report` write on a graph module; no submodule may have such a name."""


def attach_report(graph_module: fx.GraphModule, report: GraphReport) -> None:
    """Set `graph_module.report`, and `graph_module.placement` where the report has one; replaces an earlier report."""
    _attach(graph_module, "report", report)
    if hasattr(report, "placement"):
        _attach(graph_module, "placement", report.placement)


def report_of(model: nn.Module) -> GraphReport:
    """The report attached to a graph module; an empty one if none is attached."""
    report = getattr(model, "report", None)
    return report if isinstance(report, GraphReport) else GraphReport()


def leaves_of(model: nn.Module) -> tuple[Leaf, ...]:
    """The submodules of a graph module that are opaque, each with its reason."""
    return report_of(model).leaves


def _attach(graph_module: fx.GraphModule, name: str, value: object) -> None:
    """Set an attribute that survives copies: deepcopy keeps what `meta` names, pickle keeps plain attributes."""
    graph_module.meta.setdefault("_user_preserved_attributes", {})[name] = value
    setattr(graph_module, name, value)
