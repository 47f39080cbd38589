"""Makes networks smaller by several methods at equal measured latency, fine-tunes them alike, and compares accuracy.

One process trains on the GPU; others, each on a physical core, search, export and measure. Latency is timed once more
at the end, when nothing else runs. Every row is written as it is made.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from analysis.common.cifar import NETWORKS
from analysis.common.study import command_line, gpu_software, study_parser
from analysis.low_bits.step import DEVICE, Images
from analysis.search_study import data
from analysis.search_study.find import Effort, Found, exported, find, hits, timed
from analysis.search_study.report import write
from analysis.search_study.subjects import GROUPS, Part, Subject, parts
from analysis.search_study.train import Trainer
from analysis.search_study.workers import Workers
from compress.measure import describe_machine
from compress.search.lab import time_ratio

_FOLDERS = {"--data", "--folder", "--floats"}
_CHUNKS = 5  # of the test pictures, which as many processes judge


@dataclass(frozen=True, kw_only=True)
class Float:
    """A trained float network.

    Attributes:
        model: on the CPU, in evaluation mode.
        teacher: a copy on the device.
        top1: percent of the test pictures, in torch.
        epochs: of its training; 0 = its weights were given.
    """

    model: nn.Module
    teacher: nn.Module
    top1: float
    epochs: int


class Study:
    """A run of the study.

    Args:
        options: of the command line.
    """

    def __init__(self, options: Namespace) -> None:
        self.o, self.begun = options, time.perf_counter()
        self.folder = Path(options.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.workers, self.trainer = Workers(options.processes), Trainer(options.lanes, options.batch)
        self.effort = Effort(
            networks=options.networks,
            trials=options.trials,
            images=options.images,
            search_s=options.search_s,
            seconds=options.timing_s,
        )
        self.files: dict[Subject, dict[str, Path]] = {}
        self._floats: dict[Subject, asyncio.Task[Float]] = {}
        self._images: dict[str, tuple[Images, data.Files]] = {}

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.perf_counter() - self.begun:6.1f} {text}", flush=True)

    def row(self, **row: Any) -> None:
        """Append a row."""
        with (self.o.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def images(self, name: str) -> tuple[Images, data.Files]:
        """Return a data set on the device and on disk."""
        if name not in self._images:
            split = data.load(name, self.o.data, train=self.o.train_images, val=self.o.val_images, device=DEVICE)
            images = Images(split, DEVICE)
            self._images[name] = images, data.write(images, self.folder, name)
            self.say(f"{name}: {len(images.targets)} pictures")
        return self._images[name]

    def base(self, subject: Subject, *, background: bool = False) -> asyncio.Task[Float]:
        """Train the float network of a subject, or read it; once, however many parts begin with it."""
        if subject not in self._floats:
            self._floats[subject] = asyncio.create_task(self._float(subject, background))
        return self._floats[subject]

    async def _float(self, subject: Subject, background: bool) -> Float:
        images, _ = self.images(subject.data)
        torch.manual_seed(subject.seed)
        model = NETWORKS[subject.network]()
        given = None if self.o.floats is None else self.o.floats / f"{subject.name}.safetensors"
        epochs = 0 if given is not None and given.is_file() else self.o.float_epochs
        if given is not None and not epochs:
            model.load_state_dict(load_file(given))
        else:
            spec = subject.training(epochs)
            result = await self.trainer.train(model, None, images, spec, seed=subject.seed, background=background)
            save_file(model.state_dict(), self.o.out / f"{subject.name}.safetensors")
            self.say(f"{subject.name}: float {result.top1:.2f} %, {result.images_per_s:,.0f} images/s")
        teacher = copy.deepcopy(model).to(DEVICE).to(memory_format=torch.channels_last).eval()
        found = Float(model=model.eval(), teacher=teacher, top1=images.top1(teacher), epochs=epochs)
        self.row(kind="float", subject=asdict(subject), top1=found.top1, epochs=epochs)
        return found

    async def part(self, part: Part) -> None:
        """Make one row, or say why there is none."""
        try:
            await self._part(part)
        except Exception as error:
            self.failed(part, repr(error))

    def failed(self, part: Part, error: str) -> None:
        """Say and write that a part has no row."""
        self.say(f"{part.name}: {error[:300]}")
        self.row(kind="failure", subject=asdict(part.subject), method=part.label, error=error)

    async def _part(self, part: Part) -> None:
        """Find, fine-tune, export, judge."""
        subject, name = part.subject, part.name
        base = await self.base(subject, background=part.method == "float")
        if part.method == "float":
            return
        images, files = self.images(subject.data)
        found: Found = await self.workers.call(find, part, base.model, files, self.folder, self.effort)
        self.say(f"{name}: {found.ratio:.3f} of {found.dense:.3f} after {found.seconds:.0f} s")
        self.row(kind="found", subject=asdict(subject), method=part.label, **_facts(found))
        model = found.network
        spec = subject.tuning(self.o.epochs)
        tuned = await self.trainer.train(model, base.teacher, images, spec, seed=subject.seed)
        path = await self._export(model, part, files)
        top1 = await self._top1(path, files)
        self.row(
            kind="network",
            subject=asdict(subject),
            method=part.label,
            top1=top1,
            float_top1=base.top1,
            torch_top1=tuned.top1,
            epochs=tuned.epochs,
            images_per_s=tuned.images_per_s,
            parameters=sum(p.numel() for p in model.parameters()),
        )
        self.files.setdefault(subject, {})[part.label] = path
        self.say(f"{name}: {top1:.2f} % on the engine, float {base.top1:.2f} %, {tuned.images_per_s:,.0f} images/s")

    async def _export(self, model: nn.Module, part: Part, files: data.Files) -> Path:
        path = self.folder / f"{part.name.replace(' ', '-')}.onnx"
        return Path(await self.workers.call(finished, model, files, path, part.subject.int8, soon=True))

    async def _top1(self, path: Path, files: data.Files) -> float:
        """Percent of the test pictures whose class the engine finds."""
        count = len(np.load(files.targets))
        size = -(-count // _CHUNKS)
        calls = [self.workers.call(hits, path, files, first, size, soon=True) for first in range(0, count, size)]
        return 100 * sum(await asyncio.gather(*calls)) / count

    async def all(self, wanted: list[Part], seconds: float) -> None:
        """Make all parts within some seconds; those that fail or are late are said."""
        tasks = {part: asyncio.create_task(self.part(part)) for part in wanted}
        _, late = await asyncio.wait(tasks.values(), timeout=seconds)
        for part, task in tasks.items():
            if task in late:
                self.failed(part, "late")
                task.cancel()

    async def latencies(self) -> None:
        """Time the networks of each subject in turn beside its float network, several times, with nothing else."""
        for subject, paths in self.files.items():
            network = (await self.base(subject)).model
            images = torch.from_numpy(np.load(self.images(subject.data)[1].calibration))
            files = {"float": exported(network, images, self.folder / f"{subject.name}-float.onnx"), **paths}
            for turn in range(self.o.repeats):
                rows = timed(files, subject.batch, self.o.timing_s)
                for method, row in rows.items():
                    ratio = time_ratio(row, rows["float"])
                    self.row(
                        kind="latency", subject=asdict(subject), method=method, turn=turn, ms=row.p50_ms, ratio=ratio
                    )


def finished(model: nn.Module, files: data.Files, path: Path, int8: bool) -> Path:
    """Write a fine-tuned network; runs in a worker."""
    return exported(model, torch.from_numpy(np.load(files.calibration)), path, int8=int8)


def _facts(found: Found) -> dict[str, Any]:
    return {"ratio": found.ratio, "dense": found.dense, "seconds": found.seconds, "facts": dict(found.facts)}


def _without_folders() -> list[str]:
    """Return this process's arguments without folders of one machine."""
    words = sys.argv[1:]
    return ["DIR" if before in _FOLDERS else word for before, word in zip(["", *words], words, strict=False)]


def main() -> None:
    """Run the groups that the command line names, and write the page."""
    parser = study_parser(__doc__, out="results/search/search_study")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["mobilenet", "resnet56"])
    parser.add_argument("--data", help="folder of cifar-10-batches-py")
    parser.add_argument("--folder", default="/tmp/search_study", help="of exported networks and of searches")
    parser.add_argument("--floats", type=Path, help="folder of trained float networks, <network>-<data>-<seed>")
    parser.add_argument("--budget-s", type=float, default=600, help="of everything")
    parser.add_argument("--reserve-s", type=float, default=45, help="of that, for timing at the end")
    parser.add_argument("--float-epochs", type=int, default=25)
    parser.add_argument("--epochs", type=int, default=10, help="of fine-tuning")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--networks", type=int, default=9, help="timed for the latency model")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--images", type=int, default=128, help="that a search looks at")
    parser.add_argument("--search-s", type=float, default=300, help="after which a search begins no further trial")
    parser.add_argument("--timing-s", type=float, default=1.0, help="for each network of a measurement")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--lanes", type=int, default=6, help="networks that train at a time")
    parser.add_argument("--repeats", type=int, default=5, help="of the timings at the end")
    parser.add_argument("--train-images", type=int)
    parser.add_argument("--val-images", type=int)
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = False  # it would search anew for the shapes of every network, 20 s each
    machine = describe_machine()
    about = {
        "command": command_line(_without_folders()),
        "software": gpu_software("onnxruntime", "optuna", "torch-pruning"),
    }
    study = Study(o)
    about["machine"] = {"cpu": machine.cpu, "cores": machine.usable_cores, "processes": study.workers.count}
    (o.out / "about.json").write_text(json.dumps(about))
    try:
        asyncio.run(_whole(study))
    finally:
        study.workers.close()
    study.say("done")
    print(write(o.out))


async def _whole(study: Study) -> None:
    o = study.o
    await study.all(parts(o.groups), o.budget_s - o.reserve_s - (time.perf_counter() - study.begun))
    study.workers.close()
    study.say("timing alone")
    await study.latencies()


if __name__ == "__main__":
    main()
