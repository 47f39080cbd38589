"""The stages `floats` and `train`: several small networks at a time on one GPU, each as a CUDA graph on its own stream.

The kernels of such a network do not fill the GPU, so that trainings which take their steps in turn overlap.
"""

from __future__ import annotations

import asyncio
import copy
import time
from argparse import Namespace
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from analysis.common.cifar import NETWORKS
from analysis.common.study import Row
from analysis.low_bits.step import DEVICE, Images, Result, Training
from analysis.search_study import data
from analysis.search_study.choice import Whole
from analysis.search_study.files import (
    TUNED,
    append,
    float_network,
    found_rows,
    name_of,
    network_of,
    subject_of,
    write_states,
)
from analysis.search_study.subjects import Subject, parts
from compress.training.spec import TrainSpec


class Trainer:
    """Trains networks that take their steps in turn.

    Args:
        batch: images of a step.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.mode = "graph" if DEVICE.type == "cuda" else "eager"

    async def train(
        self, model: nn.Module, teacher: nn.Module | None, images: Images, spec: TrainSpec, *, seed: int
    ) -> Result:
        """Train a network in place; it ends on the CPU, in evaluation mode.

        Args:
            model: to train.
            teacher: on the device, in evaluation mode, or None.
            images: data.
            spec: settings.
            seed: of the order of the images.
        """
        model.to(DEVICE).to(memory_format=torch.channels_last).train()
        state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        training = Training(model, teacher, images.fork(), spec, self.batch, self.mode)
        steps, stream = training.walk(state, seed, spec.epochs), _stream()
        _finish()
        while True:
            await asyncio.sleep(0)
            with _on(stream):
                try:
                    next(steps)
                except StopIteration as ended:
                    result: Result = ended.value
                    break
        _finish()
        model.zero_grad(set_to_none=True)
        model.cpu().to(memory_format=torch.contiguous_format).eval()
        return result


class Study:
    """The state that the trainings of a stage share.

    Args:
        options: of the command line.
    """

    def __init__(self, options: Namespace) -> None:
        self.o, self.begun = options, time.perf_counter()
        self.trainer, self.lanes = Trainer(options.batch), asyncio.Semaphore(options.lanes)
        self.states: dict[str, dict[str, Tensor]] = {}
        self._images: dict[str, Images] = {}
        self._teachers: dict[Subject, tuple[Whole, nn.Module, float]] = {}

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.perf_counter() - self.begun:6.1f} {text}", flush=True)

    def images(self, name: str) -> Images:
        """Return a data set on the device."""
        if name not in self._images:
            o = self.o
            split = data.load(name, o.data, train=o.train_images, val=o.val_images, device=DEVICE)
            self._images[name] = Images(split, DEVICE)
            self.say(f"{name}: {len(split.train)} pictures")
        return self._images[name]

    def teacher(self, subject: Subject) -> tuple[Whole, nn.Module, float]:
        """Return a float network, its copy on the device, and its accuracy in percent."""
        if subject not in self._teachers:
            network, images = float_network(subject, self.o.floats), self.images(subject.data)
            teacher = copy.deepcopy(network).to(DEVICE).to(memory_format=torch.channels_last).eval()
            example = torch.zeros(2, 3, *images.val[0].shape[-2:])
            self._teachers[subject] = Whole(network, example), teacher, images.top1(teacher)
        return self._teachers[subject]

    async def tune(self, row: Row) -> None:
        """Fine-tune the network of a row when a lane is free, and write its weights."""
        async with self.lanes:
            await self._tune(row)

    async def _tune(self, row: Row) -> None:
        subject, name = subject_of(row), name_of(row)
        whole, teacher, float_top1 = self.teacher(subject)
        model, spec = network_of(row, whole), subject.tuning(self.o.epochs)
        result = await self.trainer.train(model, teacher, self.images(subject.data), spec, seed=subject.seed)
        self.states[name] = model.state_dict()
        write_states(self.o.out, self.states)
        figures = {"top1": result.top1, "float_top1": float_top1, "images_per_s": result.images_per_s}
        append(
            self.o.out / TUNED,
            {"subject": row["subject"], "method": row["method"], **figures, "epochs": result.epochs},
        )
        self.say(f"{name}: {result.top1:.2f} %, float {float_top1:.2f} %, {result.images_per_s:,.0f} images/s")

    async def whole(self, subject: Subject) -> None:
        """Train a float network when a lane is free, and write it."""
        async with self.lanes:
            await self._whole(subject)

    async def _whole(self, subject: Subject) -> None:
        torch.manual_seed(subject.seed)
        model = NETWORKS[subject.network]()
        spec = subject.training(self.o.float_epochs)
        result = await self.trainer.train(model, None, self.images(subject.data), spec, seed=subject.seed)
        save_file(model.state_dict(), self.o.out / f"{subject.name}.safetensors")
        append(self.o.out / "floats.jsonl", {"subject": asdict(subject), "top1": result.top1, "epochs": result.epochs})
        self.say(f"{subject.name}: float {result.top1:.2f} %, {result.images_per_s:,.0f} images/s")


def train_floats(o: Namespace) -> None:
    """Train the float networks of the groups that have none in the folder `--floats`."""
    study = Study(o)
    subjects = dict.fromkeys(part.subject for part in parts(o.groups))
    missing = [s for s in subjects if not (o.floats / f"{s.name}.safetensors").is_file()]
    asyncio.run(_within(study, o.budget_s, [study.whole(subject) for subject in missing]))


def train_found(o: Namespace) -> None:
    """Fine-tune every network that was found; the weights of those that are done are written at once."""
    study = Study(o)
    rows = {name_of(row): row for row in found_rows(o.found)}
    wanted = [f"{part.subject.name} {label}" for part in parts(o.groups) for label in part.labels]
    asyncio.run(_within(study, o.budget_s, [study.tune(rows[name]) for name in wanted if name in rows]))


async def _within(study: Study, seconds: float, work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do all work within some seconds; say what failed or was late."""
    tasks = [asyncio.create_task(one) for one in work]
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=max(1.0, seconds - (time.perf_counter() - study.begun)))
    for task in tasks:
        if task in late:
            task.cancel()
        elif error := task.exception():
            study.say(f"failed: {error!r}"[:400])
    study.say(f"{len(tasks) - len(late)} of {len(tasks)} in time")


def _stream() -> Any:
    return torch.cuda.Stream() if DEVICE.type == "cuda" else None


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
