"""Figures of studies of effective receptive fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compress.plots.erf import DECADES, HEAT, draw_box
from compress.plots.style import LIGHT, caption, plain_ticks, styled
from compress.receptive import EffectiveReceptiveField
from compress.receptive.metrics import distances

_COLOURS = ("blue", "alarm", "green", "amber", "purple")


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """y = factor * x^exponent."""

    exponent: float
    factor: float


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The least squares of logarithms, positive points.

    >>> power_law([1, 2, 4], [3, 12, 48])
    PowerLaw(exponent=2.0, factor=3.0)
    """
    logs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in logs) / sum((a - mean_x) ** 2 for a, _ in logs)
    return PowerLaw(exponent=round(exponent, 9), factor=round(math.exp(mean_y - exponent * mean_x), 9))


def draw_depth(
    sizes: Mapping[str, Sequence[tuple[int, float]]],
    closed: Mapping[str, Sequence[tuple[int, float]]],
    theory: Mapping[int, int],
    text: str,
) -> Figure:
    """Size against depth, and its share of the theoretical field.

    Args:
        sizes: name -> (layers, measured size in pixels).
        closed: name -> (layers, size by a closed form), drawn as lines.
        theory: layers -> theoretical size.
        text: what to see.
    """
    with styled():
        figure = Figure(figsize=(10.6, 4.7), layout="constrained")
        left, right = figure.subplots(ncols=2)
        for name, points in closed.items():
            style = "-" if "equal" in name else ":"
            left.plot(*zip(*points, strict=True), color=LIGHT["muted"], linestyle=style, linewidth=1.2, label=name)
            share = [(n, size / theory[n]) for n, size in points]
            right.plot(*zip(*share, strict=True), color=LIGHT["muted"], linestyle=style, linewidth=1.2)
        for place, (name, points) in enumerate(sizes.items()):
            colour, marker = LIGHT[_COLOURS[place]], "os^Dv"[place]
            law = power_law(*zip(*points, strict=True))
            shares = [(n, size / theory[n]) for n, size in points]
            falling = power_law(*zip(*shares, strict=True))
            left.plot(
                *zip(*points, strict=True), marker, color=colour, markersize=6, label=f"{name}: n^{law.exponent:.2f}"
            )
            right.plot(
                *zip(*shares, strict=True),
                marker,
                color=colour,
                markersize=6,
                label=f"{name}: n^{falling.exponent:.2f}",
            )
        left.set(xlabel="convolutions of 3 × 3", ylabel="side of the effective field, px")
        right.set(xlabel="convolutions of 3 × 3", ylabel="side over that of the theoretical field")
        left.set_title("It grows with the square root of the depth")
        right.set_title("Its share of the theoretical field falls")
        for axes in (left, right):
            _plain_logs(axes, [n for points in sizes.values() for n, _ in points])
            axes.legend(fontsize=7.5)
        caption(figure, text)
        return figure


def _plain_logs(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)))
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)


def ring_share(field: EffectiveReceptiveField, ring: tuple[float, float]) -> float:
    """Share of influence at distances within `ring`, pixels."""
    distance = distances(field.heat.shape, field.centre)
    inside = (distance >= ring[0]) & (distance <= ring[1])
    return float(field.heat[inside].sum() / field.heat.sum())


def draw_training(
    fields: Sequence[tuple[int, float, EffectiveReceptiveField]], *, ring: tuple[float, float], text: str
) -> Figure:
    """A field while a network learns, with the ring that holds the answer.

    Args:
        fields: (step, accuracy in percent, field); first and last are drawn as maps.
        ring: least and largest distance, pixels.
        text: what to see.
    """
    with styled():
        figure = Figure(figsize=(10.6, 4.3), layout="constrained")
        first, last, right = figure.subplots(ncols=3, width_ratios=(1, 1, 1.25))
        for axes, (step, accuracy, field) in ((first, fields[0]), (last, fields[-1])):
            scale = axes.imshow(field.normalized.clamp_min(10**-DECADES).log10(), cmap=HEAT, vmin=-DECADES, vmax=0)
            draw_box(axes, field, "white")
            axes.grid(visible=False)
            axes.set(xlabel="column, px", ylabel="row, px")
            axes.set_title(f"step {step}: {accuracy:.0f} % right", fontsize=9.5)
            angles = [2 * math.pi * i / 180 for i in range(181)]
            for radius in ring:
                axes.plot(
                    [field.centre[1] + radius * math.cos(a) for a in angles],
                    [field.centre[0] + radius * math.sin(a) for a in angles],
                    color=LIGHT["sky"],
                    linewidth=1,
                )
        figure.colorbar(scale, ax=[first, last], location="bottom", shrink=0.6, label="log10 of the influence")
        steps = [step for step, _, _ in fields]
        shares = [100 * ring_share(field, ring) for _, _, field in fields]
        right.plot(steps, shares, color=LIGHT["blue"], marker="o", markersize=3)
        right.set(xlabel="training step", ylabel="influence inside the ring, %", ylim=(0, 1.15 * max(shares)))
        right.yaxis.label.set_color(LIGHT["blue"])
        other = right.twinx()
        other.plot(steps, [accuracy for _, accuracy, _ in fields], color=LIGHT["alarm"], linestyle="--")
        other.set_ylabel("right answers, % (dashed)", color=LIGHT["alarm"])
        other.set_ylim(0, 101)
        other.grid(visible=False)
        right.set_title("It learns to look where the answer is", fontsize=9.5)
        caption(figure, text)
        return figure
