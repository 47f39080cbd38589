"""Ranges of many calibrators at once: a GPU is waited for once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from compress.quantization.calibration.calibrator import Calibrator
from compress.quantization.calibration.calibrators import HistogramCalibrator
from compress.quantization.calibration.histogram import Histogram


def choose_together(calibrators: Iterable[Calibrator]) -> None:
    """Prepare `compute_amax` of many calibrators with statistics on GPUs; on a CPU each chooses by itself.

    All statistics are read at once, and calibrators of one kind choose their ranges at once.
    """
    found = [(c, largest) for c in calibrators if (largest := c._largest()) is not None]
    found = [(calibrator, largest) for calibrator, largest in found if largest.device.type != "cpu"]
    alike: dict[Any, list[HistogramCalibrator]] = {}
    copies = on_host([largest for _, largest in found])
    for (calibrator, largest), copy in zip(found, copies, strict=True):
        calibrator._read = copy
        if isinstance(calibrator, HistogramCalibrator) and calibrator.axis is None:
            alike.setdefault((type(calibrator), largest.device, calibrator._options()), []).append(calibrator)
    for group in alike.values():
        together([cast(Histogram, calibrator._counted) for calibrator in group], group)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of small tensors of one type on the CPU, waiting for each device once."""
    found: dict[int, Tensor] = {}
    for device in {tensor.device for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in places]).cpu()
        parts = flat.split([tensors[i].numel() for i in places])
        found.update({i: part.reshape(tensors[i].shape).clone() for i, part in zip(places, parts, strict=True)})
    return [found[i] for i in range(len(tensors))]


def together(histograms: Sequence[Histogram], group: Sequence[HistogramCalibrator]) -> None:
    """Choose the ranges of a `group` of calibrators of one kind and options from their histograms."""
    counts = torch.cat([h.counts for h in histograms])
    chosen = group[0]._choose_bin(counts, torch.cat([h.width for h in histograms]).nan_to_num()).cpu()
    for calibrator, own in zip(group, chosen.split(1), strict=True):
        calibrator._chosen = own
