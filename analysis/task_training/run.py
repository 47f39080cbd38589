"""Trains a network of the study through its recipe, and collects the small files of the run."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from analysis.task_training.networks import NETWORKS, recipe_of
from analysis.task_training.plan import decoded, planned
from analysis.task_training.turns import TrainingsOverError, Turn, granted, ready
from compress.pipeline import commands, run
from compress.recipe import Recipe, load_recipe
from compress.records import read_run, summary_table
from compress.training import loop
from compress.training.prepare import surroundings

KEPT = ("metrics.json", "environment.json", "report.md", "report.html", "recipe.yaml", "*.csv", "notes.json", "*.json")
LARGEST = 16 * 2**20  # bytes of an ONNX file that is collected


def collect(folder: Path, out: Path) -> list[Path]:
    """Copy the small files of a run folder, and return them."""
    out.mkdir(parents=True, exist_ok=True)
    found = [path for pattern in KEPT for path in sorted(folder.glob(pattern))]
    found += [path for path in sorted(folder.glob("*.onnx")) if path.stat().st_size <= LARGEST]
    return [Path(shutil.copy2(path, out / path.name)) for path in dict.fromkeys(found)]


def recipe_in_turn(arguments: argparse.Namespace, device: str) -> Recipe:
    """Wait for the GPU, and return the recipe whose trainings fit into the network's time on it."""

    def recipe(epochs: int, qat_epochs: int, graphs: bool) -> Recipe:
        more = [*arguments.set, f"train.cuda_graphs={str(graphs).lower()}"]
        return _recipe(arguments, epochs, qat_epochs, more)

    decoded(recipe(1, 1, False))
    _warm(device)
    ready(arguments.runs, arguments.network)
    until = granted(arguments.runs, arguments.network)
    return planned(recipe, load_recipe(NETWORKS[arguments.network].base).train.epochs, device, until)


def without_delays() -> None:
    """Leave out what a long training pays once, and a training of two minutes should not.

    The trial of quantization and export runs on the CPU while the GPU stands still. cuDNN's search builds all of its
    algorithms, which takes 20 s for a network in each precision.
    """
    vars(commands)["check_network"] = _no_check
    vars(loop)["surroundings"] = _without_search


def _no_check(*_: Any) -> None:
    """Take the recipe as it is: it has been tried before."""


@contextmanager
def _without_search(*given: Any) -> Iterator[None]:
    with surroundings(*given):
        torch.backends.cudnn.benchmark = False
        yield


def _warm(device: str) -> None:
    """Load the libraries of a device by one step of a small network."""
    layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(device)
    with torch.autocast(device, torch.bfloat16):
        layer(torch.zeros(2, 3, 32, 32, device=device)).float().sum().backward()


def _recipe(arguments: argparse.Namespace, epochs: int, qat_epochs: int, more: list[str]) -> Recipe:
    return recipe_of(
        arguments.network,
        arguments.data,
        epochs=epochs,
        qat_epochs=qat_epochs,
        pixels=arguments.pixels,
        engines=arguments.engines,
        resident=arguments.resident,
        overrides=more,
    )


def main() -> None:
    """Run the study of one network from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=sorted(NETWORKS), required=True)
    parser.add_argument("--data", required=True, help="folder of CamVid, or of BCCD")
    parser.add_argument("--out", type=Path, help="takes a folder of small files for the network")
    parser.add_argument("--runs", type=Path, default=Path("runs/task_training"), help="takes the run folders")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--qat-epochs", type=int, default=10)
    parser.add_argument("--in-turn", action="store_true", help="wait for `together` to give the GPU, and the epochs")
    parser.add_argument("--train-only", action="store_true", help="end after the trainings; the run folder goes on")
    parser.add_argument("--pixels", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--engines", nargs="+", default=["openvino", "onnxruntime"])
    parser.add_argument("--resident", action="store_true", help="keep the decoded pictures on the device")
    parser.add_argument("--set", action="append", default=[], help="key=value of the recipe")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.train_only:
        without_delays()
    folder = arguments.runs / arguments.network
    resume = (folder / "state.json").is_file()
    if resume:
        if arguments.in_turn:
            ready(arguments.runs, arguments.network)
            granted(arguments.runs, arguments.network)
        recipe = load_recipe(folder / "recipe.yaml")
    elif arguments.in_turn:
        recipe = recipe_in_turn(arguments, device)
    else:
        recipe = _recipe(arguments, arguments.epochs, arguments.qat_epochs, arguments.set)
    turn = Turn(arguments.runs, arguments.network if arguments.in_turn else None, ends=arguments.train_only)
    try:
        run(recipe, "qat", folder, resume=resume, progress=turn)
    except TrainingsOverError:
        print("trained", flush=True)
        return
    finally:
        if arguments.out is not None and folder.is_dir():
            collect(folder, arguments.out / arguments.network)
    for row in summary_table(read_run(folder).metrics):
        print(" | ".join(row.cells()), flush=True)


if __name__ == "__main__":
    main()
