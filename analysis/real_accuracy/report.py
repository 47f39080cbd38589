"""The page and the picture of the study, from its rows."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.common.study import Row, listed, read_rows, report_from_file
from compress.files import write_text
from compress.plots.style import LIGHT, caption, name_rows, save_figure, styled
from compress.text import display

TITLE = "# Accuracy of quantized networks with real weights on real pictures"
REACH = 4.0  # points of top-1 below float that the picture shows


def write(folder: Path) -> str:
    """Write `real_accuracy.md` and `real_accuracy.png` beside the rows, and return the page."""
    rows = read_rows(folder / "rows.jsonl")
    lines = [
        TITLE,
        "",
        "Every method on the same pictures, calibrated on the same others, beside the float network on the same "
        "engine. In brackets: 95 % intervals of a paired bootstrap over pictures. Agreement: share of pictures with "
        "the float network's class. SQNR: of the logits. Seconds to quantize are of the load that is given below. The "
        "pictures of ImageNet come from its training split, those of CIFAR-10 are a JPEG copy: compare methods only.",
    ]
    for network in dict.fromkeys(row["network"] for row in rows):
        own = sorted((r for r in rows if r["network"] == network), key=lambda r: (r["bits"] != "W8A8", r["engine"]))
        lines += ["", f"## {network}", ""]
        lines.append("| method | bits | engine | top-1 % | float % | points | agreement % | SQNR dB | seconds |")
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for row in own:
            f = row["figures"]
            cells = [row["method"], row["bits"], row["engine"], f"{f['top1']['value']:.2f}", f"{row['float_top1']:.2f}"]
            cells += [_shown(f[key]) for key in ("points", "agreement", "sqnr_db")] + [f"{row['seconds']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
        first = own[0]
        loads = [row["load"] for row in own]
        lines += [
            "",
            f"{first['calibration']} pictures calibrate, {first['evaluated']} are evaluated; `{first['command']}` on "
            f"{first['machine']}, load {min(loads):.0f} to {max(loads):.0f}; "
            + listed({k: v for row in own for k, v in row["software"].items()})
            + ".",
        ]
    save_figure(picture(rows), folder / "real_accuracy.png")
    return write_text(folder / "real_accuracy.md", "\n".join(lines) + "\n").read_text()


def picture(rows: list[Row]) -> Figure:
    """Draw the difference to float of every row, with its interval, in a panel for each network.

    A loss beyond the axis is a number at its edge.
    """
    networks: dict[str, list[Row]] = {}
    for row in rows:
        networks.setdefault(row["network"], []).append(row)
    with styled():
        figure = Figure(figsize=(10.6, 1.6 + 0.21 * len(rows)), layout="constrained")
        heights = [len(own) for own in networks.values()]
        panels = figure.subplots(nrows=len(networks), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, own) in zip(panels, networks.items(), strict=True):
            axes.set_title(name)
            axes.axvline(0, color=LIGHT["muted"], linewidth=0.9)
            for i, row in enumerate(own):
                _mark(axes, i, row)
            name_rows(axes, [_name(row) for row in own], end=1)
            axes.set_xlim(-REACH, max(REACH, *(row["figures"]["points"]["high"] for row in own)))
        panels[-1].set_xlabel("points of top-1 to the float network, on the same engine and pictures")
        caption(figure, "Blue: compress, orange: others. Bars are 95 % intervals of a paired bootstrap over pictures.")
    return figure


def _name(row: Row) -> str:
    """Method, engine and bits; the method's own mention of the engine is left out."""
    method = row["method"].removesuffix(f", {row['engine']}")
    return f"{method} ({display(row['engine'])}, {row['bits']})"


def _mark(axes: Axes, place: int, row: Row) -> None:
    """Draw one row: a point and its interval, or its value where it lies beyond the axis."""
    found = row["figures"]["points"]
    colour = LIGHT["blue" if row["method"].startswith("compress") else "alarm"]
    if found["value"] < -REACH:
        axes.plot(-REACH, place, "<", color=colour, clip_on=False)
        axes.annotate(f"{found['value']:.1f}", (-REACH, place), xytext=(8, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
        return
    axes.plot([found["low"], found["high"]], [place, place], color=colour)
    axes.plot(found["value"], place, "o", color=colour, markersize=4)


def _shown(f: Row) -> str:
    return f"{f['value']:.2f} [{f['low']:.2f}, {f['high']:.2f}]"


if __name__ == "__main__":
    report_from_file(__doc__, lambda path: write(path.parent))
