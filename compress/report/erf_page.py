"""A page in which one picks a layer and sees where it looks: one file, no script, nothing fetched from anywhere.

The layers are radio buttons and the style sheet shows the picture of the one that is checked, so that the arrow keys
walk through the network.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from compress.receptive_field import EffectiveReceptiveField
from compress.report.page import STYLE

_STYLE = """
.picker { position: absolute; opacity: 0; }
.names { display: flex; flex-wrap: wrap; gap: .4rem; margin: 0 0 1rem; }
.names label { border: 1px solid var(--line); border-radius: .4rem; padding: .25rem .6rem; cursor: pointer;
  font-size: .85rem; }
.view { display: none; }
.view img { width: 100%; height: auto; display: block; border-radius: .3rem; }
@media print { .view { display: block; break-inside: avoid; } .names { display: none; } }
"""
_COLUMNS = ("layer", "units", "side, px", "σ, px", "half within, px", "theoretical, px", "share")


def erf_page(title: str, lead: str, fields: Sequence[EffectiveReceptiveField], pictures: Sequence[bytes]) -> str:
    """The page.

    Args:
        title: of the page, plain text.
        lead: a paragraph that says what was measured, plain text.
        fields: in the order of the network; the last one is shown first.
        pictures: PNG of each.
    """
    last = len(fields) - 1
    inputs = "".join(
        f'<input class="picker" type="radio" name="layer" id="l{i}"{" checked" if i == last else ""}>'
        for i in range(len(fields))
    )
    labels = "".join(f'<label for="l{i}">{html.escape(f.layer)}</label>' for i, f in enumerate(fields))
    views = "".join(
        f'<div class="view" id="v{i}"><img alt="{html.escape(_alt(field))}" '
        f'src="data:image/png;base64,{base64.b64encode(picture).decode()}"></div>'
        for i, (field, picture) in enumerate(zip(fields, pictures, strict=True))
    )
    chosen = "".join(
        f"#l{i}:checked ~ .views #v{i} {{ display: block; }}\n"
        f'#l{i}:checked ~ .names label[for="l{i}"] {{ background: var(--blue); color: #fff; }}\n'
        f'#l{i}:focus-visible ~ .names label[for="l{i}"] {{ outline: 2px solid var(--alarm); }}\n'
        for i in range(len(fields))
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}{_STYLE}{chosen}</style>
</head>
<body>
<header><h1>{html.escape(title)}</h1><p class="note">{html.escape(lead)}</p></header>
<main>
<section aria-label="Layers">{inputs}<div class="names" role="presentation">{labels}</div>
<div class="views">{views}</div>
<p class="note">Pick a layer, or walk through the network with the arrow keys.</p></section>
<section><h2>All layers</h2><div class="scroll" tabindex="0">{_table(fields)}</div></section>
</main>
<footer><p>Written by compress.</p></footer>
</body>
</html>
"""


def _alt(field: EffectiveReceptiveField) -> str:
    return f"Effective receptive field of {field.layer}: side {field.metrics.size:.0f} pixels"


def _table(fields: Sequence[EffectiveReceptiveField]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in _COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(f)) + "</tr>" for f in fields)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cells(field: EffectiveReceptiveField) -> tuple[str, ...]:
    """One field as text: layer, units, side, sigma, radius of half the influence, theoretical size, share of it."""
    metrics, row = field.metrics, field.theoretical
    theory = "not known"
    if row is not None and row.status == "global":
        local = f" ({row.local_size[0]} without)" if row.local_size[0] is not None else ""
        theory = f"global{local}"
    elif row is not None and row.status == "exact":
        theory = " × ".join(str(s) for s in dict.fromkeys(row.size))
    share = f"{100 * metrics.theoretical_share:.0f} %" if metrics.theoretical_share else "n/a"
    sigma = " × ".join(f"{s:.1f}" for s in metrics.gaussian.sigma)
    units = f"{field.grid[0]} × {field.grid[1]}"
    return field.layer, units, f"{metrics.size:.1f}", sigma, f"{metrics.radius_50:.1f}", theory, share
