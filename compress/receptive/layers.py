"""Choice of layers to draw: the ends of a network's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from compress.errors import ModelError
from compress.receptive.probe import grids
from compress.receptive.table import ReceptiveField, ReceptiveFieldTable
from compress.receptive.theoretical import receptive_field

T = TypeVar("T")


def layers_to_show(model: nn.Module, image: Tensor, *, count: int = 8) -> list[str | None]:
    """Return up to `count` layers whose units lie on a grid, in order, including the last one.

    The image is (1, C, height, width). A model that cannot be traced gives [None], its last layer.
    """
    own = next((t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), torch.zeros(()))
    try:
        table = receptive_field(model, image.to(own))
    except ModelError:
        return [None]
    rows = grids(table, image)
    ends = _block_ends(table, rows, count)
    if len(ends) < min(count, 4):
        kinds = {"conv", "max_pool", "avg_pool", "add", "concat", "attention"}
        ends = [(row, row.path or row.name) for row in rows if row.kind in kinds]
    if rows and (not ends or ends[-1][0] is not rows[-1]):
        ends.append((rows[-1], rows[-1].path or rows[-1].name))
    return [name for _, name in spread(ends, count)]


def _block_ends(
    table: ReceptiveFieldTable, rows: Sequence[ReceptiveField], count: int
) -> list[tuple[ReceptiveField, str]]:
    """(last row, path) of the blocks at the outermost level with `count` blocks, else with the most."""
    levels: dict[int, list[tuple[ReceptiveField, str]]] = {}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        after = set(following.scopes) if following is not None else set()
        for scope in row.scopes:
            if scope and scope not in after and scope != row.path and table.row(scope) is row:
                levels.setdefault(scope.count("."), []).append((row, scope))
    enough = [ends for _, ends in sorted(levels.items()) if len(ends) >= count]
    return enough[0] if enough else max(levels.values(), key=len, default=[])


def spread(rows: list[T], count: int) -> list[T]:
    """Return `count` of some items, evenly spread, including the last."""
    if len(rows) <= count:
        return rows
    if count <= 1:
        return rows[-1:]
    indices = sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})
    return [rows[index] for index in indices]
