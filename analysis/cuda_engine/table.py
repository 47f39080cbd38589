"""The short tables of the study, for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_LEAST_SHARE = 0.015  # of a network's time; shorter layers are left out


def heads(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each network, and what failed."""
    yield str(report["command"])
    yield str(report.get("machine"))
    yield str(report.get("cold_build", ""))
    yield from map(head, report["networks"])
    yield from (f"FAILED {text}" for text in report["failed"])


def head(row: Mapping[str, Any]) -> str:
    """A network's figures without its layers."""
    numbers = {k: (round(v, 3) if isinstance(v, float) else v) for k, v in row.items() if k not in {"layers", "check"}}
    if row.get("ms") and row.get("fp16_ms"):
        numbers["speedup"] = round(row["fp16_ms"] / row["ms"], 3)
        numbers["speedup_waiting"] = round(row["fp16_waiting_ms"] / row["waiting_ms"], 3)
    return f"== {json.dumps(numbers)}"


def layers(row: Mapping[str, Any]) -> list[str]:
    """A network's figures, its comparison with exact arithmetic, and its layers, the longest first."""
    lines = [head(row)]
    if "check" in row:
        lines.append(f"   check {json.dumps(row['check'])[:600]}")
    total = row.get("layers_ms", 0) or 1
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for layer in row.get("layers", ()):
        grouped.setdefault((layer["kind"], layer["kernel"], str(layer["shape"]), layer["bytes"]), []).append(layer)
    for group in sorted(grouped.values(), key=lambda g: -sum(x["ms"] for x in g)):
        ms = sum(x["ms"] for x in group)
        if ms > _LEAST_SHARE * total:
            lines.append(_line(ms, group))
    return lines


def _line(ms: float, group: list[Mapping[str, Any]]) -> str:
    layer, each = group[0], ms / len(group)
    fp16 = f" fp16 {layer['fp16_ms']:.4f}" if layer.get("fp16_ms") else ""
    return (
        f"   {ms:7.3f} = {len(group):2d} x {each:.4f} ms {layer['bytes'] / each / 1e6:6.0f} GB/s "
        f"{2e-9 * layer['macs'] / each:5.0f} TOPS {layer['kind']} {layer['shape']} {layer['kernel']}{fp16} "
        f"[{layer['step'][-24:]}]"
    )
