"""Which tensors are never negative, so that their integers need no sign."""

from __future__ import annotations

from compress.quantization.placement.view import GraphView, Node


def never_negative(view: GraphView) -> set[Node]:
    """The nodes whose values are known to be at least 0 for every input of the model."""
    found: set[Node] = set()
    for node in view.nodes:
        if _is_never_negative(node, found):
            found.add(node)
    return found


def _is_never_negative(node: Node, known: set[Node]) -> bool:
    if node.traits.non_negative == "always" or (node.kind == "clamp" and node.low >= 0):
        return True
    if node.mode == "bicubic" or any(number < 0 for number in node.numbers):
        return False  # cubic weights are negative in places
    sources = node.tensors
    return node.traits.non_negative == "if inputs are" and bool(sources) and known.issuperset(sources)
