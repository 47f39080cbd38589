"""Layers of quantized networks that are no faster than float."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from compress.engines.onnx_file import load_onnx
from compress.engines.registry import suits, target_of
from compress.errors import EngineError
from compress.export.names import module_of
from compress.graph.ops import onnx_operators
from compress.measure.latency import cpu_time, disturbance, measure_engine_layers
from compress.measure.metric import Metric
from compress.measure.spec import BenchSpec
from compress.pipeline.run import NetworkFiles
from compress.quantization.spec import Target
from compress.records.files import SLOWER
from compress.records.rows import LayerCost, SlowRow
from compress.records.slower import not_faster
from compress.records.summary import family
from compress.support.process import core_count
from compress.support.progress import NoProgress, Progress
from compress.variants import Variant

_ENGINES = ("openvino", "onnxruntime")
"""Engines that time their layers."""
_RUNS = (5, 30)
_WARMUP = 3
_TRIES = 2
_LAYERS = onnx_operators(lambda traits: traits.category in {"weighted", "product"})


def slower(
    files: Mapping[str, NetworkFiles],
    metrics: Sequence[Metric],
    spec: BenchSpec,
    targets: Sequence[Target],
    *,
    progress: Progress | None = None,
) -> tuple[SlowRow, ...]:
    """Return the quantized networks no faster than float, with the layers at fault.

    Files placed for another engine are left out. `metrics` are those of `bench`; `spec` has engines, threads and time.
    """
    rows = []
    for row in not_faster(metrics):
        engine = family(row.engine)
        if engine in _ENGINES and row.variant in files and suits(engine, targets):
            plain, quantized = (files[name].of(engine) for name in (Variant.FLOAT, row.variant))
            rows.append(_with_layers(row, plain, quantized, spec, progress or NoProgress()))
    return tuple(rows)


def _with_layers(row: SlowRow, plain: Path, quantized: Path, spec: BenchSpec, progress: Progress) -> SlowRow:
    """Time the layers of both networks, again if the machine was busy, and return the row with the slower ones."""
    engine, (least, most) = family(row.engine), _RUNS
    runs = max(least, min(most, spec.runs, int(1e3 * spec.seconds / (row.p50_ms + row.float_p50_ms))))
    for _ in range(_TRIES):
        before = cpu_time()
        try:
            times = measure_engine_layers(
                {"float": plain, "quantized": quantized},
                layers_of(plain),
                engine=engine,
                batch_size=row.batch_size,
                precision=precision_of(row.float_engine),
                threads=spec.threads,
                warmup=_WARMUP,
                runs=runs,
                follow=True,
                progress=progress,
            )
        except EngineError:  # an engine of a version that does not time its layers
            return row
        unquiet = disturbance(before, cpu_time(), cores=os.cpu_count() or 1, usable=core_count())
        if not unquiet:
            break
    row = replace(row, target=target_of(engine) or "", unquiet=unquiet)
    if unquiet:
        return row
    float_ms, quantized_ms = times["float"].ms, times["quantized"].ms
    costs = [
        LayerCost(layer=layer, float_ms=float_ms[layer], quantized_ms=quantized_ms[layer])
        for layer in float_ms
        if quantized_ms[layer] > float_ms[layer]
    ]
    costs.sort(key=lambda cost: -cost.lost_ms)
    return replace(row, layers=tuple(costs), rest_ms=times["quantized"].rest_ms, float_rest_ms=times["float"].rest_ms)


def precision_of(label: str) -> str | None:
    """Return the precision that gives an engine this label."""
    return "f32" if family(label) == "openvino" and "f32" in label else None


def layers_of(path: Path) -> list[str]:
    """Return the modules whose nodes multiply, each once."""
    nodes = (node for node in load_onnx(path).graph.node if node.op_type in _LAYERS)
    return [module for module in dict.fromkeys(module_of(node.name) for node in nodes) if module]


def keep_slower(
    folder: Path, rows: Sequence[SlowRow], files: Mapping[str, NetworkFiles], spec: BenchSpec
) -> Sequence[SlowRow]:
    """Write rows over those of the same networks, engines and batch sizes."""
    before = SLOWER.read(folder) or ()
    kept = [
        row
        for row in before
        if row.variant not in files or family(row.engine) not in spec.engines or row.batch_size not in spec.batch_sizes
    ]
    kept += rows
    if kept or before:
        SLOWER.write(folder, kept)
    return kept
