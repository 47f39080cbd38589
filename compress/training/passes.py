"""Passes of a batch, as launches or as one CUDA graph; evaluation of a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from compress.data.base import BatchPlan, Split
from compress.errors import CompressError, DataError, ModelError, RecipeError, near_misses
from compress.graph.inputs import flat_tensors, size_remark
from compress.graph.modules import modes_restored
from compress.kernels.memory_format import along_axis
from compress.quantization.quantizer import _QuantWeight
from compress.support.imports import any_failure
from compress.support.meters import Meter
from compress.support.progress import NoProgress, Progress
from compress.tasks.base import Task, first_tensor
from compress.tasks.classification import classification
from compress.training import Precision, QATSpec, TrainSpec
from compress.training.distributed import SINGLE, GradientExchange, Processes, broadcast_state


class OutputsOf(nn.Module):
    """Calls `model` and selects outputs, by default the logits."""

    def __init__(self, model: nn.Module, select: Callable[[Any], Any] = first_tensor) -> None:
        super().__init__()
        self.model = model
        self.select = select

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Any:
        return self.select(self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs))


def outputs_of(forward: OutputsOf, inputs: Tensor | Mapping[str, Tensor]) -> Any:
    def refusal(error: Exception) -> ModelError:
        shapes = inputs if isinstance(inputs, Mapping) else {"images": inputs}
        got = ", ".join(f"{name} of shape {tuple(value.shape)}" for name, value in shapes.items())
        return ModelError(
            f"{type(forward.model).__name__} fails on {got}, the shape of the data's "
            f"images ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            f"{size_remark(forward.model)}"
        )

    with any_failure(refusal):
        return forward(inputs)


QUIET = NoProgress()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measurements of a network on a split; shares are 0 to 1, the loss is without smoothing."""

    values: Mapping[str, float]
    loss: float
    images: int

    @property
    def top1(self) -> float:
        """Share of images whose highest logit is the target's, 0 to 1."""
        return self.values["top1"]

    @property
    def top5(self) -> float:
        """Share of images whose target is among the 5 highest logits, 0 to 1."""
        return self.values["top5"]


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    batch_size: int,
    task: Task | None = None,
    device: torch.device | str | None = None,
    processes: Processes = SINGLE,
    precision: Precision = "fp32",
    limit: int | None = None,
    progress: Progress = QUIET,
    name: str = "evaluate",
) -> Evaluation:
    """Measure `model` on `split` in evaluation mode; every module's mode is restored afterwards.

    Args:
        model: moved to `device`; takes images (N, C, H, W).
        split: images and targets, in their stored order.
        batch_size: images of one step over all processes together.
        task: loss and metric; None = classification.
        device: None = the process's own.
        processes: each must call, and gets the same result.
        precision: `fp32`, or autocast in `bf16` or `fp16`.
        limit: number of images; None = all.
        progress: is informed of every batch.
        name: name of the progress bar.

    Raises:
        DataError: no image, fewer images a batch than processes, or a metric that is no number.
        ModelError: the model fails, or its outputs are not those of the task.
        RecipeError: fp16 on the CPU.

    Examples:
        >>> split = compress.load_data(compress.DataSpec(name="shapes", num_classes=4, val_images=32)).val
        >>> compress.evaluate(model, split, batch_size=16, device="cpu").images
        32
    """
    task = task or classification(split.num_classes)
    device = processes.on(device)
    progress = progress if processes.is_main else QUIET
    plan = BatchPlan(batch_size=batch_size, rank=processes.rank, world_size=processes.world_size, limit=limit)
    forward = OutputsOf(model.to(device), task.select)
    meter = task.metric.make()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    progress.start(name, split.steps(plan))
    with modes_restored(model), torch.no_grad(), autocast(device, precision):
        model.eval()
        for images, targets in split.batches(plan, device=device):
            outputs = tree_map(_in_float32, outputs_of(forward, images))
            task.check(outputs, images)
            meter.update(outputs, targets)
            loss = task.loss(outputs, targets).double()
            sums += torch.stack([loss * len(targets), loss.new_full((), len(targets))])
            progress.advance(name)
    progress.finish(name)
    loss_sum, count = processes.all_reduce_sum(sums).tolist()
    if not count:
        raise _nothing_read(split)
    values = task.metric.figures(_merged(meter, processes))
    return Evaluation(values=values, loss=loss_sum / count, images=int(count))


def _in_float32(value: Any) -> Any:
    # numpy, which metrics compute with, has no bfloat16
    return value.float() if isinstance(value, Tensor) and value.dtype in {torch.bfloat16, torch.float16} else value


def _nothing_read(split: Split) -> DataError:
    unread = f", or none of {len(split.skipped)} files could be read" if split.skipped else ""
    return DataError(f"there is no image to evaluate on: the split is empty, or the limit is 0{unread}")


def _merged(meter: Meter, processes: Processes) -> Meter:
    if processes.world_size == 1:
        return meter
    merge = getattr(meter, "merge_state", None)
    if merge is None:
        raise DataError(
            f"the metric {type(meter).__name__} has no merge_state(other), which adds what another process has "
            "measured: define it, or train in one process"
        )
    for rank, other in enumerate(processes.gather(meter)):
        if rank != processes.rank:
            merge(other)
    return meter


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    if precision == "fp16" and device.type == "cpu":
        raise RecipeError("precision is 'fp16' on the CPU, which computes it slowly: use 'fp32' or 'bf16', or a GPU")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def damping_strength(peak: float, share: float) -> float:
    """Return the strength after a share (0 to 1) of the training: half a cosine.

    >>> damping_strength(0.01, 0.0), damping_strength(0.01, 1.0)
    (0.0, 0.01)
    """
    return peak * (1 - math.cos(math.pi * share)) / 2


def damping_loss(qmodel: nn.Module) -> Tensor:
    """Squared distance of weights to their integers (arXiv 2203.11086, equation 5); only weights get a gradient."""
    total: Tensor | None = None
    for layer in qmodel.modules():
        if not isinstance(layer, _QuantWeight) or not layer.weight_quantizer.enabled:
            continue
        quantizer, weight = layer.weight_quantizer, layer.weight
        if quantizer.format.kind != "int":
            continue
        with torch.no_grad():
            scale = along_axis(quantizer.scale.detach(), weight, quantizer.format.axis)
            low, high = quantizer.format.low * scale, quantizer.format.high * scale
            center = quantizer(weight.detach())
        part = (center - weight.clamp(low, high)).square().sum()
        total = part if total is None else total + part
    return torch.zeros(()) if total is None else total


def training_loss(
    task: Task, outputs: Any, targets: Any, taught: Any, spec: TrainSpec, features: Tensor | None = None
) -> Tensor:
    """(1 - distill_weight) task loss + distill_weight distillation, mean, float32.

    `features` counts distill_feature_weight times beside outputs.
    """
    loss = task.loss(outputs, targets, label_smoothing=spec.label_smoothing)
    if taught is None:
        return loss
    distance = task.distance(outputs, taught, spec.distill_temperature)
    if features is not None:
        distance = distance + spec.distill_feature_weight * features
    return (1 - spec.distill_weight) * loss + spec.distill_weight * distance


# Steps before the recording.
_EAGER_STEPS = 3


@dataclass(eq=False)
class Passes:
    """Adds gradients of a batch; `teach` and `features` are of a teacher, or None, `scaler` is of fp16."""

    forward: Callable[[Any], Any]
    teach: Callable[[Any], Any] | None
    features: FeaturePairs | None = None
    _: KW_ONLY
    model: nn.Module
    task: Task
    spec: TrainSpec
    scaler: torch.amp.GradScaler
    device: torch.device

    def __call__(self, images: Any, targets: Any, *, factor: float, done: float) -> Tensor:
        with autocast(self.device, self.spec.precision):
            outputs = self.forward(images)
            with torch.no_grad():
                taught = None if self.teach is None else self.teach(images)
        features = None if self.features is None else self.features.distance()
        loss = training_loss(self.task, outputs, targets, taught, self.spec, features)
        if isinstance(self.spec, QATSpec) and self.spec.damping:
            loss = loss + damping_strength(self.spec.damping, done) * damping_loss(self.model)
        self.scaler.scale(loss * factor).backward()
        mean = loss.detach().double()
        with torch.no_grad():
            correct = None if self.task.correct is None else self.task.correct(outputs, targets).double()
        hits = mean.new_zeros(()) if correct is None else correct
        return torch.stack([mean * len(targets), hits, mean.new_full((), len(targets))])


class RecordedPasses:
    """`Passes` as a CUDA graph, with mean gradients of all processes."""

    def __init__(self, passes: Passes, spec: TrainSpec, processes: Processes) -> None:
        self._parameters = list(passes.model.parameters())
        dtype = torch.bfloat16 if spec.gradients == "bf16" else None
        exchange = GradientExchange(self._parameters, dtype) if processes.world_size > 1 else None
        self._recorder = Recorder(passes, passes.model, passes.device, exchange)

    def __call__(self, images: Any, targets: Any, *, factor: float, done: float) -> Tensor:
        if not isinstance(images, Tensor) or not isinstance(targets, Tensor):
            raise RecipeError("cuda_graphs records batches of two tensors, and this task's are none; leave it out")
        with _added(self._parameters):
            return self._recorder((images, targets), factor=factor, done=done)

    def release(self) -> None:
        """Forget the graph: NCCL's group waits at its end for graphs that hold exchanges, as of BatchNorm's."""
        self._recorder.graph = None


class Recorder:
    """Gradients as a CUDA graph after a few calls, again after changes.

    `compute` may depend only on batch, state and torch's random numbers; it leaves gradients, which are None before.
    Other shapes run eagerly.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        model: nn.Module,
        device: torch.device,
        exchange: GradientExchange | None = None,
    ) -> None:
        self._compute, self._model, self._device, self._exchange = compute, model, device, exchange
        self._side = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._key: Any = None
        self._eager = 0
        self._batch: tuple[Tensor, ...] = ()
        self._result = torch.empty(0)
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []

    def __call__(self, batch: tuple[Tensor, ...], **options: float) -> Tensor:
        fixed = tuple(value for name, value in options.items() if name != "done")
        modes = tuple(module.training for module in self._model.modules())
        key = (*((x.shape, x.stride(), x.dtype) for x in batch), fixed, modes)
        if key != self._key and (self._key is None or modes != self._key[-1]):
            self._key, self._eager, self.graph = key, 0, None
        if key != self._key:
            return self._eagerly(batch, **options)
        if self.graph is None and self._eager < _EAGER_STEPS:
            self._eager += 1
            return self._beside(batch, **options)
        if self.graph is None:
            self.graph = self._record(batch, **options)
        for kept, x in zip(self._batch, batch, strict=True):
            kept.copy_(x)
        self.graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._exchange is not None:
            self._exchange.exchange()
        return self._result.clone()

    def _beside(self, batch: tuple[Tensor, ...], **options: float) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = self._eagerly(batch, **options)
        current.wait_stream(self._side)
        return result

    def _eagerly(self, batch: tuple[Tensor, ...], **options: float) -> Tensor:
        with nullcontext() if self._exchange is None else self._exchange.afterwards():
            return self._compute(*batch, **options)

    def _record(self, batch: tuple[Tensor, ...], **options: float) -> torch.cuda.CUDAGraph:
        self._batch = tuple(x.clone() for x in batch)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        try:
            with (
                torch.cuda.graph(graph, capture_error_mode="thread_local"),  # another thread may make images
                nullcontext() if self._exchange is None else self._exchange.meanwhile(),
            ):
                self._result = self._compute(*self._batch, **options)
        except RuntimeError as error:
            raise CompressError(
                f"the passes of a step cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}): the network "
                "or its loss makes the host wait for the GPU, or the loss of an earlier pass is still held, whose "
                "gradients belong to another stream (`del loss`); else leave cuda_graphs (record_step) out"
            ) from error
        self._gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        return graph


def record_step(model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Loss and gradients as one CUDA graph on a GPU, for your own loop.

    Gradients are added to those present. With several processes (`torch.distributed` is initialized) they are the mean
    over all, sent while the rest of the backward pass computes, and the network's state becomes rank 0's now:
    `DistributedDataParallel` is not needed. The first calls of a shape, and a smaller last batch, run eagerly, as
    everything on a CPU. With `SyncBatchNorm`, delete the function before `destroy_process_group`, which waits for the
    graph that holds exchanges.

    Args:
        model: on its device, in training mode.
        loss: to the mean, such as `lambda x, y: cross_entropy(model(x), y)`; may not read values.

    Returns:
        A function from tensors to this process's loss, detached.

    Raises:
        CompressError: no parameters, or wrapped; when called: no tensors, or a loss that cannot be recorded.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches).train()
        >>> optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.01)
        >>> step = compress.record_step(qmodel, lambda x, y: torch.nn.functional.cross_entropy(qmodel(x), y))
        >>> value = step(*batches[0])
        >>> optimizer.step()
        >>> value.requires_grad
        False
    """
    parameters = list(model.parameters())
    if not parameters:
        raise CompressError("record_step got a model without parameters: give it the one that the optimizer trains")
    if isinstance(model, DistributedDataParallel):
        raise CompressError("record_step averages gradients itself: give it the network, not DistributedDataParallel's")

    def compute(*batch: Tensor) -> Tensor:
        value = loss(*batch)
        value.backward()
        return value.detach()

    device = parameters[0].device
    exchange = GradientExchange(parameters) if broadcast_state(model, device) else None
    recorder = Recorder(compute, model, device, exchange) if device.type == "cuda" else None

    def step(*batch: Tensor) -> Tensor:
        if not all(isinstance(x, Tensor) for x in batch):
            raise CompressError(f"a recorded step takes tensors, and got {[type(x).__name__ for x in batch]}")
        batch = tuple(x.to(device, non_blocking=True) for x in batch)
        with _added(parameters):
            if recorder is not None:
                return recorder(batch)
            with nullcontext() if exchange is None else exchange.afterwards():
                return compute(*batch)

    return step


@contextmanager
def _added(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Add the block's gradients, which a replay writes anew, to those present."""
    before = [(parameter, parameter.grad.clone()) for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, old in before:
        parameter.grad = old if parameter.grad is None else parameter.grad.add_(old)


class FeaturePairs:
    """`pairs` maps the student's modules to the teacher's."""

    def __init__(self, student: nn.Module, teacher: nn.Module, pairs: Mapping[str, str]) -> None:
        self.pairs = dict(pairs)
        self.modules = [
            (_module(student, own, "the student"), _module(teacher, other, "the teacher"))
            for own, other in pairs.items()
        ]
        self._seen: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._recorder(index, side))
            for index, modules in enumerate(self.modules)
            for side, module in enumerate(modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def distance(self) -> Tensor:
        """Mean distance since the last call, in float32."""
        parts = []
        for index, (own, other) in enumerate(self.pairs.items()):
            for side, path in enumerate((own, other)):
                if (index, side) not in self._seen:
                    raise RecipeError(self._not_run(index, side, path))
            parts.append(feature_distance(self._seen[index, 0], self._seen[index, 1], f"{own}: {other}"))
        self._seen.clear()
        return torch.stack(parts).mean()

    def _recorder(self, index: int, side: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = list(flat_tensors(output))
            if tensors:
                self._seen[index, side] = tensors[0].detach() if side else tensors[0]

        return record

    def _not_run(self, index: int, side: int, path: str) -> str:
        which = "the teacher" if side else "the student"
        inner = [
            name for name, child in self.modules[index][side].named_modules() if name and not list(child.children())
        ]
        hint = f", such as {path}.{inner[-1]}" if inner else ""
        return (
            f"distill_features names {path!r} of {which}, which is not called as a module: a traced or quantized "
            f"network calls its layers alone{hint}"
        )


def feature_distance(student: Tensor, teacher: Tensor, pair: str = "") -> Tensor:
    """Distance of outputs (N, C, ...).

    Of one shape: mean squared difference over the teacher's mean square (after FitNets, arXiv 1412.6550, without the
    regressor). Else of attention maps (Zagoruyko and Komodakis, arXiv 1612.03928, equation 2): mean squares over
    channels, of length one.
    """
    student, teacher = student.float(), teacher.float()
    if student.shape == teacher.shape:
        return F.mse_loss(student, teacher) / teacher.square().mean().clamp_min(1e-12)
    if student.ndim != teacher.ndim or student.ndim < 3:
        raise RecipeError(
            f"distill_features {pair}: outputs of shapes {tuple(student.shape)} and {tuple(teacher.shape)} cannot be "
            "compared; name layers of the same shape, or maps (N, C, H, W) of any number of channels"
        )
    if student.ndim == 4 and student.shape[2:] != teacher.shape[2:]:
        size = (min(student.shape[2], teacher.shape[2]), min(student.shape[3], teacher.shape[3]))
        student, teacher = (F.adaptive_avg_pool2d(one.square(), size).sqrt() for one in (student, teacher))
    maps = [one.square().mean(1 if one.ndim == 4 else 2).flatten(1) for one in (student, teacher)]
    if maps[0].shape != maps[1].shape:
        raise RecipeError(
            f"distill_features {pair}: maps of {tuple(maps[0].shape[1:])} and {tuple(maps[1].shape[1:])} places cannot "
            "be compared"
        )
    own, other = (F.normalize(one, dim=1) for one in maps)
    return (own - other).square().sum(1).mean()


def _module(model: nn.Module, path: str, which: str) -> nn.Module:
    known = dict(model.named_modules())
    if path not in known or not path:
        raise RecipeError(f"distill_features names {path!r}: {which} has no such module{near_misses(path, known)}")
    return known[path]
