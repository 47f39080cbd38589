"""How long does a search at 224 px take before anything is fine-tuned, and what front does it end with?

ResNet-50 has weights as drawn, which say nothing of accuracy but take the same time; EfficientNet-Lite0 has its
ImageNet weights and sees real pictures, so that its front can be read: how many pictures held back keep their class.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import compress
from analysis.common.study import command_line, gpu_software, listed, read_rows, study_parser
from analysis.real_accuracy.networks import efficientnet_lite0, pictures
from analysis.search_study.files import append
from compress.files import write_text
from compress.measure import describe_machine

_SIDE = 224


def main() -> None:
    """Search once, and print and write how long it took and the front."""
    parser = study_parser(__doc__, out="results/search/large")
    parser.add_argument("--network", choices=("resnet50", "efficientnet_lite0"), default="resnet50")
    parser.add_argument("--pictures", type=Path, help="folder of ImageNet pictures; of EfficientNet-Lite0")
    parser.add_argument("--engine", default="openvino")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--networks", type=int, default=4, help="timed for the latency model")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of reconstruction")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no trial begins")
    parser.add_argument("--latency", type=float, default=0.6)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/search_large"))
    o = parser.parse_args()
    model, images = _subject(o.network, o.pictures, o.images)
    spec = compress.SearchSpec(
        widths=(0.5,), formats=("float", "int8"), images=o.images, networks=o.networks, trials=o.trials,
        reconstruction_steps=o.steps, hours=o.minutes / 60,
    )  # fmt: skip
    shutil.rmtree(o.folder, ignore_errors=True)
    begun, cpu = time.time(), time.process_time()
    front = compress.search(
        model, images[:1], list(images.split(8)), engine=o.engine, latency=o.latency, spec=spec, out=o.folder,
        cache=o.folder / "cache",
    )  # fmt: skip
    seconds, cpu_s = time.time() - begun, time.process_time() - cpu
    machine = describe_machine()
    row = {
        "command": command_line(),
        "machine": {"cpu": machine.cpu, "cores": machine.usable_cores},
        "software": gpu_software("openvino", "onnxruntime", "optuna"),
        "network": o.network,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "seconds_until_trials": (o.folder / "plan.json").stat().st_mtime - begun,
        "points": len(front.points) - 1,
        "engine": o.engine,
        "front": [[p.label, p.figures.ratio, p.figures.ms, p.figures.distance] for p in front.front],
        "candidates": asdict(front.candidate_check),
    }
    append(o.out / "large.jsonl", row)
    print(_write(o.out))


def _write(folder: Path) -> str:
    """Write `large.md` from all rows of a folder, and return it."""
    lines = ["# How long a search at 224 pixels takes before anything is fine-tuned", ""]
    for row in read_rows(folder / "large.jsonl"):
        seen = row["candidates"]
        lines += [
            f"## {row['network']}, {row['engine']}, batch 1",
            "",
            f"- `{row['command']}`; {listed(row['software'])}; {listed(row['machine'])}.",
            f"- {row['seconds'] / 60:.1f} minutes ({row['cpu_s'] / 60:.1f} of processor time), of which "
            f"{row['seconds_until_trials'] / 60:.1f} before the first trial; {row['points']} networks were measured.",
            f"- Latency of all {len(seen['measured'])} candidates, each predicted by a model without it: median error "
            f"{100 * seen['median_error']:.1f} %, rank correlation {seen['spearman']:.2f} (95 % interval "
            f"{seen['interval'][0]:.2f} to {seen['interval'][1]:.2f}).",
            "",
            "| network of the front | time, of float | ms | error of the outputs |",
            "|---|---|---|---|",
            *(f"| {label} | {ratio:.3f} | {ms:.1f} | {error:.3g} |" for label, ratio, ms, error in row["front"]),
            "",
        ]
    return write_text(folder / "large.md", "\n".join(lines)).read_text()


def _subject(name: str, folder: Path | None, count: int) -> tuple[nn.Module, Tensor]:
    """A network in evaluation mode and pictures (count, 3, 224, 224)."""
    torch.manual_seed(0)
    if name == "resnet50":
        return torchvision.models.resnet50(weights=None).eval(), torch.randn(count, 3, _SIDE, _SIDE)
    if folder is None:
        raise SystemExit("efficientnet_lite0 needs --pictures")
    paths = sorted(folder.glob("*.jpg"))
    return efficientnet_lite0(), pictures(paths[:: max(1, len(paths) // count)][:count])


if __name__ == "__main__":
    main()
