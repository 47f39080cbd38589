"""The elements of a page: plain text and figures, which the writers of Markdown and HTML escape."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compress.report.headline import KeyFigure


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column; numbers are right-aligned, code has a fixed width."""

    title: str
    align: Literal["left", "right"] = "left"
    code: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns.

    Attributes:
        group_by: so many leading columns become a heading over the rows that agree in them.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    group_by: int = 0

    def groups(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """(heading, rows without it); one group if `group_by` is 0."""
        grouped = itertools.groupby(self.rows, key=lambda row: row[: self.group_by])
        return [(self._heading(key), [row[self.group_by :] for row in rows]) for key, rows in grouped]

    def _heading(self, key: tuple[str, ...]) -> str:
        parts = [
            f"{column.title} {text}" if column.align == "right" and text[:1].isdigit() else text
            for column, text in zip(self.columns, key, strict=False)
        ]
        return ", ".join(parts)


@dataclass(frozen=True)
class Text:
    """A paragraph; `note` marks an aside."""

    text: str
    note: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Tiles:
    """Large figures side by side."""

    items: tuple[KeyFigure, ...]


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    text: str
    language: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawn figure.

    Attributes:
        alt: what it shows, for who cannot see it.
    """

    name: str
    title: str
    caption: str
    alt: str
    png: bytes
    svg_wide: str
    svg_narrow: str


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An image of a gallery.

    Attributes:
        data: JPEG.
    """

    file: str
    alt: str
    text: str
    data: bytes

    @property
    def address(self) -> str:
        """The image as a data URL."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Images in rows under columns.

    Attributes:
        rows: None where there is no image.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Shown | None, ...], ...]
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Details:
    """Blocks that open on request."""

    summary: str
    blocks: tuple[Table | Text | Code | Bullets, ...]


Block = Table | Text | Bullets | Tiles | Code | Picture | Gallery | Details


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; `key` names it in links."""

    key: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A page: title, what was run, the result as a sentence and as text to copy, sections."""

    title: str
    subtitle: str
    headline: str
    tiles: Tiles
    sections: tuple[Section, ...]
    summary: str = ""


def table(*columns: Column | str, rows: Sequence[Sequence[str]], group_by: int = 0) -> Table:
    """A table; text makes a left-aligned column."""
    made = tuple(Column(title=c) if isinstance(c, str) else c for c in columns)
    return Table(columns=made, rows=tuple(tuple(row) for row in rows), group_by=group_by)


def number(title: str) -> Column:
    """A column of numbers."""
    return Column(title=title, align="right")


def code(title: str) -> Column:
    """A column of names from the model."""
    return Column(title=title, code=True)
