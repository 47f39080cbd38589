"""Activation histograms with their amax.

Tensors of the largest expected noise: step^2 / 12 inside amax (Bennett, 1948), squared distance beyond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from compress.plots.style import LIGHT, Format, bare, compact, distinct, new_figure, tip
from compress.records.rows import Histogram
from compress.support.text import finite, shorten, significant

SHOWN = 6
_BINS = 160  # bins drawn; calibration's thousands would only make the file large

Array = NDArray[np.float64]


def bins_of(histogram: Histogram) -> tuple[Array, Array]:
    """(counts, edges) with every edge."""
    counts = np.asarray(histogram.counts, dtype=np.float64)
    edges = np.asarray(histogram.bin_edges, dtype=np.float64)
    return counts, edges if len(edges) == len(counts) + 1 else np.linspace(edges[0], edges[-1], len(counts) + 1)


def clipped_share(histogram: Histogram) -> float:
    """Share of values beyond amax, 0 to 1; a bin that amax cuts counts in proportion."""
    counts, edges = bins_of(histogram)
    total = counts.sum()
    if not total:
        return 0.0
    width = np.maximum(np.diff(edges), np.finfo(np.float64).tiny)
    above = np.clip((edges[1:] - histogram.amax) / width, 0, 1)
    below = np.clip((-histogram.amax - edges[:-1]) / width, 0, 1)
    return float((counts * np.minimum(above + below, 1)).sum() / total)


def largest(histogram: Histogram) -> float:
    """The largest magnitude, to a bin."""
    counts, edges = bins_of(histogram)
    filled = np.flatnonzero(counts)
    return float(max(abs(edges[filled[0]]), abs(edges[filled[-1] + 1]))) if len(filled) else 0.0


def expected_sqnr_db(histogram: Histogram, *, num_bits: int = 8) -> float:
    """Expected signal to quantization noise, dB, from the histogram alone."""
    counts, edges = bins_of(histogram)
    centres = np.abs(edges[:-1] + edges[1:]) / 2
    levels = 2 ** (num_bits - 1) - 1 if histogram.signed else 2**num_bits - 1
    step = histogram.amax / levels
    noise = np.where(centres <= histogram.amax, step**2 / 12, (centres - histogram.amax) ** 2)
    signal, lost = float((counts * centres**2).sum()), float((counts * noise).sum())
    return 10 * math.log10(signal / lost) if signal > 0 and lost > 0 else math.inf


def interesting(histograms: Sequence[Histogram], count: int = SHOWN) -> tuple[Histogram, ...]:
    """The `count` tensors of the worst expected SQNR, worst first."""
    usable = [h for h in histograms if sum(h.counts) > 0 and finite(h.amax) and h.amax > 0]
    return tuple(sorted(usable, key=expected_sqnr_db)[:count])


def draw_histograms(histograms: Sequence[Histogram], form: Format) -> Figure:
    """Log counts, amax as a line, the clipped part in another colour."""
    columns = min(len(histograms), 2 if form.narrow else 3)
    rows = math.ceil(len(histograms) / columns)
    figure = new_figure(form, rows * (1.75 if form.narrow else 2.05))
    panels = figure.subplots(nrows=rows, ncols=columns, squeeze=False).ravel()
    names = distinct([h.name for h in histograms])
    for axes, histogram, name in zip(panels, histograms, names, strict=False):
        _panel(axes, histogram)
        axes.set_title(shorten(name, 17 if form.narrow else 32), fontsize=8 if form.narrow else 8.5)
    for axes in panels[len(histograms) :]:
        axes.set_visible(False)
    figure.supxlabel("magnitude" if all(h.bin_edges[0] >= 0 for h in histograms) else "value", fontsize=9)
    figure.supylabel("values per bin (log)", fontsize=9)
    return figure


def _panel(axes: Axes, histogram: Histogram) -> None:
    counts, edges = _coarse(*bins_of(histogram))
    shown = np.where(counts > 0, counts, np.nan)
    inside = (edges[1:] <= histogram.amax * (1 + 1e-9)) & (edges[:-1] >= -histogram.amax * (1 + 1e-9))
    for part, colour in ((inside, "blue"), (~inside, "alarm")):
        patch = axes.stairs(np.where(part, shown, np.nan), edges, fill=True, baseline=0.5, color=LIGHT[colour])
        where = "within amax" if colour == "blue" else "clipped"
        tip(patch, f"{histogram.name}: {compact(float(np.nansum(np.where(part, counts, 0))))} values {where}")
    axes.set_yscale("log")
    axes.set_ylim(0.5, max(2.0, float(counts.max()) * 12))
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(compact))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    for line in {histogram.amax, -histogram.amax if edges[0] < 0 else histogram.amax}:
        axes.axvline(line, color=LIGHT["ink"], linewidth=1.1, linestyle=(0, (4, 2)))
    clipped = clipped_share(histogram)
    note = f"amax {significant(histogram.amax)} of {significant(largest(histogram))}\nclipped {_share(clipped)}"
    box = {"facecolor": LIGHT["paper"], "edgecolor": "none", "pad": 1.5}
    axes.text(1, 0.99, note, transform=axes.transAxes, ha="right", va="top", fontsize=7.5, linespacing=1.35, bbox=box)
    bare(axes)


def _coarse(counts: Array, edges: Array) -> tuple[Array, Array]:
    factor = math.ceil(len(counts) / _BINS)
    if factor == 1:
        return counts, edges
    starts = np.arange(0, len(counts), factor)
    return np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])


def _share(share: float) -> str:
    percent = 100 * share
    return "0 %" if percent == 0 else "<0.001 %" if percent < 0.001 else f"{percent:.2g} %"
