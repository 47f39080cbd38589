"""A document as one self-contained HTML page. Every text from outside goes through `html.escape` here."""

from __future__ import annotations

import html
import itertools
from functools import singledispatch

from compress.report.blocks import (
    Block,
    Bullets,
    Code,
    Column,
    Details,
    Document,
    Picture,
    Section,
    Table,
    Text,
    Tiles,
)
from compress.report.page import SKELETON, STYLE
from compress.report.style import plain
from compress.report.tables import MISSING


def to_html(document: Document) -> str:
    """The whole of report.html."""
    return SKELETON.format(
        style=STYLE,
        title=escape(document.title),
        subtitle=f" <span>{escape(document.subtitle)}</span>" if document.subtitle else "",
        headline=escape(document.headline),
        tiles=_block(document.tiles) if document.tiles.items else "",
        links="".join(f'<a href="#{escape(s.key)}">{escape(s.title)}</a>' for s in document.sections),
        sections="\n".join(_section(section) for section in document.sections),
    )


def escape(text: str) -> str:
    """Text for an element or a quoted attribute, on one line.

    >>> escape('<b a="1">')
    '&lt;b a=&quot;1&quot;&gt;'
    """
    return html.escape(plain(text))


def _section(section: Section) -> str:
    inner = "\n".join(_block(block) for block in section.blocks)
    key = escape(section.key)
    heading = f'<h2 id="{key}-title">{escape(section.title)}</h2>'
    return f'<section id="{key}" aria-labelledby="{key}-title">\n{heading}\n{inner}\n</section>'


@singledispatch
def _block(block: Block) -> str:
    raise TypeError(f"no HTML for {type(block).__name__}")


@_block.register
def _(block: Text) -> str:
    return f'<p class="note">{escape(block.text)}</p>' if block.note else f"<p>{escape(block.text)}</p>"


@_block.register
def _(block: Bullets) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in block.items)}</ul>"


@_block.register
def _(block: Tiles) -> str:
    items = "".join(f"<li><b>{escape(tile.value)}</b><span>{escape(tile.label)}</span></li>" for tile in block.items)
    return f'<ul class="tiles">{items}</ul>'


@_block.register
def _(block: Code) -> str:
    lines = "\n".join(plain(line) for line in block.text.rstrip().split("\n"))
    return f'<pre tabindex="0">{html.escape(lines)}</pre>'


@_block.register
def _(block: Picture) -> str:
    return (
        f"<figure>\n<h3>{escape(block.title)}</h3>\n"
        f'<div class="wide">{block.svg_wide}</div>\n<div class="narrow">{block.svg_narrow}</div>\n'
        f"<figcaption>{escape(block.caption)}</figcaption>\n</figure>"
    )


@_block.register
def _(block: Details) -> str:
    inner = "\n".join(_block(item) for item in block.blocks)
    return f"<details><summary>{escape(block.summary)}</summary>\n{inner}\n</details>"


@_block.register
def _(block: Table) -> str:
    columns = block.columns[block.group_by :]
    head = "".join(f'<th scope="col"{_class(column)}>{escape(column.title)}</th>' for column in columns)
    opening = '<table class="grouped">' if block.group_by else "<table>"
    lines = [f'<div class="scroll" tabindex="0">{opening}<thead><tr>{head}</tr></thead>']
    for key, rows in itertools.groupby(block.rows, key=lambda row: row[: block.group_by]):
        lines.append("<tbody>")
        if key:
            heading = f'<th scope="rowgroup" colspan="{len(columns)}">{escape(_heading(block, key))}</th>'
            lines.append(f"<tr>{heading}</tr>")
        for row in rows:
            cells = zip(columns, row[block.group_by :], strict=True)
            lines.append(f"<tr>{''.join(f'<td{_class(c)}>{_cell(c, text)}</td>' for c, text in cells)}</tr>")
        lines.append("</tbody>")
    return "\n".join(lines) + "</table></div>"


def _heading(block: Table, key: tuple[str, ...]) -> str:
    """The grouping cells in a line: the first alone, numbers with their column's title."""
    parts = [
        f"{column.title} {text}" if column.align == "right" and text[:1].isdigit() else text
        for column, text in zip(block.columns, key, strict=False)
    ]
    return ", ".join(parts)


def _class(column: Column) -> str:
    return ' class="num"' if column.align == "right" else ""


def _cell(column: Column, text: str) -> str:
    if text == MISSING:
        return f'<span class="none">{MISSING}</span>'
    return f"<code>{escape(text)}</code>" if column.code and text else escape(text)
