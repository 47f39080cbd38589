"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import InitVar, asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from compress.data.base import Batch, BatchPlan, DataSet, hash_seed
from compress.errors import CheckpointError, CompressError, DataError
from compress.support.progress import Progress
from compress.tasks.base import Task
from compress.tasks.classification import classification
from compress.training.augment import make_augment
from compress.training.best import BestWeights, WeightAverage, check_reference, stop_reason
from compress.training.checkpoint import read_checkpoint, restore_checkpoint, save_checkpoint
from compress.training.distributed import SINGLE, Processes, average_running_statistics, broadcast_state, synchronized
from compress.training.evaluate import QUIET, Evaluation, OutputsOf, autocast, evaluate
from compress.training.freezing import drop_frozen_gradients, freeze_batchnorm, frozen
from compress.training.log import Position, TrainReport, best_row, diverged, summarize, write_log
from compress.training.loggers import Callback, Callbacks
from compress.training.optim import check_schedule, learning_rate, make_optimizer
from compress.training.passes import Passes, RecordedPasses
from compress.training.prepare import (
    check_models,
    example_batch,
    feature_pairs,
    is_recorded,
    not_finite,
    surroundings,
    to_channels_last,
    wrap,
)
from compress.training.spec import TrainSpec, check_train_spec, identity_of


class Waiting:
    """Times the wait for batches.

    On a GPU between steps; on the CPU by the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._clock = 0.0
        self._begin = 0.0

    def __enter__(self) -> None:
        if self._device.type == "cuda":
            self._pairs.append((self._recorded(), torch.cuda.Event(enable_timing=True)))
        else:
            self._begin = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self._pairs[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._clock += time.perf_counter() - self._begin

    def seconds(self) -> float:
        """Since the last call; waits for the GPU's last block."""
        milliseconds = 0.0
        for begin, end in self._pairs:
            end.synchronize()
            milliseconds += begin.elapsed_time(end)
        found = self._clock + milliseconds / 1e3
        self._pairs.clear()
        self._clock = 0.0
        return found

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


READ_EVERY = 20

AfterStep = Callable[[int, int, torch.optim.Optimizer], None]
"""Called with (steps done, all steps, the optimizer)."""


def fit(
    model: nn.Module,
    data: DataSet,
    spec: TrainSpec,
    *,
    batch_size: int,
    folder: Path | None,
    task: Task | None = None,
    teacher: nn.Module | None = None,
    device: torch.device | str | None = None,
    processes: Processes = SINGLE,
    resume: bool = False,
    name: str = "train",
    first_epoch: int = 0,
    reference: float | None = None,
    after_step: AfterStep | None = None,
    callbacks: Iterable[Callback] = (),
    progress: Progress = QUIET,
) -> TrainReport:
    """Train `model` in place.

    Args:
        model: from images (N, C, H, W) to outputs. Moved to `device`; modes and random state are restored, gradients
            gone.
        data: trained on `train`, evaluated on `val`.
        spec: all settings.
        batch_size: over all processes; `grad_accumulation` of them make a step.
        folder: of `<name>.checkpoint.safetensors`, before the first step too, and `<name>.csv`.
        task: None = classification.
        teacher: float, for `spec.distill`.
        device: None = the process's own.
        processes: each must call; rank 0 writes.
        resume: from the folder's checkpoint.
        name: of files and bar.
        first_epoch: n after n epochs of training.
        reference: of `spec.stop_within`.
        after_step: its effect must follow from model and step.
        callbacks: on rank 0.
        progress: listener.

    Raises:
        RecipeError: a bad value, fp16 on the CPU, no teacher or reference, a failing part of the user's.
        ModelError: logits of other shape.
        DataError: too few images for the processes.
        CheckpointError: truncated, foreign, of another training, or not writable.
        CompressError: loss or weights not finite; the last checkpoint is from before.
    """
    check_train_spec(spec)
    check_reference(spec, reference)
    autocast(device := processes.on(device), spec.precision)
    if resume and folder is None:
        raise CheckpointError("resume is set without a folder: name the one that holds the checkpoint")
    progress, task = progress if processes.is_main else QUIET, task or classification(data.train.num_classes)
    with surroundings(model, teacher, device), frozen(model, spec.frozen), synchronized(model, spec, processes):
        training = _Training(model, data, spec, batch_size, folder, task, teacher, device, processes, name, progress)
        training.after_step, training.first_epoch, training.reference = after_step, first_epoch, reference
        training.callbacks = Callbacks(callbacks if processes.is_main else ())
        return training.run(resume)


@dataclass(eq=False)
class _Training:
    model: nn.Module
    data: DataSet
    spec: TrainSpec
    batch_size: InitVar[int]
    folder: Path | None
    task: Task
    teacher: InitVar[nn.Module | None]
    device: torch.device
    processes: Processes
    name: str
    progress: Progress
    after_step: AfterStep | None = None
    first_epoch: int = 0
    reference: float | None = None
    callbacks: Callbacks = field(default_factory=lambda: Callbacks(()))

    def __post_init__(self, batch_size: int, teacher: nn.Module | None) -> None:
        data, spec, task, device, processes = self.data, self.spec, self.task, self.device, self.processes
        model = self.model.to(device)
        self.position = Position()
        self.unread: list[Tensor] = []
        self.waiting = Waiting(device)
        self.plan = BatchPlan(
            batch_size=batch_size, epoch=0, rank=processes.rank, world_size=processes.world_size, drop_last=True
        )
        self.batches_per_epoch = data.train.steps(self.plan)
        self.steps_per_epoch = math.ceil(self.batches_per_epoch / spec.grad_accumulation)
        whole = min(batch_size, len(data.train))
        self.share = len(range(processes.rank, whole, processes.world_size)) * processes.world_size / max(1, whole)

        images, targets = example_batch(data.train, device, processes)
        teacher = teacher.to(device).eval() if teacher is not None and spec.distill else None
        check_models(model, teacher, images, task=task, spec=spec)
        check_schedule(spec)
        self.features = feature_pairs(model, teacher, images, spec)
        self.augment = make_augment(
            spec,
            num_classes=data.train.num_classes,
            preprocessing=data.train.preprocessing,
            images=images,
            targets=targets,
        )
        self.channels_last = to_channels_last(model, images, spec.channels_last, task)
        broadcast_state(model, processes)
        forward, self.no_sync = wrap(model, images, task=task, spec=spec, processes=processes, device=device)
        teach = OutputsOf(teacher, task.select) if teacher is not None else None
        if teach is not None and spec.compile:
            teach.compile()
        self.optimizer = make_optimizer(model, spec)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        passes = Passes(
            forward, teach, self.features, model=model, task=task, spec=spec, scaler=self.scaler, device=device
        )
        self.passes = RecordedPasses(passes, spec, processes) if is_recorded(spec, device) else passes
        self.average = None if spec.ema_decay is None else WeightAverage(model, spec.ema_decay)
        self.best = BestWeights(model) if spec.keep_best else None

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.position.epoch * self.steps_per_epoch + self.position.step

    def run(self, resume: bool) -> TrainReport:
        """Train; gradients are gone afterwards."""
        try:
            return self._run(resume)
        finally:
            self.progress.finish(self.name)
            if isinstance(self.passes, RecordedPasses):
                self.passes.release()
            self.optimizer.zero_grad()
            self.model.to(memory_format=torch.contiguous_format)

    def _run(self, resume: bool) -> TrainReport:
        resumed_from = self._begin(resume)
        self.progress.start(self.name, self.spec.epochs * self.steps_per_epoch, done=self.step)
        self.callbacks.begin(self.name, self.spec, done=self.step)
        with nullcontext() if self.features is None else self.features.watched():
            while self.position.epoch < self.spec.epochs and not self._stopped():
                self._epoch()
        for weights in (self.average, self.best):
            if weights is not None:
                weights.install()
        history, why = tuple(self.position.history), self._stopped()
        report = summarize(history, self._final(), metric=self.task.metric, resumed_from=resumed_from, stopped=why)
        self.callbacks.end(self.name, report)
        return report

    def _stopped(self) -> str | None:
        return stop_reason(self.position.history, self.spec, self.task.metric, self.reference)

    def _begin(self, resume: bool) -> int | None:
        """Restore, or write the first checkpoint."""
        if self.folder is None:
            return None
        path = self._checkpoint_path(self.folder)
        if self.processes.is_main:
            for left_over in self.folder.glob(f".{self.name}.*.part"):  # of a process killed while it was writing
                left_over.unlink(missing_ok=True)
        if not self.processes.on_main(lambda: resume and path.exists()):
            self._save()
            return None
        contents = self.processes.on_main(lambda: read_checkpoint(path, self._identity()))
        position = Position.read(contents, epochs=self.spec.epochs, steps_per_epoch=self.steps_per_epoch)
        restore_checkpoint(contents, **self._parts())
        self.position = position
        skipped = self.data.train.skipped
        skipped[:] = dict.fromkeys([*self.position.skipped, *skipped])
        self._write_log()
        return self.step

    def _epoch(self) -> None:
        freeze_batchnorm(self.model.train(), self.spec, self.position.epoch)
        first = self.position.step * self.spec.grad_accumulation
        plan = replace(self.plan, epoch=self.first_epoch + self.position.epoch, first=first)
        batches = self.data.train.batches(plan, device=self.device)
        self.mark = time.perf_counter()
        while self.position.step < self.steps_per_epoch:
            lr = self._optimizer_step(batches)
            self.position.step += 1
            if len(self.unread) >= (READ_EVERY if self.device.type == "cuda" else 1):
                self._read()
            figures = {**self.position.figures(self.task.correct), "lr": lr}
            self.progress.advance(self.name, 1, **figures)
            self.callbacks.step(self.name, self.step, figures)
            every = self.spec.checkpoint_steps
            if every and self.step % every == 0 and self.position.step < self.steps_per_epoch:
                self._save()
                self.mark = time.perf_counter()
        self._read()
        self._end_epoch()

    def _optimizer_step(self, batches: Iterator[Batch]) -> float:
        """Take one step and return its learning rate."""
        spec, lr = self.spec, self._learning_rate(self.step)
        left = self.batches_per_epoch - self.position.step * spec.grad_accumulation
        group = min(spec.grad_accumulation, left)
        before = self.first_epoch * self.steps_per_epoch
        torch.manual_seed(hash_seed(spec.seed, before + self.step, self.processes.rank))
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr * parameters.get("lr_scale", 1.0)
        sums = [self._backward(self._next(batches), group=group, last=i == group - 1) for i in range(group)]
        drop_frozen_gradients(self.model, spec, self.position.epoch)
        if spec.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), spec.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.after_step is not None:
            self.after_step(self.step + 1, spec.epochs * self.steps_per_epoch, self.optimizer)
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.step + 1)
        self.unread.append(sum(sums[1:], start=sums[0]))
        return lr

    def _backward(self, batch: Batch, *, group: int, last: bool) -> Tensor:
        """[summed loss, correct, images], float64, unread."""
        images, targets = batch if self.augment is None else self.augment(*batch)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        done = self.step / (self.spec.epochs * self.steps_per_epoch)
        with nullcontext() if last else self.no_sync():
            return self.passes(images, targets, factor=self.share / group, done=done)

    def _next(self, batches: Iterator[Batch]) -> Batch:
        with self.waiting:
            batch = next(batches, None)
        if batch is None or not len(batch[1]):
            raise DataError(
                f"the training split ran out of images in epoch {self.position.epoch + 1}: it promised "
                f"{self.batches_per_epoch} batches; check for files that vanished or cannot be read"
            )
        return batch

    def _read(self) -> None:
        """Add sums; refuse a loss that is not finite."""
        if not self.unread:
            return
        rows = self.processes.all_reduce_sum(torch.stack(self.unread)).tolist()
        self.unread.clear()
        now = time.perf_counter()
        self.position.seconds += now - self.mark
        self.position.waited += self.waiting.seconds()
        self.mark = now
        for i, (loss, correct, images) in enumerate(rows):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss is {loss}", self.step - len(rows) + i)
            self.position.loss += loss
            self.position.correct += correct
            self.position.images += images

    def _end_epoch(self) -> None:
        position, spec = self.position, self.spec
        average_running_statistics(self.model, self.processes)
        done = position.epoch + 1
        due = done % spec.evaluate_every == 0 or done == spec.epochs
        with nullcontext() if self.average is None else self.average.swapped():
            seen = self._evaluate() if due else None
            row = position.row(seen, step=self.step, lr=self._learning_rate(self.step - 1), counted=self.task.correct)
            self.position = Position(epoch=done, history=[*position.history, row])
            if self.best is not None and seen is not None:
                self.best.offer(self.position.history, self.task.metric)
        self.progress.note(f"{self.name}: {row.sentence(spec.epochs, self.task.metric)}")
        if done % spec.checkpoint_every == 0 or done == spec.epochs or self._stopped():
            self._save()
        self._write_log()
        self.callbacks.epoch(self.name, row)

    def _evaluate(self) -> Evaluation:
        return evaluate(
            self.model,
            self.data.val,
            batch_size=self.plan.batch_size,
            task=self.task,
            device=self.device,
            processes=self.processes,
            precision=self.spec.precision,
            progress=self.progress,
            name=f"{self.name}: evaluate",
        )

    def _final(self) -> Evaluation:
        history = self.position.history
        row = best_row(history, self.task.metric) if self.best is not None else history[-1] if history else None
        seen = None if row is None else row.evaluation(len(self.data.val))
        return self._evaluate() if seen is None else seen

    def _save(self) -> None:
        if self.folder is None:
            return
        self._read()
        average_running_statistics(self.model, self.processes)
        if broken := not_finite(self.model):
            raise self._diverged(f"{broken} is NaN or infinite", self.step - 1)
        self.position.skipped = list(self.data.train.skipped)
        path, position = self._checkpoint_path(self.folder), asdict(self.position)
        self.processes.on_main(
            lambda: save_checkpoint(path, **self._parts(), identity=self._identity(), position=position)
        )

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {**parts, "average": self.average, "best": self.best}

    def _write_log(self) -> None:
        if self.folder is not None and self.processes.is_main:
            write_log(self.position.history, self.folder / f"{self.name}.csv")

    def _checkpoint_path(self, folder: Path) -> Path:
        return folder / f"{self.name}.checkpoint.safetensors"

    def _identity(self) -> dict[str, Any]:
        train = self.data.train
        data = {"batch_size": self.plan.batch_size, "train_images": len(train), "data_seed": train.seed}
        digest, spec = train.fingerprint.digest(), identity_of(self.spec, reference=self.reference)
        return {**spec, **data, "data_digest": digest, "first_epoch": self.first_epoch}

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step,
            steps=self.spec.epochs * self.steps_per_epoch,
            warmup_steps=round(self.spec.warmup_epochs * self.steps_per_epoch),
            peak=self.spec.lr,
            schedule=self.spec.schedule,
        )

    def _diverged(self, problem: str, step: int) -> CompressError:
        where = f"epoch {step // self.steps_per_epoch + 1}, step {step + 1} (lr {self._learning_rate(step):.3g}"
        saved = "" if self.folder is None else f" {self._checkpoint_path(self.folder)} is from before."
        return diverged(f"{self.name}: {problem} at {where}, precision {self.spec.precision})", saved)
