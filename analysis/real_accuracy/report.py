"""The page and the picture of the study, from its rows."""

from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.common.study import Row, listed, read_rows, report_from_file, table
from compress.files import write_text
from compress.plots.style import LIGHT, caption, name_rows, save_figure, styled
from compress.support.text import display

KEYS = ("points", "agreement", "sqnr_db")
FIRST = {"W8A8": "compress: default (mse)", "W4A8": "compress: nearest"}
TITLE = "# Accuracy of quantized networks with real weights on real pictures"
REACH = 4.0  # points of top-1 below float that the picture shows


def write(folder: Path) -> str:
    rows = read_rows(folder / "rows.jsonl")
    lines = [
        TITLE,
        "",
        "Every method on the same pictures, calibrated on the same others, beside the float network on the same "
        "engine. In brackets: 95 % intervals of a paired bootstrap over pictures. Agreement: share of pictures with "
        "the float network's class. SQNR: of the logits. Seconds to quantize are of the load that is given below. The "
        "pictures of ImageNet come from its training split, those of CIFAR-10 are a JPEG copy: compare methods only.",
    ]
    for bits, engine in dict.fromkeys((row["bits"], row["engine"]) for row in rows):
        lines += mean_table([row for row in rows if (row["bits"], row["engine"]) == (bits, engine)], bits, engine)
    for network, engine in dict.fromkeys((row["network"], row["engine"]) for row in rows):
        lines += network_table([row for row in rows if (row["network"], row["engine"]) == (network, engine)])
    save_figure(picture(rows), folder / "real_accuracy.png")
    return write_text(folder / "real_accuracy.md", "\n".join(lines) + "\n").read_text()


def mean_table(rows: list[Row], bits: str, engine: str) -> list[str]:
    """Return the lines of one engine's table: each method's means over its networks, and our default's over the same.

    A method that only one network has is left out, and so are networks without a row of our default.
    """
    first = {row["network"]: row for row in rows if shown_name(row["method"]) == FIRST[bits]}
    lines = ["", f"## {bits} on {display(engine)}, means over networks", ""]
    cells = []
    for title in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == title and row["network"] in first]
        if len(own) < 2:
            continue
        found, beside = (_means(some) for some in (own, [first[row["network"]] for row in own]))
        cells.append([shown_name(title), ", ".join(row["network"] for row in own), *found, " / ".join(beside)])
    head = ("method", "networks", "points", "agreement %", "SQNR dB", f"{FIRST[bits]} on the same")
    return lines + table(head, cells)


def _means(rows: list[Row]) -> list[str]:
    return [f"{fmean(row['figures'][key]['value'] for row in rows):.2f}" for key in KEYS]


def network_table(rows: list[Row]) -> list[str]:
    own = sorted(rows, key=lambda r: r["bits"] != "W8A8")
    lines = ["", f"## {own[0]['network']}, {own[0]['engine']}", ""]
    lines.append("| method | bits | top-1 % | float % | points | agreement % | SQNR dB | seconds |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in own:
        f = row["figures"]
        note = f" ({row['note']})" if row.get("note") else ""
        cells = [shown_name(row["method"]) + note, row["bits"], f"{f['top1']['value']:.2f}"]
        seconds = f"{row['seconds']:.1f}" + (" (GPU)" if row.get("gpu") else "")
        cells += [f"{row['float_top1']:.2f}", *(_shown(f[key]) for key in KEYS), seconds]
        lines.append(f"| {' | '.join(cells)} |")
    loads = [row["load"] for row in own]
    commands = dict.fromkeys(row["command"] for row in own)
    lines += [
        "",
        f"{own[0]['calibration']} pictures calibrate, {own[0]['evaluated']} are evaluated; "
        + ", ".join(f"`{command}`" for command in commands)
        + f" on {listed_names(list(dict.fromkeys(row['machine'] for row in own)))}, "
        + f"load {min(loads):.0f} to {max(loads):.0f}; "
        + listed({k: v for row in own for k, v in row["software"].items()})
        + ".",
    ]
    gpus = sorted({row["gpu"] for row in own if row.get("gpu")})
    if gpus:
        lines[-1] += f" (GPU): quantized on {listed_names(gpus)}, measured on the CPU beside it."
    return lines


def shown_name(title: str) -> str:
    return title.removesuffix(", openvino").removesuffix(", onnxruntime")


def listed_names(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def picture(rows: list[Row]) -> Figure:
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
    return f"{row['method'].removesuffix(', ' + row['engine'])} ({display(row['engine'])}, {row['bits']})"


def _mark(axes: Axes, place: int, row: Row) -> None:
    found = row["figures"]["points"]
    colour = LIGHT["blue" if row["method"].startswith("compress") else "alarm"]
    if found["value"] < -REACH:
        axes.plot(-REACH, place, "<", color=colour, clip_on=False)
        axes.annotate(
            f"{found['value']:.1f}", (-REACH, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8
        )
        return
    axes.plot([found["low"], found["high"]], [place, place], color=colour)
    axes.plot(found["value"], place, "o", color=colour, markersize=4)


def _shown(f: Row) -> str:
    return f"{f['value']:.2f} [{f['low']:.2f}, {f['high']:.2f}]"


if __name__ == "__main__":
    report_from_file(__doc__, lambda path: write(path.parent))
