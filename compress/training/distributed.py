"""Processes of a training, and their exchanges."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn

from compress.errors import CompressError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # a rank may wait while rank 0 writes a large checkpoint or compiles


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process; by default a single one on the CPU.

    Attributes:
        rank: 0 writes and shows progress.
        world_size: on all machines.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """True for rank 0."""
        return self.rank == 0

    def on(self, device: torch.device | str | None) -> torch.device:
        """Return `device` with its index; None = this process's own.

        Raises:
            CompressError: another kind than that of exchanges.
        """
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
        """Sum over processes; each must call, with the same shape and type."""
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
        """Return the `value` of every process (picklable, on the CPU) by rank; each must call."""
        if self.world_size == 1:
            return [value]
        packed = io.BytesIO()
        torch.save(value, packed)
        boxes: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(boxes, packed.getvalue())
        return [torch.load(io.BytesIO(box), map_location="cpu", weights_only=False) for box in boxes]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` in rank 0; its result or refusal in every process.

        Raises:
            CompressError: what `work` raised.
        """
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
        """Leave the group; the last call."""
        if self.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


SINGLE = Processes()
"""A single process on the CPU."""


def init_processes(device: str | None = None, *, environment: Mapping[str, str] | None = None) -> Processes:
    """Join the processes that torchrun started, or be a single process.

    `device` None = `cuda` if there is a GPU; `environment` replaces `os.environ`. Several take the GPU of their local
    rank, and exchange by gloo on CPUs and NCCL on GPUs.

    Raises:
        CompressError: a wrong environment, a missing GPU, or processes that do not meet.
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


def average_running_statistics(model: nn.Module, processes: Processes) -> None:
    """Replace BatchNorm's running means and variances by their mean over the processes, in place."""
    if processes.world_size == 1:
        return
    for statistic in _running_statistics(model):
        statistic.copy_(processes.all_reduce_sum(statistic) / processes.world_size)


def broadcast_state(model: nn.Module, processes: Processes) -> None:
    """Rank 0's parameters and buffers, in place."""
    if processes.world_size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        copy = tensor.detach().to(processes.device, copy=True).contiguous()
        torch.distributed.broadcast(copy, src=0)
        tensor.data.copy_(copy)


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
