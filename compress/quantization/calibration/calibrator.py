"""The base of all calibrators: tensors are collected (`collect`), then a range is computed (`compute_amax`).

Statistics stay on the device of the tensors, and the host reads nothing while they are collected, so that a GPU never
waits. Values that have no range (NaN, Inf, none at all, only zeros) are found by `compute_amax`, whose caller adds the
layer's name. `all_reduce` merges statistics and not ranges, so that every rank computes the amax of all images. A
tensor on a CPU may also come in stretches, looked at by several threads (`part`, `collect_parts`).

A single channel of zeros (pruned) gets the largest amax of all channels, so that its scale is a usable number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from compress.errors import CalibrationError
from compress.quantization.calibration.amax import as_rows

SMALLEST_AMAX = 2.0**-118
"""A smaller amax counts as zero: divided by 255 it is no longer a normal float32 number."""


class Calibrator(ABC):
    """Collects statistics of tensors, then yields `amax`.

    Args:
        axis: the channel axis, for an amax of shape (C,); None = one for the whole tensor, of shape ().
    """

    statistics: ClassVar[str]  # what is counted; calibrators that count alike can share it
    _channels: int  # channels of the tensors so far; 0 = no tensor yet
    _read: Tensor | None  # largest magnitudes on the CPU, set by `choose_together`

    def __init__(self, *, axis: int | None = None) -> None:
        self.axis = axis
        self.reset()

    @torch.compiler.disable
    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Take `x` into the statistics: any shape, any floating type (counted as float32); an empty tensor is ignored.

        Raises:
            CalibrationError: there is no such axis, or another number of channels than before.
        """
        if self.axis is not None and not -x.dim() <= self.axis < x.dim():
            raise CalibrationError(f"axis is {self.axis}, but the tensor has shape {tuple(x.shape)}")
        if x.numel() == 0:
            return
        rows = as_rows(x.detach(), self.axis)
        if self._channels and self._channels != len(rows):
            raise CalibrationError(
                f"a tensor has {len(rows)} channels along axis {self.axis}, those before it {self._channels}: "
                "per-channel ranges need the same number in every batch; use axis None"
            )
        self._channels, self._read = len(rows), None
        self._observe(rows if rows.is_floating_point() else rows.float())

    @torch.no_grad()
    def part(self, values: Tensor, *, start: int, total: int) -> object:
        """What `collect_parts` needs of a stretch, (n,), of a tensor on the CPU; several threads may call it.

        The result does not refer to the memory of `values`. `start` is the place of the first value in the tensor.
        """
        return self._part(values, start, total)

    @torch.no_grad()
    def collect_parts(self, parts: Sequence[Any]) -> None:
        """Collect a tensor, without axis, of which `part` was given every stretch, in order."""
        self._channels, self._read = 1, None
        self._add(parts)

    @torch.no_grad()
    def compute_amax(self) -> Tensor:
        """The range, float32: shape () or (C,), all > 0.

        It is on the device of the tensors; after `choose_together` on the CPU.

        Raises:
            CalibrationError: nothing was collected, or NaN or Inf, or nothing but zeros.
        """
        amax = self._checked_largest()
        live = amax >= SMALLEST_AMAX
        chosen = self._choose(amax).to(amax.device)
        chosen = torch.where(live, chosen, chosen[live].amax())
        return chosen.reshape(()) if self.axis is None else chosen

    @property
    def seen(self) -> bool:
        """True if anything was collected."""
        return self._seen() is not None

    @property
    def only_zeros(self) -> bool:
        """True if no value but zero was collected."""
        amax = self._seen()
        return amax is None or not bool(amax.any())

    def _seen(self) -> Tensor | None:
        return self._largest() if self._read is None else self._read

    def _checked_largest(self) -> Tensor:
        """The largest magnitude of each row, all finite and not all zero."""
        amax = self._seen()
        if amax is None:
            raise CalibrationError(
                "nothing was collected: run calibration images through the model; a layer that they do not reach "
                "has no range and must stay float (a rule with enable: false)"
            )
        if not bool(amax.isfinite().all()):
            raise CalibrationError(
                "NaN or Inf was collected: look for a broken weight, an image that is not normalized, or a half "
                "precision overflow before this tensor, and calibrate in float32"
            )
        if not bool((amax >= SMALLEST_AMAX).any()):
            raise CalibrationError(
                "all collected values are zero, and a scale of zero cannot be: calibrate with images that reach this "
                "tensor, or leave its layer float (a rule with enable: false)"
            )
        return amax

    def take(self, other: Calibrator) -> None:
        """Take over what another calibrator of the same `statistics` collected; neither may collect afterwards."""
        self._channels, self._read = other._channels, other._read
        self._share(other)

    def reset(self) -> None:
        """Delete the statistics."""
        self._channels, self._read = 0, None
        self._forget()

    @property
    def histogram(self) -> tuple[Tensor, Tensor] | None:
        """(counts, edges) on the CPU: (bins,) int64 and (bins + 1,) float64, or (C, ...) each; None without one."""
        return None

    @torch.no_grad()
    def all_reduce(self, group: ProcessGroup | None = None) -> None:
        """Merge the statistics of all processes of `group`, each of which must call this; nothing for a single process.

        Raises:
            CalibrationError: the processes collected different numbers of channels.
        """
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        device = self._device(group)
        span = torch.tensor([self._channels, -self._channels or -(1 << 30)], device=device)
        dist.all_reduce(span, op=dist.ReduceOp.MAX, group=group)
        most, least = int(span[0]), -int(span[1])
        if most == 0:
            return
        if most != least:
            raise CalibrationError(
                f"the processes collected tensors of {least} to {most} channels along axis {self.axis}"
            )
        self._channels, self._read = most, None
        self._reduce(group, device)

    def _device(self, group: ProcessGroup | None) -> torch.device:
        """The device of the statistics; before any, one on which the group can communicate."""
        amax = self._largest()
        if amax is not None:
            return amax.device
        on_gpu = dist.get_backend(group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @abstractmethod
    def _observe(self, rows: Tensor) -> None:
        """Collect (channels, n) values, n > 0, one row if there is no axis; must not wait for the device."""

    @abstractmethod
    def _part(self, values: Tensor, start: int, total: int) -> object:
        """The statistics of a stretch of a tensor."""

    @abstractmethod
    def _add(self, parts: Sequence[Any]) -> None:
        """Collect the statistics of all stretches of a tensor."""

    @abstractmethod
    def _largest(self) -> Tensor | None:
        """The largest magnitude of each row so far, (rows,) float32; None before any."""

    @abstractmethod
    def _choose(self, largest: Tensor) -> Tensor:
        """The amax of each row, (rows,), from the largest magnitude of each; arbitrary for rows of zeros."""

    @abstractmethod
    def _forget(self) -> None:
        """Delete the statistics."""

    @abstractmethod
    def _share(self, other: Any) -> None:
        """Refer to the statistics of another calibrator, which counts alike."""

    @abstractmethod
    def _reduce(self, group: ProcessGroup | None, device: torch.device) -> None:
        """Merge the statistics of all processes; this one may have none."""
