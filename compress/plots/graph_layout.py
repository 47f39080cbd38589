"""Layout of a small directed graph: layers from top to bottom (Sugiyama, Tagawa and Toda, IEEE Trans. SMC 11(2), 1981).

A node's layer is the longest path to it; within a layer, nodes are ordered by the mean of their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

Place = tuple[float, float]
_SWEEPS = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions, x in widths of a box from left, y in layers from the top.

    Attributes:
        routes: the points of each edge.
    """

    places: dict[str, Place]
    routes: dict[tuple[str, str], list[Place]]


def lay_out(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> Layout:
    """Lay out an acyclic graph."""
    before: dict[str, list[str]] = {node: [a for a, b in edges if b == node] for node in nodes}
    after: dict[str, list[str]] = {node: [b for a, b in edges if a == node] for node in nodes}
    level: dict[str, int] = {}
    for node in nodes:
        level[node] = max((level[a] + 1 for a in before[node]), default=0)
    for node in reversed(nodes):  # a node without inputs is placed just above its first consumer
        if not before[node] and after[node]:
            level[node] = min(level[b] for b in after[node]) - 1
    chains = {edge: _chain(edge, level) for edge in dict.fromkeys(edges)}
    links = [pair for chain in chains.values() for pair in pairwise(chain)]
    for chain in chains.values():
        for step, point in enumerate(chain):
            level.setdefault(point, level[chain[0]] + step)
    x = _columns(level, links)
    places = {node: (x[node], float(level[node])) for node in nodes}
    routes = {edge: [(x[point], float(level[point])) for point in chain] for edge, chain in chains.items()}
    return Layout(places=places, routes=routes)


def _chain(edge: tuple[str, str], level: Mapping[str, int]) -> list[str]:
    start, end = edge
    return [start, *(f"{start}>{end}>{i}" for i in range(level[start] + 1, level[end])), end]


def _columns(level: Mapping[str, int], links: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Columns: neighbours pull, boxes of one layer keep a width."""
    rows: dict[int, list[str]] = {}
    for node, depth in level.items():
        rows.setdefault(depth, []).append(node)
    near: dict[str, list[str]] = {node: [] for node in level}
    for a, b in links:
        near[a].append(b)
        near[b].append(a)
    x = {node: float(i) - (len(row) - 1) / 2 for row in rows.values() for i, node in enumerate(row)}
    depths = sorted(rows)
    for sweep in range(_SWEEPS):
        for depth in depths if sweep % 2 == 0 else reversed(depths):
            pull = {node: fmean([x[other] for other in near[node]] or [x[node]]) for node in rows[depth]}
            rows[depth].sort(key=lambda node: pull[node])
            _spread(rows[depth], pull, x)
    left = min(x.values())
    return {node: value - left for node, value in x.items()}


def _spread(row: Sequence[str], pull: Mapping[str, float], x: dict[str, float]) -> None:
    previous = None
    for node in row:
        x[node] = pull[node] if previous is None else max(pull[node], x[previous] + (1.0 if ">" not in node else 0.75))
        previous = node
    shift = fmean(pull[node] for node in row) - fmean(x[node] for node in row)
    for node in row:
        x[node] += shift
