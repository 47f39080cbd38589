"""CUDA kernels that find a tensor's largest magnitude and its histogram at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.kernels.cuda.nvrtc import Kernel, available, compile_cuda
from compress.kernels.triton.launch import BoundedCache

SOURCE = Path(__file__).with_name("histogram.cu")

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Types that the kernels read, and how they call them."""

_SHAPE = {"THREADS": 1024, "BLOCKS": 1, "UNROLL": 4}
_MOST_BINS = 12_000  # fewer than 48 KiB of counts: what every block may have
_MOST_VALUES = 1 << 33  # indices of 16-byte loads are 32 bits wide

_KERNELS = BoundedCache()


def takes(values: Tensor, bins: int = 1) -> bool:
    """Whether the kernels take (rows, n) values: one row without gaps in at most 32 bits, on a GPU."""
    if not values.is_cuda or len(values) != 1 or not values.is_contiguous() or bins > _MOST_BINS:
        return False
    return values.dtype in KINDS and values.numel() < _MOST_VALUES and available(values.get_device())


def collect_amax(values: Tensor, amax: Tensor) -> None:
    """Raise `amax` to the largest magnitude; NaN if there is one.

    Args:
        values: that `takes` is true of.
        amax: (1,) float32, at least 0 or NaN; changed in place.
    """
    _run("largest", values, [amax], 1, 1)


class Watch:
    """A histogram that the kernels count into.

    Args:
        amax, width: (1,) float32, and
        counts: (1, bins) int64: of the histogram, changed in place.
        start: bins that the first batch is spread over, a power of two.
    """

    def __init__(self, amax: Tensor, width: Tensor, counts: Tensor, start: int) -> None:
        gate = torch.zeros(2, dtype=torch.int32, device=counts.device)
        self._tables = (amax, width, counts, gate)
        self._sizes = (counts.shape[1], start)

    def collect(self, values: Tensor) -> None:
        """Take values, that `takes` is true of, into the histogram."""
        _run("watch", values, self._tables, *self._sizes)


def _run(name: str, values: Tensor, tables: Sequence[Tensor], bins: int, start: int) -> None:
    device = values.get_device()
    key = (name, values.dtype, device, bins, start)
    with torch.cuda.device(device):
        if key not in _KERNELS:
            macros = {"KIND": KINDS[values.dtype], "BINS": bins, "START": start, **_SHAPE}
            code = compile_cuda(SOURCE.read_text(), torch.cuda.get_device_capability(device), **macros)
            _KERNELS[key] = Kernel(code, name, threads=_SHAPE["THREADS"], together=name == "watch")
        _KERNELS[key](device, values, tables)
