"""Trains a network of the study through its recipe, and collects the small files of the run."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

import torch

from analysis.task_training.networks import NETWORKS, recipe_of
from compress.pipeline import run
from compress.pipeline.steps import export
from compress.pipeline.steps.float import build_float
from compress.progress import NoProgress
from compress.recipe import Recipe, load_recipe
from compress.records import read_run, summary_table
from compress.tasks import make_task
from compress.tasks.load import detector_head
from compress.training import fit

KEPT = ("metrics.json", "environment.json", "report.md", "report.html", "recipe.yaml", "*.csv", "notes.json", "*.json")
LARGEST = 16 * 2**20  # bytes of an ONNX file that is collected
PROBED = 3
QAT_SHARE, QAT_COST = 0.08, 4.0
"""Epochs of QAT for each of float training, and the time of one, both as a multiple."""


class Lines(NoProgress):
    """Prints the notes of a run, such as the figures of an epoch."""

    def note(self, text: str) -> None:
        """Print a line with the time."""
        print(time.strftime("%H:%M:%S"), text, flush=True)


def seconds_per_epoch(recipe: Recipe, device: str) -> float:
    """Return the time of an epoch of float training, from the last of a few, with whatever else runs on the machine."""
    from compress.data.load import load_data  # lazy: the pictures are decoded once, and kept by `resident`

    data = load_data(recipe.data)
    detector = None
    if recipe.task == "detection":
        size = data.val.preprocessing.height_width
        detector = detector_head(recipe.model, num_classes=data.val.num_classes, image_size=size)
    task = make_task(recipe.task, data.val.labels, loss=recipe.loss, decode=recipe.decode, detector=detector)
    model = build_float(recipe).model.to(device)
    report = fit(model, data, recipe.train, batch_size=recipe.data.batch_size, folder=None, task=task, device=device)
    return report.history[-1].seconds


def lengths(recipe: Recipe, device: str, left: float) -> tuple[int, int]:
    """Return epochs of float training and of QAT that fit into `left` seconds."""
    one = seconds_per_epoch(recipe, device)
    epochs = max(4, int(left / (one * (1 + QAT_SHARE * QAT_COST))))
    print(f"{one:.2f} s an epoch, {left:.0f} s left for training: {epochs} epochs", flush=True)
    return epochs, max(2, round(QAT_SHARE * epochs))


def collect(folder: Path, out: Path) -> list[Path]:
    """Copy the small files of a run folder, and return them."""
    out.mkdir(parents=True, exist_ok=True)
    found = [path for pattern in KEPT for path in sorted(folder.glob(pattern))]
    found += [path for path in sorted(folder.glob("*.onnx")) if path.stat().st_size <= LARGEST]
    return [Path(shutil.copy2(path, out / path.name)) for path in dict.fromkeys(found)]


def main() -> None:
    """Run the study of one network from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=sorted(NETWORKS), required=True)
    parser.add_argument("--data", required=True, help="folder of CamVid, or of BCCD")
    parser.add_argument("--out", type=Path, help="takes a folder of small files for the network")
    parser.add_argument("--runs", type=Path, default=Path("runs/task_training"), help="takes the run folders")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--qat-epochs", type=int, default=10)
    parser.add_argument("--deadline", type=float, help="time.time() at which all is done, in place of the epochs")
    parser.add_argument("--pixels", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--engines", nargs="+", default=["openvino", "onnxruntime"])
    parser.add_argument("--resident", action="store_true", help="keep the decoded pictures on the device")
    parser.add_argument("--cores", type=int, nargs="+", help="numbers of the CPU cores to use")
    parser.add_argument("--set", action="append", default=[], help="key=value of the recipe")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, arguments.cores)
        torch.set_num_threads(len(arguments.cores))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    epochs, qat_epochs = arguments.epochs, arguments.qat_epochs

    def recipe(epochs: int, qat_epochs: int) -> Recipe:
        return recipe_of(
            arguments.network,
            arguments.data,
            epochs=epochs,
            qat_epochs=qat_epochs,
            pixels=arguments.pixels,
            engines=arguments.engines,
            resident=arguments.resident,
            overrides=arguments.set,
        )

    folder = arguments.runs / arguments.network
    resume = (folder / "state.json").is_file()
    if arguments.deadline is not None:
        export.SQNR_IMAGES = 2  # it runs on the CPU, for a figure that this study does not show
        left = arguments.deadline - time.time() - NETWORKS[arguments.network].after
        if not resume:
            epochs, qat_epochs = lengths(recipe(PROBED, 1), device, left - 10)
    planned = load_recipe(folder / "recipe.yaml") if resume else recipe(epochs, qat_epochs)
    try:
        run(planned, "qat", folder, resume=resume, progress=Lines())
    finally:
        if arguments.out is not None and folder.is_dir():
            collect(folder, arguments.out / arguments.network)
    for row in summary_table(read_run(folder).metrics):
        print(" | ".join(row.cells()), flush=True)


if __name__ == "__main__":
    main()
