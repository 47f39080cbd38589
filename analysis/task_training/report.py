"""Collects what run folders and `judge` hold into a folder of results, and writes the table of its page anew.

The page is a text with a table between two marks; a figure that was not measured is a dash.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from analysis.common.study import Row, read_rows
from analysis.task_training.judge import has_own_file
from compress.files import write_text
from compress.measure.metric import Metric
from compress.recipe import load_recipe
from compress.records.files import METRICS
from compress.variants import Variant

KEPT = ("train.csv", "qat.csv", "recipe.yaml")
ROWS, TIMES = "accuracy.jsonl", "latency.jsonl"
MARKS = ("<!-- table -->", "<!-- end of the table -->")
HEAD = (
    "| network | epochs | variant | metric, torch | ONNX Runtime | its own file | OpenVINO f32 "
    "| to float, OpenVINO f32 (95 %) | p50 ONNX Runtime | its own file | OpenVINO f32 | OpenVINO bf16 |"
)
OWN = "onnxruntime, own file"
"""ONNX Runtime with the file that is placed for it; without that it ran OpenVINO's."""
ENGINES = ("onnxruntime", OWN, "openvino (f32)", "openvino (bf16)")


def collect(folders: list[Path], out: Path) -> None:
    """Copy the small files of run folders, and add the latencies that `compress bench` measured."""
    for folder in folders:
        for name in KEPT:
            shutil.copy2(folder / name, out / f"{folder.name}.{name}")
        new = [_time(folder, one) for one in METRICS.read(folder) or () if one.name == "p50_ms"]
        if new:
            again = {_key(row) for row in new}
            kept = [row for row in read_rows(out / TIMES) if _key(row) not in again]
            write_text(out / TIMES, "".join(f"{json.dumps(row)}\n" for row in kept + new))


def _time(folder: Path, one: Metric) -> Row:
    own = one.engine == ENGINES[0] and one.variant != Variant.FLOAT and _own_file(folder)
    engine = OWN if own else one.engine
    return {"network": folder.name, "variant": one.variant, "engine": engine, "p50_ms": one.value, "how": one.method}


def _own_file(folder: Path) -> bool:
    return has_own_file(load_recipe(folder / "recipe.yaml"), ENGINES[0])


def _key(row: Row) -> tuple[str, ...]:
    return row["network"], row["variant"], _engine(row)


def _engine(row: Row) -> str:
    """Return the engine of a figure, which a file of its own makes another one."""
    engine = str(row["engine"]).lower()
    own = row.get("own") or str(row.get("file", "")) == f"{row['variant']}.{ENGINES[0]}.onnx"
    return OWN if own and engine in (ENGINES[0], OWN) else engine


def table(out: Path) -> Iterator[str]:
    """Yield the lines of the table, a network after the other."""
    rows, times = read_rows(out / ROWS), read_rows(out / TIMES)
    yield HEAD
    yield "|---|---:|---|" + "---:|" * (HEAD.count("|") - 4)
    trained = (path.name.removesuffix(".train.csv") for path in sorted(out.glob("*.train.csv")))
    for network in dict.fromkeys([*(row["network"] for row in rows), *trained]):
        own = {(row["variant"], _engine(row)): row for row in rows if row["network"] == network}
        spent = {(t["variant"], _engine(t)): t["p50_ms"] for t in times if t["network"] == network}
        for variant, step in (("float", "train"), ("ptq", ""), ("qat", "qat")):
            epochs, in_torch = _trained(out / f"{network}.{step}.csv") if step else ("", "-")
            cells = [network if variant == "float" else "", epochs, {"float": "float"}.get(variant, variant.upper())]
            cells += [in_torch, *(_value(own.get((variant, engine))) for engine in ENGINES[:3])]
            cells.append(_difference(own.get((variant, ENGINES[2]))))
            found = [spent.get((variant, engine)) for engine in ENGINES]
            cells += ["-" if value is None else f"{value:.3g} ms" for value in found]
            yield f"| {' | '.join(cells)} |"


def _trained(path: Path) -> tuple[str, str]:
    """Return the number of epochs of a training, and the metric after the last."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    value = next(rows[-1][name] for name in ("val_miou", "val_map") if name in rows[-1])
    return str(len(rows)), f"{100 * float(value):.2f} %"


def _value(row: Row | None) -> str:
    return "-" if row is None else f"{row['values'][row['metric']]:.2f} %"


def _difference(row: Row | None) -> str:
    if row is None or "difference" not in row:
        return ""
    middle, low, high = row["difference"]
    return f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"


def main() -> None:
    """Collect from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("results/task_training"))
    arguments = parser.parse_args()
    collect(arguments.folders, arguments.out)
    page = arguments.out / "task_training.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    write_text(page, "\n".join([f"{before}{MARKS[0]}", *table(arguments.out), f"{MARKS[1]}{after}"]))


if __name__ == "__main__":
    main()
