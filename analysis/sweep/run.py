"""Quantize all classifiers and segmentation networks of torchvision, and networks of all families of timm."""

import argparse
import json
from pathlib import Path

from analysis.common.side_by_side import Ended, side_by_side
from analysis.common.study import Row, append_row, newest_rows, option, software, study_options
from analysis.sweep import report
from analysis.sweep.names import names
from compress.measure.machine import describe_machine


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--models", nargs="+", help="these, with or without a row; default: all without one"),
        option("--retry", action="store_true", help="also the models whose row is a failure"),
        option("--limit", type=int, help="largest number of models"),
        option("--timeout", type=int, default=900, help="seconds for a model"),
        option("--processes", type=int, default=1, help="models side by side, one thread each"),
        option("--budget-s", type=float, help="seconds for all; unfinished models get no row"),
        out="results",
    )
    log = arguments.out / "sweep.jsonl"
    todo = queue(arguments.models, newest_rows(log, "model"), retry=arguments.retry)[: arguments.limit]
    run(todo, log, arguments)
    report.write(log)


def run(models: list[str], log: Path, arguments: argparse.Namespace) -> None:
    measured = machine() | {"side_by_side": arguments.processes}
    commands = [(name, ["analysis.sweep.unit", name]) for name in models]
    options = {"processes": arguments.processes, "timeout": arguments.timeout, "budget_s": arguments.budget_s}
    done = 0
    for one in side_by_side(commands, **options):
        done += 1
        row = {"model": one.name, **row_of(one), "seconds": round(one.seconds, 1), "machine": measured}
        append_row(log, row)
        print(f"{one.name}: {row['status']} {row.get('error', '')} ({row['seconds']:.0f} s)", flush=True)
    if done < len(models):
        print(
            f"{len(models) - done} of {len(models)} not done in {arguments.budget_s:.0f} s; the same command continues"
        )


def row_of(ended: Ended) -> Row:
    found: Row = json.loads(ended.last_line) if ended.last_line.startswith("{") else {}
    return found or {"status": "failed", "stage": "?", "error": ended.why}


def queue(models: list[str] | None, rows: dict[str, Row], *, retry: bool) -> list[str]:
    if models:
        return models
    done = {name for name, row in rows.items() if row["status"] == "ok" or not retry}
    return [name for name in names() if name not in done]


def machine() -> Row:
    found = describe_machine()
    versions = software("torch", "onnxruntime", "openvino", "timm")
    return {"cpu": found.cpu, "cores": found.usable_cores, "versions": versions}


if __name__ == "__main__":
    main()
