"""Do several workers on one storage find what one finds, in as many parts of its time?

A search of MobileNetV2 is planned once. Then its trials are run by one process and by several, each with a processor of
its own, from the same plan into a new storage; the time is that from the first trial's start to the last one's end.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import compress
from analysis.common.cifar import NETWORKS
from analysis.common.study import Row, command_line, gpu_software, study_parser
from analysis.search_study.files import append, float_network
from analysis.search_study.find import begin_alone
from analysis.search_study.subjects import Subject
from compress.measure import describe_machine
from compress.search.search import STUDY
from compress.search.trials import ended, open_study, results

_BOUND, _PICTURES = 0.7, 96


def main() -> None:
    """Run the trials with each number of workers, and print a row for each."""
    parser = study_parser(__doc__, out="results/search/sharing")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--network", choices=NETWORKS, default="mobilenet_v2")
    parser.add_argument("--floats", type=Path, help="folder of trained float networks; default: weights as drawn")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/search_sharing"))
    o = parser.parse_args()
    machine = describe_machine()
    shutil.rmtree(o.folder, ignore_errors=True)
    _in_processes(o, 1, 1, "plan.log")
    for count in o.workers:
        storage = f"trials-{count}.log"
        _in_processes(o, count, o.trials, storage)
        row = {"command": command_line(), "machine": machine.cpu, "cores": machine.usable_cores, "workers": count}
        row |= {**_measured(o.folder / storage), "software": gpu_software("onnxruntime", "optuna")}
        append(o.out / "sharing.jsonl", row)
        print(json.dumps({key: row[key] for key in ("workers", "trials", "seconds", "least_error")}), flush=True)


def _in_processes(o: Namespace, count: int, trials: int, storage: str) -> None:
    """Take part in a search with some processes at once; the first one queues what a search begins with."""
    context = multiprocessing.get_context("spawn")
    own = [context.Process(target=_take_part, args=(o, number, trials, storage)) for number in range(count)]
    for process in own:
        process.start()
    for process in own:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a worker ended with {process.exitcode}")


def _take_part(o: Namespace, number: int, trials: int, storage: str) -> None:
    begin_alone(number)
    torch.manual_seed(0)
    subject = Subject(network=o.network)
    network = NETWORKS[o.network]().eval() if o.floats is None else float_network(subject, o.floats)
    images = torch.randn(_PICTURES, 3, 32, 32)
    spec = compress.SearchSpec(
        widths=subject.widths, formats=("float",), images=_PICTURES, networks=4, trials=trials, threads=1
    )
    compress.search(
        network, images[:2], list(images.split(64)), engine=subject.engine, spec=spec, out=o.folder / "search",
        latency=None if number else _BOUND, storage=str(o.folder / storage), cache=o.folder / "cache",
        role="worker" if number else "all", resume=(o.folder / "search" / "plan.json").is_file(),
    )  # fmt: skip


def _measured(storage: Path) -> Row:
    """Trials, the seconds that they took together, and the least error within the bound."""
    study: Any = open_study(str(storage), STUDY, seed=0, population=8, create=False)
    trials = ended(study)
    begun: datetime = min(trial.datetime_start for trial in trials)
    last: datetime = max(trial.datetime_complete for trial in trials)
    errors = [figures.distance for _, _, figures in results(study) if figures.ratio <= _BOUND]
    return {
        "trials": len(trials),
        "seconds": (last - begun).total_seconds(),
        "of_a_trial": float(np.median([trial.duration.total_seconds() for trial in trials])),
        "least_error": min(errors, default=float("nan")),
    }


if __name__ == "__main__":
    main()
