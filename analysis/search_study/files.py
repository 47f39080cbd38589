"""Files that stages of the study exchange: rows of JSON, float networks, fine-tuned weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from analysis.common.cifar import NETWORKS
from analysis.common.study import Row, read_rows
from analysis.search_study.choice import Choice, Whole
from analysis.search_study.subjects import Subject

FOUND, TUNED, JUDGED, TIMES = "found.jsonl", "tuned.jsonl", "judged.jsonl", "times.jsonl"
_FILE_BYTES = 15_000_000  # a machine that is lent gives back files of 16 MiB at most


def append(path: Path, row: Row) -> None:
    """Append a row to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def subject_of(row: Row) -> Subject:
    """The subject of a row."""
    return Subject(**{**row["subject"], "widths": tuple(row["subject"]["widths"])})


def name_of(row: Row) -> str:
    """Such as `mobilenet_v2-cifar10-0 uniform larger`."""
    return f"{subject_of(row).name} {row['method']}"


def found_rows(out: Path) -> list[Row]:
    """Rows of networks that were found."""
    return [row for row in read_rows(out / FOUND) if "choice" in row]


def float_network(subject: Subject, floats: Path) -> nn.Module:
    """The trained float network of a subject, on the CPU.

    Raises:
        FileNotFoundError: there is none in the folder.
    """
    model = NETWORKS[subject.network]()
    model.load_state_dict(whole_state(load_file(floats / f"{subject.name}.safetensors")))
    return model.eval()


def network_of(row: Row, whole: Whole) -> nn.Module:
    """The network of a row, with the float network's weights."""
    return whole.make(Choice(**row["choice"])).eval()


def half_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as float16, everything else as it is."""
    return {k: (v.half() if v.ndim > 1 and v.is_floating_point() else v).contiguous() for k, v in state.items()}


def whole_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same as float32."""
    return {k: v.float() if v.dtype == torch.float16 else v for k, v in state.items()}


def write_states(folder: Path, states: Mapping[str, Mapping[str, Tensor]], *, file_bytes: int = _FILE_BYTES) -> None:
    """Write weights by network's name into files of at most so many bytes, or of one network."""
    together: dict[str, Tensor] = {}
    count = size = 0
    for name, state in states.items():
        small = {f"{name}/{key}": value for key, value in half_state(state).items()}
        own = sum(value.nbytes for value in small.values())
        if together and size + own > file_bytes:
            save_file(together, folder / f"tuned-{count}.safetensors")
            together, size, count = {}, 0, count + 1
        together |= small
        size += own
    if together:
        save_file(together, folder / f"tuned-{count}.safetensors")


def read_states(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the weights of each network that a folder holds."""
    for path in sorted(folder.glob("tuned-*.safetensors")):
        states: dict[str, dict[str, Tensor]] = {}
        for key, value in whole_state(load_file(path)).items():
            name, _, tensor = key.rpartition("/")
            states.setdefault(name, {})[tensor] = value
        yield from states.items()
