"""Whether a graph takes images of another size than the one it was traced with: it is run at twice that size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.graph.inputs import each_input
from compress.graph.report import report_of


def bound_to_size(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> str:
    """A sentence on the size of images, (N, C, H, W), that the graph is bound to; "" if none, or not known."""
    if any(x.dim() != 4 for x in inputs):
        return ""
    height, width = inputs[0].shape[2:]
    larger = each_input(
        lambda x: x.new_empty((*x.shape[:2], *(2 * side for side in x.shape[2:])), device="meta"), inputs
    )
    place = _failing_node(graph_module, larger)
    same = each_input(lambda x: torch.empty_like(x, device="meta"), inputs)
    if place is None or _failing_node(graph_module, same) is not None:
        return ""
    return (
        f"the network takes images of {height} x {width} pixels alone: {place} has a size or a tensor that was fixed "
        "when it was traced; trace and quantize it again for another size"
    )


def size_remark(model: nn.Module) -> str:
    """What to add to the error of a model that failed on its inputs: that it is bound to a size, or ""."""
    bound = report_of(model).bound
    return f"; {bound}" if bound else ""


def _failing_node(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> str | None:
    run = _OnMeta(graph_module)
    try:
        with torch.no_grad():
            run.run(*inputs)
    except Exception:  # a graph's operations can fail in any way
        return run.place
    return None


class _OnMeta(fx.Interpreter):
    """Runs a graph on the meta device, beside its weights; `place` is the node that ran last."""

    place = ""

    def run_node(self, n: fx.Node) -> Any:
        fixed = [str(node.target) for node in n.all_input_nodes if node.op == "get_attr"]
        name = str(n.target) if n.op == "call_module" else n.name
        self.place = f"{name} (of {', '.join(fixed)})" if fixed else name
        return super().run_node(n)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.submodules[target]
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        there = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return torch.func.functional_call(module, there, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
