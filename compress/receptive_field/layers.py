"""Which layers of a network are worth a picture: the ends of its blocks, spread from the first to the last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.errors import ModelError
from compress.receptive_field.probe import grids
from compress.receptive_field.table import ReceptiveField, ReceptiveFieldTable
from compress.receptive_field.theoretical import receptive_field


def layers_to_show(model: nn.Module, image: Tensor, *, count: int = 8) -> list[str | None]:
    """Names of up to `count` layers whose units lie on a grid, in order; the last one is always among them.

    Args:
        model: any module; one that torch.fx cannot trace gives [None], which stands for its last layer.
        image: (1, C, height, width).
        count: at least 1.
    """
    held = next((t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), torch.zeros(()))
    try:
        table = receptive_field(model, image.to(held))
    except ModelError:
        return [None]
    rows = grids(table, image)
    ends = [row for row, following in zip(rows, [*rows[1:], None], strict=True) if _ends_block(row, following)]
    if len(ends) < min(count, 4):
        kinds = {"conv", "max_pool", "avg_pool", "add", "concat", "attention"}
        ends = [row for row in rows if row.kind in kinds] or rows
    if rows and ends[-1] is not rows[-1]:
        ends.append(rows[-1])
    return [_label(table, row) for row in spread(ends, count)]


def _ends_block(row: ReceptiveField, following: ReceptiveField | None) -> bool:
    """Whether a block of at least two levels of modules ends at this row (layer1.0, features.3)."""
    after = set(following.scopes) if following is not None else set()
    return any("." in scope and scope not in after and scope != row.path for scope in row.scopes)


def _label(table: ReceptiveFieldTable, row: ReceptiveField) -> str:
    """The innermost block that returns this row, else the module's path, else the node's name."""
    for scope in sorted((s for s in row.scopes if "." in s and s != row.path), key=len, reverse=True):
        if table.row(scope) is row:
            return scope
    return row.path or row.name


def spread(rows: list[ReceptiveField], count: int) -> list[ReceptiveField]:
    """`count` of some rows, evenly, with the last."""
    if len(rows) <= count:
        return rows
    if count <= 1:
        return rows[-1:]
    places = sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})
    return [rows[place] for place in places]
