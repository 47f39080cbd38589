"""Writes the page of the study from its JSON, without measuring again.

    python -m analysis.cuda_engine.report results/h200/cuda_engine.json
    python -m analysis.cuda_engine.report results/h200/cuda_engine.json NEW.json    # takes the rows of a new run first

Findings stand in `cuda_engine.notes.md` beside the data, and become a part of the page.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.common.study import listed, option, study_options, table
from compress.files import write_json, write_text
from compress.roofline_model.devices import TABLE, Device, table_device

_LEAST_SHARE = 0.02
_REACHED = 0.6
_LAUNCH_MS = 0.01
# Why a layer misses its roof, by the word in the table.
REASONS = {
    "launch": "the layer takes less than 10 us, 2 of which are its launch and the rest the latency of a few loads",
    "cores": "a depthwise filter multiplies on ordinary cores, and computes an address and a condition for each pixel",
    "softmax": "exponentials and rounding of the scores",
    "strides": "elements do not lie in one run, or rows are short",
    "loads": "memory is the nearer roof; programs wait for loads at the beginning of tiles, and few fit at a time",
    "products": "INT8 peak is the nearer roof; tensor cores wait for loads, and for the warps of a program to meet",
}
_CANDIDATES = frozenset({"times_ms", "refused"})

Row = Mapping[str, Any]


def write(file: Path) -> None:
    report = json.loads(file.read_text(encoding="utf-8"))
    notes = file.with_suffix(".notes.md")
    found = notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else []
    write_text(file.with_suffix(".md"), "\n".join(page(report, found)) + "\n")


def merged(old: Row | None, new: Row) -> Row:
    """Return a report with the rows of a new run, and those of the old one, if there is one, that it does not replace.

    Times of candidates that were not chosen are left out.
    """
    old = old or {"runs": [], "networks": [], "failed": []}
    runs = [*(old["runs"] if "runs" in old else [old["command"]]), new["command"]]
    rows = [{"run": 1, **row} for row in old["networks"]]
    taken = {_key(row): row | {"run": len(runs)} for row in new["networks"] if row.get("ms")}
    networks = [taken.pop(_key(row), row) for row in rows] + list(taken.values())
    for row in networks:
        row["layers"] = [{k: v for k, v in x.items() if k not in _CANDIDATES} for x in row.get("layers", ())]
    return {**new, "networks": networks, "runs": runs, "failed": [*old["failed"], *new["failed"]]}


def _key(row: Row) -> tuple[Any, ...]:
    return row["network"], row["batch"], *row.get("options", {}).items()


def page(report: Row, notes: Sequence[str] = ()) -> list[str]:
    device = device_of(report["machine"]["gpu"])
    measured = [row for row in report["networks"] if row.get("ms")]
    missing = ", ".join(f"{row['network']} b{row['batch']}" for row in report["networks"] if not row.get("ms"))
    layered = [row for row in report["networks"] if row.get("layers")]
    cold = report.get("cold_build")
    return [
        f"# INT8 on our own engine, {device.title}",
        "",
        f"Networks of random weights, quantized after training, exported, 224 px. {listed(report['machine'])}. "
        f"Baseline: fp16, channels_last, {report['baseline']}.",
        "",
        *table(HEAD, map(_network, measured)),
        "",
        *([f"Not measured in its time: {missing}.", ""] if missing else []),
        "Times are those of calls queued one after another, which is the GPU's time. Ratios are fp16's time over ours. "
        "Where a star stands, kernels were compiled before building.",
        *(["", _cold(cold)] if cold else []),
        "",
        *(f"- Run {n}: `{command}`" for n, command in enumerate(report.get("runs", [report["command"]]), 1)),
        *(["", *notes] if notes else []),
        "",
        f"Why layers above {_LEAST_SHARE:.0%} of the time miss {_REACHED} of both roofs, by a word in the tables:",
        "",
        *(f"- {word}: {meaning};" for word, meaning in REASONS.items()),
        "",
        *_causes(layered, device),
        *(line for row in layered for line in _layers(row, device)),
    ]


def _cold(build: Row) -> str:
    return (
        f"Building {build['network']} at batch {build['batch']} with an empty plan and an empty cache of kernels took "
        f"{build['build_s']:.1f} s on a machine that did nothing else; {build['jobs']} processes compiled."
    )


def device_of(gpu: str) -> Device:
    known = {device.name for device in TABLE} | {"h100", "a100"}
    return table_device(next(word for word in gpu.lower().split() if word in known))


HEAD = (
    "network",
    "batch",
    "ms",
    "images/s",
    "fp16 ms",
    "fp16 images/s",
    "ratio",
    "ratio, each call waited for",
    "build s",
    "with the plan s",
    "codes that differ from exact arithmetic",
    "run",
)


def _network(row: Row) -> Sequence[str]:
    check = row.get("check")
    codes = f"{check['differing']:,} of {check['codes']:,}, by {check['largest']} at most" if check else "not compared"
    name = ", ".join([row["network"], *(f"{key} {value}" for key, value in row.get("options", {}).items())])
    return (
        name,
        str(row["batch"]),
        f"{row['ms']:.3f}",
        f"{row['images_per_s']:,.0f}",
        _number(row.get("fp16_ms"), ".3f"),
        _number(row.get("fp16_images_per_s"), ",.0f"),
        _ratio(row.get("fp16_ms"), row["ms"]),
        _ratio(row.get("fp16_waiting_ms"), row["waiting_ms"]),
        f"{row['build_s']:.1f}{'*' if row.get('compiled_ahead') else ''}",
        _number(row.get("build_with_plan_s"), ".2f"),
        codes,
        str(row.get("run", 1)),
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ratio(theirs: float | None, ours: float) -> str:
    return "" if theirs is None else f"{theirs / ours:.2f}"


def _groups(row: Row) -> list[list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for layer in row["layers"]:
        key = (layer["kind"], layer["kernel"], str(layer["shape"]), str(layer["bytes"]))
        groups.setdefault(key, []).append(layer)
    found = sorted(groups.values(), key=lambda group: -sum(layer["ms"] for layer in group))
    return [group for group in found if sum(layer["ms"] for layer in group) >= _LEAST_SHARE * row["layers_ms"]]


def _causes(rows: Sequence[Row], device: Device) -> list[str]:
    """The share of each network's time that layers take which reach a roof, and that each cause takes."""
    lines = []
    for row in rows:
        shares = dict.fromkeys(("", *REASONS), 0.0)
        for group in _groups(row):
            ms, each = sum(layer["ms"] for layer in group), sum(layer["ms"] for layer in group) / len(group)
            shares[reason(group[0], each, *roofs(group[0], each / 1e3, device))] += ms / row["layers_ms"]
        small = 1 - sum(shares.values())
        lines.append(
            (f"{row['network']} b{row['batch']}", *(f"{x:.0%}" if x else "" for x in (*shares.values(), small)))
        )
    title = "Share of the time of each network by what keeps its layers from the roof:"
    return [title, "", *table(("network", f"reaches {_REACHED}", *REASONS, f"layers below {_LEAST_SHARE:.0%}"), lines)]


def roofs(layer: Row, seconds: float, device: Device) -> tuple[float, float]:
    """The shares of bandwidth and of INT8 peak, by the data sheet, of a layer that takes so long."""
    peak = device.dense_flops_per_s["int8"]
    return layer["bytes"] / seconds / device.bandwidth_bytes_per_s, 2 * layer["macs"] / seconds / peak


def _layers(row: Row, device: Device) -> list[str]:
    total, kept = row["layers_ms"], _groups(row)
    lines = [_layer(group, total, device) for group in kept]
    reached = sum(not line[6] for line in lines)
    slower = [layer for layer in row["layers"] if layer.get("fp16_ms") and layer["fp16_ms"] < layer["ms"]]
    head = (
        "layer, result",
        "count",
        "ms each",
        "share of time",
        "of bandwidth",
        "of INT8 peak",
        "misses by",
        "bare fp16 ms",
        "kernel",
    )
    return [
        "",
        f"## {row['network']}, batch {row['batch']}",
        "",
        f"{reached} of {len(lines)} kinds of layers above 2 % of the time reach {_REACHED} of a roof. In "
        f"{len(slower)} of {len(row['layers'])} steps the bare product would be faster in fp16"
        + (f": {sum(x['ms'] - x['fp16_ms'] for x in slower):.3f} ms in all." if slower else "."),
        "",
        *table(head, lines),
    ]


def _layer(group: Sequence[Row], total: float, device: Device) -> Sequence[str]:
    first, ms = group[0], sum(layer["ms"] for layer in group)
    each = ms / len(group) / 1e3
    shape = "x".join(str(n) for n in (first["shape"] or [[]])[0])
    shares = roofs(first, each, device)
    return (
        f"{first['kind']} {shape}",
        str(len(group)),
        f"{1e3 * each:.4f}",
        f"{ms / total:.1%}",
        *(f"{share:.2f}" for share in shares),
        reason(first, 1e3 * each, *shares),
        _number(first.get("fp16_ms"), ".4f"),
        first["kernel"].removeprefix("triton "),
    )


def reason(layer: Row, ms: float, bandwidth: float, peak: float) -> str:
    if round(max(bandwidth, peak), 2) >= _REACHED:
        return ""
    if ms < _LAUNCH_MS:
        return "launch"
    if "depthwise" in layer["kernel"]:
        return "cores"
    if layer["kind"] == "Attention":
        return "softmax"
    if not layer["macs"]:
        return "strides"
    return "loads" if bandwidth > peak else "products"


def main() -> None:
    arguments = study_options(
        __doc__,
        option("file", type=Path),
        option("new", type=Path, nargs="?", help="of a new run, whose rows take the place of older ones"),
    )
    if arguments.new:
        old = json.loads(arguments.file.read_text(encoding="utf-8")) if arguments.file.is_file() else None
        write_json(arguments.file, merged(old, json.loads(arguments.new.read_text(encoding="utf-8"))))
    write(arguments.file)


if __name__ == "__main__":
    main()
