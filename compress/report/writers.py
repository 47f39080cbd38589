"""A document as Markdown and as HTML.

Markup in names of models and data is escaped: here for GitHub, by the templates' environment in HTML.
"""

from __future__ import annotations

import re
from functools import cache, singledispatch
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from compress.plots.style import DARK, LIGHT
from compress.report.blocks import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Gallery,
    Picture,
    Table,
    Text,
    Tiles,
)
from compress.support.text import MISSING, plain

FIGURES = "figures"
"""Folder of the figures, beside the report."""


def to_markdown(document: Document) -> str:
    """The whole of report.md."""
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
    """Break what GitHub would turn into a link."""
    return f"{match[1] or match[3]}<span></span>{match[2] or match[4]}"


@singledispatch
def _block(block: Block) -> str:
    raise TypeError(f"no markdown for {type(block).__name__}")


@_block.register
def _(block: Text) -> str:
    return f"_{escape(block.text)}_" if block.note else escape(block.text)


@_block.register
def _(block: Bullets) -> str:
    return "\n".join(f"- {escape(item)}" for item in block.items)


@_block.register
def _(block: Tiles) -> str:
    return "\n".join(f"- **{escape(tile.value)}** {escape(tile.label)}" for tile in block.items)


@_block.register
def _(block: Code) -> str:
    longest = max((len(run) for run in re.findall(r"`+", block.text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{block.language}\n{block.text.rstrip()}\n{fence}"


@_block.register
def _(block: Picture) -> str:
    image = f"![{escape(block.alt)}]({FIGURES}/{block.name}.png)"
    return f"### {escape(block.title)}\n\n{image}\n\n{escape(block.caption)}"


@_block.register
def _(block: Table) -> str:
    head = _line([escape(column.title) for column in block.columns])
    rule = _line([" ---: ".strip() if column.align == "right" else "---" for column in block.columns])
    return "\n".join([head, rule, *(_line([escape(cell) for cell in row]) for row in block.rows)])


@_block.register
def _(block: Gallery) -> str:
    lines = [_line([escape(title) for title in block.columns]), _line(["---"] * len(block.columns))]
    for row in block.rows:
        cells = [
            "" if one is None else f"![{escape(one.alt)}]({one.file})" + (f"<br>{escape(one.text)}" if one.text else "")
            for one in row
        ]
        lines.append(_line(cells))
    colours = ", ".join(f"{escape(name)} {colour}" for name, colour in block.legend)
    return "\n".join([*lines, "", f"Colours: {colours}."] if colours else lines)


@_block.register
def _(block: Details) -> str:
    inner = "\n\n".join(_block(item) for item in block.blocks)
    return f"<details><summary>{escape(block.summary)}</summary>\n\n{inner}\n\n</details>"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_html(document: Document) -> str:
    """The whole of report.html."""
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
    """Fill a template; texts are put on one line and escaped."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("compress.report"),
        autoescape=True,
        finalize=_printed,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"light": LIGHT, "dark": DARK, "missing": MISSING}
    environment.filters |= {"kind": lambda block: type(block).__name__, "lines": _lines}
    return environment


def _printed(value: object) -> object:
    """Text on one line without control characters; markup stays."""
    return value if isinstance(value, Markup) else plain(str(value))


def _lines(text: str) -> Markup:
    return Markup("\n").join(plain(line) for line in text.rstrip().split("\n"))
