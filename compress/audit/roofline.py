"""Roofline of a built engine, and the layers in which INT8 can be faster than fp16."""

from __future__ import annotations

from dataclasses import dataclass

from compress.audit.engine import EIGHT_BITS, AuditedLayer, EngineAudit
from compress.errors import first_few
from compress.roofline_model import Device, Roofline, Row, find_device
from compress.roofline_model.counting import Kernel
from compress.roofline_model.model import row_under_roof


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """A weighted layer with the kernels that quantize its result, in INT8 as built and in fp16 as estimated.

    Times are the least for the batch, bytes are of activations for one image.
    """

    name: str
    int8_ms: float
    fp16_ms: float
    int8_bytes: float
    fp16_bytes: float

    @property
    def int8_pays(self) -> bool:
        return self.int8_ms < self.fp16_ms


def engine_roofline(audit: EngineAudit, *, device: str | Device, batch_size: int = 32) -> Roofline:
    """Compute the roofline of an engine's layers on a device: a name of `DEVICE_NAMES`, `machine`, or a `Device`."""
    found = find_device(device)
    most = max(audit.weighted, key=lambda layer: layer.macs or 0, default=None)
    precision = _device_precision(most.precision) if most else "fp32"
    return Roofline(
        model="engine",
        device=found,
        precision=precision,
        batch_size=batch_size,
        fused=True,
        input_shapes=(),
        rows=tuple(_row(layer, found, batch_size) for layer in audit.layers if layer.role != "host"),
        ridge_point=found.ridge_point(precision),
    )


def _device_precision(name: str) -> str:
    """The device table's name of a type; FP32, the slowest, if the type is unknown."""
    return {"uint8": "int8", "": "fp32", "unknown": "fp32"}.get(name, name)


def _row(layer: AuditedLayer, device: Device, batch_size: int) -> Row:
    precision = _device_precision(layer.precision) + ("-2:4" if layer.sparse else "")
    kernel = Kernel(
        name=layer.name,
        kind=layer.operation,
        type=layer.kind,
        detail=f"{'/'.join(layer.input_types)} -> {'/'.join(layer.output_types)}",
        members=layer.onnx_nodes,
        paths=(),
        macs=None if layer.macs is None else layer.macs * batch_size,
    )
    moves = (layer.weight_bytes, layer.activation_bytes * batch_size)
    peak, bandwidth = device.peak_flops_per_s(precision), device.bandwidth_bytes_per_s
    return row_under_roof(kernel, moves, peak=peak, bandwidth=bandwidth)


def int8_choices(audit: EngineAudit, *, device: str | Device, batch_size: int = 32) -> tuple[LayerChoice, ...]:
    """The least time of every 8-bit weighted layer as built, and that of fp16 in its place."""
    found = find_device(device)
    writers = {name: layer for layer in audit.weighted for name in layer.writes}
    followers: dict[str, list[tuple[AuditedLayer, int]]] = {}
    for layer in audit.layers:
        if layer.role in {"requantize", "add"}:
            before = {writers[name].name for name in layer.reads if name in writers}
            for name in before:
                followers.setdefault(name, []).append((layer, len(before)))
    return tuple(
        _choice(layer, followers.get(layer.name, []), found, batch_size)
        for layer in audit.weighted
        if layer.precision in EIGHT_BITS and layer.macs and not layer.unknown_sizes
    )


def _choice(layer: AuditedLayer, after: list[tuple[AuditedLayer, int]], device: Device, batch_size: int) -> LayerChoice:
    bandwidth = device.bandwidth_bytes_per_s
    flops = 2 * (layer.macs or 0) * batch_size
    extra = sum(kernel.activation_bytes / among for kernel, among in after)
    extra_half = sum(kernel.fp16_bytes / among for kernel, among in after)
    own = layer.activation_bytes * batch_size + layer.weight_bytes
    half = (layer.fp16_bytes + extra_half) * batch_size + 2 * layer.weight_bytes
    eight = _device_precision(layer.precision)
    return LayerChoice(
        name=layer.name,
        int8_ms=1e3 * (max(flops / device.peak_flops_per_s(eight), own / bandwidth) + extra * batch_size / bandwidth),
        fp16_ms=1e3 * max(flops / device.peak_flops_per_s("fp16"), half / bandwidth),
        int8_bytes=layer.activation_bytes + extra,
        fp16_bytes=layer.fp16_bytes + extra_half,
    )


def choices_text(choices: tuple[LayerChoice, ...], *, device: str, batch_size: int) -> str:
    if not choices:
        return "The engine has no 8-bit layer."
    eight, half = sum(c.int8_ms for c in choices), sum(c.fp16_ms for c in choices)
    best = sum(min(c.int8_ms, c.fp16_ms) for c in choices)
    paying = [c.name for c in choices if c.int8_pays]
    where = f": {first_few(paying, 6)}" if 0 < len(paying) < len(choices) else ""
    return (
        f"Under the roofs of {device} at batch {batch_size} the weighted layers take at least {eight:.3f} ms in INT8 "
        f"as built, {half:.3f} ms in fp16, and {best:.3f} ms with the better of the two for each. INT8 can pay in "
        f"{len(paying)} of {len(choices)} layers{where}."
    )
