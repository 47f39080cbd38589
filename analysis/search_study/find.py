"""The stage `find`: every method makes every network smaller; on CPUs, of which each process has one."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from analysis.common.study import Row, read_rows
from analysis.search_study import data
from analysis.search_study.files import FOUND, append, float_network
from analysis.search_study.methods import Effort, NoNetworkError, find
from analysis.search_study.subjects import Part, parts

T = TypeVar("T")


def find_all(o: Namespace) -> None:
    """Make all parts of the groups that have no rows yet, and write a row for each network."""
    rows, folder = o.out / FOUND, Path(o.folder)
    done = {(json.dumps(row["subject"]), row["method"]) for row in read_rows(rows)}
    wanted = [
        part for part in parts(o.groups) if any((json.dumps(asdict(part.subject)), m) not in done for m in part.labels)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: data.files(name, o, folder) for name in dict.fromkeys(part.subject.data for part in wanted)}
    effort = Effort(
        networks=o.networks,
        trials=o.trials,
        images=o.images,
        search_s=o.search_s,
        loads=o.loads,
        seconds=o.timing_s,
    )
    begun = time.perf_counter()
    with side_by_side(o.processes) as each:
        for made in each(partial(_rows, files=files, floats=o.floats, folder=folder, effort=effort), wanted):
            for row in made:
                append(rows, row)
                name, what = f"{row['subject']['network']} {row['subject']['data']} {row['subject']['seed']}", "error"
                said = row[what] if what in row else f"{row['ratio']:.3f} of {row['dense']:.3f}, {row['seconds']:.0f} s"
                print(f"{time.perf_counter() - begun:6.1f} {name} {row['method']}: {said}", flush=True)


def _rows(part: Part, files: dict[str, data.Files], floats: Path, folder: Path, effort: Effort) -> list[Row]:
    """The rows of a part; of one that fails the reason."""
    network = float_network(part.subject, floats)
    images = torch.from_numpy(np.load(files[part.subject.data].calibration))
    common = {"subject": asdict(part.subject)}
    try:
        made = list(find(part, network, images, folder, effort))
    except NoNetworkError as error:
        return [{**common, "method": label, "error": str(error)} for label in part.labels]
    except Exception as error:  # of one network: the others are not lost for it
        return [{**common, "method": label, "error": f"{type(error).__name__}: {error}"} for label in part.labels]
    return [{**common, "method": m.label, **{k: v for k, v in asdict(m).items() if k != "label"}} for m in made]


@contextmanager
def side_by_side(processes: int) -> Iterator[Callable[[Callable[[T], Any], Iterable[T]], Iterator[Any]]]:
    """Give a `map` whose calls run in processes, each with a processor of its own, in the order in which they end."""
    context = multiprocessing.get_context("spawn")
    places = context.SimpleQueue()
    for number in range(processes):
        places.put(number)
    with context.Pool(processes, initializer=_begin, initargs=(places,)) as pool:
        yield pool.imap_unordered
        pool.close()
        pool.join()


def _begin(places: Any) -> None:
    begin_alone(places.get())


def begin_alone(number: int) -> None:
    """Give this process one thread and a processor of its own, the one of a number if there are so many."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[number % len(allowed)]})
    torch.set_num_threads(1)
