"""Writes the results of the mutants; without compress, which the study must not import before it changes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXPLAINED = Path(__file__).with_name("explained.json")
"""Why survivors compute the same, by file and change; written by hand."""


def write(rows: dict[str, Any], out: Path) -> None:
    """Write mutants.json and mutants.md; the file system of the caller has to write them whole."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "mutants.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    (out / "mutants.md").write_text(page(rows), encoding="utf-8")


def page(rows: dict[str, Any]) -> str:
    """Return the page: rates of each part, and the survivors with what explains them."""
    explained: dict[str, str] = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    lines = [
        "# Mutants",
        "",
        "Killed: a test of the part fails. The same: nobody can see the change, for the reason given below.",
        "",
        "| part | places | tried | killed | the same | open | killed of those that differ, % |",
        "|---|---|---|---|---|---|---|",
    ]
    table: list[tuple[str, int, int, int, int]] = []
    for part, row in rows.items():
        same = sum(_key(one) in explained for one in row["survivors"])
        table.append((part, row["places"], row["tried"], row["killed"], same))
    count, tried, killed, same = (sum(numbers) for numbers in zip(*(row[1:] for row in table), strict=True))
    table.append(("all", count, tried, killed, same))
    for part, count, tried, killed, same in table:
        share = f"{100 * killed / (tried - same):.0f}" if tried > same else ""
        lines.append(f"| {part} | {count} | {tried} | {killed} | {same} | {tried - killed - same} | {share} |")
    lines += ["", "Survivors:", "", "| where | change | why |", "|---|---|---|"]
    for row in rows.values():
        for one in row["survivors"]:
            change = one["change"].replace("|", chr(92) + "|")
            lines.append(f"| {one['file']}:{one['line']} | `{change}` | {explained.get(_key(one), 'open')} |")
    return "\n".join([*lines, ""])


def _key(survivor: dict[str, Any]) -> str:
    return f"{survivor['file']}: {survivor['change']}"
