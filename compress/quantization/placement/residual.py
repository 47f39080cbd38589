"""Residual adds: finds adds that join two branches of one image, and the branch that their kernel fuses with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compress.graph.traits import PASSING, WEIGHTED
from compress.quantization.placement.view import Node

_PASSED = PASSING | {"batch_norm"}
"""Operations that do not keep a layer and the add apart."""


def depths(nodes: Iterable[Node]) -> dict[Node, int]:
    """Number of weighted layers on the longest path from the input to each node."""
    depth: dict[Node, int] = {}
    for node in nodes:
        before = max((depth[source] for source in node.inputs), default=0)
        depth[node] = before + (node.kind in WEIGHTED)
    return depth


def is_residual_add(node: Node, kinds: frozenset[str]) -> bool:
    """Return True if `node` adds two feature maps of one shape, one of which may come from a layer of `kinds`."""
    if node.kind != "add":
        return False
    sources = node.tensors
    shapes = {source.shape for source in sources}
    return len(sources) == 2 and len(shapes) == 1 and len(sources[0].shape or ()) >= 4


def fused_branch(node: Node, kinds: frozenset[str], depth: Mapping[Node, int]) -> tuple[Node, Node] | None:
    """(branch, layer) that an add fuses with: of the branches that end in a layer, the one with the longest path.

    In a ResNet's downsampling block both branches end in a convolution.

    Returns:
        The add's argument and its layer, of `kinds` and consumed by the add alone; None if there is none.
    """
    found = []
    for source in node.tensors:
        layer, alone = source, len(source.consumers) == 1
        while layer.kind in _PASSED and layer.tensors:
            layer = layer.tensors[0]
            alone = alone and len(layer.consumers) == 1
        if layer.kind in kinds and layer.parameters is not None and alone:
            found.append((source, layer))
    return max(found, key=lambda pair: depth[pair[1]], default=None)
