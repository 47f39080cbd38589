"""Table and figure of analysis/sparse_accuracy.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from compress.files import replacing
from compress.report.style import LIGHT, styled, to_png

Row = dict[str, Any]


def table(name: str, study: Row) -> list[str]:
    """A study as Markdown."""
    machine, engine = study["machine"], study["engine"]
    kinds = [kind for kind in ("f32", "default") if f"p50_ms_{kind}" in study["rows"][0]]
    own = study["rows"][0].get("computes_in_default")
    choice = f" {engine}'s own choice for float is {own}." if own else ""
    lines = [
        f"## {name.capitalize()}",
        "",
        f"{study['about']}. `{study['command']}`; trained on {study['device']}, {study['seconds']:.0f} s in all; "
        f"{engine} on {machine['cpu']}, {machine['cores']} cores.{choice}",
        "",
        "| variant | one shot % | top-1 % | L1 kept | macs M | file MB | weights MB, packed | "
        + "".join(f"p50 ms {kind} | ratio | " for kind in kinds)
        + "2:4 violations |",
        "|---|" + "---:|" * (7 + 2 * len(kinds)),
    ]
    for row in study["rows"]:
        first = row["seeds"][0]
        kept = mean(row, "kept_magnitude")
        cells = [
            spread(row, "one_shot"),
            spread(row, "top1"),
            "-" if kept is None else f"{kept:.4f}",
            f"{first['macs'] / 1e6:.0f}",
            f"{first['file_bytes'] / 1e6:.1f}",
            f"{first['packed_bytes'] / 1e6:.1f}",
            *(f"{row[f'{key}_{kind}']:.2f}" for kind in kinds for key in ("p50_ms", "ratio")),
            "-" if first["violations"] is None else str(first["violations"]),
        ]
        lines.append(f"| {row['variant']} | " + " | ".join(cells) + " |")
    return lines


def values(row: Row, key: str) -> list[float]:
    """A figure of every seed that has it."""
    return [seed[key] for seed in row["seeds"] if seed.get(key) is not None]


def mean(row: Row, key: str) -> float | None:
    """Over seeds; None where there is nothing."""
    found = values(row, key)
    return statistics.mean(found) if found else None


def spread(row: Row, key: str) -> str:
    """Mean over seeds, with the lowest and highest of several."""
    found = values(row, key)
    if not found:
        return "-"
    several = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{statistics.mean(found):.2f}{several}"


def draw(report: Row, path: Path) -> None:
    """Accuracy before and after training, and latency, of every variant; a row of panels for each data set."""
    with styled():
        figure = Figure(figsize=(8.6, 2.6 * len(report)), layout="constrained")
        for (name, study), (left, right) in zip(
            report.items(), figure.subplots(len(report), 2, squeeze=False), strict=True
        ):
            rows = study["rows"][::-1]
            places = list(range(len(rows)))
            for key, face, label in (("one_shot", "none", "one shot"), ("top1", LIGHT["blue"], "trained on")):
                shown = [(mean(row, key), place) for row, place in zip(rows, places, strict=True) if values(row, key)]
                x, y = zip(*shown, strict=True)
                left.scatter(x, y, facecolors=face, edgecolors=LIGHT["blue"], label=label, zorder=3)
            left.set_yticks(places, [row["variant"] for row in rows])
            left.set(title=f"{name}: top-1, %")
            left.legend(loc="lower left")
            bars = (("f32", "grey", 0.18), ("default", "amber", -0.18))
            for key, colour, offset in (bar for bar in bars if f"ratio_{bar[0]}" in rows[0]):
                widths = [row[f"ratio_{key}"] for row in rows]
                right.barh([p + offset for p in places], widths, height=0.32, color=LIGHT[colour], label=key)
            right.set_yticks(places, [])
            right.set(title=f"latency over float's, {study['engine']}", xlim=(0, None))
            right.legend(title="float precision", loc="lower right")
        image = to_png(figure)
    with replacing(path) as temporary:
        temporary.write_bytes(image)
