"""The page and the picture of the study, from its rows."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from analysis.common.study import Row, listed, read_rows, report_from_file
from compress.files import write_text

TITLE = "# Accuracy of quantized networks with real weights on real pictures"


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
    picture(rows).savefig(folder / "real_accuracy.png", dpi=120)
    return write_text(folder / "real_accuracy.md", "\n".join(lines) + "\n").read_text()


def picture(rows: list[Row]) -> Figure:
    """Draw the difference to float of every row, with its interval."""
    figure = Figure(figsize=(10, 1 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{row['network']}: {row['method']} ({row['engine']}, {row['bits']})" for row in rows]
    for i, row in enumerate(rows):
        f, colour = row["figures"]["points"], "C0" if row["method"].startswith("compress") else "C1"
        axes.plot([f["low"], f["high"]], [i, i], color=colour)
        axes.plot(f["value"], i, "o", color=colour)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("top-1, points to the float network on the same engine and pictures; 95 % intervals")
    return figure


def _shown(f: Row) -> str:
    return f"{f['value']:.2f} [{f['low']:.2f}, {f['high']:.2f}]"


if __name__ == "__main__":
    report_from_file(__doc__, lambda path: write(path.parent))
