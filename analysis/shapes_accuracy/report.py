"""Write shapes_accuracy.md and .png from shapes_accuracy.json."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.common.study import Row, report_from_file
from compress.files import write_text
from compress.plots.style import LIGHT, save_figure, styled

ORDER = (
    *("float", "float, trained on"),
    *("PTQ W8A8 max", "PTQ W8A8 percentile", "PTQ W8A8 entropy", "PTQ W8A8 mse", "QAT W8A8"),
    *("PTQ W4A8 max", "PTQ W4A8 mse", "PTQ W4A8 AdaRound"),
    *("QAT W4A8", "QAT W4A8, higher rate", "QAT W4A8, higher rate, BatchNorm kept"),
    *("2:4", "2:4 permuted", "channels", "2:4 permuted, PTQ W8A8", "2:4 permuted, QAT W8A8"),
)
"""Order of the methods in the table and in the figure."""
_HEAD = (
    "| network | method | seeds | top-1 torch % | top-1 file % | of float, points | ORT agrees % | one shot % |"
    " L1 kept | file MB | weights MB, packed | images/s |"
)


def groups(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Return network -> method -> rows of its seeds, in the order of the table."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda r: (ORDER.index(r["method"]), r["seed"])):
        found.setdefault(row["network"], {}).setdefault(row["method"], []).append(row)
    return found


def table(report: Row) -> str:
    """Return the rows as Markdown: means over seeds, with the lowest and the highest of several."""
    lines = [_HEAD, "|---|---|" + "---:|" * 10]
    for network, methods in groups(report["rows"]).items():
        for method, rows in methods.items():
            cells = [
                str(len(rows)),
                spread(rows, "top1_torch"),
                spread(rows, "top1"),
                _signed(differences(methods, method)),
                _agreement(rows),
                spread(rows, "one_shot"),
                spread(rows, "kept_magnitude", 4),
                _megabytes(rows, "file_bytes"),
                _megabytes(rows, "packed_bytes"),
                "-" if not values(rows, "images_per_s") else f"{statistics.mean(values(rows, 'images_per_s')):.0f}",
            ]
            lines.append(f"| {network} | {method} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *not_measured(report)])


def not_measured(report: Row) -> list[str]:
    """Return the methods without a row and their reasons, and the units that were not begun."""
    reasons: dict[str, list[str]] = {}
    known = {name.rpartition("/")[0] for name in report["not_measured"]}
    begun = {f"{row['network']}/{row['seed']}" for row in report["rows"]}
    for text in report["missing"]:
        name, _, reason = text.partition(": ")
        if name in report["not_measured"]:
            reasons.setdefault(reason, []).append(name)
    lines = [f"- Not measured ({reason}): {'; '.join(names)}." for reason, names in reasons.items()]
    untouched = sorted(known - begun)
    return [*lines, f"- Not begun: {', '.join(untouched)}."] if untouched else lines


def values(rows: list[Row], key: str) -> list[float]:
    """Return a figure of every row that has it."""
    return [row[key] for row in rows if row.get(key) is not None]


def differences(methods: dict[str, list[Row]], method: str) -> list[float]:
    """Return the points of top-1 (of the file) above the float network of the same seed."""
    base = {row["seed"]: row["top1"] for row in methods.get("float", [])}
    return [row["top1"] - base[row["seed"]] for row in methods[method] if row["seed"] in base and method != "float"]


def spread(rows: list[Row], key: str, digits: int = 2) -> str:
    """Return the mean, with the lowest and highest of several values."""
    found = values(rows, key)
    if not found:
        return "-"
    several = f" ({min(found):.{digits}f} to {max(found):.{digits}f})" if len(found) > 1 else ""
    return f"{statistics.mean(found):.{digits}f}{several}"


def _signed(found: list[float]) -> str:
    return f"{statistics.mean(found):+.2f}" if found else "-"


def _agreement(rows: list[Row]) -> str:
    found = values(rows, "ort_agreement")
    images = sum(row["ort_images"] for row in rows if row.get("ort_agreement") is not None)
    return f"{statistics.mean(found):.1f} of {images}" if found else "-"


def _megabytes(rows: list[Row], key: str) -> str:
    found = values(rows, key)
    return f"{found[0] / 1e6:.1f}" if found else "-"


def about(report: Row) -> str:
    """Return a line for each call that measured rows: its command, machine, versions and units."""
    lines = []
    for call in report["calls"]:
        machine, rows = call["machine"], [r for r in report["rows"] if report["calls"][r["call"]] is call]
        if not rows:
            continue
        gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or machine["cpu"]
        named = ("torch", "torchvision", "onnx", "onnxruntime")
        versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if name in named)
        units = ", ".join(dict.fromkeys(f"{r['network']}/{r['seed']}" for r in rows))
        seconds = f"{call['seconds']:.0f} s" if "seconds" in call else "stopped"
        lines.append(
            f"- `{call['command']}`: {units}; {gpus}, Python {machine['python']}, {versions}; {seconds} by the clock"
        )
    return "\n".join(lines)


def write(file: Path) -> None:
    """Write the page and the figure beside the JSON file."""
    report = json.loads(file.read_text())
    data = report["setting"]["data"]
    facts = f"{data['name']} at {data['image_size']} px, {data['num_classes']} classes, clutter {data['clutter']:g}, "
    facts += f"{data['train_images']:,} training and {data['val_images']:,} evaluation images."
    lines = ["# Accuracy of compressed networks", "", about(report), "", facts, "", table(report)]
    if report["rows"]:
        lines += ["", f"![points of top-1 to the float network, method by method]({file.stem}.png)"]
        with styled():
            figure = draw(report)
        save_figure(figure, file.with_suffix(".png"))
    write_text(file.with_suffix(".md"), "\n".join(lines) + "\n")


LEAST, MOST = -8.0, 1.5
"""Range of a panel, in points; lower means are printed at its edge."""


def draw(report: Row) -> Figure:
    """Draw a panel a network: points of top-1 (of the file) to the float network, a dot a seed and their mean."""
    found = groups(report["rows"])
    methods = [m for m in ORDER if m != "float" and any(m in of for of in found.values())][::-1]
    figure = Figure(figsize=(2.6 + 1.8 * len(found), 0.9 + 0.24 * max(4, len(methods))), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, sharex=True, squeeze=False)[0]
    for axis, (network, rows) in zip(panels, found.items(), strict=True):
        _panel(axis, rows, methods)
        seeds = values(rows["float"], "top1")
        axis.set_title(f"{network}\nfloat {statistics.mean(seeds):.1f} %, {len(seeds)} seeds", fontsize=9)
        axis.set_xlabel("points of top-1 to float")
    panels[0].set_xlim(LEAST, MOST)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(-0.6, len(methods) - 0.4)
    return figure


def _panel(axis: Any, rows: dict[str, list[Row]], methods: list[str]) -> None:
    """Draw the dots of one network, each seed relative to the float network of the same seed."""
    axis.axvline(0.0, color=LIGHT["ink"], linewidth=1, zorder=1)
    for place, method in enumerate(methods):
        seen = differences(rows, method) if method in rows else []
        if not seen:
            continue
        colour = LIGHT["green" if "2:4" in method or method == "channels" else "blue" if "QAT" in method else "amber"]
        colour = LIGHT["grey"] if method.startswith("float") else colour
        mean = statistics.mean(seen)
        if mean < LEAST:
            axis.text(LEAST + 0.2, place, f"\u25c2 {mean:.1f}", color=colour, fontsize=7, va="center")
            continue
        axis.scatter(seen, [place] * len(seen), s=14, color=colour, alpha=0.55, linewidths=0, zorder=2)
        axis.scatter([mean], [place], s=34, facecolors="none", edgecolors=colour, zorder=3)


if __name__ == "__main__":
    report_from_file(__doc__, write)
