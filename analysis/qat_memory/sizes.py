"""Bytes of a training step by sizes alone: nothing is computed, and Triton's launches are noted, not made."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from compress.kernels.triton.ahead import recorded

_BLOCK = 512  # bytes of which CUDA's allocator hands out multiples
_WIDE = {F.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax}


class Maker(NamedTuple):
    """The operation that allocated a tensor.

    Attributes:
        module: class of the module that was called last, or "backward".
        dtype: of the tensor.
    """

    module: str
    dtype: str


@dataclass
class StepSizes:
    """Bytes of a step.

    Attributes:
        kept: after the forward pass, by what made them.
        peak: the most at any time, with gradients, without parameters, buffers and the batch.
        own: of parameters, their momentum, buffers and the batch.
    """

    kept: Counter[Maker] = field(default_factory=Counter)
    peak: int = 0
    own: int = 0

    @property
    def total(self) -> int:
        """The peak with the step's own bytes."""
        return self.peak + self.own


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that are alive."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.module, self.bytes, self.most = "", 0, 0
        self.alive: dict[int, tuple[int, Maker]] = {_storage(tensor): (0, Maker("", "")) for tensor in known}
        self._watched: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self.alive:
                self._count(tensor)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage(tensor)
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK

        def gone(_: object) -> None:
            self.bytes -= size
            self.alive.pop(key, None)

        self.alive[key] = (size, Maker(self.module, str(tensor.dtype).removeprefix("torch.")))
        self._watched[key] = weakref.ref(storage, gone)
        self.bytes += size
        self.most = max(self.most, self.bytes)


class _AsOnGPU(TorchFunctionMode):
    """Computes in float32 what autocast does on a GPU and not on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WIDE and args[0].dtype == torch.bfloat16:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


def step_sizes(call: nn.Module, owner: nn.Module, batch: int, pixels: int) -> StepSizes:
    """Return the bytes of a step in bf16 autocast; the modules' tensors are fake afterwards.

    Args:
        call: from images to logits; its Triton kernels, if any, are asked for.
        owner: holds the parameters.
        batch: images.
        pixels: their height and width.
    """
    with FakeTensorMode(), recorded(), torch.autograd.set_multithreading_enabled(False):
        known: dict[int, tuple[Tensor, Tensor]] = {}
        for module in (*call.modules(), *owner.modules()):
            _make_fake(module, known)
        x = torch.empty(batch, 3, pixels, pixels).contiguous(memory_format=torch.channels_last)
        y = torch.empty(batch, dtype=torch.long)
        own = [*owner.parameters(), *owner.buffers(), x, y]
        live = _LiveBytes([*own, *call.buffers()])
        for module in call.modules():
            if not list(module.children()) or type(module).__module__.startswith("compress.qat_fusion"):
                module.register_forward_pre_hook(lambda module, _: setattr(live, "module", type(module).__name__))
        sizes = StepSizes(own=sum(tensor.nbytes for tensor in (*own, *owner.parameters())))
        with mock.patch.object(torch.Tensor, "data_ptr", _address), live:
            with torch.autocast("cpu", torch.bfloat16), _AsOnGPU():
                loss = F.cross_entropy(call(x).float(), y)
            for size, maker in live.alive.values():
                sizes.kept[maker] += size
            live.module = "backward"
            loss.backward()
        sizes.peak = live.most
    return sizes


def _make_fake(module: nn.Module, known: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Replace a module's tensors by fake ones; those that modules share stay shared."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            made = known.setdefault(id(tensor), (tensor, fake))[1]
            known[id(made)] = (made, made)
            tensors[name] = made  # type: ignore[assignment]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _address(tensor: Tensor) -> int:
    """An address in place of that of a tensor without memory: aligned, and its own."""
    return 16 * _storage(tensor) + int(tensor.storage_offset()) * tensor.itemsize
