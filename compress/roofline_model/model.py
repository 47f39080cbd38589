"""The roofline of a network: for each layer, a lower bound of its time on a device, and the roof that limits it.

From two of them follow upper bounds of the gain from 2:4 weights, precision, fusion and batch size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from torch import nn

from compress.errors import RooflineError, near_misses
from compress.graph.inputs import Inputs
from compress.graph.trace import trace
from compress.roofline_model.counting import PRODUCTS, Kernel, Operation, Workload, count, workload
from compress.roofline_model.devices import SPARSE, Device, Precision, parse_precision, table_device
from compress.roofline_model.measure import machine_device

Bound = Literal["memory", "compute", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Row(Kernel):
    """A kernel under the roof; figures are for the batch, None where the macs are unknown.

    arithmetic_intensity: flops per byte.
    peak_flops_per_s: with 2:4 between the dense and the sparse peak, by the share of its macs.
    bound: the roof that limits it.
    """

    flops: int | None
    weight_bytes: float
    activation_bytes: float
    arithmetic_intensity: float | None
    peak_flops_per_s: float
    ridge_point: float
    attainable_flops_per_s: float | None
    bound: Bound
    least_time_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The rows of a network on a device, in the order of its graph, with totals.

    Attributes:
        rows: the layers that compute or move something.
        ridge_point: of the precision, flops per byte.
    """

    model: str
    device: Device
    precision: str
    batch_size: int
    fused: bool
    input_shapes: tuple[tuple[int, ...], ...]
    rows: tuple[Row, ...]
    ridge_point: float

    @property
    def unknown(self) -> tuple[str, ...]:
        """Layers of unknown macs, which totals do not include."""
        return tuple(row.name for row in self.rows if row.macs is None)

    @property
    def macs(self) -> int:
        return sum(row.macs or 0 for row in self.rows)

    @property
    def flops(self) -> int:
        """Flops of all known layers, 2 * macs, for the batch."""
        return 2 * self.macs

    @property
    def weight_bytes(self) -> float:
        return sum(row.weight_bytes for row in self.rows)

    @property
    def activation_bytes(self) -> float:
        return sum(row.activation_bytes for row in self.rows)

    @property
    def arithmetic_intensity(self) -> float:
        """Flops of the network over the bytes that it moves."""
        moved = self.weight_bytes + self.activation_bytes
        return self.flops / moved if moved else 0.0

    @property
    def least_time_ms(self) -> float:
        """Sum of the bounds of the known layers, for the batch."""
        return sum(row.least_time_ms or 0.0 for row in self.rows)

    @property
    def images_per_s(self) -> float:
        return self.batch_size / self.least_time_ms * 1e3 if self.least_time_ms else float("inf")

    @property
    def memory_bound_share(self) -> float:
        """Share of the least time that layers bound by memory take."""
        total = self.least_time_ms
        return sum(row.least_time_ms or 0.0 for row in self.rows if row.bound == "memory") / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        totals = {
            "macs": self.macs,
            "flops": self.flops,
            "weight_bytes": self.weight_bytes,
            "activation_bytes": self.activation_bytes,
            "arithmetic_intensity": self.arithmetic_intensity,
            "least_time_ms": self.least_time_ms,
            "images_per_s": self.images_per_s,
            "memory_bound_share": self.memory_bound_share,
            "unknown": list(self.unknown),
        }
        head = {key: value for key, value in asdict(self).items() if key != "rows"}
        return {**head, "totals": totals, "rows": [asdict(row) for row in self.rows]}


def roofline(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    device: str | Device = "h200",
    precision: str = "int8",
    fused: bool = False,
    name: str = "",
) -> Roofline:
    """Lower bounds of the time that a device needs for each layer of a network.

    Args:
        model: any module that fx can trace.
        example_inputs: dimension 0 of the first is the batch.
        device: a name of `DEVICE_NAMES`, `machine` (saved by `measure_ceilings`), or a `Device`.
        precision: `fp32`, `tf32`, `fp16`, `bf16`, `fp8`, `int8`, or one of them with `-2:4`.
        fused: include BatchNorm, activation and residual addition in the convolution before them.
        name: for titles; its class by default.

    Raises:
        RooflineError: the device or precision is unknown, or the device lacks the precision.
        ModelError: the model fails on its inputs or cannot be traced.

    Examples:
        >>> bound = compress.roofline(model, images, device="h200", precision="int8", fused=True)
        >>> bound.macs, bound.memory_bound_share
        (677888, 1.0)
    """
    found = find_device(device)
    found.peak_flops_per_s(precision)  # refuse an unknown precision before the model runs
    work = workload(model, example_inputs, fused=fused)
    return roofline_of(replace(work, model=name or work.model), device=found, precision=precision)


def find_device(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    return machine_device() if device.strip().lower() == "machine" else table_device(device)


def roofline_of(work: Workload, *, device: str | Device, precision: str) -> Roofline:
    found, wanted = find_device(device), parse_precision(precision)
    return Roofline(
        model=work.model,
        device=found,
        precision=wanted.name,
        batch_size=work.batch_size,
        fused=work.fused,
        input_shapes=work.input_shapes,
        rows=tuple(
            row_under_roof(
                op, operation_bytes(op, wanted), peak=_peak(op, found, wanted), bandwidth=found.bandwidth_bytes_per_s
            )
            for op in work.operations
        ),
        ridge_point=found.ridge_point(wanted.name),
    )


def row_under_roof(kernel: Kernel, moves: tuple[float, float], *, peak: float, bandwidth: float) -> Row:
    """A layer's bounds from its bytes, as `operation_bytes` gives them; roofs in flop/s and B/s."""
    weight_bytes, activation_bytes = moves
    moved = weight_bytes + activation_bytes
    flops = None if kernel.macs is None else 2 * kernel.macs
    intensity = None if flops is None else flops / moved if moved else 0.0
    bound: Bound = "unknown" if intensity is None else "compute" if intensity >= peak / bandwidth else "memory"
    return Row(
        **{field.name: getattr(kernel, field.name) for field in fields(Kernel)},
        flops=flops,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        arithmetic_intensity=intensity,
        peak_flops_per_s=peak,
        ridge_point=peak / bandwidth,
        attainable_flops_per_s=None if intensity is None else min(peak, intensity * bandwidth),
        bound=bound,
        least_time_ms=None if flops is None else max(flops / peak, moved / bandwidth) * 1e3,
    )


def operation_bytes(op: Operation, precision: Precision) -> tuple[float, float]:
    size = precision.bytes_per_element
    compressed = op.sparse_weight_elements if precision.sparse else 0
    bias_size = 4 if size == 1 else size  # the bias of an 8-bit product is added to its 32-bit sum
    weights = (op.weight_elements - compressed) * size + compressed * precision.sparse_weight_bytes
    activations = (op.activation_elements - op.float_elements) * size + op.float_elements * precision.float_bytes
    return weights + op.bias_elements * bias_size, float(activations)


def _peak(op: Operation, device: Device, precision: Precision) -> float:
    """With 2:4 only some macs may run at the sparse one."""
    peak = device.peak_flops_per_s(precision.name)
    if not precision.sparse:
        return peak
    dense = device.peak_flops_per_s(precision.base)
    share = op.sparse_macs / op.macs if op.macs else 0.0
    return 1 / (share / peak + (1 - share) / dense)


@dataclass(frozen=True, kw_only=True)
class SparseLayer:
    """A convolution, matrix product or attention; `share` is of the dense network's least time, ms are of the batch."""

    layer: str
    kind: str
    detail: str
    masked: bool
    bound: Bound
    dense_ms: float
    sparse_ms: float
    share: float

    @property
    def speedup(self) -> float:
        return self.dense_ms / self.sparse_ms if self.sparse_ms else 1.0


@dataclass(frozen=True, kw_only=True)
class SparseBound:
    """Upper bound of the gain from 2:4 weights for a network on a device.

    Attributes:
        rows: every product of known cost, in the order of the graph.
        dense_ms: least time of the whole dense network, fused.
        unknown: operations of unknown cost, which totals do not include.
    """

    device: str
    precision: str
    batch_size: int
    rows: tuple[SparseLayer, ...]
    dense_ms: float
    unknown: tuple[str, ...]

    @property
    def sparse_ms(self) -> float:
        return self.dense_ms - sum(row.dense_ms - row.sparse_ms for row in self.rows)

    @property
    def speedup(self) -> float:
        return self.dense_ms / self.sparse_ms if self.sparse_ms else 1.0

    def speedup_with(self, layers: Collection[str]) -> float:
        """The upper bound if only these masked layers run as 2:4."""
        saved = sum(row.dense_ms - row.sparse_ms for row in self.rows if row.layer in layers)
        return self.dense_ms / (self.dense_ms - saved) if self.dense_ms > saved else 1.0

    def as_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "speedup": row.speedup} for row in self.rows]
        return {**asdict(self), "rows": rows, "sparse_ms": self.sparse_ms, "speedup": self.speedup}


def sparse_bound(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    masked: Collection[str],
    device: str | Device = "h200",
    precision: str = "int8",
    batch_size: int | None = None,
) -> SparseBound:
    """Compare the rooflines of a network with dense weights and with 2:4 weights in the layers `masked`."""
    base = parse_precision(precision).base
    work = workload(model, example_inputs, fused=True)
    work = work if batch_size is None else work.with_batch(batch_size)
    names = [op.paths[0] if op.paths else op.name for op in work.operations]
    for path in masked:
        if path not in names:
            raise RooflineError(f"{path!r} is not a layer that runs{near_misses(path, names) or '.'}")
    chosen = tuple(
        op if name in masked else replace(op, sparse_macs=0, sparse_weight_elements=0)
        for op, name in zip(work.operations, names, strict=True)
    )
    dense = roofline_of(work, device=device, precision=base)
    sparse = roofline_of(replace(work, operations=chosen), device=device, precision=base + SPARSE)
    total = dense.least_time_ms
    rows = tuple(
        SparseLayer(
            layer=name,
            kind=before.kind,
            detail=before.detail,
            masked=name in masked,
            bound=before.bound,
            dense_ms=before.least_time_ms,
            sparse_ms=after.least_time_ms,
            share=before.least_time_ms / total if total else 0.0,
        )
        for name, before, after in zip(names, dense.rows, sparse.rows, strict=True)
        if before.kind in PRODUCTS and before.least_time_ms is not None and after.least_time_ms is not None
    )
    return SparseBound(
        device=dense.device.name,
        precision=base,
        batch_size=dense.batch_size,
        rows=rows,
        dense_ms=total,
        unknown=dense.unknown,
    )


# Precisions in which networks run that nobody has compressed, the fastest first; some accelerators have int8 alone.
_AS_IT_IS = ("fp16", "bf16", "fp32", "int8")


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One scenario; figures are bounds, None if the device lacks the precision (`reason`).

    Attributes:
        speedup: over the first scenario, image for image.
        memory_bound_share: share of the time in layers bound by memory.
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

    The last are fused, in the device's best precision. `precision` None = its first of fp16, bf16, fp32, int8.
    """
    graph_module = trace(model, example_inputs)
    plain, fused = (count(graph_module, example_inputs, fused=fuse) for fuse in (False, True))
    return scenarios(plain, fused, device=device, precision=precision, batch_sizes=batch_sizes)


def scenarios(
    plain: Workload,
    fused: Workload,
    *,
    device: str | Device,
    precision: str | None = None,
    batch_sizes: Iterable[int] = (1, 8, 32, 128),
) -> tuple[WhatIf, ...]:
    """`what_if` of a network that is counted already, once with each operation alone and once fused."""
    found = find_device(device)
    precision = precision or next(p for p in _AS_IT_IS if p in found.precisions)
    found.peak_flops_per_s(precision)
    sparse = f"int8{SPARSE}"
    best = next((p for p in (sparse, "int8") if p in found.precisions), precision)
    steps: list[tuple[str, Workload, str]] = [
        (f"{precision}, as it is", plain, precision),
        (f"{precision} + fusion", fused, precision),
        *([] if precision == "int8" else [("int8", plain, "int8"), ("int8 + fusion", fused, "int8")]),
        (f"{sparse} + fusion", fused, sparse),
    ]
    steps += [(f"{best} + fusion, batch {size}", fused.with_batch(size), best) for size in batch_sizes]
    base = roofline_of(plain, device=found, precision=precision)
    return tuple(_scenario(name, work, wanted, found, base) for name, work, wanted in steps)


def _scenario(name: str, work: Workload, precision: str, device: Device, base: Roofline) -> WhatIf:
    unknown = WhatIf(name=name, precision=precision, fused=work.fused, batch_size=work.batch_size)
    try:
        result = roofline_of(work, device=device, precision=precision)
    except RooflineError:
        return replace(unknown, reason=f"no peak for {precision}")
    return replace(
        unknown,
        precision=result.precision,
        least_time_ms=result.least_time_ms / work.batch_size,
        images_per_s=result.images_per_s,
        speedup=result.images_per_s / base.images_per_s,
        memory_bound_share=result.memory_bound_share,
    )
