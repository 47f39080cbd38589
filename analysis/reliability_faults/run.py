"""Every file operation of a run goes wrong once, and the run goes on; see README.md."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from analysis.common.study import Row
from analysis.reliability_faults.chain import END, chain
from analysis.reliability_faults.inject import KINDS, digests, happens, operations
from compress.files import read_json, write_json, write_text
from compress.recipe import parse_recipe

TREE = {
    "model": {"name": "analysis.reliability_soak.network:small"},
    "data": {"image_size": 8, "batch_size": 32, "train_images": 64, "val_images": 32},
    "train": {"epochs": 1, "warmup_epochs": 0},
    "quantization": {"target": "openvino", "calibration_images": 32},
    "qat": {"epochs": 1, "checkpoint_steps": 1},
    "bench": {"engines": [], "batch_sizes": []},
}


def main() -> None:
    """Try all operations until they are done or the time is up, and write the table after each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", default="ptq", choices=("train", "ptq", "qat"))
    parser.add_argument("--kind", action="append", choices=KINDS, help="what goes wrong (default: all kinds)")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--out", type=Path, default=Path("results/reliability"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe, end = parse_recipe(TREE), time.monotonic() + options.seconds
    found: Counter[tuple[str, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        seen = set(operations(recipe, options.command, whole))
        expected = digests(whole)
        points = sum(happens(kind, point.operation) for kind in KINDS for point in seen)
        for kind in options.kind or KINDS:
            for point, told in chain(recipe, options.command, Path(scratch), kind, expected, end):
                found[kind, point.operation, told] += 1
                print(kind, *point, told, flush=True)
            rows = [{"fault": k, "operation": o, "the run": t, "points": n} for (k, o, t), n in sorted(found.items())]
            _write(options.out, options.command, points, rows)


def _write(out: Path, command: str, points: int, rows: list[Row]) -> None:
    """Write faults.json and faults.md; rows of other kinds of an earlier call of the same command are kept."""
    path, kinds = out / "faults.json", {row["fault"] for row in rows}
    before = read_json(path) if path.is_file() else {}
    kept = before["rows"] if (before.get("command"), before.get("points")) == (command, points) else []
    rows = sorted(
        [*(row for row in kept if row["fault"] not in kinds), *rows], key=lambda row: tuple(map(str, row.values()))
    )
    tried = sum(row["points"] for row in rows if row["operation"] != END)
    write_json(path, {"command": command, "points": points, "tried": tried, "rows": rows})
    table = [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    head = ["| fault | operation | the run | points |", "|---|---|---|---|"]
    text = f"`{command}` of a small network: {tried} faults; an undisturbed run has {points} places for them."
    write_text(out / "faults.md", "\n".join(["# Faults of the file layer", "", text, "", *head, *table, ""]))


if __name__ == "__main__":
    main()
