"""The steps that measure the metric of every engine, and latency of all in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.engines import Engine
from compress.engines.registry import target_of
from compress.errors import EngineError, EngineUnavailableError
from compress.files import write_json
from compress.measure.accuracy import EngineFigures, compare_figures
from compress.measure.latency import (
    Latency,
    first_quiet,
    latency_ratio,
    measure_latency,
    paired_interval,
    random_inputs,
)
from compress.measure.layer_parity import LayerDifference, first_difference
from compress.measure.machine import describe_machine
from compress.measure.metric import PAIRED, Metric
from compress.measure.spec import BenchSpec
from compress.pipeline.run import NetworkFiles, Run
from compress.pipeline.steps.answers import Answers, answers_of, keep_comparisons
from compress.pipeline.steps.judge import evaluation_batch, judge
from compress.pipeline.steps.slower import keep_slower, slower
from compress.quantization.spec import Target
from compress.records.summary import family
from compress.support.progress import Progress
from compress.support.text import display, significant
from compress.variants import Variant

TIMINGS = ("p50_ms", "p90_ms", "p99_ms", "images_per_s", "gpu_p50_ms", "gpu_with_transfers_p50_ms", *PAIRED)
"""Names of the metrics that `bench` measures."""

_LEAST_TURNS = 6
"""Turns from which on order statistics bound a median at 95 %."""
PROBE_IMAGES = 8
POOR_PARITY_DB = 20.0
"""Signal to noise of logits under which the first differing layer is looked for."""
ADDS_UP_DB = 10.0
"""Loss within one layer that rounding explains."""


def evaluate_step(run: Run) -> None:
    """Measure each network on each engine, and its distance to fake quantization."""
    if run.folder.done("evaluate"):
        return
    write_json(run.path("environment.json"), describe_machine().to_dict())
    metrics: list[Metric] = []
    references: dict[tuple[Variant, Target | None], EngineFigures] = {}
    answers: dict[tuple[Variant, str], Answers] = {}
    for variant in run.variants:
        references[variant, None] = _evaluate_torch(run, variant, None, metrics, answers)
        for engine, precision in _engines(run.recipe.bench):
            key = run.key(variant, target_of(engine))
            if engine == "torch":
                continue
            if key not in references:
                references[key] = _evaluate_torch(run, *key, metrics, answers)
            metrics += _evaluate_engine(run, variant, engine, precision, references[key], answers)
    keep_comparisons(run, answers)
    run.notes += _training_lost(run, {variant: references[variant, None] for variant in run.variants})
    run.folder.add_metrics(metrics)
    run.finish("evaluate")


def _evaluate_torch(
    run: Run,
    variant: Variant,
    target: Target | None,
    metrics: list[Metric],
    answers: dict[tuple[Variant, str], Answers],
) -> EngineFigures:
    """Measure the network in torch, the reference of its engines."""
    with run.in_torch(variant, target) as engine:
        label = engine.info.label
        seen = judge(run, engine, answers=answers.setdefault((variant, label), answers_of(run)))
    metrics += _figures(run, variant, label, seen)
    _say(run, variant, label, seen)
    return seen


def _say(run: Run, variant: Variant, label: str, seen: EngineFigures) -> None:
    """Note the metric of a network on an engine."""
    metric = run.task.metric
    value = metric.text(seen.values[metric.name])
    run.progress.note(f"{metric.title}: {variant.label} on {display(label)} {value} of {seen.images} images")


def _evaluate_engine(
    run: Run,
    variant: Variant,
    engine: str,
    precision: str | None,
    reference: EngineFigures,
    answers: dict[tuple[Variant, str], Answers],
) -> list[Metric]:
    files = run.files(variant)
    try:
        with files.engine(engine, batch_size=evaluation_batch(run), precision=precision) as built:
            given = answers_of(run)
            seen = judge(run, built, preprocessing=run.data.val.preprocessing, answers=given)
            label = built.info.label
            answers[variant, label] = given
    except (EngineUnavailableError, EngineError) as error:
        return _unavailable((run.task.metric.name, run.task.metric.unit), variant, engine, None, error)
    metrics = _figures(run, variant, label, seen)
    _say(run, variant, label, seen)
    parity = compare_figures(reference, seen, run.task.metric)
    part = "the evaluation split" if parity.images == seen.images else f"{parity.images} images"
    method = f"engine against torch on {part}, same ONNX"
    agreement = [] if parity.agreement is None else [("agreement", 100 * parity.agreement, "%")]
    for name, value, unit in (*agreement, ("sqnr_db", parity.sqnr_db, "dB")):
        metrics.append(Metric(name=name, variant=variant, engine=label, value=value, unit=unit, method=method))
    if parity.sqnr_db < POOR_PARITY_DB:
        images = run.batches("val", PROBE_IMAGES, limit=PROBE_IMAGES)[0].numpy()
        where = where_it_differs(files.of(engine), engine, images, precision)
        run.notes.append(f"{variant} on {label}: {where}{_of_another_target(run, variant, engine)}")
    return metrics


def where_it_differs(path: Path, engine: str, images: NDArray[np.float32], precision: str | None = None) -> str:
    """Return a sentence on the first layer in which an engine differs from its file, if its logits are far off."""
    try:
        found = first_difference(path, engine, images, precision=precision)
    except EngineError as error:
        return f"its logits are far from torch's, and its layers could not be compared ({error})"
    if found is None:
        return (
            "its logits are far from torch's, yet every layer computes what the file says: it is the file that differs"
        )
    return (
        f"the first layer that differs from the file (fake quantization) is {found.node} ({found.op_type}), "
        f"{found.sqnr_db:.1f} dB; {_of_those_before(found)}"
    )


def _training_lost(run: Run, seen: Mapping[Variant, EngineFigures]) -> list[str]:
    """Warn if QAT lost more than twice the standard error of the difference."""
    notes, metric = [], run.task.metric
    for after in seen:
        before = after.trained_from
        if before is None or before not in seen:
            continue
        had, has = seen[before].values[metric.name], seen[after].values[metric.name]
        shares = had * (1 - had) + has * (1 - has)  # of an error rate; for other metrics an estimate
        error = (max(shares, 0.0) / max(1, seen[after].images)) ** 0.5 if metric.unit == "%" else 0.0
        if metric.drop(had, has) > 2 * metric.shown(error):
            spec, kept = run.qat, run.quantization.batchnorm == "keep"
            way = "" if kept else ", or quantization.batchnorm: keep, which allows higher rates"
            notes.append(
                f"{after}: training took {metric.title} from {metric.text(had)} to {metric.text(has)} (in torch); "
                f"qat.lr {spec.lr:g} with "
                f"{spec.optimizer} is too high for it, if {after}.csv shows no other cause: try a tenth{way}"
            )
    return notes


def _of_another_target(run: Run, variant: Variant, engine: str) -> str:
    """Warn of files written for one engine and measured on another."""
    spec, suits = run.recipe.quantization, target_of(engine)
    if spec is None or not variant.is_quantized or suits is None or suits in spec.targets:
        return ""
    return (
        f"; the file is for target {spec.targets[0]}, and {suits} is the target that suits this engine: name both in "
        "quantization.target"
    )


def _of_those_before(found: LayerDifference) -> str:
    """Tell whether a layer is at fault, or rounding that adds up."""
    if found.before_db == float("inf"):
        return "nothing differs before it"
    if found.before_db - found.sqnr_db < ADDS_UP_DB:
        return f"{found.before_db:.1f} dB before it, so that rounding adds up and no layer is at fault"
    return f"those before it are at {found.before_db:.1f} dB and more, so look there"


def _figures(run: Run, variant: str, label: str, seen: EngineFigures) -> list[Metric]:
    metric, method = run.task.metric, f"{seen.images} images, the whole evaluation split"
    return [
        Metric(
            name=name,
            variant=variant,
            engine=label,
            value=metric.shown(value),
            unit=metric.unit,
            method=method,
            direction=metric.direction if name == metric.name != "top1" else "",
        )
        for name, value in seen.values.items()
    ]


def bench_step(run: Run) -> None:
    """Measure latency and throughput of every network on every engine."""
    if run.folder.done("bench"):
        return
    files = {str(variant): run.files(variant) for variant in run.variants}
    spec, metrics = run.recipe.bench, bench(files, run.recipe.bench, progress=run.progress)
    run.folder.add_metrics(metrics)
    targets = () if run.recipe.quantization is None else run.recipe.quantization.targets
    keep_slower(run.folder.path, slower(files, metrics, spec, targets, progress=run.progress), files, spec)
    run.finish("bench")


def bench(
    files: Mapping[str, NetworkFiles], spec: BenchSpec, *, sides: Sequence[int] = (), progress: Progress
) -> list[Metric]:
    """Measure latency, all variants in turn at each batch size."""
    metrics: list[Metric] = []
    for batch_size in spec.batch_sizes:
        with ExitStack() as stack:
            engines: dict[str, tuple[str, Engine]] = {}
            for variant, network in files.items():
                for name, precision in _engines(spec):
                    try:
                        built = network.engine(name, batch_size=batch_size, threads=spec.threads, precision=precision)
                    except EngineError as error:
                        metrics += _unavailable(("p50_ms", "ms"), variant, name, batch_size, error)
                        continue
                    stack.enter_context(built)
                    engines[f"{variant}: {built.info.label}"] = (variant, built)
            metrics += _latencies(engines, spec, batch_size, sides, progress)
    return metrics


def _latencies(
    engines: dict[str, tuple[str, Engine]],
    spec: BenchSpec,
    batch_size: int,
    sides: Sequence[int],
    progress: Progress,
) -> list[Metric]:
    if not engines:
        return []
    timed = first_quiet(
        partial(
            measure_latency,
            {key: engine for key, (_, engine) in engines.items()},
            batch_size=batch_size,
            sides=sides,
            warmup=spec.warmup,
            runs=spec.runs,
            seconds=spec.seconds,
            progress=progress,
        )
    )
    metrics = [*_gpu_times(engines, batch_size, sides), *paired_speeds(engines, timed)]
    for row in timed:
        variant, engine = engines[row.label]
        progress.note(
            f"latency: {display(variant)} on {display(engine.info.label)}, batch {batch_size}: "
            f"{significant(row.p50_ms)} ms{', on a busy machine' if row.unquiet else ''}"
        )
        method = f"{row.runs} runs, {len(engines)} variants in turn, after {spec.warmup} warm-up runs"
        figures = (
            ("p50_ms", row.p50_ms, "ms"),
            ("p90_ms", row.p90_ms, "ms"),
            ("p99_ms", row.p99_ms, "ms"),
            ("images_per_s", row.images_per_s, "images/s"),
        )
        metrics += [
            Metric(
                name=name,
                variant=variant,
                engine=engine.info.label,
                batch_size=batch_size,
                value=value,
                unit=unit,
                method=method,
                status="partial" if row.unquiet else "complete",
                reason=row.unquiet,
            )
            for name, value, unit in figures
        ]
    return metrics


def paired_speeds(engines: Mapping[str, tuple[str, Engine]], timed: Sequence[Latency]) -> Iterator[Metric]:
    """Yield speeds over float's fastest on the same engine with 95 % intervals, if comparable.

    `engines` are by labels of `timed`.
    """
    for row in timed:
        variant, engine = engines[row.label]
        own = family(engine.info.label)
        floats = [
            (one, label)
            for one in timed
            for other, label in [(engines[one.label][0], engines[one.label][1].info.label)]
            if other == Variant.FLOAT and family(label) == own
        ]
        if variant == Variant.FLOAT or not floats:
            continue
        fastest, label = min(floats, key=lambda pair: pair[0].p50_ms)
        if row.unquiet or fastest.unquiet or len(row.turns_ms) < _LEAST_TURNS:
            continue
        low, high = paired_interval(fastest.turns_ms, row.turns_ms)
        turns = f"{len(row.turns_ms)} {'turn' if len(row.turns_ms) == 1 else 'turns'}"
        for name, value in zip(PAIRED, (latency_ratio(fastest, row), low, high), strict=True):
            yield Metric(
                name=name,
                variant=variant,
                engine=engine.info.label,
                batch_size=row.batch_size,
                value=value,
                unit="×",
                method=f"against float on {label}, median over {turns} in pairs",
            )


def _gpu_times(engines: dict[str, tuple[str, Engine]], batch_size: int, sides: Sequence[int]) -> list[Metric]:
    """Return times by the GPU's clock, with and without copies."""
    metrics = []
    for label, (variant, engine) in engines.items():
        seen = engine.gpu_times(random_inputs(engine, label, batch_size, sides))
        if seen is None:
            continue
        method = f"median of {len(seen.compute_ms)} runs, CUDA events"
        for name, times in (("gpu_p50_ms", seen.compute_ms), ("gpu_with_transfers_p50_ms", seen.total_ms)):
            metrics.append(
                Metric(
                    name=name,
                    variant=variant,
                    engine=engine.info.label,
                    batch_size=batch_size,
                    value=float(np.median(times)),
                    unit="ms",
                    method=method,
                )
            )
    return metrics


def _engines(spec: BenchSpec) -> list[tuple[str, str | None]]:
    """(engine, precision); OpenVINO in float32 and its own choice."""
    pairs: list[tuple[str, str | None]] = []
    for name in spec.engines:
        pairs += [(name, "f32"), (name, None)] if name == "openvino" else [(name, None)]
    return pairs


def _unavailable(
    name: tuple[str, str], variant: str, engine: str, batch_size: int | None, error: Exception
) -> list[Metric]:
    row = Metric(
        name=name[0],
        variant=variant,
        engine=engine,
        batch_size=batch_size,
        value=None,
        unit=name[1],
        status="unavailable",
        reason=str(error),
    )
    return [row]
