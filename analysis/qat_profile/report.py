"""Write qat_profile.md from the files qat_profile_*.json of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from analysis.common.study import Row, listed, report_from_file
from analysis.qat_profile.kernels import GROUPS
from compress.files import write_text


def table(rows: list[Row]) -> str:
    """Return milliseconds of a step by group, a column a variant."""
    titles = [f"{row['variant']}, {row['mode']}" for row in rows]
    lines = [_line("ms of a step", titles), "|" + "---|" * (len(rows) + 1)]
    for group in GROUPS:
        cells = [row["groups_ms"][group] for row in rows]
        if any(cells):
            lines.append(_line(group, (f"{cell:.2f}" for cell in cells)))
    busy = [sum(row["groups_ms"].values()) for row in rows]
    lines.append(_line("waiting", (f"{row['step_ms'] - b:.2f}" for row, b in zip(rows, busy, strict=True))))
    lines.append(_line("the step", (f"{row['step_ms']:.2f}" for row in rows)))
    return "\n".join(lines)


def _line(title: str, cells: Iterable[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def longest(row: Row) -> list[str]:
    """Return the 25 longest kernels of a variant as lines of Markdown."""
    lines = ["", f"The longest of {row['variant']}, {row['mode']}:", "", "| ms | count | group | kernel | shapes |"]
    return [*lines, "|---|---|---|---|---|"] + [
        f"| {k['ms']:.3f} | {k['count']:.0f} | {k['group']} | `{k['kernel'][:90]}` | {k['shapes'][:90]} |"
        for k in row["kernels"][:25]
    ]


def write(folder: Path) -> str:
    """Write the page of all variants in a folder, and return its table."""
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("qat_profile_*.json"))]
    if not rows:
        return f"there are no files qat_profile_*.json in {folder}"
    first, commands = rows[0], " and ".join(sorted({f"`{row['command']}`" for row in rows}))
    lines = ["# Where the time of a training step goes", ""]
    lines += [f"{commands}; {first['network']}, batch {first['batch']}; {listed(first['machine'])}. `waiting` is the "]
    lines[-1] += "time of a step (without the profiler) in which no kernel runs."
    lines += ["", table(rows), *(line for row in rows for line in longest(row))]
    write_text(folder / "qat_profile.md", "\n".join(lines) + "\n")
    return table(rows)


if __name__ == "__main__":
    report_from_file(__doc__, write)
