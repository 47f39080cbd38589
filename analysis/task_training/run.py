"""Trains a segmentation network on CamVid through its recipe, and collects the small files of the run."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from compress.pipeline import run
from compress.progress import NoProgress
from compress.recipe import Recipe, load_recipe
from compress.records import read_run, summary_table

NETWORKS = ("lraspp_mobilenet_v3_large", "fcn_resnet50", "deeplabv3_resnet50")
KEPT = ("metrics.json", "environment.json", "report.md", "report.html", "recipe.yaml", "*.csv", "notes.json")
LARGEST = 16 * 2**20  # bytes of an ONNX file that is collected


def recipe_of(
    network: str, data: str, *, epochs: int, qat_epochs: int, pixels: Sequence[int], engines: Sequence[str]
) -> Recipe:
    """Return the recipe of a network, with the lengths of its trainings."""
    base = "lraspp-camvid" if network.startswith("lraspp") else "fcn_resnet50-camvid"
    return load_recipe(
        base,
        [
            f"model.name={network}",
            f"data.root={data}",
            f"data.image_size=[{pixels[0]},{pixels[1]}]",
            f"train.epochs={epochs}",
            f"train.warmup_epochs={min(5, epochs / 4)}",
            f"qat.epochs={qat_epochs}",
            f"bench.engines=[{','.join(engines)}]",
            "bench.batch_sizes=[1]",
        ],
    )


def collect(folder: Path, out: Path) -> list[Path]:
    """Copy the small files of a run folder, and return them."""
    out.mkdir(parents=True, exist_ok=True)
    found = [path for pattern in KEPT for path in sorted(folder.glob(pattern))]
    found += [path for path in sorted(folder.glob("*.onnx")) if path.stat().st_size <= LARGEST]
    return [Path(shutil.copy2(path, out / path.name)) for path in found]


def main() -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default=NETWORKS[0])
    parser.add_argument("--data", required=True, help="folder of CamVid: train/ trainannot/ val/ valannot/")
    parser.add_argument("--out", type=Path, required=True, help="takes a folder of small files for the network")
    parser.add_argument("--runs", type=Path, default=Path("runs/task_training"), help="takes the run folders")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--qat-epochs", type=int, default=10)
    parser.add_argument("--pixels", type=int, nargs=2, default=(360, 480), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--engines", nargs="+", default=["openvino", "onnxruntime"])
    arguments = parser.parse_args()
    recipe = recipe_of(
        arguments.network,
        arguments.data,
        epochs=arguments.epochs,
        qat_epochs=arguments.qat_epochs,
        pixels=arguments.pixels,
        engines=arguments.engines,
    )
    folder = arguments.runs / arguments.network
    try:
        run(recipe, "qat", folder, resume=(folder / "state.json").is_file(), progress=NoProgress())
    finally:
        if folder.is_dir():
            collect(folder, arguments.out / arguments.network)
    for row in summary_table(read_run(folder).metrics):
        print(" | ".join(row.cells()))


if __name__ == "__main__":
    main()
