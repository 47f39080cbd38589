"""Upper bounds of the gain from compression on a device: precision, 2:4, fusion and batch size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from compress.errors import RooflineError
from compress.graph.inputs import Inputs
from compress.graph.trace import trace
from compress.roofline_model.counting import Workload, count
from compress.roofline_model.devices import SPARSE, Device
from compress.roofline_model.model import Roofline, find_device, roofline_of

_AS_IT_IS = ("fp16", "bf16", "fp32")
"""Precisions in which networks run that nobody has compressed, the fastest first."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One scenario; figures are None if the device lacks the precision.

    Attributes:
        name: such as `int8 + fusion`.
        least_time_ms: lower bound for one image.
        images_per_s: upper bound.
        speedup: over the first scenario, image for image.
        memory_bound_share: share of the time in layers bound by memory.
        reason: why the device cannot run it.
    """

    name: str
    precision: str
    fused: bool
    batch_size: int
    least_time_ms: float | None = None
    images_per_s: float | None = None
    speedup: float | None = None
    memory_bound_share: float | None = None
    reason: str = ""


def what_if(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    device: str | Device = "h200",
    precision: str | None = None,
    batch_sizes: Iterable[int] = (1, 8, 32, 128),
) -> tuple[WhatIf, ...]:
    """The model as it is (speedup 1), then fusion, int8, both, int8 2:4 with fusion, and the batch sizes.

    All but the last have the batch size of the inputs; the last are fused, in the device's best precision. `precision`
    None = the first of fp16, bf16 and fp32 that the device has.

    Raises:
        RooflineError: the device is unknown, it lacks `precision`, or a batch size is below 1.
        ModelError: the model fails on its inputs or cannot be traced.
    """
    found = find_device(device)
    precision = precision or next((p for p in _AS_IT_IS if p in found.precisions), "fp32")
    found.peak_flops_per_s(precision)
    graph_module = trace(model, example_inputs)
    plain, fused = (count(graph_module, example_inputs, fused=fuse) for fuse in (False, True))
    sparse = f"int8{SPARSE}"
    best = next((p for p in (sparse, "int8") if p in found.precisions), precision)
    steps: list[tuple[str, Workload, str]] = [
        (f"{precision}, as it is", plain, precision),
        (f"{precision} + fusion", fused, precision),
        ("int8", plain, "int8"),
        ("int8 + fusion", fused, "int8"),
        (f"{sparse} + fusion", fused, sparse),
    ]
    steps += [(f"{best} + fusion, batch {size}", fused.with_batch(size), best) for size in batch_sizes]
    base = roofline_of(plain, device=found, precision=precision)
    return tuple(_scenario(name, work, wanted, found, base) for name, work, wanted in steps)


def _scenario(name: str, work: Workload, precision: str, device: Device, base: Roofline) -> WhatIf:
    unknown = WhatIf(name=name, precision=precision, fused=work.fused, batch_size=work.batch_size)
    try:
        result = roofline_of(work, device=device, precision=precision)
    except RooflineError as error:
        return replace(unknown, reason=str(error))
    return replace(
        unknown,
        precision=result.precision,
        least_time_ms=result.least_time_ms / work.batch_size,
        images_per_s=result.images_per_s,
        speedup=result.images_per_s / base.images_per_s,
        memory_bound_share=result.memory_bound_share,
    )
