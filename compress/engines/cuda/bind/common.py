"""Shared by the functions that bind kernels to steps: the cache of a device, epilogues, rows of pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from compress.engines.cuda.executor import Tensors
from compress.engines.cuda.plan.activation import Activation
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.quantizers import Grid
from compress.engines.cuda.plan.steps import Output, Product, Step
from compress.kernels.triton.int8_epilogue import Finish, Function, OutputGrid, Outputs, Residual, finish_of
from compress.kernels.triton.int8_product import ALIGNED, Workspace

Kept = TypeVar("Kept")


@dataclass
class Bindings:
    """The cache of steps on a device: packed weights, epilogues, workspaces.

    Attributes:
        floats: products of codes may be computed in floating point where their results are values.
        workspaces: by the number of tiles and their size; of one stream, as kernels write to them.
    """

    device: torch.device
    kept: dict[tuple[object, ...], Any]
    floats: bool = True
    workspaces: dict[tuple[int, int], Workspace] = field(default_factory=dict)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU, or of Hopper without one."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (9, 0)

    @property
    def multiprocessors(self) -> int:
        """Of the GPU."""
        if self.device.type != "cuda":
            return 4
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def keep(self, key: tuple[object, ...], make: Callable[[], Kept]) -> Kept:
        """The result of `make` at its first call under this key."""
        if key not in self.kept:
            self.kept[key] = make()
        kept: Kept = self.kept[key]
        return kept

    def finish(self, step: Step, **arguments: Any) -> Finish:
        """The epilogue of a step on the device."""
        return self.keep((step.name, "finish"), lambda: finish_of(**arguments).to(self.device))


def function_of(activation: Activation) -> Function:
    """An activation in words of the kernels."""
    if activation.kind == "leaky_relu":
        return Function("leaky_relu", activation.slope)
    return Function(activation.kind, activation.lower, activation.upper)


def output_grid(grid: Grid | None) -> OutputGrid | None:
    """A grid in words of the kernels; None for none."""
    if grid is None:
        return None
    return OutputGrid(torch.tensor(grid.scale, dtype=torch.float64), grid.zero, grid.low, grid.high)


def plain_finish(
    step: Step, out: Output, bindings: Bindings, *, factor: Tensor | None = None, activation: Activation | None = None
) -> Finish:
    """The epilogue of a step without a product."""
    one = torch.ones(1, dtype=torch.float64)
    return bindings.finish(
        step,
        factor=one if factor is None else factor,
        bias=torch.zeros_like(one if factor is None else factor),
        first=Function() if activation is None else function_of(activation),
        grid=output_grid(out.grid) if out.codes else None,
        value=bool(out.value),
    )


def pixel_rows(x: Tensor, channel_axis: int) -> Tensor | None:
    """A tensor as (rows, channels), a view with neighbouring channels; None if there is no such view."""
    turned = x.movedim(channel_axis, -1)
    try:
        rows = turned.view(-1, turned.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else None


class Results:
    """The outputs of a step as rows; what does not lie evenly is written aside and copied."""

    def __init__(self, out: Output, residual: str, tensors: Tensors, axis: int) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        added = None
        if residual:
            turned = tensors[residual].movedim(axis, -1)
            added = pixel_rows(tensors[residual], axis)
            added = turned.reshape(-1, turned.shape[-1]).contiguous() if added is None else added
        codes, value = (self._rows(tensors[name], axis) if name else None for name in (out.codes, out.value))
        pitches = [0 if t is None else t.stride(0) for t in (added, codes, value)]
        self.outputs = Outputs(added, codes, value, *pitches)

    def _rows(self, target: Tensor, axis: int) -> Tensor:
        rows = pixel_rows(target, axis)
        if rows is not None:
            return rows
        turned = target.movedim(axis, -1)
        aside = torch.empty(turned.shape, dtype=target.dtype, device=target.device)
        self._copies.append((turned, aside))
        return aside.view(-1, turned.shape[-1])

    def finish(self) -> None:
        """Copy what was written aside."""
        for target, aside in self._copies:
            target.copy_(aside)


def channels_last(x: Tensor) -> Tensor:
    """`x` (N, C, H, W), a copy if its channels are not neighbours."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous(memory_format=torch.channels_last)


def in_words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape and type as elements of up to 8 bytes, where their innermost elements lie so."""
    inner = next((i for i, n in enumerate(a.shape) if n > 1 and a.stride(i) == b.stride(i) == 1), None)
    if a.dtype != b.dtype or inner is None:
        return a, b
    turned = [x.movedim(inner, -1) for x in (a, b)]
    for word in (torch.int64, torch.int32):
        count = word.itemsize // a.element_size()
        numbers = [n for x in turned for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])]
        if count > 1 and all(n % count == 0 for n in numbers):
            return turned[0].view(word), turned[1].view(word)
    return a, b


def product_finish(step: Product, bindings: Bindings) -> Finish:
    """The epilogue of a product."""
    e = step.epilogue
    residual = None
    if e.residual.name:
        g = e.residual.grid
        residual = Residual(1.0, 0, False) if g is None else Residual(g.scale[0], g.zero, True)
    return bindings.finish(
        step,
        factor=e.factor,
        bias=e.bias,
        first=function_of(e.first),
        middle=output_grid(e.middle),
        residual=residual,
        second=function_of(e.second),
        grid=output_grid(e.out.grid) if e.out.codes else None,
        value=bool(e.out.value),
    )


def whole_parts(name: str, layout: Layout) -> bool:
    """True for codes whose pixels can be read 16 channels at a time."""
    place = layout.places.get(name)
    if place is None or place.dtype != torch.int8 or len(place.shape) != 4 or place.strides[1] != 1:
        return False
    aligned = all(n % ALIGNED == 0 for n in (place.offset, place.strides[0], place.strides[2], place.strides[3]))
    return aligned and place.strides[3] >= place.shape[1]
