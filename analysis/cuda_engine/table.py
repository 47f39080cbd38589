"""The short table of the study, for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LEAST_SHARE = 0.015  # of a network's time; shorter layers are left out


def table(report: Mapping[str, Any]) -> str:
    """Networks, each with its layers, longest first; failures last."""
    lines = [str(report["command"]), str(report.get("machine"))]
    for row in report["networks"]:
        lines += ["", *_network(row)]
    lines += [f"FAILED {text}" for text in report["failed"]]
    return "\n".join(lines)


def head(row: Mapping[str, Any]) -> str:
    """A network's figures without its layers."""
    numbers = {k: (round(v, 3) if isinstance(v, float) else v) for k, v in row.items() if k not in {"layers", "check"}}
    if row.get("ms") and row.get("fp16_ms"):
        numbers["speedup"] = round(row["fp16_ms"] / row["ms"], 3)
        numbers["speedup_waiting"] = round(row["fp16_waiting_ms"] / row["waiting_ms"], 3)
    return f"== {json.dumps(numbers)}"


def _network(row: Mapping[str, Any]) -> list[str]:
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
