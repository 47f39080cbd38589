"""Tensors that are zero for every image, because a weight makes them so.

Branches may begin at zero (timm's `zero_init_last`, torchvision's `zero_init_residual`), and pruned ones may stay so.
No calibration image reaches such tensors, and any range is right for them.
"""

from __future__ import annotations

from torch import Tensor

from compress.quantization.placement.view import GraphView, Node


def always_zero(view: GraphView) -> list[Node]:
    """The nodes whose tensors are provably zero for every input, in graph order."""
    dead: set[Node] = set()
    for node in view.nodes:
        if _is_zero(node, dead):
            dead.add(node)
    return [node for node in view.nodes if node in dead]


def _is_zero(node: Node, dead: set[Node]) -> bool:
    known, parameters = [source in dead for source in node.inputs], node.parameters
    if parameters is not None:
        if not _zero(parameters.bias()):
            return False
        weight = parameters.weight()
        multiplies_by_zero = weight is not None and not weight.detach().any()
        return multiplies_by_zero or (all(known) and _zero(parameters.mean()))
    if node.kind == "zeros":
        return True
    if node.traits.multiplies:
        return any(known)
    return node.traits.keeps_zero and bool(known) and all(known) and not any(node.numbers)


def _zero(values: Tensor | None) -> bool:
    return values is None or not values.detach().any()
