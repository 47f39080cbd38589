"""Every file operation of a run goes wrong once, and the run is resumed; see README.md."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from analysis.reliability_faults.inject import DIED, KINDS, REFUSED, Kind, digests, disturbed, operations
from compress.errors import CompressError
from compress.files import write_json, write_text
from compress.pipeline import run
from compress.recipe import Recipe, parse_recipe

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 32, "train_images": 64, "val_images": 32},
    "train": {"epochs": 1, "warmup_epochs": 0},
    "quantization": {"target": "openvino", "calibration_images": 32},
    "bench": {"engines": [], "batch_sizes": []},
}


def outcome(recipe: Recipe, command: str, folder: Path, kind: Kind, at: int, expected: dict[str, str]) -> str:
    """Return what became of a run with one fault that was then resumed: `same bits`, or what is wrong."""
    status = disturbed(recipe, command, folder, kind, at)
    if status not in (DIED, REFUSED):
        return f"the disturbed run ended with {status}"
    try:
        run(recipe, command, folder, resume=True, device="cpu")
    except CompressError as error:
        return f"refused: {error}"
    return "same bits" if digests(folder) == expected else "other bits"


def main() -> None:
    """Try the points in random order until all are done or the time is up, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", default="ptq", choices=("train", "ptq", "qat"))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--out", type=Path, default=Path("results/reliability"))
    options = parser.parse_args()
    recipe, end = parse_recipe(TREE), time.monotonic() + options.seconds
    found: Counter[tuple[str, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        seen = operations(recipe, options.command, whole)
        expected = digests(whole)
        points = [(k, i) for k in KINDS for i, name in enumerate(seen) if k != "cut" or name == "fsync"]
        random.Random(0).shuffle(points)
        for number, (kind, at) in enumerate(points):
            if time.monotonic() > end:
                break
            told = outcome(recipe, options.command, Path(scratch) / str(number), kind, at, expected)
            found[kind, seen[at], told] += 1
    rows = [{"fault": k, "operation": o, "after resume": t, "runs": n} for (k, o, t), n in sorted(found.items())]
    tried = sum(found.values())
    write_json(
        options.out / "faults.json", {"command": options.command, "points": len(points), "tried": tried, "rows": rows}
    )
    table = [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    head = ["| fault | operation | after `--resume` | runs |", "|---|---|---|---|"]
    text = f"`{options.command}` of a small network: {tried} of {len(points)} points tried."
    write_text(options.out / "faults.md", "\n".join(["# Faults of the file layer", "", text, "", *head, *table, ""]))


if __name__ == "__main__":
    main()
