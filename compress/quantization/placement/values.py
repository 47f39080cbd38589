"""What is known of the values of tensors: never negative, never below a value, or always zero because of a weight.

The first two need integers without a sign, or with few below zero. Branches may begin at zero (timm's `zero_init_last`,
torchvision's `zero_init_residual`), and pruned ones may stay so: no calibration image reaches such tensors, and any
range is right for them.
"""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from compress.quantization.placement.view import GraphView, Node

_KEEP = frozenset({"movement", "join", "pool", "passing"})
"""Categories of operations whose results are no lower than the lowest of their inputs, or than a padding zero."""


def never_negative(view: GraphView) -> set[Node]:
    """The nodes whose values are known to be at least 0 for every input of the model."""
    found: set[Node] = set()
    for node in view.nodes:
        if _is_never_negative(node, found):
            found.add(node)
    return found


def lowest_values(view: GraphView, positive: Set[Node]) -> dict[Node, float]:
    """The other nodes that are never below a known value: activations, and copies and means of them."""
    found: dict[Node, float] = {}
    for node in view.nodes:
        if node in positive:
            continue
        tensors = _read(node)
        sources = [source for source in tensors if source.kind != "constant"]
        known = bool(sources) and all(source in found or source in positive for source in sources)
        least = min((found.get(source, 0.0) for source in sources), default=0.0)
        if node.traits.lowest:
            found[node] = node.traits.lowest
        elif known and node.kind == "mul" and node.factor:
            found[node] = least * node.factor
        elif known and len(sources) == len(tensors) and (node.traits.category in _KEEP or node.kind == "mean"):
            found[node] = least
    return found


def _read(node: Node) -> list[Node]:
    """Return the tensors that a node consumes, and what takes one apart or some of its parts, which have no shape."""
    return [source for source in node.inputs if source.shape is not None or source.kind in ("split", "getitem")]


def _is_never_negative(node: Node, known: set[Node]) -> bool:
    if node.traits.non_negative == "always" or (node.kind == "clamp" and node.low >= 0):
        return True
    if node.mode == "bicubic" or any(number < 0 for number in node.numbers):
        return False  # cubic weights are negative in places
    sources = _read(node)
    if node.kind == "pad":
        return node.filling >= 0 and bool(sources) and known.issuperset(sources)
    return node.traits.non_negative == "if inputs are" and bool(sources) and known.issuperset(sources)


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
