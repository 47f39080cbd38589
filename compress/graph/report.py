"""The typed report of a graph module, at its attribute `report`; it survives copying and pickling."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from compress.errors import CompressWarning


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A submodule that is one opaque node of the graph, and why torch.fx could not trace it, or "asked for"."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """Result of a trace beside the graph.

    Attributes:
        training: what training the graph leaves out of the model's own training; "" if nothing.
        bound: why the graph takes images of no other size, and which; "" if it does, or if that is not known.
        for_training: True for a graph that is for training steps alone, and that no file can hold.
    """

    leaves: tuple[Leaf, ...] = ()
    training: str = ""
    bound: str = ""
    for_training: bool = False


# The key of a graph module's `meta` under which torch looks up attributes that copies keep.
_PRESERVED = "_user_preserved_attributes"


class ReportedModule(fx.GraphModule):
    """A graph module whose report and `meta` are kept in any order of pickling and copying."""

    def __copy__(self) -> Self:
        made = self.of(super().__copy__())
        name_blocks(made)
        for name, value in self.meta.get(_PRESERVED, {}).items():
            setattr(made, name, value)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, super().__reduce__()

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and warn of what training leaves out of the model's own training."""
        left_out = report_of(self).training
        if mode and left_out:
            warnings.warn(left_out, CompressWarning, stacklevel=2)
        return super().train(mode)

    @classmethod
    def of(cls, graph_module: fx.GraphModule) -> Self:
        """Take over a graph module that is not used afterwards."""
        made = cls.__new__(cls)  # torch makes a class for each instance here, which holds the generated `forward`
        made.__dict__.update(graph_module.__dict__)
        type(made).__name__ = type(graph_module).__name__
        made.graph = graph_module.graph
        return made


def _restored(rebuild: Any, state: tuple[dict[str, Any], str]) -> ReportedModule:
    made = ReportedModule.of(rebuild(*state))
    made.meta.update(state[0].get("meta", {}))
    return made


def _warning(register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
    @functools.wraps(register)
    def warned(self: Block, *args: Any, **kwargs: Any) -> RemovableHandle:
        warnings.warn(
            "this hook will never be called: a traced network calls the layers of a block and not the block; register "
            "it on a layer, such as the last one of the block (print the network's graph), or use qat.distill_features",
            CompressWarning,
            stacklevel=2,
        )
        return register(self, *args, **kwargs)

    return warned


class Block(nn.Module):
    """Holds the layers of a block of the model under its name; it is never called, so registering a hook warns."""

    register_forward_hook = _warning(nn.Module.register_forward_hook)
    register_forward_pre_hook = _warning(nn.Module.register_forward_pre_hook)
    register_full_backward_pre_hook = _warning(nn.Module.register_full_backward_pre_hook)
    register_full_backward_hook = _warning(nn.Module.register_full_backward_hook)


def name_blocks(graph_module: nn.Module) -> None:
    """Put a `Block` in the place of each plain module that only holds others; in place."""
    for path, module in list(graph_module.named_modules()):
        if type(module) is nn.Module:
            block = Block()
            block.__dict__.update(module.__dict__)
            graph_module.set_submodule(path, block)


# Attributes that torch.fx and `attach_report` write on a graph module; no submodule may have such a name.
ATTRIBUTES = frozenset({"meta", "report", "placement"})


def attach_report(graph_module: fx.GraphModule, report: GraphReport) -> None:
    """Set `graph_module.report`, and `graph_module.placement` where the report has one."""
    values = {"report": report, **({"placement": report.placement} if hasattr(report, "placement") else {})}
    graph_module.meta.setdefault(_PRESERVED, {}).update(values)
    for name, value in values.items():
        setattr(graph_module, name, value)


def report_of(model: nn.Module) -> GraphReport:
    """The report attached to a graph module; an empty one if none is attached."""
    report = getattr(model, "report", None)
    return report if isinstance(report, GraphReport) else GraphReport()


def leaves_of(model: nn.Module) -> tuple[Leaf, ...]:
    return report_of(model).leaves
