"""Training and calibration with one GPU and with several: images a second of all together, for the same batch a GPU.

    python -m analysis.several_gpus.run --processes 1 2

Writes several_gpus.json after every row, and prints the rows.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import compress
from analysis.common.qat_variants import DEVICE, NETWORKS, fast_arithmetic, finish, machine, pretrained
from analysis.common.study import Row, command_line, study_parser
from compress.data import BatchPlan, DataSet
from compress.data.augment import Movement
from compress.data.memory import MemorySplit
from compress.data.preprocessing import Preprocessing
from compress.files import write_json
from compress.training import Processes, QATSpec, TrainSpec, fit, init_processes

CASES = ("resnet50:224", "resnet18:64")
EPOCHS = 4
"""The first one compiles and does not count."""


def main() -> None:
    """Start torchrun for each number of processes; or measure, as one of its processes."""
    parser = study_parser(__doc__, out="results/h200")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="NETWORK:PIXELS")
    parser.add_argument("--batch", type=int, default=128, help="images of a step of one GPU")
    parser.add_argument("--images", type=int, default=12_288)
    parser.add_argument("--compile", default="regions", type=lambda word: {"no": False, "whole": True}.get(word, word))
    parser.add_argument("--member", action="store_true", help="this is a process of torchrun")
    arguments = parser.parse_args()
    if arguments.member:
        member(arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: Row = {"command": command_line(), "machine": machine(), "rows": []}
    for count in arguments.processes:
        begin = time.monotonic()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
        done = subprocess.run(
            [*command, "analysis.several_gpus.run", "--member", *sys.argv[1:]],
            capture_output=True,
            text=True,
            check=False,
        )
        rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
        rows += [{"failed": done.stderr[-1500:]}] if done.returncode else []
        for row in [*rows, {"seconds_in_all": round(time.monotonic() - begin)}]:
            report["rows"].append({"processes": count, **row})
            write_json(arguments.out / "several_gpus.json", report)
            print(report["rows"][-1], flush=True)


def member(arguments: Any) -> None:
    """Measure all cases in this process and its companions."""
    fast_arithmetic()
    processes = init_processes(DEVICE.type)
    for case in arguments.cases:
        name, pixels = case.split(":")
        data = in_memory(int(pixels), arguments.images, processes.device)
        model = network(name, int(pixels))
        common: Any = {"epochs": EPOCHS, "lr": 1e-4, "precision": "bf16", "evaluate_every": EPOCHS}
        trainings: dict[str, tuple[nn.Module, TrainSpec]] = {}
        if name != "resnet18":
            qmodel = calibrated(model, data, arguments, processes, case)
            qat = QATSpec(**common, distill=False, fused="on", warmup_epochs=0, compile=arguments.compile)
            trainings = {"QAT": (qmodel, qat), "QAT, gradients bf16": (qmodel, replace(qat, gradients="bf16"))}
        else:
            trainings = {"float": (model, TrainSpec(**common, warmup_epochs=0))}
            if processes.world_size > 1:
                synchronized = TrainSpec(**common, warmup_epochs=0, sync_batchnorm=True)
                trainings["float, BatchNorm synchronized"] = (model, synchronized)
        for title, (trained, spec) in trainings.items():
            batch = arguments.batch * processes.world_size
            report = fit(trained, data, spec, batch_size=batch, folder=None, processes=processes)
            speeds = [round(row.images_per_s) for row in report.history]
            show(processes, case=case, training=title, images_per_s=max(speeds[1:]), epochs=speeds,
                 waited=report.history[-1].waited, loss=report.history[-1].train_loss)  # fmt: skip
    processes.close()


def network(name: str, pixels: int) -> nn.Module:
    """Return a network for ten classes, the same in every process."""
    found = replace(NETWORKS[name], pixels=pixels)
    if name != "tiny":
        make: Any = found.make
        found = replace(found, make=functools.partial(make, num_classes=10))
    return pretrained(found).eval()


def in_memory(pixels: int, count: int, device: torch.device) -> DataSet:
    """Return random images, the same in every process, that its GPU keeps."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 256, (min(count, 512), 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    images = few.to(device).repeat(-(-count // len(few)), 1, 1, 1)[:count]
    targets = torch.arange(count) % 10

    def split(n: int, movement: Movement | None) -> MemorySplit:
        return MemorySplit(
            images[:n], targets[:n], labels=tuple("0123456789"), preprocessing=Preprocessing(image_size=pixels), seed=0,
            movement=movement,
        )  # fmt: skip

    return DataSet(train=split(count, Movement(shift=0.1, flip=True)), val=split(min(count, 512), None))


def calibrated(model: nn.Module, data: DataSet, arguments: Any, processes: Processes, case: str) -> nn.Module:
    """Time calibration of this process's share of the images, and return the network."""

    def share(limit: int) -> Iterator[Tensor]:
        plan = BatchPlan(
            batch_size=arguments.batch * processes.world_size, limit=limit, rank=processes.rank,
            world_size=processes.world_size,
        )  # fmt: skip
        return (images for images, _ in data.train.batches(plan, device=processes.device))

    several = processes.world_size > 1
    x = next(share(2 * processes.world_size * arguments.batch))[:2]
    qmodel = compress.insert_quantizers(model.to(processes.device), x, compress.QuantSpec())
    qmodel.to(memory_format=torch.channels_last)
    whole = min(len(data.train), 8192)
    compress.calibrate(qmodel, share(whole // 8), all_reduce=several)
    for _ in range(2):
        finish()
        start = time.perf_counter()
        compress.calibrate(qmodel, share(whole), all_reduce=several)
        finish()
        seconds = time.perf_counter() - start
    show(processes, case=case, calibration="entropy", images=whole, seconds=round(seconds, 3),
         images_per_s=round(whole / seconds))  # fmt: skip
    return qmodel


def show(processes: Processes, **row: Any) -> None:
    """Print a row of all processes, on the first one."""
    if processes.is_main:
        print("ROW", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
