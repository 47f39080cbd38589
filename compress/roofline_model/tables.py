"""Rooflines as Markdown tables that are readable in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compress.roofline_model.devices import PRECISIONS, SPARSE, TABLE, Device, parse_precision
from compress.roofline_model.measure import CONV, Ceilings
from compress.roofline_model.model import Roofline, Row, WhatIf

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(value: float | None, unit: str) -> str:
    """A number with three figures and a decimal prefix; `unknown` for None.

    >>> quantity(4.8e12, "B/s")
    '4.8 TB/s'
    """
    if value is None:
        return "unknown"
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{_three(value / factor)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right and words to the left."""
    columns = [list(column) for column in zip(headers, *rows, strict=True)]
    lines = [_padded(column) for column in columns]
    return "\n".join("|" + "|".join(cells) + "|" for cells in zip(*lines, strict=True))


def _padded(column: Sequence[str]) -> list[str]:
    head, *body = column
    right = all(cell[:1].isdigit() or cell in {"-", "unknown"} for cell in body) and bool(body)
    width = max(3, *map(len, column))
    cells = [f" {cell.rjust(width) if right else cell.ljust(width)} " for cell in (head, *body)]
    return [cells[0], "-" * (width + 1) + (":" if right else "-"), *cells[1:]]


def summary_text(roofline: Roofline) -> str:
    device = roofline.device
    size = "x".join(str(n) for n in roofline.input_shapes[0])
    fused = "fused as in an engine" if roofline.fused else "each operation alone"
    unit = parse_precision(roofline.precision).operation
    lines = [
        f"{roofline.model} on {device.title}, {roofline.precision}, input {size}, {fused}",
        f"roofs: {quantity(device.peak_flops_per_s(roofline.precision), unit + '/s')}, "
        f"{quantity(device.bandwidth_bytes_per_s, 'B/s')}; ridge point {_three(roofline.ridge_point)} {unit}/B "
        f"({device.source}{'; ' + device.note if device.note else ''})",
        f"macs {quantity(roofline.macs, 'mac')}, {unit}s {quantity(roofline.flops, unit)}, weights "
        f"{quantity(roofline.weight_bytes, 'B')}, activations moved {quantity(roofline.activation_bytes, 'B')}, "
        f"intensity {_three(roofline.arithmetic_intensity)} {unit}/B",
        f"least time {_three(roofline.least_time_ms)} ms, at most {_three(roofline.images_per_s)} images/s, "
        f"{roofline.memory_bound_share:.0%} of the time bound by memory",
    ]
    if roofline.unknown:
        lines.append(f"unknown and not included: {', '.join(roofline.unknown)}")
    return "\n".join(lines)


def rows_text(roofline: Roofline, *, top: int | None = 20) -> str:
    """The `top` longest layers as a table; None = all in graph order."""
    rows = list(roofline.rows)
    if top is not None:
        rows = sorted(rows, key=lambda row: -(row.least_time_ms or float("inf")))[:top]
    unit = parse_precision(roofline.precision).operation
    headers = [
        "layer",
        "kind",
        "macs",
        "weights",
        "activations",
        f"{unit}/B",
        "attainable",
        "bound",
        "least ms",
        "share",
    ]
    return table(headers, (_row_cells(row, roofline.least_time_ms, unit) for row in rows))


def _row_cells(row: Row, total_ms: float, unit: str) -> list[str]:
    share = row.least_time_ms / total_ms if row.least_time_ms is not None and total_ms else None
    return [
        row.name,
        f"{row.kind} {row.detail}".strip(),
        quantity(row.macs, ""),
        quantity(row.weight_bytes, "B"),
        quantity(row.activation_bytes, "B"),
        "unknown" if row.arithmetic_intensity is None else _three(row.arithmetic_intensity),
        quantity(row.attainable_flops_per_s, f"{unit}/s"),
        row.bound,
        "unknown" if row.least_time_ms is None else f"{row.least_time_ms:.4f}",
        "unknown" if share is None else f"{share:.1%}",
    ]


def what_if_text(scenarios: Iterable[WhatIf]) -> str:
    headers = ["scenario", "batch", "least ms/image", "images/s", "speed-up", "bound by memory"]
    return table(headers, (_what_if_cells(scenario) for scenario in scenarios))


def _what_if_cells(s: WhatIf) -> list[str]:
    head = [s.name, str(s.batch_size)]
    if s.least_time_ms is None or s.images_per_s is None or s.speedup is None or s.memory_bound_share is None:
        return [*head, "-", "-", "-", s.reason]
    figures = [f"{s.least_time_ms:.4f}", _three(s.images_per_s), f"{s.speedup:.2f}x", f"{s.memory_bound_share:.0%}"]
    return head + figures


def ceilings_text(ceilings: Ceilings) -> str:
    rows = []
    for c in ceilings.ceilings:
        best = max(c.samples, key=lambda s: s.rate, default=None)
        unit = "B" if c.unit == "bytes/s" else parse_precision(c.name.removesuffix(CONV)).operation
        rate = quantity(c.rate, f"{unit}/s") if c.rate is not None else "-"
        rows.append([c.name, rate, str(best.size) if best and c.rate is not None else "-", c.reason or c.method])
    head = f"{ceilings.title}, {ceilings.threads} threads" if ceilings.threads else ceilings.title
    load = ", load " + " -> ".join(str(v) for v in ceilings.load_average) if ceilings.load_average else ""
    return f"{head}, torch {ceilings.torch_version}, best of {ceilings.rounds} rounds{load}\n\n" + table(
        ["roof", "measured", "at size", "method, or reason"], rows
    )


def devices_text(devices: Iterable[Device] = TABLE) -> str:
    rows = []
    for d in devices:
        peaks = [_tera(d.dense_flops_per_s.get(p)) for p in PRECISIONS]
        sparse = [_tera(d.sparse_flops_per_s.get(p)) for p in ("fp16", "int8")]
        bandwidth = f"{d.bandwidth_bytes_per_s / 1e9:.4g}"
        ridge = _three(d.ridge_point("int8")) if "int8" in d.dense_flops_per_s else "-"
        rows.append([d.name, d.title, bandwidth, *peaks, *sparse, ridge, d.source])
    headers = ["name", "device", "GB/s", *PRECISIONS, f"fp16{SPARSE}", f"int8{SPARSE}", "int8 ridge", "source"]
    return table(headers, rows)


def _tera(flops_per_s: float | None) -> str:
    return "-" if flops_per_s is None else f"{flops_per_s / 1e12:.4g}"
