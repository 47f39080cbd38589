"""Take transformers' vision networks through quantization, export, ONNX Runtime and a training step."""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

from analysis.common.study import Row, newest_rows, software, study_parser
from analysis.transformers_sweep import report
from analysis.transformers_sweep.networks import networks
from analysis.transformers_sweep.unit import study
from compress.measure import describe_machine


def main() -> None:
    """Run the networks without a row, or those that are asked for, and write the page."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--networks", nargs="+", help="these, with or without a row; default: all without one")
    parser.add_argument("--retry", action="store_true", help="also the networks whose row is not ok")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for a network")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no network after so many seconds")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log: Path = arguments.out / "transformers.jsonl"
    rows, began = newest_rows(log, "network"), time.monotonic()
    done = {name for name, row in rows.items() if row["status"] == "ok" or not arguments.retry}
    machine = {"cpu": describe_machine().cpu, "versions": software("torch", "onnxruntime", "transformers")}
    for name in arguments.networks or [name for name in networks() if name not in done]:
        if time.monotonic() - began > arguments.seconds:
            print("The same command continues.")
            break
        row = {"network": name, **in_child(name, arguments.timeout), "machine": machine}
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(name, row["status"], row.get("error", ""), flush=True)
    report.write(log)


def in_child(name: str, timeout: float) -> Row:
    """Study a network in a copy of this process, so that a crash is a row and transformers is imported once."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(name, sender))
    child.start()
    sender.close()
    try:
        row: Row = receiver.recv() if receiver.poll(timeout) else {"status": "failed", "error": "not done in time"}
    except EOFError:
        row = {"status": "failed", "error": "the process ended without a word"}
    child.kill()
    child.join()
    return row


def _send(name: str, sender: Connection) -> None:
    sender.send(study(name))


if __name__ == "__main__":
    main()
