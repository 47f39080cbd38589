"""The steps that measure: the metric of every engine, latency of all in turn, and layers no faster than float."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_map

from compress.data.base import Batch, BatchPlan, Preprocessing
from compress.engines import Engine, build_engine
from compress.engines.base import load_onnx
from compress.engines.registry import suits, target_of
from compress.errors import CompressError, DataError, EngineError, EngineUnavailableError
from compress.export.names import module_of
from compress.files import replacing, write_json
from compress.graph.ops import onnx_operators
from compress.measure import BenchSpec
from compress.measure.accuracy import (
    EngineFigures,
    compare_evidence,
    compare_figures,
    kept_images,
    measure_accuracy,
    measure_metric,
)
from compress.measure.latency import (
    Latency,
    cpu_time,
    disturbance,
    first_quiet,
    latency_ratio,
    measure_engine_layers,
    measure_latency,
    paired_interval,
    random_inputs,
)
from compress.measure.machine import describe_machine
from compress.measure.metric import PAIRED, Metric
from compress.measure.parity import LayerDifference, first_difference
from compress.pipeline.run import NetworkFiles, Run
from compress.quantization import Target
from compress.records.files import (
    INTERVALS,
    PRECISION,
    PREDICTIONS,
    SLOWER,
    IntervalRow,
    LayerCost,
    PrecisionRow,
    PredictionRow,
    SlowRow,
)
from compress.records.summary import family, not_faster
from compress.support.meters import Meter, shown
from compress.support.process import core_count
from compress.support.progress import NoProgress, Progress
from compress.support.text import display, significant
from compress.tasks.base import Evidence
from compress.tasks.classification import TOP1
from compress.tasks.detection import Detections
from compress.variants import Variant

TIMED_ENGINES = ("openvino", "onnxruntime")
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
        if engine in TIMED_ENGINES and row.variant in files and suits(engine, targets):
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
                precision="f32" if engine == "openvino" and "f32" in row.float_engine else None,
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


def layers_of(path: Path) -> list[str]:
    nodes = (node for node in load_onnx(path).graph.node if node.op_type in _LAYERS)
    return [module for module in dict.fromkeys(module_of(node.name) for node in nodes) if module]


def keep_slower(
    folder: Path, rows: Sequence[SlowRow], files: Mapping[str, NetworkFiles], spec: BenchSpec
) -> Sequence[SlowRow]:
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


IMAGES = 4
_LONGEST_SIDE = 480
_QUALITY = 85
_FOLDER = "predictions"
TRUTH = "truth"


@dataclass
class Answers:
    """The kept answers of one network on one engine.

    Attributes:
        evidence: each image's part of the metric, or None.
        outputs: batches of one.
    """

    evidence: Evidence | None
    wanted: tuple[int, ...] = ()
    outputs: list[Any] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    count: int = 0

    def update(self, outputs: Any, targets: Any) -> None:
        if self.evidence is not None:
            self.evidence.update(outputs, targets)
        for i in range(len(targets)):
            if self.count + i in self.wanted:
                self.outputs.append(tree_map(operator.itemgetter(slice(i, i + 1)), outputs))
                self.targets.append(targets[i : i + 1])
        self.count += len(targets)


def answers_of(run: Run) -> Answers:
    count = len(run.data.val)
    wanted = sorted({round(i * (count - 1) / max(1, IMAGES - 1)) for i in range(min(IMAGES, count))})
    return Answers(evidence=None if run.task.evidence is None else run.task.evidence(), wanted=tuple(wanted))


def keep_comparisons(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    """Write intervals.json, precision.json and images; failures become notes."""
    for work in (_keep_intervals, _keep_precision, _keep_images):
        try:
            work(run, seen)
        except (CompressError, ValueError, TypeError, RuntimeError, IndexError) as error:  # of a user's own decoding
            what = work.__name__.removeprefix("_keep_")
            run.notes.append(f"the report has no {what} ({type(error).__name__}: {error})")


def _keep_intervals(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    metric, rows = run.task.metric, []
    for (variant, label), one in seen.items():
        reference = seen.get((Variant.FLOAT, label)) or seen.get((Variant.FLOAT, "torch"))  # of engines without float
        if one.evidence is None or reference is None or reference.evidence is None:
            continue
        found = compare_evidence(reference.evidence, one.evidence)
        shown = {
            name: metric.shown(getattr(found, name))
            for name in ("value", "low", "high", "difference", "difference_low", "difference_high")
        }
        rows.append(
            IntervalRow(
                variant=variant,
                engine=label,
                metric=metric.name,
                unit=metric.unit,
                images=found.images,
                measurable=found.measurable,
                **shown,
            )
        )
    if rows:
        INTERVALS.write(run.folder.path, rows)


def _keep_precision(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    rows = [
        PrecisionRow(variant=variant, engine=label, label=name, precision=precision)
        for (variant, label), one in _first_engines(seen).items()
        if isinstance(one.evidence, Detections)
        for name, precision in one.evidence.curves()
    ]
    if rows:
        PRECISION.write(run.folder.path, rows)


def _first_engines(seen: Mapping[tuple[Variant, str], Answers]) -> dict[tuple[Variant, str], Answers]:
    chosen: dict[Variant, str] = {}
    for variant, label in seen:
        if variant not in chosen or (chosen[variant].startswith("torch") and not label.startswith("torch")):
            chosen[variant] = label
    return {(variant, label): seen[variant, label] for variant, label in chosen.items()}


def _keep_images(run: Run, seen: Mapping[tuple[Variant, str], Answers]) -> None:
    chosen = _first_engines(seen)
    if not chosen:
        return
    first = next(iter(chosen.values()))
    if first.count != len(run.data.val):  # images that cannot be read shift those after them
        raise DataError(f"{first.count} of {len(run.data.val)} images could be read")
    draw = _classified(run, first.targets[0]) if run.task.draw is None else run.task.draw
    if draw is None:
        return
    rows: list[PredictionRow] = []
    for place, index in enumerate(first.wanted):
        images = run.data.val.load([index], epoch=None, device=torch.device("cpu"))[0]
        pixels = run.data.val.preprocessing.pixels(images)
        if pixels.shape[1] not in (1, 3):
            return
        shown: list[tuple[str, str, Any]] = [(TRUTH, "", None)]
        shown += [(variant, label, one.outputs[place]) for (variant, label), one in chosen.items()]
        for variant, label, outputs in shown:
            drawn = draw(pixels, outputs, first.targets[place] if outputs is None else None)
            picture, text = drawn if isinstance(drawn, tuple) else (drawn, "")
            name = f"{_FOLDER}/{place}-{variant}.jpg"
            _save(picture[0], run.folder / name)
            rows.append(PredictionRow(image=index, variant=variant, engine=label, file=name, text=text))
    PREDICTIONS.write(run.folder.path, rows)


def _classified(run: Run, target: Any) -> Callable[[Tensor, Any, Any], tuple[Tensor, str]] | None:
    """Return a drawing of classes as text; None without one class for each image."""
    if run.task.name != "classification" or torch.as_tensor(target).numel() != 1:
        return None
    labels: Sequence[str] = run.data.val.labels

    def draw(pixels: Tensor, outputs: Any, targets: Any) -> tuple[Tensor, str]:
        if outputs is None:
            return pixels, str(labels[int(targets[0])])
        share, label = torch.as_tensor(outputs)[0].float().softmax(0).max(0)
        name = labels[int(label)] if int(label) < len(labels) else str(int(label))
        return pixels, f"{name} {100 * share.item():.0f} %"

    return draw


def _save(pixels: Tensor, path: Path) -> None:
    """Write an image (C, H, W) uint8 as JPEG, longer side at most 480 pixels."""
    image = Image.fromarray(pixels.expand(3, -1, -1).movedim(0, -1).contiguous().cpu().numpy())
    scale = _LONGEST_SIDE / max(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    with replacing(path) as temporary:
        image.save(temporary, format="JPEG", quality=_QUALITY)


_CLASSIFICATION_BATCH = 32


def evaluation_batch(run: Run) -> int:
    return _CLASSIFICATION_BATCH if run.task.name == "classification" else run.recipe.data.batch_size


def judge(
    run: Run,
    engine: Engine,
    *,
    preprocessing: Preprocessing | None = None,
    limit: int | None = None,
    answers: Answers | None = None,
) -> EngineFigures:
    """Measure the task's metric on an engine.

    `preprocessing` is compared with the file's; `limit` None = all; `answers` keeps outputs for the report.
    """
    batches = _Evaluation(run, limit)
    metric = run.task.metric
    if metric is TOP1:
        seen = measure_accuracy(engine, batches, preprocessing=preprocessing, keep_logits=True, progress=run.progress)
        logits = torch.from_numpy(seen.logits)
        if answers is not None:
            answers.update(logits, torch.cat(batches.targets))
        values = {"top1": seen.top1, "top5": seen.top5}
        return EngineFigures(label=seen.label, values=values, images=seen.images, outputs=(logits,), notes=seen.notes)
    probe = {tensor.name: torch.zeros(1, *tensor.shape[1:]) for tensor in engine.outputs}
    if answers is not None:
        metric = replace(metric, make=lambda: _Both(run.task.metric.make(), answers))
    return measure_metric(
        engine,
        batches,
        metric,
        preprocessing=preprocessing,
        keep=kept_images(probe),
        progress=run.progress,
    )


def judge_file(run: Run, path: Path, engine: str, limit: int | None, **options: Any) -> EngineFigures:
    with build_engine(path, engine, **options) as built:
        return judge(run, built, limit=limit)


class _Both:
    def __init__(self, meter: Meter, answers: Answers) -> None:
        self.meter, self.answers = meter, answers

    def update(self, outputs: Any, targets: Any) -> None:
        self.meter.update(outputs, targets)
        self.answers.update(outputs, targets)

    def compute(self) -> object:
        return self.meter.compute()


class _Evaluation:
    def __init__(self, run: Run, limit: int | None) -> None:
        self.split = run.data.val
        self.plan = BatchPlan(batch_size=evaluation_batch(run), limit=limit)
        self.targets: list[Any] = []

    def __len__(self) -> int:
        return self.split.steps(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        self.targets.clear()
        for images, targets in self.split.batches(self.plan):
            self.targets.append(targets)
            yield images, targets


TIMINGS = ("p50_ms", "p90_ms", "p99_ms", "images_per_s", "gpu_p50_ms", "gpu_with_transfers_p50_ms", *PAIRED)

_LEAST_TURNS = 6  # turns from which on order statistics bound a median at 95 %
PROBE_IMAGES = 8
POOR_PARITY_DB = 20.0  # signal to noise of logits under which the first differing layer is looked for
ADDS_UP_DB = 10.0  # loss within one layer that rounding explains


def evaluate_step(run: Run) -> None:
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
    with run.in_torch(variant, target) as engine:
        label = engine.info.label
        seen = judge(run, engine, answers=answers.setdefault((variant, label), answers_of(run)))
    metrics += _figures(run, variant, label, seen)
    _say(run, variant, label, seen)
    return seen


def _say(run: Run, variant: Variant, label: str, seen: EngineFigures) -> None:
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
    spec, suits = run.recipe.quantization, target_of(engine)
    if spec is None or not variant.is_quantized or suits is None or suits in spec.targets:
        return ""
    return (
        f"; the file is for target {spec.targets[0]}, and {suits} is the target that suits this engine: name both in "
        "quantization.target"
    )


def _of_those_before(found: LayerDifference) -> str:
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
            value=shown(value, unit),
            unit=unit,
            method=method,
            direction=metric.direction if name == metric.name != "top1" else "",
        )
        for name, value in seen.values.items()
        for unit in [metric.units.get(name, metric.unit)]
    ]


def bench_step(run: Run) -> None:
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
