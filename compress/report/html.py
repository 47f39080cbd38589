"""Pages as self-contained HTML; the templates' environment escapes all text but our own figures."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from compress.plots.style import DARK, LIGHT
from compress.report.blocks import Document
from compress.support.text import MISSING, plain


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
