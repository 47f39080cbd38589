"""Lifetimes of the values of a graph: where only one value has consumers left, the graph can be cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx


def alive_after(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Yield each node with those of `nodes`, in graph order, up to it that later ones of them consume."""
    place = {node: i for i, node in enumerate(nodes)}
    last = {node: max((place[user] for user in node.users if user in place), default=-1) for node in place}
    live: set[fx.Node] = set()
    for node, i in place.items():
        live = {other for other in (*live, node) if last[other] > i}
        yield node, live
