"""The front of a search."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from compress.plots.style import LIGHT, Format, new_figure

_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 14.0, 12.0, 44.0
_RADIUS = {"front": 5.5, "chosen": 8.0}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point of the picture.

    Attributes:
        x: time over that of the float network.
        text: shown under the pointer.
    """

    x: float
    y: float
    kind: str
    text: str


_COLOURS = {"front": "blue", "chosen": "green", "trial": "grey", "baseline": "amber"}
_NAMES = {"front": "front", "chosen": "chosen", "trial": "other trials", "baseline": "uniform"}


def draw_front(marks: Sequence[Mark], form: Format, *, x_label: str, y_label: str) -> Figure:
    """The front as a figure."""
    figure = new_figure(form, 3.4)
    axes = figure.subplots()
    for kind, colour in _COLOURS.items():
        own = [mark for mark in marks if mark.kind == kind]
        if own:
            size = 60 if kind == "chosen" else 24
            axes.scatter([m.x for m in own], [m.y for m in own], s=size, color=LIGHT[colour], label=_NAMES[kind])
    steps = sorted((m.x, m.y) for m in marks if m.kind in {"front", "chosen"})
    axes.plot([x for x, _ in steps], [y for _, y in steps], color=LIGHT["blue"], linewidth=1, zorder=1)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend()
    return figure


def front_svg(marks: Sequence[Mark], *, width: float, label: str, x_label: str, y_label: str) -> str:
    """The front as <svg>, each mark with a title; `width` is in pixels, `label` the text alternative."""
    height = 0.62 * width
    right = max([mark.x for mark in marks] + [0.1]) * 1.06
    top = max([mark.y for mark in marks] + [1e-6]) * 1.06

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (width - _LEFT - _RIGHT) * x / right, (height - _TOP - _BOTTOM) * y / top
        return round(_LEFT + across, 1), round(height - _BOTTOM - up, 1)

    parts = []
    for i in range(6):
        x, y = at(right * i / 5, top * i / 5)
        parts.append(_line(x, _TOP, x, height - _BOTTOM) + _text(x, height - _BOTTOM + 16, f"{right * i / 5:.2f}"))
        parts.append(_line(_LEFT, y, width - _RIGHT, y) + _text(_LEFT - 6, y + 4, f"{top * i / 5:.2g}", anchor="end"))
    parts.append(_text(width / 2, height - 6, x_label))
    parts.append(f'<g transform="rotate(-90 12 {height / 2:.0f})">{_text(12, height / 2, y_label)}</g>')
    steps = " ".join("{},{}".format(*at(m.x, m.y)) for m in _sorted(marks) if m.kind in {"front", "chosen"})
    parts.append(f'<polyline points="{steps}" fill="none" stroke="var(--blue)"/>')
    for mark in sorted(marks, key=lambda m: list(_COLOURS).index(m.kind), reverse=True):
        x, y = at(mark.x, mark.y)
        title = html.escape(mark.text)
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="{_RADIUS.get(mark.kind, 4.0)}" fill="var(--{_COLOURS[mark.kind]})" '
            f'tabindex="0"><title>{title}</title></circle>'
        )
    box = f"0 0 {width:.0f} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'


def _sorted(marks: Sequence[Mark]) -> list[Mark]:
    return sorted(marks, key=lambda mark: mark.x)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1:.1f}" x2="{x2}" y2="{y2:.1f}" stroke="var(--grid)"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    words = html.escape(text)
    return f'<text x="{x}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="var(--muted)">{words}</text>'
