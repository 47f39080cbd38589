"""The stages `export`, `judge` and `time`: networks are exported, judged and timed on the engine.

The time of a network does not depend on its weights: files from before the fine-tuning are timed where there are no
others.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import compress
from analysis.common.study import Row, read_rows
from analysis.search_study import data
from analysis.search_study.choice import Whole
from analysis.search_study.files import (
    JUDGED,
    TIMES,
    append,
    float_network,
    found_rows,
    name_of,
    network_of,
    read_states,
    subject_of,
)
from analysis.search_study.find import side_by_side
from analysis.search_study.methods import THREADS, exported, timed
from analysis.search_study.subjects import Subject, parts
from compress.search.lab import time_ratio


def export_all(o: Namespace) -> None:
    """Export every network that was found and has no file yet, as it was before the fine-tuning."""
    folder = Path(o.folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [row for row in found_rows(o.found) if _wanted(row, o) and not file_of(row, folder).is_file()]
    files = {name: data.files(name, o, folder) for name in dict.fromkeys(row["subject"]["data"] for row in wanted)}
    with side_by_side(o.processes) as each:
        for name in each(partial(_exported, files=files, floats=o.floats, folder=folder), wanted):
            print(name, flush=True)


def _exported(row: Row, files: Mapping[str, data.Files], floats: Path, folder: Path) -> str:
    subject = subject_of(row)
    images = torch.from_numpy(np.load(files[subject.data].calibration))
    network = network_of(row, Whole(float_network(subject, floats), images))
    exported(network, images, file_of(row, folder), subject, quick=True)
    return name_of(row)


def judge_all(o: Namespace) -> None:
    """Export every fine-tuned network and measure its accuracy on the engine; those that have a row are left out."""
    folder, rows = Path(o.folder), o.out / JUDGED
    folder.mkdir(parents=True, exist_ok=True)
    done = {name_of(row) for row in read_rows(rows)}
    states = {name: state for name, state in read_states(o.weights) if name not in done}
    wanted = [row for row in found_rows(o.found) if name_of(row) in states and _wanted(row, o)]
    files = {name: data.files(name, o, folder) for name in dict.fromkeys(row["subject"]["data"] for row in wanted)}
    begun = time.perf_counter()
    with side_by_side(o.processes) as each:
        work = [(row, states[name_of(row)], files[row["subject"]["data"]]) for row in wanted]
        for row in each(partial(_judged, floats=o.floats, folder=folder), work):
            append(rows, row)
            print(f"{time.perf_counter() - begun:6.1f} {name_of(row)}: {row['top1']:.2f} %", flush=True)


def file_of(row: Row, folder: Path) -> Path:
    """The exported file of a row."""
    return folder / f"{name_of(row).replace(' ', '-')}.onnx"


def _judged(work: tuple[Row, Mapping[str, Tensor], data.Files], floats: Path, folder: Path) -> Row:
    row, state, files = work
    subject = subject_of(row)
    images = torch.from_numpy(np.load(files.calibration))
    network = network_of(row, Whole(float_network(subject, floats), images))
    network.load_state_dict(state)
    path = exported(network, images, file_of(row, folder), subject)
    parameters = sum(p.numel() for p in network.parameters())
    return {
        "subject": row["subject"],
        "method": row["method"],
        "top1": top1(path, subject, files),
        "parameters": parameters,
    }


def top1(path: Path, subject: Subject, files: data.Files) -> float:
    """Percent of the test pictures whose class the engine finds."""
    images, targets = np.load(files.images, mmap_mode="r"), np.load(files.targets)
    size, hits = subject.batch, 0
    with compress.build_engine(path, subject.engine, batch_size=size, threads=THREADS) as engine:
        name, output = engine.inputs[0].name, engine.outputs[0].name
        for at in range(0, len(images), size):
            part = images[at : at + size]
            full = np.ascontiguousarray(np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), "f4")]))
            logits = engine.run({name: full})[output][: len(part)]
            hits += int((logits.argmax(1) == targets[at : at + size]).sum())
    return 100 * hits / len(targets)


def time_all(o: Namespace) -> None:
    """Time each file in turn with its float network alone, several times; nothing else may run.

    Several networks in one turn would fill the caches for each other.
    """
    folder, by_subject = Path(o.folder), dict[Subject, dict[str, Path]]()
    for row in found_rows(o.found):
        if _wanted(row, o) and file_of(row, folder).is_file():
            by_subject.setdefault(subject_of(row), {})[row["method"]] = file_of(row, folder)
    for subject, paths in by_subject.items():
        images = torch.from_numpy(np.load(data.files(subject.data, o, folder).calibration))
        network = float_network(subject, o.floats)
        plain = exported(network, images, folder / f"{subject.name}-float.onnx", subject, int8=False)
        for turn, (method, path) in itertools.product(range(o.repeats), paths.items()):
            latencies = timed({"float": plain, method: path}, subject, o.timing_s)
            ratio = time_ratio(latencies[method], latencies["float"])
            about = {"subject": asdict(subject), "method": method, "turn": turn}
            append(o.out / TIMES, {**about, "ms": latencies[method].p50_ms, "ratio": ratio})
        print(f"{subject.name}: {len(paths)} files", flush=True)


def _wanted(row: Row, o: Namespace) -> bool:
    return name_of(row) in {f"{part.subject.name} {label}" for part in parts(o.groups) for label in part.labels}
