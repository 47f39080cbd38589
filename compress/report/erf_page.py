"""A page in which one picks a layer and sees its effective receptive field: one file, no script, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from compress.receptive import EffectiveReceptiveField
from compress.report.html import render

_COLUMNS = ("layer", "units", "side, px", "σ, px", "half within, px", "theoretical, px", "share")


def erf_page(title: str, lead: str, fields: Sequence[EffectiveReceptiveField], pictures: Sequence[bytes]) -> str:
    """The page.

    Args:
        title: of the page, plain text.
        lead: a paragraph that says what was measured, plain text.
        fields: in the order of the network; the last one is shown first.
        pictures: PNG of each.
    """
    views = [
        {
            "layer": field.layer,
            "alt": f"Effective receptive field of {field.layer}: side {field.metrics.size:.0f} pixels",
            "png": base64.b64encode(picture).decode(),
            "cells": cells(field),
        }
        for field, picture in zip(fields, pictures, strict=True)
    ]
    return render("erf.html", title=title, lead=lead, columns=_COLUMNS, views=views)


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
