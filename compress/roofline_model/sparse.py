"""Upper bounds of the gain from 2:4 weights, layer by layer, before any training: two rooflines of one network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from compress.errors import RooflineError, near_misses
from compress.graph.inputs import Inputs
from compress.roofline_model.counting import PRODUCTS, Operation, workload
from compress.roofline_model.devices import SPARSE, Device, parse_precision
from compress.roofline_model.model import Bound, roofline_of


@dataclass(frozen=True, kw_only=True)
class SparseLayer:
    """A convolution, matrix product or attention.

    Attributes:
        layer: module path, or the node's name.
        kind, detail: see `Operation`.
        masked: True if its weight is 2:4.
        bound: the roof that limits it when dense.
        dense_ms, sparse_ms: least time for the batch, dense and as `masked` says.
        share: of the dense network's least time.
    """

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
        """Upper bound of its speed-up; 1 = no gain."""
        return self.dense_ms / self.sparse_ms if self.sparse_ms else 1.0


@dataclass(frozen=True, kw_only=True)
class SparseBound:
    """Upper bound of the gain from 2:4 weights for a network on a device.

    Attributes:
        precision: of both networks, such as `int8`.
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
        """Least time of the network with its masked layers 2:4."""
        return self.dense_ms - sum(row.dense_ms - row.sparse_ms for row in self.rows)

    @property
    def speedup(self) -> float:
        """Upper bound of the network's speed-up."""
        return self.dense_ms / self.sparse_ms if self.sparse_ms else 1.0

    def speedup_with(self, layers: Collection[str]) -> float:
        """The upper bound if only these masked layers run as 2:4."""
        saved = sum(row.dense_ms - row.sparse_ms for row in self.rows if row.layer in layers)
        return self.dense_ms / (self.dense_ms - saved) if self.dense_ms > saved else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All rows and totals as plain values for JSON."""
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
    """Compare the rooflines of a network with dense weights and with 2:4 weights in some layers.

    `masked` are module paths; dimension 0 of the first input is the batch, unless `batch_size` says so. The precision
    is without the suffix `-2:4`; device as in `roofline`.

    Raises:
        RooflineError: the device or precision is unknown, the device lacks 2:4 at it, or a path is not a layer.
        ModelError: the model fails on its inputs or cannot be traced.
    """
    base = parse_precision(precision).base
    work = workload(model, example_inputs, fused=True)
    work = work if batch_size is None else work.with_batch(batch_size)
    names = [_layer(op) for op in work.operations]
    for path in masked:
        if path not in names:
            raise RooflineError(f"{path!r} is not a layer that runs{near_misses(path, names) or '.'}")
    chosen = tuple(op if name in masked else _dense(op) for op, name in zip(work.operations, names, strict=True))
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


def _layer(op: Operation) -> str:
    """The path of the product's module, or the operation's name."""
    return op.paths[0] if op.paths else op.name


def _dense(op: Operation) -> Operation:
    return replace(op, sparse_macs=0, sparse_weight_elements=0)
