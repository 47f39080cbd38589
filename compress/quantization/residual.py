"""Residual adds: which add joins two branches of one image, and which branch its kernel fuses with."""

from __future__ import annotations

from torch import fx

from compress.graph.layers import tensor_args
from compress.graph.ops import WEIGHTED, node_kind

_PASSED = frozenset({"identity", "dropout", "batch_norm"})
"""What may stand between a layer and the add without keeping them apart: nothing in evaluation, or folded."""


def depths(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """Weighted layers on the longest path from the input to each node."""
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((depth[source] for source in node.all_input_nodes), default=0)
        depth[node] = before + (node_kind(node) in WEIGHTED)
    return depth


def is_residual_add(node: fx.Node, kinds: frozenset[str]) -> bool:
    """Whether `node` adds two feature maps of one shape, one of which may come from a layer of `kinds`."""
    if node_kind(node) != "add":
        return False
    sources = tensor_args(node)
    shapes = {source.meta["shape"] for source in sources}
    rank = 3 if "linear" in kinds else 4
    return len(sources) == 2 and len(shapes) == 1 and len(next(iter(shapes))) >= rank


def fused_branch(node: fx.Node, kinds: frozenset[str], depth: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node] | None:
    """(branch, layer) that an add fuses with: of the branches that end in a layer, the one with the longest path.

    In a ResNet's downsampling block both branches end in a convolution; the main path is the longer one.

    Returns:
        The add's argument and the layer that computes it, or None when no branch ends in a layer of `kinds` that
        the add alone reads.
    """
    found = []
    for source in tensor_args(node):
        layer, alone = source, len(source.users) == 1
        while node_kind(layer) in _PASSED and tensor_args(layer):
            layer = tensor_args(layer)[0]
            alone = alone and len(layer.users) == 1
        if node_kind(layer) in kinds and layer.op == "call_module" and alone:
            found.append((source, layer))
    return max(found, key=lambda pair: depth[pair[1]], default=None)
