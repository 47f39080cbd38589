"""The style of all figures: a palette for colour-blind readers, fonts, sizes, formats.

Colours are those of Okabe and Ito (2008). PNG uses a colour's light value, SVG a CSS variable for light and dark
screens.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from compress.files import replacing
from compress.support.text import display, in_bytes, plain, shorten
from compress.variants import Variant

LIGHT: Mapping[str, str] = {
    "ink": "#1b2430",
    "muted": "#5b6675",
    "grid": "#e3e7ec",
    "paper": "#fefefe",
    "grey": "#7a8594",
    "amber": "#e69f00",
    "blue": "#0072b2",
    "green": "#009e73",
    "purple": "#c274a5",
    "sky": "#56b4e9",
    "alarm": "#d55e00",
}
DARK: Mapping[str, str] = {
    "ink": "#e6eaf0",
    "muted": "#a3adba",
    "grid": "#333c48",
    "paper": "#161b22",
    "grey": "#98a3b1",
    "amber": "#f0b429",
    "blue": "#4aa8e0",
    "green": "#2bbd92",
    "purple": "#d998c2",
    "sky": "#8ccdf2",
    "alarm": "#ff7f3f",
}
_VARIANT_COLOURS: Mapping[str, str] = {Variant.FLOAT: "grey", Variant.PTQ: "amber", Variant.QAT: "blue"}
_OTHER_COLOURS = ("green", "purple", "sky", "alarm")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, kw_only=True)
class Format:
    """A page: width in inches, and whether panels are stacked."""

    name: str
    width: float
    narrow: bool


WIDE = Format(name="wide", width=8.6, narrow=False)
NARROW = Format(name="narrow", width=3.5, narrow=True)


def label(name: str, limit: int = 22) -> str:
    return shorten(display(name), limit)


def variant_colours(variants: tuple[str, ...]) -> dict[str, str]:
    others = [v for v in variants if v not in _VARIANT_COLOURS]
    rest = {v: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, v in enumerate(others)}
    return {v: LIGHT[_VARIANT_COLOURS.get(v) or rest[v]] for v in variants}


def distinct(names: Sequence[str]) -> list[str]:
    """Names without the dotted beginning and end that all share.

    >>> distinct(["quantizers.conv1", "quantizers.fc"]), distinct(["conv1.input", "fc.input"])
    (['conv1', 'fc'], ['conv1', 'fc'])
    """
    parts = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return list(names)
    while all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    while all(len(p) > 1 for p in parts) and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]
    return [".".join(p) for p in parts]


def compact(value: float, _position: object = None) -> str:
    """A number for a tick.

    >>> [compact(v) for v in (0, 0.25, 12, 1500, 2_000_000)]
    ['0', '0.25', '12', '1.5k', '2M']
    """
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


@contextmanager
def styled() -> Iterator[None]:
    """The style while figures are made and saved; names are text, never markup."""
    settings: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.0,
        "axes.titlesize": 10.0,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9.0,
        "axes.edgecolor": LIGHT["muted"],
        "axes.labelcolor": LIGHT["ink"],
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.facecolor": LIGHT["paper"],
        "figure.facecolor": LIGHT["paper"],
        "grid.color": LIGHT["grid"],
        "grid.linewidth": 0.8,
        "text.color": LIGHT["ink"],
        "text.parse_math": False,
        "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["muted"],
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 3.0,
        "ytick.major.size": 3.0,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "hatch.linewidth": 0.6,
        "svg.fonttype": "none",
        "svg.hashsalt": "compress",
        "savefig.bbox": "standard",
    }
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the page's own fonts have it
        yield


def tip(artist: Artist, text: str) -> None:
    """Show `text` under the pointer, on pages."""
    artist.set_gid(_TIP + text.encode("utf-8").hex())


_TIP = "tip-"


def new_figure(form: Format, height: float) -> Figure:
    return Figure(figsize=(form.width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.07))


def settle(figure: Figure) -> Figure:
    """Lay out for good: later additions move nothing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")
    return figure


def bare(axes: Axes, *, grid: Literal["x", "y"] = "y") -> None:
    axes.grid(visible=False)
    axes.grid(visible=True, axis=grid)


def name_rows(axes: Axes, names: Sequence[str], *, end: float) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()
    axes.set_xlim(0, end or 1)
    axes.tick_params(axis="y", length=0)
    bare(axes, grid="x")


def byte_ticks(axes: Axes, count: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(count))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value).replace(".0 ", " ")))


def plain_ticks(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def caption(figure: Figure, text: str) -> None:
    text = text.replace(" %", "\u00a0%").replace(" px", "\u00a0px")
    wrapped = textwrap.fill(text, int(figure.get_figwidth() * 15.5))
    figure.supxlabel(wrapped, fontsize=8.5, color=LIGHT["muted"], x=0.01, ha="left")


def save_figure(figure: Figure, path: Path | str, *, dpi: int = 160) -> Path:
    with styled(), replacing(path) as temporary:
        temporary.write_bytes(to_png(figure, dpi=dpi))
    return Path(path)


def to_png(figure: Figure, *, dpi: int = 160) -> bytes:
    """The figure as a PNG that depends on nothing but what is drawn."""
    buffer = io.BytesIO()
    with _printed_at(figure, dpi):
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def _printed_at(figure: Figure, dpi: float) -> Iterator[None]:
    """The canvas may change the resolution: restore it."""
    before = figure.dpi
    figure.dpi = dpi
    try:
        yield
    finally:
        figure.dpi = before


def to_inline_svg(figure: Figure, *, key: str, label: str) -> str:
    """The figure as <svg> with CSS variables and ids made unique by `key`."""
    buffer = io.StringIO()
    with _printed_at(figure, figure.dpi):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(style|metadata)\b.*?</\1>", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]*)"', svg)
    body = svg[svg.index(">") + 1 :]
    tags = _TAG.findall(body)  # text between tags holds names from outside and is left as it is
    used = {name for tag in tags for name in re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', tag)}
    body = _TAG.sub(lambda match: _page_tag(match[0], key, used), body)
    body = re.sub(r"\s*\n\s*", " ", body).strip()
    return f'<svg viewBox="{box[1] if box else ""}" role="img" aria-label="{html.escape(label)}">{body}'


_TAG = re.compile(r"<[^>]*>")
_VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}


def _page_tag(tag: str, key: str, used: set[str]) -> str:
    if said := re.search(rf' id="{_TIP}([0-9a-f]*)"', tag):
        text = html.escape(plain(bytes.fromhex(said[1]).decode("utf-8")))
        return f'<g class="mark"><title>{text}</title>'
    tag = re.sub(r' id="([^"]*)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", tag)
    tag = tag.replace("url(#", f"url(#{key}-").replace('xlink:href="#', f'href="#{key}-')
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", tag)
    tag = re.sub(r"(\d+\.\d\d)\d+", r"\1", tag)
    tag = re.sub(r"#[0-9a-f]{6}\b", lambda m: _VARIABLES.get(m[0], m[0]), tag)
    return re.sub(r"\s*\n\s*", " ", tag)


def nice_limits(values: list[float], *, least_span: float) -> tuple[float, float]:
    """Limits with a margin, spanning at least `least_span`: noise must not fill the axis."""
    low, high = min(values), max(values)
    span = max(high - low, least_span)
    middle = (low + high) / 2
    low, high = min(low, middle - span / 2), max(high, middle + span / 2)
    return low - 0.15 * span, high + 0.15 * span
