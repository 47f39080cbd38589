"""Write sweep.md from sweep.jsonl."""

from collections import Counter
from pathlib import Path

from analysis.common.study import Row, newest_rows, report_from_file
from analysis.sweep.names import names
from analysis.sweep.unit import TARGETS
from compress.files import write_text

LEGEND = (
    "W and A: quantizers of weights and of activations. SQNR, in dB over 16 images that were not used for calibration: "
    "of fake quantization to the float model, and of the engine to fake quantization; moved: of fake quantization to "
    "itself with pixels moved by 1e-5, which shows the effect of rounding alone: an engine near that value is right. "
    "Top-1: share of equal predictions of engine and fake quantization. Latency: INT8 over float in the same engine, "
    "in turn (OpenVINO's float is its default, bf16 where the CPU has it). Random networks say nothing about accuracy "
    "after training. Left float: number of operations by rule; the reasons are below."
)


def write(log: Path) -> None:
    rows = newest_rows(log, "model")
    order = {name: i for i, name in enumerate(names())}
    models = sorted(rows, key=lambda name: (rows[name]["status"] == "ok", order.get(name, len(order))))
    failed = [name for name in models if rows[name]["status"] != "ok"]
    lines = [
        "# Every architecture: placement, export, parity, latency",
        "",
        f"`python -m analysis.sweep.run`, one thread, batch 1, random weights. {len(rows)} of {len(order)} models "
        f"done, {len(failed)} failed.",
        "",
        *machines(rows),
        "",
        LEGEND,
        "",
        "| model | px | target | W | A | SQNR to float | engine SQNR | moved | top-1 | latency | left float |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name in models:
        lines += table_rows(name, rows[name])
    lines += ["", "## Why operations stay float", "", "| rule | models | reason (first seen) |", "|---|---:|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows.values():
        for rule, entry in {r: e for t in TARGETS for r, e in row.get(t, {}).get("float", {}).items()}.items():
            reasons.setdefault(rule, []).append(entry["reason"])
    lines += [f"| {rule} | {len(found)} | {found[0]} |" for rule, found in sorted(reasons.items())]
    leaves = {name: row["openvino"]["leaves"] for name, row in rows.items() if row.get("openvino", {}).get("leaves")}
    lines += ["", "## Leaf modules (torch.fx cannot trace them)", ""]
    lines += [f"- {name}: {len(found)} modules, first {found[0]}" for name, found in leaves.items()] or ["None."]
    write_text(log.with_suffix(".md"), "\n".join(lines) + "\n")


def machines(rows: dict[str, Row]) -> list[str]:
    found: Counter[str] = Counter()
    for row in rows.values():
        if (where := row.get("machine")) is not None:
            versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
            found[
                f"{where['cpu']}, {where['cores']:g} cores, {where['side_by_side']} models side by side; {versions}"
            ] += 1
    return [f"- {count} models on {where}." for where, count in found.most_common()]


def table_rows(name: str, row: Row) -> list[str]:
    lines = []
    for target in TARGETS:
        cells = row.get(target, {})
        if "top1_agreement" not in cells:
            continue
        left = ", ".join(f"{entry['count']} {rule}" for rule, entry in cells["float"].items()) or "none"
        figures = [cells[key] for key in ("sqnr_float_db", "sqnr_engine_db", "top1_agreement")]
        ratio, moved = cells.get("latency_ratio"), cells.get("sqnr_moved_db", "-")
        lines.append(
            f"| {name} | {row['image']} | {target} | {cells['weights']} | {cells['activations']} | {figures[0]} | "
            f"{figures[1]} | {moved} | {figures[2]:.3f} | {'-' if ratio is None else f'{ratio:.2f}'} | {left} |"
        )
    if row["status"] != "ok":
        error = row["error"].replace("|", "/")
        lines.append(f"| {name} | {row.get('image', '')} | **failed**, {row['stage']} | | | | | | | | {error} |")
    return lines


if __name__ == "__main__":
    report_from_file(__doc__, write)
