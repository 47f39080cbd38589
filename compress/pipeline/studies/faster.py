"""Networks with layers in float that an engine runs slower in INT8, timed beside float and PTQ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from compress.engines import build_engine
from compress.errors import RunError
from compress.export.onnx import export_onnx
from compress.files import write_text
from compress.measure import BenchSpec, Latency, first_quiet, measure_latency
from compress.pipeline.again import finished_run, network
from compress.pipeline.run import Run
from compress.pipeline.steps.judge import evaluation_batch, judge
from compress.pipeline.steps.ptq import calibration_images
from compress.pipeline.steps.slower import precision_of
from compress.quantization.ptq.quantize import quantize
from compress.quantization.spec import TARGETS, QuantSpec, Rule, Target
from compress.records.files import SLOWER
from compress.records.rows import MixedRow, SlowRow
from compress.records.slower import costly
from compress.records.summary import family
from compress.support.progress import NoProgress, Progress
from compress.variants import Variant

_SHARES = (0.25, 0.5, 1.0)
FLOAT = "float"


def quantizing_run(folder: Path) -> Run:
    """Return a finished run that quantizes, with its data.

    Raises:
        RunError: no run, or none that quantizes.
        DataError: its data are not here.
    """
    run = finished_run(folder)
    if run.recipe.quantization is None:
        raise RunError(f"{folder} is of a recipe with quantization: null, so that nothing of it can be left in float")
    return run


def faster(folder: Path, spec: BenchSpec, *, progress: Progress | None = None) -> tuple[SlowRow, ...]:
    """Build and measure a mixed network for each engine that is slower in INT8; return the folder's rows.

    Raises:
        RunError: no run, or none that quantizes.
        EngineError: an engine cannot take a network.
    """
    rows = tuple(SLOWER.read(folder) or ())
    # PTQ is made anew, at the first batch size: its own row comes first.
    chosen = {row.engine: row for row in reversed(rows) if family(row.engine) in spec.engines and costly(row)}
    if not chosen:
        return rows
    run = quantizing_run(folder)
    run.progress = progress or NoProgress()
    model = network(run, Variant.FLOAT).eval()
    found = {engine: _mixed(run, model, row, spec) for engine, row in chosen.items()}
    rows = tuple(replace(row, mixed=found[row.engine]) if row.engine in found else row for row in rows)
    SLOWER.write(folder, rows)
    return rows


def _mixed(run: Run, model: nn.Module, row: SlowRow, spec: BenchSpec) -> MixedRow:
    tried = {f"{len(layers)} layers": layers for layers in choices(costly(row))}
    files = {FLOAT: run.path(Variant.FLOAT.onnx_file)}
    files |= {label: _export(run, model, row, layers) for label, layers in tried.items()}
    times = _times(files, row, spec, run.progress)
    best = min(tried, key=lambda label: times[label].p50_ms)
    name = f"mixed-{family(row.engine)}.yaml"
    write_text(run.path(name), replace(run.recipe, quantization=_spec(run, row, tried[best])).to_yaml())
    return MixedRow(
        layers=tried[best],
        p50_ms=times[best].p50_ms,
        float_p50_ms=times[FLOAT].p50_ms,
        score=_score(run, files[best], row),
        recipe=name,
        unquiet=next((one.unquiet for one in times.values() if one.unquiet), ""),
    )


def choices(layers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the costliest quarter of the layers, their costliest half, and all of them.

    >>> choices(["a", "b", "c"])
    [('a',), ('a', 'b'), ('a', 'b', 'c')]
    """
    counts = dict.fromkeys(math.ceil(share * len(layers)) for share in _SHARES)
    return [tuple(layers[:count]) for count in counts]


def _target(row: SlowRow) -> Target | None:
    return next((target for target in TARGETS if target == row.target), None)


def _spec(run: Run, row: SlowRow, layers: Sequence[str]) -> QuantSpec:
    """Return the quantization with further float layers in the engine's file."""
    spec, target = run.quantization, _target(row)
    return replace(spec, rules=(*spec.rules, *(Rule(match=layer, enable=False, target=target) for layer in layers)))


def _export(run: Run, model: nn.Module, row: SlowRow, layers: Sequence[str]) -> Path:
    """Write a network's ONNX file, quantized as PTQ does."""
    spec = _spec(run, row, layers).for_target(_target(row))
    made = quantize(model, run.example.to(run.device), calibration_images(run, spec), spec=spec, progress=run.progress)
    path = run.path(f"mixed/{family(row.engine)}-{len(layers)}.onnx")
    return export_onnx(made.cpu(), run.example, path, preprocessing=run.data.val.preprocessing)


def _times(files: Mapping[str, Path], row: SlowRow, spec: BenchSpec, progress: Progress) -> dict[str, Latency]:
    """Return latencies in turn; float in its fastest precision."""
    with ExitStack() as stack:
        engines = {
            label: stack.enter_context(
                build_engine(
                    path,
                    family(row.engine),
                    batch_size=row.batch_size,
                    threads=spec.threads,
                    precision=precision_of(row.float_engine if label == FLOAT else row.engine),
                )
            )
            for label, path in files.items()
        }
        timed = first_quiet(
            partial(
                measure_latency,
                engines,
                batch_size=row.batch_size,
                warmup=spec.warmup,
                runs=spec.runs,
                seconds=spec.seconds,
                progress=progress,
            )
        )
    return {one.label: one for one in timed}


def _score(run: Run, path: Path, row: SlowRow) -> str:
    """The metric of a file on the engine, over the evaluation split."""
    metric = run.task.metric
    precision, size = precision_of(row.engine), evaluation_batch(run)
    with build_engine(path, family(row.engine), batch_size=size, precision=precision) as engine:
        seen = judge(run, engine, preprocessing=run.data.val.preprocessing)
    return f"{metric.text(seen.values[metric.name])} {metric.title}"
