"""Residual blocks that can be left out, and layers that share a format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from compress.graph.inplace import preserve_input
from compress.graph.ops import node_kind
from compress.graph.traits import WEIGHTED

LARGEST_UNIT = 6
"""Weighted layers of a module that share one format at most; larger modules are whole stages."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A residual block: node `add` sums node `identity` and a branch that depends on it alone."""

    name: str
    add: str
    identity: str
    layers: tuple[str, ...]


def residual_blocks(graph: fx.Graph) -> tuple[Block, ...]:
    """Blocks x + f(x) whose f has weights and feeds only the sum."""
    found: list[Block] = []
    for node in graph.nodes:
        operands = [x for x in node.args[:2] if isinstance(x, fx.Node)] if node_kind(node) == "add" else []
        if len(operands) != 2 or operands[0].meta.get("shape") != operands[1].meta.get("shape"):
            continue
        for identity, end in (operands, operands[::-1]):
            branch = _branch(identity, end)
            if branch is None or any(user not in branch and user is not node for x in branch for user in x.users):
                continue
            layers = _weighted_paths(x for x in graph.nodes if x in branch)
            if layers:
                name = _common(layers) or node.name
                taken = {block.name for block in found}
                name = f"{name} ({node.name})" if name in taken else name
                found.append(Block(name=name, add=node.name, identity=identity.name, layers=layers))
                break
    return tuple(found)


def leave_out(module: fx.GraphModule, block: Block) -> None:
    """Replace a block by its identity, in place; the caller removes dead code.

    An operation that overwrote the sum returns a new tensor from here on.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    if block.add in nodes and block.identity in nodes:
        for consumer in nodes[block.add].users:
            preserve_input(module, consumer)
        nodes[block.add].replace_all_uses_with(nodes[block.identity])


def units(layers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Blocks that share a format: the deepest module with several layers that is no stage.

    >>> units(["conv1", "layer1.0.conv1", "layer1.0.conv2", "fc"])
    {'conv1': ('conv1',), 'layer1.0': ('layer1.0.conv1', 'layer1.0.conv2'), 'fc': ('fc',)}
    """
    counts = Counter(prefix for layer in layers for prefix in _prefixes(layer))
    grouped: dict[str, list[str]] = {}
    for layer in layers:
        deepest = next((prefix for prefix in _prefixes(layer) if counts[prefix] > 1), "")
        name = deepest if deepest and counts[deepest] <= LARGEST_UNIT else layer
        grouped.setdefault(name, []).append(layer)
    return {name: tuple(own) for name, own in grouped.items()}


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _branch(identity: fx.Node, end: fx.Node) -> set[fx.Node] | None:
    """Nodes after `identity` to `end`; None if `end` depends on anything else."""
    seen: set[fx.Node] = set()
    waiting, reached = [end], False
    while waiting:
        node = waiting.pop()
        if node is identity:
            reached = True
            continue
        if node in seen:
            continue
        if node.op == "placeholder":
            return None
        seen.add(node)
        waiting += node.all_input_nodes
    return seen if reached and end is not identity else None


def _weighted_paths(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(str(n.target) for n in nodes if n.op == "call_module" and node_kind(n) in WEIGHTED)


def _common(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    shared = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
