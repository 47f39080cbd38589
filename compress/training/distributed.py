"""Processes of a training, and their exchanges."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from compress.errors import CompressError
from compress.training import TrainSpec

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # a rank may wait while rank 0 writes a large checkpoint or compiles


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process, by default a single one on the CPU; rank 0 writes and shows progress."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def on(self, device: torch.device | str | None) -> torch.device:
        """`device` with its index; None = this process's own."""
        chosen = self.device if device is None else _known_device(device)
        if self.world_size > 1 and chosen.type != self.device.type:
            raise CompressError(
                f"device is {chosen.type} and the processes were started on {self.device.type}: name the same one in "
                "init_processes, or leave device out"
            )
        if chosen.type == "cuda" and chosen.index is None:
            return self.device if self.device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        return chosen

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Each must call, with the same shape and type."""
        if self.world_size == 1:
            return tensor
        reduced = tensor.detach().to(self.device, copy=True).contiguous()
        torch.distributed.all_reduce(reduced)
        return reduced.to(tensor.device)

    def broadcast_object(self, value: T) -> T:
        """Rank 0's `value` (picklable); each must call."""
        if self.world_size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every process (picklable, on the CPU) by rank; each must call."""
        if self.world_size == 1:
            return [value]
        packed = io.BytesIO()
        torch.save(value, packed)
        boxes: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(boxes, packed.getvalue())
        return [torch.load(io.BytesIO(box), map_location="cpu", weights_only=False) for box in boxes]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` in rank 0; its result or refusal in every process."""
        if self.world_size == 1:
            return work()
        result: list[T] | CompressError = []
        if self.is_main:
            try:
                result = [work()]
            except CompressError as error:
                result = error
        result = self.broadcast_object(result)
        if isinstance(result, CompressError):
            raise result
        return result[0]

    def close(self) -> None:
        if self.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


# A single process on the CPU.
SINGLE = Processes()


def init_processes(device: str | None = None, *, environment: Mapping[str, str] | None = None) -> Processes:
    """Join the processes that torchrun started, or be a single process.

    Several take the GPU of their local rank, and exchange by gloo on CPUs and NCCL on GPUs.
    """
    environment = os.environ if environment is None else environment
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not {"RANK", "WORLD_SIZE"} & environment.keys() or environment.get("WORLD_SIZE") == "1":
        return Processes(device=_device(chosen, None))
    world_size = _variable(environment, "WORLD_SIZE", least=1)
    rank = _variable(environment, "RANK", below=world_size)
    local_rank = _variable(environment, "LOCAL_RANK", below=world_size)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise _bad_environment(name, "it is not set")
    place = _device(chosen, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    try:
        torch.distributed.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            init_method=f"tcp://{environment['MASTER_ADDR']}:{_variable(environment, 'MASTER_PORT', least=1)}",
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
            device_id=place if place.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CompressError(
            f"process {rank} of {world_size} could not join the others at {environment['MASTER_ADDR']}:"
            f"{environment['MASTER_PORT']}: {error}. Start all of them with torchrun, with the same address and port"
        ) from error
    return Processes(rank=rank, world_size=world_size, device=place)


class GradientExchange:
    """Replaces gradients by their mean over all processes of torch.distributed.

    Args:
        parameters: the same in every process; those without a gradient have none in any.
        dtype: in which gradients are exchanged; None = their own.
        bucket_bytes: of gradients that leave together during a backward pass.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype | None = None,
        *,
        bucket_bytes: int = 25 << 20,  # DistributedDataParallel's
    ) -> None:
        self._parameters, self._dtype, self._bucket_bytes = list(parameters), dtype, bucket_bytes
        self._arrived: list[nn.Parameter] = []
        self._made: list[_Bucket] = []
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def afterwards(self) -> Iterator[None]:
        """Exchange in one piece when the block, a backward pass, has ended; it shows the order of the gradients."""
        self._arrived = []
        with self._heard(self._arrived.append):
            yield
        self._whole()

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Make the buckets in the block, the same pass as the last one `afterwards`; `exchange` sends them.

        The block may be recorded as a CUDA graph, and `exchange` follows each replay: a bucket is sent when the graph
        has filled it. The exchanges stay out of the graph, so that NCCL's group can end before it.
        """
        once = len(set(self._arrived)) == len(self._arrived)  # else a bucket might be made before its last part
        buckets = list(_buckets(self._arrived, self._bucket_bytes)) if once else []
        waited = [len(bucket) for bucket in buckets]
        place = {parameter: index for index, bucket in enumerate(buckets) for parameter in bucket}
        made: list[_Bucket] = []

        def arrive(parameter: nn.Parameter) -> None:
            if parameter in place:
                waited[place[parameter]] -= 1
            while len(made) < len(buckets) and not waited[len(made)]:  # in one order in every process
                made.append(_Bucket(buckets[len(made)], self._dtype))

        with self._heard(arrive):
            yield
        rest = dict.fromkeys(self._parameters)
        for parameter in (p for bucket in made for p in bucket.parameters):
            del rest[parameter]
        made += [_Bucket(bucket, self._dtype) for bucket in _buckets(_with_gradients(rest), self._bucket_bytes)]
        self._made = made

    def exchange(self) -> None:
        """Send the buckets made `meanwhile`, and give every parameter its mean gradient."""
        if self._stream is None and self._made and self._made[0].device.type == "cuda":
            self._stream = torch.cuda.Stream(self._made[0].device)  # one: each may hold up a queue to the hardware
        works = [bucket.send(self._stream) for bucket in self._made]
        for bucket, work in zip(self._made, works, strict=True):
            bucket.receive(work)

    @contextmanager
    def _heard(self, listener: Callable[[nn.Parameter], None]) -> Iterator[None]:
        hooks = [p.register_post_accumulate_grad_hook(listener) for p in self._parameters if p.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _whole(self) -> None:
        for parameters in _buckets(_with_gradients(self._parameters), math.inf):
            bucket = _Bucket(parameters, self._dtype)
            bucket.receive(bucket.send())


def _with_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def _buckets(parameters: Sequence[nn.Parameter], size: float) -> Iterator[list[nn.Parameter]]:
    for kind in dict.fromkeys(parameter.dtype for parameter in parameters):
        bucket: list[nn.Parameter] = []
        held = 0
        for parameter in (p for p in parameters if p.dtype == kind):
            bucket.append(parameter)
            held += parameter.nbytes
            if held >= size:
                yield bucket
                bucket, held = [], 0
        if bucket:
            yield bucket


class _Bucket:
    """Gradients beside each other; their parameters have none until it is received."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.parameters, self.device = parameters, parameters[0].device
        gradients = [_dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
        self._strides = [gradient.stride() for gradient in gradients]
        flat = torch.cat([gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients])
        for parameter in parameters:
            parameter.grad = None
        self._flat = flat.to(dtype or flat.dtype).div_(torch.distributed.get_world_size())
        self._gradients = self._parts() if self._flat.dtype == flat.dtype else None  # a graph fills the same memory
        self._filled: torch.cuda.Event | None = None
        if flat.is_cuda and torch.cuda.is_current_stream_capturing():
            self._filled = torch.cuda.Event(external=True)
            self._filled.record()

    def send(self, beside: torch.cuda.Stream | None = None) -> torch.distributed.Work:
        """Sum it over all processes; on the stream `beside` if a graph fills it."""
        if self._filled is None:
            return self._reduce()
        with torch.cuda.stream(beside):
            self._filled.wait()
            return self._reduce()

    def _reduce(self) -> torch.distributed.Work:
        work = torch.distributed.all_reduce(self._flat, async_op=True)
        assert work is not None
        return work

    def receive(self, work: torch.distributed.Work) -> None:
        """Give every parameter its mean gradient, in the layout of its own."""
        work.wait()
        for parameter, gradient in zip(self.parameters, self._gradients or self._parts(), strict=True):
            parameter.grad = gradient

    def _parts(self) -> list[Tensor]:
        parts = self._flat.to(self.parameters[0].dtype).split([p.numel() for p in self.parameters])
        placed = zip(self.parameters, parts, self._strides, strict=True)
        return [part.as_strided(parameter.shape, strides) for parameter, part, strides in placed]


def _dense(gradient: Tensor) -> Tensor:
    """A gradient whose numbers lie beside each other, in any order of dimensions."""
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    return gradient if gradient.permute(order).is_contiguous() else gradient.contiguous()


def average_running_statistics(model: nn.Module, processes: Processes) -> None:
    if processes.world_size == 1:
        return
    for statistic in _running_statistics(model):
        statistic.copy_(processes.all_reduce_sum(statistic) / processes.world_size)


def broadcast_state(model: nn.Module, device: torch.device) -> bool:
    """Give every process the first's parameters and buffers, through `device`; False if there is one process."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = several and torch.distributed.get_world_size() > 1
    for tensor in [*model.parameters(), *model.buffers()] if several else []:
        copy = tensor.detach().to(device, copy=True).contiguous()
        torch.distributed.broadcast(copy, src=0)
        with torch.no_grad():
            tensor.copy_(copy)
    return several


def _running_statistics(model: nn.Module) -> list[Tensor]:
    names = ("running_mean", "running_var")
    return [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in names]


def _known_device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CompressError(f"device {name!r} is not one that torch knows (cpu, cuda, cuda:1, ...)") from error
    if device.type not in ("cpu", "cuda"):
        raise CompressError(f"device is {str(name)!r}: compress computes on cpu and cuda (cuda:1, ...)")
    return device


def _device(name: str, local_rank: int | None) -> torch.device:
    device = _known_device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = local_rank if local_rank is not None else (device.index or 0)
    if not count:
        raise CompressError(f"device {name} is asked for, and torch sees 0 GPUs here: use device cpu")
    if index >= count:
        raise CompressError(
            f"device {name} number {index} is asked for, and torch sees {count} GPUs here: "
            "start at most one process a GPU (torchrun --nproc-per-node), or use device cpu"
        )
    return torch.device("cuda", index)


def _variable(environment: Mapping[str, str], name: str, *, least: int = 0, below: int | None = None) -> int:
    text: Any = environment.get(name)
    if text is None:
        raise _bad_environment(name, "it is not set")
    if not text.isdecimal():
        raise _bad_environment(name, f"{text!r} is not a whole number")
    number = int(text)
    if number < least or (below is not None and number >= below):
        high = "" if below is None else f" and below {below}"
        raise _bad_environment(name, f"{number} is not at least {least}{high}")
    return number


def _bad_environment(name: str, problem: str) -> CompressError:
    return CompressError(
        f"environment variable {name}: {problem}. torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
        "MASTER_PORT: start with `torchrun --nproc-per-node N -m compress ...`, or unset them all for one process"
    )


@contextmanager
def synchronized(model: nn.Module, spec: TrainSpec, processes: Processes) -> Iterator[None]:
    """Share statistics while the block runs; in place, names stay."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    if spec.sync_batchnorm and processes.world_size > 1:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                    setattr(parent, name, _shared(child, processes.device.type))
                    swapped.append((parent, name, child))
    try:
        yield
    finally:
        for parent, name, child in swapped:
            child.train(getattr(parent, name).training)
            setattr(parent, name, child)


class HostBatchNorm(_BatchNorm):
    """Synchronized BatchNorm for CPUs, which torch's SyncBatchNorm does not support."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) by mean and variance over processes, in training mode."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        values = input.double()
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = all_reduce(torch.cat([values.sum(axes), values.square().sum(axes), count]))
        total, squares, count = sums.split([len(sums) // 2, len(sums) // 2, 1])
        mean = total / count
        variance = squares / count - mean.square()
        self._remember(mean.detach(), variance.detach() * count / (count - 1))
        shape = [1, -1, *(1 for _ in axes[1:])]
        normal = ((values - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)).to(input.dtype)
        if self.weight is None:
            return normal
        return normal * self.weight.view(shape) + self.bias.view(shape)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def _shared(layer: _BatchNorm, device: str) -> _BatchNorm:
    kind: type[_BatchNorm] = nn.SyncBatchNorm if device == "cuda" else HostBatchNorm
    made = kind(
        layer.num_features,
        eps=layer.eps,
        momentum=layer.momentum,
        affine=layer.affine,
        track_running_stats=layer.track_running_stats,
    )
    made.weight, made.bias = layer.weight, layer.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(made, name, getattr(layer, name))
    return made.train(layer.training)
