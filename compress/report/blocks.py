"""The elements of a page, and a page as Markdown and HTML.

Markup in names of models and data is escaped: here for GitHub, by the templates' environment in HTML.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from compress.plots.style import DARK, LIGHT
from compress.support.text import MISSING, plain


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


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """A large figure with what it means."""

    value: str
    label: str


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
    made = tuple(Column(title=c) if isinstance(c, str) else c for c in columns)
    return Table(columns=made, rows=tuple(tuple(row) for row in rows), group_by=group_by)


def number(title: str) -> Column:
    return Column(title=title, align="right")


def code(title: str) -> Column:
    return Column(title=title, code=True)


FIGURES = "figures"


def to_markdown(document: Document) -> str:
    parts = [f"# {escape(document.title)}"]
    if document.subtitle:
        parts.append(escape(document.subtitle))
    parts.append(f"**{escape(document.headline)}**")
    parts.append(_block(document.tiles))
    for section in document.sections:
        parts.append(f"## {escape(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    r"""Escaped text on one line.

    >>> print(escape("a|b <i> *x* layer1_0 _y_"))
    a\|b &lt;i&gt; \*x\* layer1_0 \_y\_
    """
    text = plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~$])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    text = re.sub(r"^(\s*)([-+=#])(?=[-+=#\s]*(?:\s|$))", r"\1\\\2", text)  # bullets, headings, rules
    text = re.sub(r"^(\s*\d+)([.)])(?=\s|$)", r"\1\\\2", text)
    return re.sub(r"(?i)\b(https?|ftp|mailto)(:)|\b(www)(\.)", _unlinked, text)


def _unlinked(match: re.Match[str]) -> str:
    return f"{match[1] or match[3]}<span></span>{match[2] or match[4]}"


def _block(block: Block) -> str:
    match block:
        case Text():
            return f"_{escape(block.text)}_" if block.note else escape(block.text)
        case Bullets():
            return "\n".join(f"- {escape(item)}" for item in block.items)
        case Tiles():
            return "\n".join(f"- **{escape(tile.value)}** {escape(tile.label)}" for tile in block.items)
        case Code():
            fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", block.text))])
            return f"{fence}{block.language}\n{block.text.rstrip()}\n{fence}"
        case Picture():
            image = f"![{escape(block.alt)}]({FIGURES}/{block.name}.png)"
            return f"### {escape(block.title)}\n\n{image}\n\n{escape(block.caption)}"
        case Table():
            rules = ["---:" if column.align == "right" else "---" for column in block.columns]
            rows = ([escape(cell) for cell in row] for row in block.rows)
            return "\n".join(map(_line, [[escape(column.title) for column in block.columns], rules, *rows]))
        case Gallery():
            return _gallery(block)
        case Details():
            inner = "\n\n".join(map(_block, block.blocks))
            return f"<details><summary>{escape(block.summary)}</summary>\n\n{inner}\n\n</details>"


def _gallery(block: Gallery) -> str:
    lines = [_line([escape(title) for title in block.columns]), _line(["---"] * len(block.columns))]
    for row in block.rows:
        cells = [
            "" if one is None else f"![{escape(one.alt)}]({one.file})" + (f"<br>{escape(one.text)}" if one.text else "")
            for one in row
        ]
        lines.append(_line(cells))
    colours = ", ".join(f"{escape(name)} {colour}" for name, colour in block.legend)
    return "\n".join([*lines, "", f"Colours: {colours}."] if colours else lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_html(document: Document) -> str:
    return render(
        "report.html",
        title=document.title,
        subtitle=document.subtitle,
        headline=document.headline,
        summary=document.summary,
        tiles=document.tiles,
        sections=document.sections,
    )


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("compress.report"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else plain(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"light": LIGHT, "dark": DARK, "missing": MISSING}
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "lines": lambda text: Markup("\n").join(plain(line) for line in text.rstrip().split("\n")),
    }
    return environment
