"""Tables and figure of analysis/sparse_kernels.py.

What draws is imported where it draws: a bare machine that measures prints the short table too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]


def speedup(row: Row) -> float | None:
    """Dense time over 2:4 time, of the same result type; None where either is missing."""
    return row["dense"]["ms"] / row["2:4"]["ms"] if "dense" in row and "2:4" in row else None


def summary(rows: list[Row]) -> list[str]:
    """A Markdown table: a network's products together, all 2:4, and 2:4 only where it is faster."""
    lines = [
        "| network | batch | precision | dense ms | 2:4 ms | gain | the faster of both ms | gain | layers that gain |",
        "| --- " * 9 + "|",
    ]
    for key in dict.fromkeys((r["network"], r["batch"], r["precision"]) for r in rows):
        every = [r for r in rows if (r["network"], r["batch"], r["precision"]) == key]
        own = [r for r in every if "dense" in r]
        if not own:
            lines.append(f"| {' | '.join(map(str, key))} | " + "- | " * 5 + f"none of {len(every)} shapes measured |")
            continue
        dense = sum(r["count"] * r["dense"]["ms"] for r in own)
        sparse = sum(r["count"] * r.get("2:4", r["dense"])["ms"] for r in own)
        best = sum(r["count"] * min(r["dense"]["ms"], r.get("2:4", r["dense"])["ms"]) for r in own)
        gaining = sum(r["count"] for r in own if (speedup(r) or 0) > 1.02)
        total = sum(r["count"] for r in own)
        partial = f", {len(own)} of {len(every)} shapes measured" if len(own) < len(every) else ""
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {dense:.3f} | {sparse:.3f} | {dense / sparse:.2f} | {best:.3f} | "
            f"{dense / best:.2f} | {gaining} of {total}{partial} |"
        )
    return lines


def details(rows: list[Row]) -> list[str]:
    """A Markdown table of every shape."""
    lines = [
        "| network | batch | precision | layer | times | outputs | inputs | positions | dense ms | 2:4 ms | gain |"
        " 2:4, FP16 out ms | how |",
        "| --- " * 13 + "|",
    ]
    keys = ("network", "batch", "precision", "layer", "count", "outputs", "inputs", "positions")
    for r in rows:
        gain = speedup(r)
        kinds = ("dense", "2:4", "2:4 fp16 out")[: 3 if r["precision"] == "int8" else 2]
        dense, sparse, *half = [f"{r[kind]['ms']:.4f}" if kind in r else "-" for kind in kinds]
        how = r.get("skipped") or (r["2:4"]["how"] if gain else "; ".join(r["failed"]))
        how += ", launched without a graph" if gain and r["timed"] != "graph" else ""
        cells = [*(r[key] for key in keys), dense, sparse, f"{gain:.2f}" if gain else "-", *(half or ["-"]), how]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def draw(report: Row, folder: Path, *, method: str) -> None:
    """Write sparse_kernels.md and .png: what 2:4 brings to each shape, by its multiply-accumulates.

    Args:
        report: what was measured.
        folder: of both files.
        method: how, in words.
    """
    from matplotlib.figure import Figure

    from compress.files import replacing, write_text
    from compress.report.style import LIGHT, compact, styled, to_png

    about = ", ".join(f"{name} {value}" for name, value in report["machine"].items() if value)
    command = f"Measured with `{report['command']}`; {about}."
    command += f" {report['note']}." if report.get("note") else ""
    head = ["# Dense against 2:4 matrix products", "", method, "", command, ""]
    body = [*summary(report["rows"]), "", *details(report["rows"]), "", "![gain by shape](sparse_kernels.png)"]
    write_text(folder / "sparse_kernels.md", "\n".join([*head, *body]) + "\n")
    measured = [r for r in report["rows"] if speedup(r)]
    shown = sorted({r["precision"] for r in measured})
    if not shown:
        raise SystemExit("sparse_kernels: no product was measured, so there is nothing to draw")
    with styled():
        figure = Figure(figsize=(1.2 + 3.9 * len(shown), 4.0), layout="constrained")
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axis, precision in zip(panels, shown, strict=True):
            own = [r for r in measured if r["precision"] == precision]
            scatter(axis, own)
            searched = any(r["2:4"]["how"] == "searched" for r in own)
            how = "algorithm searched" if searched else "default algorithm: the search fails"
            axis.axhline(1.0, color=LIGHT["ink"], linewidth=0.8)
            axis.set(xscale="log", ylim=(0, 2.5), title=f"{precision.upper()}, {how}")
            axis.set_xlabel("multiply-accumulates of the dense product")
            axis.xaxis.set_major_formatter(compact)
        figure.axes[0].set_ylabel("dense time / 2:4 time (above 1: 2:4 is faster)")
        figure.axes[0].legend(loc="upper left", ncols=2)
        image = to_png(figure)
    with replacing(folder / "sparse_kernels.png") as temporary:
        temporary.write_bytes(image)


def scatter(axis: Any, rows: list[Row]) -> None:
    """A mark for each product: shape and colour for its network, filled for the largest batch, hollow for others."""
    from compress.report.style import LIGHT

    largest = max(r["batch"] for r in rows)
    looks = {"resnet50": ("o", "blue"), "vgg16": ("s", "amber"), "vit_b_16": ("^", "green")}
    for network, batch in dict.fromkeys((r["network"], r["batch"]) for r in rows):
        own = [r for r in rows if (r["network"], r["batch"]) == (network, batch)]
        mark, colour = looks[network][0], LIGHT[looks[network][1]]
        axis.scatter(
            [r["outputs"] * r["inputs"] * r["positions"] for r in own],
            [speedup(r) for r in own],
            marker=mark,
            s=22,
            label=f"{network}, batch {batch}",
            edgecolors=colour,
            facecolors=colour if batch == largest else "none",
        )
