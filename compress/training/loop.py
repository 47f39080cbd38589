"""Training: `fit`, checks before the first step, and the loop, whose every step follows from (spec, step)."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from compress.data.base import Batch, BatchPlan, DataSet, Split, hash_seed
from compress.data.load import loader_data
from compress.errors import CheckpointError, CompressError, DataError, ModelError, RecipeError
from compress.files import cache_folder
from compress.graph.inputs import flat_tensors
from compress.graph.modules import modes_restored
from compress.qat_fusion.fuse import fuse_for_training, is_fusible, pays_off
from compress.qat_fusion.int8 import Forward
from compress.qat_fusion.regions import compile_regions
from compress.support.meters import MeanOf, TaskMetric, task_metric, whole
from compress.support.progress import Progress
from compress.tasks.base import Task
from compress.tasks.classification import classification
from compress.tasks.load import own, own_loss
from compress.training import QATSpec, TrainSpec, check_train_spec, identity_of
from compress.training.augment import make_augment
from compress.training.checkpoint import (
    BestWeights,
    Parts,
    WeightAverage,
    read_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from compress.training.distributed import SINGLE, Processes, average_running_statistics, broadcast_state, synchronized
from compress.training.log import (
    Callback,
    Position,
    TrainReport,
    best_row,
    check_reference,
    diverged,
    stop_reason,
    summarize,
    write_log,
)
from compress.training.optim import (
    check_schedule,
    drop_frozen_gradients,
    freeze_batchnorm,
    frozen,
    learning_rate,
    make_optimizer,
)
from compress.training.passes import (
    QUIET,
    Evaluation,
    FeaturePairs,
    OutputsOf,
    Passes,
    RecordedPasses,
    autocast,
    evaluate,
    outputs_of,
)

_BROADCAST_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")  # the newer name first (torch 2.15)
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    next(name for name in _BROADCAST_OPTIONS if name in inspect.signature(DistributedDataParallel).parameters): False
}

# Makes a context without averaging of gradients.
NoSync = Callable[[], AbstractContextManager[None]]


def example_batch(split: Split, device: torch.device, processes: Processes) -> Batch:
    """Two images of `split`, or its only one, (N, C, H, W), and targets."""
    if len(split) < processes.world_size:
        raise DataError(
            f"the training split holds {len(split)} images for {processes.world_size} processes: it needs at least "
            "one for each"
        )
    return split.load(list(range(min(2, len(split)))), epoch=None, device=device)


def check_models(model: nn.Module, teacher: nn.Module | None, images: Tensor, *, task: Task, spec: TrainSpec) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the model has no trainable parameter: set requires_grad on those that training may change")
    if broken := not_finite(model):
        raise ModelError(f"the model's parameter {broken} is NaN or infinite before the training: load good weights")
    if spec.distill and teacher is None:
        raise RecipeError("distill is set and no teacher was given: pass the float model, or set distill: false")
    shapes = []
    for one in (model, teacher) if spec.distill else (model,):
        if one is not None:
            outputs = _evaluation_outputs(one, images, task)
            task.check(outputs, images)
            shapes.append(", ".join(str(tuple(tensor.shape)) for tensor in flat_tensors(outputs)))
    if len(set(shapes)) > 1:
        raise ModelError(
            f"the model's logits have shape {shapes[0]} and the teacher's {shapes[1]}: distillation needs the same "
            "classes in both"
        )


def feature_pairs(model: nn.Module, teacher: nn.Module | None, images: Any, spec: TrainSpec) -> FeaturePairs | None:
    if not spec.distill_features or teacher is None:
        return None
    pairs = FeaturePairs(model, teacher, spec.distill_features)
    with modes_restored(model), torch.no_grad(), pairs.watched():
        for one in (model.eval(), teacher):
            outputs_of(OutputsOf(one, whole), images)
        pairs.distance()
    return pairs


def has_volumes(model: nn.Module) -> bool:
    # Tensors of five dimensions, such as Conv3d's weights, have no format channels_last.
    return any(tensor.ndim == 5 for tensor in (*model.parameters(), *model.buffers()))


def to_channels_last(model: nn.Module, images: Tensor, wanted: bool | None, task: Task) -> bool:
    """Convert weights, if `wanted`, or None and the model runs in it; True if done."""
    if wanted is False or not isinstance(images, Tensor) or images.ndim != 4:
        return False
    if has_volumes(model):
        return False
    model.to(memory_format=torch.channels_last)
    if wanted is None:
        try:
            _evaluation_outputs(model, images.contiguous(memory_format=torch.channels_last), task)
        except ModelError:
            model.to(memory_format=torch.contiguous_format)
            return False
    return True


def not_finite(model: nn.Module) -> str | None:
    """The first parameter's name that holds NaN or infinity; None = all are finite."""
    names = [name for name, _ in model.named_parameters()]
    finite = torch.stack([parameter.isfinite().all() for parameter in model.parameters()]).tolist()
    return next((name for name, good in zip(names, finite, strict=True) if not good), None)


def wrap(
    model: nn.Module, images: Tensor, *, task: Task, spec: TrainSpec, processes: Processes, device: torch.device
) -> tuple[Callable[[Any], Any], NoSync]:
    """The callable that training runs, from images to outputs, and a context without exchange of gradients.

    Buffers are not broadcast: BatchNorm statistics stay apart until averaged.
    """
    if spec.compile:
        keep_compiled()
    forward: Forward = "int8" if isinstance(spec, QATSpec) and spec.fused == "int8" else "float"
    graph = fuse_for_training(model, forward=forward) if _is_fused(model, spec, device) else model
    by_region = spec.compile == "regions" and is_fusible(model)
    if by_region and isinstance(graph, fx.GraphModule):
        graph = compile_regions(graph)
    module: nn.Module = OutputsOf(graph, task.select)
    no_sync: NoSync = nullcontext
    if processes.world_size > 1 and not is_recorded(spec, device):  # recorded passes exchange gradients themselves
        module = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=_has_unused_parameters(model, images, task),
            **_NO_BUFFER_BROADCAST,
        )
        if spec.gradients == "bf16":
            module.register_comm_hook(None, bf16_compress_hook)
        no_sync = module.no_sync
    return (torch.compile(module) if spec.compile and not by_region else module), no_sync


def is_recorded(spec: TrainSpec, device: torch.device) -> bool:
    return spec.cuda_graphs and device.type == "cuda"


def keep_compiled() -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    name = "autograd_cache_allow_custom_autograd_functions"
    if hasattr(functorch_config, name):
        setattr(functorch_config, name, True)


@contextmanager
def surroundings(model: nn.Module, teacher: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Turn on cuDNN's search; restore modes and random state at the end."""
    devices = [device] if device.type == "cuda" else []
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=devices), modes_restored(model, teacher):
        torch.backends.cudnn.benchmark = True  # every batch has the same shape, so the search runs once
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark


def _is_fused(model: nn.Module, spec: TrainSpec, device: torch.device) -> bool:
    """True for a second, fused graph over the same parameters."""
    if not isinstance(spec, QATSpec) or spec.fused == "off" or spec.distill_features:
        return False
    return spec.fused in {"on", "int8"} or (pays_off(device) and is_fusible(model))


def _evaluation_outputs(model: nn.Module, images: Tensor, task: Task) -> object:
    with modes_restored(model), torch.no_grad():
        return outputs_of(OutputsOf(model.eval(), task.select), images)


def _has_unused_parameters(model: nn.Module, images: Tensor, task: Task) -> bool:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with modes_restored(model), torch.enable_grad():
        outputs = flat_tensors(OutputsOf(model.eval(), task.select)(images))
        total = torch.stack([tensor.float().sum() for tensor in outputs if tensor.is_floating_point()]).sum()
        return None in torch.autograd.grad(total, parameters, allow_unused=True)


class Waiting:
    """Times the wait for batches: on a GPU between steps; on the CPU by the clock."""

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

# Called with (steps done, all steps, the optimizer).
AfterStep = Callable[[int, int, torch.optim.Optimizer], None]


def train(
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
    """Train `model` in place; its modes and random state are restored, gradients gone.

    - `batch_size`: over all processes; `grad_accumulation` of them make a step.
    - `folder`: of `<name>.checkpoint.safetensors`, before the first step too, and `<name>.csv`.
    - `task`: None = classification.
    - `device`: None = the process's own.
    - `first_epoch`: n after n epochs of training.
    - `reference`: of `spec.stop_within`.
    - `after_step`: its effect must follow from model and step.

    Raises:
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
        training.callbacks = tuple(callbacks) if processes.is_main else ()
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
    callbacks: tuple[Callback, ...] = ()

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
        broadcast_state(model, processes.device)
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
        return self.position.epoch * self.steps_per_epoch + self.position.step

    def run(self, resume: bool) -> TrainReport:
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
        self._tell("begin", self.spec, done=self.step)
        with nullcontext() if self.features is None else self.features.watched():
            while self.position.epoch < self.spec.epochs and not self._stopped():
                self._epoch()
        for weights in (self.average, self.best):
            if weights is not None:
                weights.install()
        history, why = tuple(self.position.history), self._stopped()
        report = summarize(history, self._final(), metric=self.task.metric, resumed_from=resumed_from, stopped=why)
        self._tell("end", report)
        return report

    def _tell(self, event: str, *about: Any, **more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.name, *about, **more)

    def _stopped(self) -> str | None:
        return stop_reason(self.position.history, self.spec, self.task.metric, self.reference)

    def _begin(self, resume: bool) -> int | None:
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
        restore_checkpoint(contents, self._parts())
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
            self._tell("step", self.step, figures)
            every = self.spec.checkpoint_steps
            if every and self.step % every == 0 and self.position.step < self.steps_per_epoch:
                self._save()
                self.mark = time.perf_counter()
        self._read()
        self._end_epoch()

    def _optimizer_step(self, batches: Iterator[Batch]) -> float:
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
            if self.best is not None and best_row(self.position.history, self.task.metric) is row:
                self.best.keep()
        self.progress.note(f"{self.name}: {row.sentence(spec.epochs, self.task.metric)}")
        if done % spec.checkpoint_every == 0 or done == spec.epochs or self._stopped():
            self._save()
        self._write_log()
        self._tell("epoch", row)

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
            lambda: save_checkpoint(path, self._parts(), identity=self._identity(), position=position)
        )

    def _parts(self) -> Parts:
        return Parts(
            model=self.model, optimizer=self.optimizer, scaler=self.scaler, average=self.average, best=self.best
        )

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


def fit(
    model: nn.Module,
    data: DataSet | DataLoader[Any],
    spec: TrainSpec | None = None,
    *,
    val: DataLoader[Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    metric: Any = None,
    batch_size: int | None = None,
    folder: Path | None = None,
    task: Task | None = None,
    **options: Any,
) -> TrainReport:
    """Train `model`, float or quantized, in place.

    Args:
        model: any module from images to outputs.
        data: a data set of two splits, or a DataLoader of (images, targets) or of mappings such as {"pixel_values":
            images, "labels": targets}.
        spec: None = `TrainSpec()`.
        val: a loader to evaluate on, for a DataLoader; None = the training images.
        loss: (outputs, targets) -> a batch's mean loss; None = the task's, cross entropy without a task.
        metric: what `meters.task_metric` takes; None = top-1, with an own loss the loss.
        batch_size: images of a step; None = the loader's.
        folder: takes checkpoints and the log; None = no files.
        task: loss and metric of a recipe; not with `loss` or `metric`.
        **options: further arguments of the recipes' loop: teacher, device, resume, progress, ...

    Raises:
        RecipeError: no batch size, or a task with a loss; and as the recipes' loop.
        DataError: a loader that cannot be trained on; and as the recipes' loop.
        ModelError, CheckpointError, CompressError: as the recipes' loop.

    Examples:
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, targets), batch_size=8)
        >>> report = compress.fit(model, loader, compress.TrainSpec(epochs=1, warmup_epochs=0.0), device="cpu")
        >>> report.steps, 0.0 <= report.final.top1 <= 1.0
        (2, True)
    """
    spec = spec or TrainSpec()
    if isinstance(data, DataLoader):
        batch_size = batch_size or data.batch_size
    elif val is not None:
        raise DataError("val is a loader beside a DataSet, which has its own val")
    if batch_size is None:
        raise RecipeError("batch_size is not set: give the number of images of a step")
    if isinstance(data, DataLoader):
        data = loader_data(data, val, seed=spec.seed)
    if task is not None and (loss is not None or metric is not None):
        raise RecipeError("give a task, or a loss and a metric of your own")
    if loss is not None or metric is not None:
        task = own_task(loss, metric)
    return train(model, data, spec, batch_size=batch_size, folder=folder, task=task, **options)


def own_task(loss: Callable[[Any, Any], Tensor] | None, metric: Any = None) -> Task:
    plain = classification(0)
    if loss is None:
        found = task_metric(metric, select=plain.metric.select)
        return Task(name="classification", metric=found, loss=plain.loss, distance=plain.distance, check=plain.check)
    mean = TaskMetric(name="loss", make=lambda: MeanOf(loss), unit="", direction="lower")
    judged = mean if metric is None else task_metric(metric)
    return own(loss=own_loss(loss), metric=judged, check=lambda outputs, images: None)
