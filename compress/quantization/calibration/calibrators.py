"""Calibrators, which collect statistics of tensors (`collect`) and then choose a range (`compute_amax`).

Statistics stay on the device of the tensors, and the host reads nothing while they are collected. Values that have no
range (NaN, Inf, none at all, only zeros) are found by `compute_amax`, whose caller adds the layer's name.
`all_reduce_together` merges statistics and not ranges, so that every rank computes the amax of all images. A tensor on
a CPU may also come in stretches, looked at by several threads (`part`, `collect_parts`). A single channel of zeros
(pruned) gets the largest amax of all channels, so that its scale is a usable number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from compress.errors import CalibrationError, near_misses
from compress.quantization import (
    HISTOGRAM_CALIBRATORS,
    LEAST_BITS,
    MOST_BITS,
    WIDEST,
    ActivationSpec,
    CalibratorName,
    WeightSpec,
)
from compress.quantization.calibration.histogram import (
    BINS,
    MAX_BINS,
    NEAR_TIE,
    Counted,
    Histogram,
    Sample,
    as_rows,
    check_percentile,
    drawn_from,
    entropy_amax,
    mse_amax,
    percentile_amax,
    raise_amax,
    row_amax,
)
from compress.quantization.numerics import QuantFormat

# A smaller amax counts as zero: divided by 255 it is no longer a normal float32 number.
SMALLEST_AMAX = 2.0**-118


class Calibrator(ABC):
    """Collects statistics of tensors, then yields `amax`.

    Args:
        axis: the channel axis, for an amax of shape (C,); None = one for the whole tensor, of shape ().
    """

    statistics: ClassVar[str]  # what is counted; calibrators that count alike can share it
    kept: ClassVar[tuple[str, ...]]  # attributes that hold the statistics, None before any
    lowest: float = 0.0  # values below it, which is below 0, count as it; 0.0 = all count
    _channels: int  # channels of the tensors so far; 0 = no tensor yet
    _read: Tensor | None  # largest magnitudes on the CPU, set by `choose_together`
    _chosen: Tensor | None  # amax of each row, set by `choose_together`

    def __init__(self, *, axis: int | None = None) -> None:
        self.axis = axis
        self.reset()

    def collect(self, x: Tensor) -> None:
        """Count `x`: any shape, any floating type (as float32); an empty tensor is ignored."""
        # Not a decorator, which would import torch's compiler here: two seconds of every command.
        (torch.compiler.disable(self._collect) if torch.compiler.is_compiling() else self._collect)(x)

    @torch.no_grad()
    def _collect(self, x: Tensor) -> None:
        if self.axis is not None and not -x.dim() <= self.axis < x.dim():
            raise CalibrationError(f"axis is {self.axis}, but the tensor has shape {tuple(x.shape)}")
        if x.numel() == 0:
            return
        rows = as_rows(self._bounded(x.detach()), self.axis)
        if self._channels and self._channels != len(rows):
            raise CalibrationError(
                f"a tensor has {len(rows)} channels along axis {self.axis}, those before it {self._channels}: "
                "per-channel ranges need the same number in every batch; use axis None"
            )
        self._changed(len(rows))
        self._observe(rows if rows.is_floating_point() else rows.float())

    def _bounded(self, x: Tensor) -> Tensor:
        return x.clamp_min(self.lowest) if self.lowest else x

    @torch.no_grad()
    def collect_parts(self, parts: Sequence[Any]) -> None:
        """Collect a tensor, without axis, of which `part` was given every stretch, in order."""
        self._changed(1)
        self._add(parts)

    @torch.no_grad()
    def compute_amax(self) -> Tensor:
        """The range, float32: shape () or (C,), all > 0.

        It is on the device of the tensors; after `choose_together` on the CPU.
        """
        amax = self._checked_largest()
        live = amax >= SMALLEST_AMAX
        chosen = self._choose(amax).to(amax.device)
        chosen = torch.where(live, chosen, chosen[live].amax())
        return chosen.reshape(()) if self.axis is None else chosen

    @property
    def seen(self) -> bool:
        return self._seen() is not None

    @property
    def only_zeros(self) -> bool:
        """True if no value but zero was collected, or none that float32 has a scale for."""
        amax = self._seen()
        return amax is None or bool((amax < SMALLEST_AMAX).all())

    @property
    def infinite(self) -> bool:
        """True if infinity was collected, and no NaN."""
        amax = self._seen()
        return amax is not None and bool(amax.isinf().any()) and not bool(amax.isnan().any())

    def _seen(self) -> Tensor | None:
        return self._largest() if self._read is None else self._read

    def _checked_largest(self) -> Tensor:
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
        self._changed(other._channels)
        self._read = other._read
        for name in self.kept:
            setattr(self, name, getattr(other, name))

    def reset(self) -> None:
        self._changed(0)
        for name in self.kept:
            setattr(self, name, None)

    def _changed(self, channels: int) -> None:
        self._channels, self._read, self._chosen = channels, None, None

    @property
    def histogram(self) -> tuple[Tensor, Tensor] | None:
        """(counts, edges) on the CPU: (bins,) int64 and (bins + 1,) float64, or (C, ...) each; None without one."""
        return None

    @abstractmethod
    def _observe(self, rows: Tensor) -> None:
        """Collect (channels, n) values, n > 0, one row if there is no axis; must not wait for the device."""

    @abstractmethod
    def part(self, values: Tensor, *, start: int, total: int, signed: bool = True) -> object:
        """Return the statistics of n consecutive values of a tensor on the CPU, for `collect_parts`; thread-safe.

        The result does not refer to the memory of `values`. `start` is the index of the first value in the tensor;
        `signed` is False if negative values do not matter.
        """

    @abstractmethod
    def _add(self, parts: Sequence[Any]) -> None:
        """Collect the statistics of all stretches of a tensor."""

    @abstractmethod
    def _largest(self) -> Tensor | None:
        """The largest magnitude of each row so far, (rows,) float32; None before any."""

    @abstractmethod
    def _choose(self, largest: Tensor) -> Tensor:
        """The amax of each row, (rows,), from the largest magnitude of each; arbitrary for rows of zeros."""

    @staticmethod
    @abstractmethod
    def _reduce(alike: Sequence[Any], group: ProcessGroup | None, device: torch.device) -> None:
        """Merge the statistics that all processes have of calibrators that count alike; this one may have none."""


class MaxCalibrator(Calibrator):
    """Clips nothing: amax is the largest magnitude."""

    statistics = "largest"
    kept: ClassVar[tuple[str, ...]] = ("_amax",)
    _amax: Tensor | None

    def _observe(self, rows: Tensor) -> None:
        if self._amax is None:
            self._amax = torch.zeros(len(rows), device=rows.device)
        raise_amax(rows, self._amax)

    def part(self, values: Tensor, *, start: int, total: int, signed: bool = True) -> object:
        return row_amax(self._bounded(torch.stack(values.aminmax()))[None])

    def _add(self, parts: Sequence[Any]) -> None:
        self._amax = torch.stack([*parts, *([] if self._amax is None else [self._amax])]).amax(0)

    def _largest(self) -> Tensor | None:
        return self._amax

    def _choose(self, largest: Tensor) -> Tensor:
        return largest

    @staticmethod
    def _reduce(alike: Sequence[Any], group: ProcessGroup | None, device: torch.device) -> None:
        mine = [torch.zeros(c._channels, device=device) if c._amax is None else c._amax for c in alike]
        for calibrator, amax in zip(alike, _rows_of_each(_largest_of_all(torch.cat(mine), group), alike), strict=True):
            calibrator._amax = amax


class HistogramCalibrator(Calibrator):
    """Counts magnitudes, and chooses from the counts.

    `choice` returns the amax of each row, (rows,), from counts (rows, bins) and the bins' width (rows,).
    """

    statistics, kept = "histogram", ("_counted",)
    _counted: Histogram | None

    def __init__(self, choice: partial[Tensor], *, axis: int | None = None) -> None:
        super().__init__(axis=axis)
        self.choice = choice

    def _observe(self, rows: Tensor) -> None:
        self._counted = self._counted or self._empty(len(rows), rows.device)
        self._counted.add(rows)

    def part(self, values: Tensor, *, start: int, total: int, signed: bool = True) -> object:
        return self.part_of(drawn_from(values, start=start, total=total, signed=signed))

    def part_of(self, sample: Sample) -> Sample | Counted:
        """What `part` does, from a sample of the stretch, without its memory; `amax` is without what is bounded."""
        if self.lowest:
            values, rest = (self._bounded(part) for part in (sample.values, sample.rest))
            least = min((float(part.min()) for part in (values, rest) if part.numel()), default=0.0)
            sample = replace(sample, values=values, rest=rest, amax=float(np.maximum(sample.amax, -least)))
        counted = self._counted
        return sample.copied() if counted is None else counted.counted(sample)

    def _add(self, parts: Sequence[Any]) -> None:
        self._counted = self._counted or self._empty(1, torch.device("cpu"))
        self._counted.add_parts(parts)

    def _empty(self, rows: int, device: torch.device) -> Histogram:
        return Histogram.empty(rows, MAX_BINS if self.axis is None else BINS, device)

    def _largest(self) -> Tensor | None:
        return None if self._counted is None else self._counted.amax

    def _choose(self, largest: Tensor) -> Tensor:
        if self._chosen is not None:
            return self._chosen
        counted = self._counted or self._empty(len(largest), largest.device)
        return self.choice(*counted.live())

    @property
    def histogram(self) -> tuple[Tensor, Tensor] | None:
        return None if self._counted is None else self.histogram_of(self._counted)

    def histogram_of(self, counted: Histogram) -> tuple[Tensor, Tensor]:
        counts, width = counted.live()
        edges = torch.arange(counts.shape[1] + 1) * width.double()[:, None]
        return (counts[0], edges[0]) if self.axis is None else (counts, edges)

    @staticmethod
    def _reduce(alike: Sequence[Any], group: ProcessGroup | None, device: torch.device) -> None:
        mine = [c._counted or c._empty(c._channels, device) for c in alike]
        amax = _largest_of_all(torch.cat([h.amax for h in mine]), group)
        width = torch.cat([h.width for h in mine]).nan_to_num()
        dist.all_reduce(width, op=dist.ReduceOp.MAX, group=group)
        whole = Histogram(
            counts=torch.cat([h.counts for h in mine]), width=torch.cat([h.width for h in mine]), amax=amax
        )
        whole = whole.rescaled(width, amax)
        dist.all_reduce(whole.counts, group=group)
        parts = (_rows_of_each(tensor, alike) for tensor in (whole.counts, whole.width, whole.amax))
        for calibrator, counts, widths, largest in zip(alike, *parts, strict=True):
            calibrator._counted = Histogram(counts=counts, width=widths, amax=largest)


def all_reduce_together(calibrators: Sequence[Calibrator], group: ProcessGroup | None = None) -> None:
    """Merge the statistics of each calibrator over the processes of `group`; nothing for a single process.

    Each process must call this with the same kinds of calibrators in the same order. Statistics of one kind leave
    together, because a GPU's exchange of a few numbers takes as long as that of a million.
    """
    if not calibrators or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    device = _device(calibrators, group)
    spans = [[c._channels for c in calibrators], [-c._channels or -(1 << 30) for c in calibrators]]
    exchanged = torch.tensor(spans, device=device)
    dist.all_reduce(exchanged, op=dist.ReduceOp.MAX, group=group)
    alike: dict[Any, list[Calibrator]] = {}
    for calibrator, most, least in zip(calibrators, *exchanged.tolist(), strict=True):
        if most == 0:
            continue
        if most != -least:
            raise CalibrationError(
                f"the processes collected tensors of {-least} to {most} channels along axis {calibrator.axis}"
            )
        calibrator._changed(most)
        alike.setdefault((calibrator.statistics, calibrator.axis is None), []).append(calibrator)
    with torch.no_grad():
        for same in alike.values():
            same[0]._reduce(same, group, device)


def _device(calibrators: Sequence[Calibrator], group: ProcessGroup | None) -> torch.device:
    """The device of the statistics; before any, one on which the group can communicate."""
    found = next((amax.device for c in calibrators if (amax := c._largest()) is not None), None)
    if found is not None:
        return found
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _rows_of_each(tensor: Tensor, calibrators: Sequence[Calibrator]) -> tuple[Tensor, ...]:
    return tuple(part.clone() for part in tensor.split([c._channels for c in calibrators]))


def _largest_of_all(amax: Tensor, group: ProcessGroup | None) -> Tensor:
    """The maximum over processes; NaN is sent as Inf, because not every backend's MAX propagates NaN."""
    amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


class LSQCalibrator(MaxCalibrator):
    """A step of 2 E|v| / sqrt(Qp), where learned step sizes begin (Esser et al., arXiv 1902.08153, section 2.1).

    At many bits that range would be wider than the values; it ends at the largest magnitude.
    """

    statistics, kept = "mean", ("_amax", "_sums")
    _sums: Tensor | None  # (2, rows) float64: of the magnitudes, and their number

    def __init__(self, *, num_bits: int = 8, signed: bool = True, axis: int | None = None) -> None:
        super().__init__(axis=axis)
        self.high = 2 ** (num_bits - signed) - 1

    def _observe(self, rows: Tensor) -> None:
        super()._observe(rows)
        self._sums = self._sums_of(rows) + (0 if self._sums is None else self._sums)

    def part(self, values: Tensor, *, start: int, total: int, signed: bool = True) -> object:
        rows = self._bounded(values)[None]
        return row_amax(rows), self._sums_of(rows)

    def _add(self, parts: Sequence[Any]) -> None:
        super()._add([amax for amax, _ in parts])
        self._sums = sum(sums for _, sums in parts) + (0 if self._sums is None else self._sums)

    @staticmethod
    def _sums_of(rows: Tensor) -> Tensor:
        sums = rows.abs().sum(1, dtype=torch.float64)
        return torch.stack([sums, torch.full_like(sums, rows.shape[1])])

    def _choose(self, largest: Tensor) -> Tensor:
        sums = torch.ones(2, 1, dtype=torch.float64) if self._sums is None else self._sums
        mean = (sums[0] / sums[1]).to(largest.device)
        return torch.minimum((2 * math.sqrt(self.high) * mean).float(), largest)

    @staticmethod
    def _reduce(alike: Sequence[Any], group: ProcessGroup | None, device: torch.device) -> None:
        MaxCalibrator._reduce(alike, group, device)
        empty = [torch.zeros(2, c._channels, dtype=torch.float64, device=device) for c in alike]
        sums = torch.cat([none if c._sums is None else c._sums for c, none in zip(alike, empty, strict=True)], 1)
        dist.all_reduce(sums, group=group)
        for calibrator, own in zip(alike, _rows_of_each(sums.T, alike), strict=True):
            calibrator._sums = own.T


CALIBRATORS: tuple[str, ...] = get_args(CalibratorName)


def calibrator_for(quant_format: QuantFormat, spec: WeightSpec | ActivationSpec) -> Calibrator:
    return make_calibrator(
        spec.calibrator,
        num_bits=quant_format.num_bits,
        axis=quant_format.axis,
        signed=quant_format.signed and not quant_format.lowest,  # else nearly all steps are above zero
        percentile=spec.percentile,
    )


def make_calibrator(
    name: str, *, num_bits: int = 8, axis: int | None = None, signed: bool = True, percentile: float = 99.99
) -> Calibrator:
    """The calibrator called `name`; arguments that it does not need are ignored.

    With `signed` False all 2**num_bits integers lie above zero. `percentile` is the share that is not clipped, in
    percent.
    """
    most = MOST_BITS if name in HISTOGRAM_CALIBRATORS else WIDEST
    if not LEAST_BITS <= num_bits <= most:
        raise CalibrationError(f"num_bits is {num_bits}: it must be {LEAST_BITS} to {most}")
    unsigned = not signed
    choices = {
        "percentile": partial(percentile_amax, percentile=percentile),
        "entropy": partial(entropy_amax, num_bits=num_bits, unsigned=unsigned),
        "mse": partial(mse_amax, num_bits=num_bits, unsigned=unsigned, tolerance=NEAR_TIE),
    }
    if name not in CALIBRATORS:
        raise CalibrationError(
            f"there is no calibrator {name!r}{near_misses(name, CALIBRATORS)}: choose one of {', '.join(CALIBRATORS)}"
        )
    if name == "percentile":
        check_percentile(percentile)
    if name in choices:
        return HistogramCalibrator(choices[name], axis=axis)
    return LSQCalibrator(num_bits=num_bits, signed=signed, axis=axis) if name == "lsq" else MaxCalibrator(axis=axis)
