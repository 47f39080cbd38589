"""Measures the latency of several engines in turn, also from images to classes; judges whether times compare."""

from __future__ import annotations

import gc
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from compress.data.base import Preprocessing
from compress.data.decode import (
    centre_window,
    decode_jpegs,
    open_image,
    preprocessed,
    read_image,
    refusal,
    resized,
)
from compress.engines import build_engine
from compress.engines.base import Engine, TensorInfo, check_engine, load_onnx, shape_text
from compress.errors import DataError, EngineError
from compress.export.names import PREPROCESSING_KEY, find_module
from compress.kernels.resample import resample
from compress.support.limits import IMAGE_PIXELS
from compress.support.process import core_count
from compress.support.progress import NoProgress, Progress

# Most share of the processors that other processes may take from this one.
OTHERS = 0.15
# Most share of the time that a hypervisor may keep for other machines.
STEAL = 0.05
# Most ratio of the ends of a paired interval.
SPREAD = 1.5
# Most ratio of mean and median: above it, single runs were interrupted for long.
TAIL = 1.5

_TICK = 0.01  # seconds of a step of the processors' counters
_SHORT = 0.2  # seconds of a period whose counts are off by two steps
_TOO_SHORT = 0.05  # seconds of a period whose counts say nothing

BUSY = "the machine was busy"
# What stands in the place of a factor between times that are not to be compared.
NOT_MEASURED = f"not measured: {BUSY}"


@dataclass(frozen=True, kw_only=True)
class CpuTime:
    """Seconds since some start, summed over processors; `own` is of this process and its finished children."""

    wall: float
    busy: float
    own: float
    stolen: float


def cpu_time() -> CpuTime | None:
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(f) / os.sysconf("SC_CLK_TCK") for f in fields)
    except (OSError, ValueError):
        return None
    busy, own = user + nice + system + irq + softirq, sum(os.times()[:4])
    return CpuTime(wall=time.perf_counter(), busy=busy, own=own, stolen=stolen)


def disturbance(before: CpuTime | None, after: CpuTime | None, *, cores: int, usable: float) -> str:
    """Who else used the processor between two readings; "" = nobody to speak of, or unknown.

    `cores` are the machine's, `usable` those that this process may use.
    """
    if before is None or after is None or after.wall - before.wall < _TOO_SHORT:
        return ""
    seconds = after.wall - before.wall
    unsure = 2 * _TICK * cores if seconds < _SHORT else 0.0
    others = ((after.busy - before.busy) - (after.own - before.own) - unsure) / seconds
    stolen = (after.stolen - before.stolen - unsure) / (seconds * cores)
    if stolen > STEAL:
        return f"{BUSY} (its hypervisor kept {stolen:.0%} of the time)"
    if (others + usable - cores) / usable > OTHERS:
        return f"{BUSY} (other processes used {others:.1f} of {cores} processors)"
    return ""


def paired_interval(turns: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median of `turns` over `reference`, turn by turn.

    Order statistics by the sign test (Conover, Practical Nonparametric Statistics, 1999, section 3.2); with fewer than
    six turns the smallest and the largest ratio.
    """
    ratios = np.sort(np.divide(turns, reference))
    count = len(ratios)
    # Largest k with P(Binomial(n, 1/2) < k) <= 2.5 %.
    tail, term, k = 0.0, 0.5**count, 0
    while tail + term <= 0.025:
        tail, k = tail + term, k + 1
        term *= (count - k + 1) / k
    first = max(k - 1, 0)
    return float(ratios[first]), float(ratios[count - 1 - first])


def judge(turns: Mapping[str, Sequence[float]], means: Mapping[str, float], disturbed: str = "") -> dict[str, str]:
    """Why the times of a label are not to be compared with those of the others; "" = they are.

    `turns` are the medians of each turn, equally many for all labels, `means` those of all runs, ms.
    """
    if disturbed:
        return dict.fromkeys(turns, disturbed)
    found = dict.fromkeys(turns, "")
    for label, times in turns.items():
        others = [other for name, other in turns.items() if name != label]
        spreads = [high / low for low, high in (paired_interval(times, other) for other in others)]
        tail = means[label] / float(np.median(times))
        if spreads and min(spreads) > SPREAD:
            found[label] = f"{BUSY} (turn by turn, its time beside the others' moved by {min(spreads):.1f}x)"
        elif tail > TAIL:
            found[label] = f"{BUSY} (the mean of the runs is {tail:.1f}x their median)"
    return found


T = TypeVar("T")

RUNS_PER_TURN = 5  # single runs in turn would measure cold caches, and make large and small models look alike
_QUIET = NoProgress()
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Time of one run of one variant.

    Attributes:
        p50_ms, p90_ms, p99_ms: quantiles over all timed runs (Hyndman and Fan, 1996, type 7).
        float_precision: type in which the part that is not quantized ran.
        turns_ms: median of each turn, in the order of the rounds.
        unquiet: why the times are not to be compared; "" = they are.
    """

    label: str
    batch_size: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    images_per_s: float
    runs: int
    float_precision: str
    turns_ms: tuple[float, ...]
    unquiet: str = ""


def measure_latency(
    engines: Mapping[str, Engine] | Sequence[Engine],
    *,
    batch_size: int = 1,
    inputs: Mapping[str, NDArray[np.generic]] | None = None,
    sides: Sequence[int] = (),
    warmup: int = 5,
    runs: int = 50,
    seconds: float = 3.0,
    progress: Progress = _QUIET,
) -> tuple[Latency, ...]:
    """Time engines in turn, from arrays in memory to arrays in memory.

    Args:
        engines: by label; in a sequence, each engine has its own label.
        batch_size: images of one run.
        inputs: arrays for all engines, by input name; None = seeded random ones.
        sides: of random inputs whose sides after the batch are open, such as height and width.
        warmup: runs of each that are not timed, before the first round.
        runs: timed runs of each, at most.
        seconds: time for each, at most, on average, without warm-up; a round under way is finished.
        progress: advanced by every round.

    Returns:
        One result for each engine, in their order.

    Raises:
        EngineError: there is no engine, two have one label, a number is out of range, inputs do not fit, or a run
            fails.

    Examples:
        >>> engines = {name: compress.build_engine("int8.onnx", name) for name in ("openvino", "onnxruntime")}
        >>> [row.label for row in compress.measure_latency(engines, batch_size=4, warmup=1, runs=3)]
        ['openvino', 'onnxruntime']
    """
    named = _labelled(engines)
    check_numbers("measure_latency", batch_size=batch_size, warmup=warmup, runs=runs, seconds=seconds)
    arrays = {label: _inputs(engine, label, batch_size, inputs, sides) for label, engine in named.items()}
    for label, engine in named.items():
        for _ in range(warmup):
            engine.run(arrays[label])
    timed = {label: partial(_timed_run, engine, arrays[label]) for label, engine in named.items()}
    turns, disturbed = watched_turns(timed, runs=runs, seconds=seconds * len(named), progress=progress)
    found = [_latency(label, engine, turns[label], batch_size) for label, engine in named.items()]
    why = judge({row.label: row.turns_ms for row in found}, {row.label: row.mean_ms for row in found}, disturbed)
    return tuple(replace(row, unquiet=why[row.label]) for row in found)


def first_quiet(measure: Callable[[], Sequence[Latency]]) -> Sequence[Latency]:
    """The first measurement if all its times are to be compared, else a second one."""
    timed = measure()
    return measure() if any(row.unquiet for row in timed) else timed


@contextmanager
def loaded(
    files: Mapping[str, Path], engine: str, *, precisions: Mapping[str, str | None] | None = None, **options: Any
) -> Iterator[dict[str, Engine]]:
    """Files (by label) on an engine, closed at the end."""
    with ExitStack() as stack:
        yield {
            label: stack.enter_context(build_engine(path, engine, precision=(precisions or {}).get(label), **options))
            for label, path in files.items()
        }


def time_files(
    files: Mapping[str, Path],
    engine: str,
    *,
    batch_size: int = 1,
    threads: int | None = None,
    precisions: Mapping[str, str | None] | None = None,
    **timing: Any,
) -> dict[str, Latency]:
    """Time ONNX files (by label) in turn on an engine, a second time if the machine was busy."""
    with loaded(files, engine, precisions=precisions, batch_size=batch_size, threads=threads) as engines:
        timed = first_quiet(partial(measure_latency, engines, batch_size=batch_size, **timing))
    return {row.label: row for row in timed}


def latency_ratio(value: Latency, reference: Latency) -> float:
    """The median, over the rounds of a measurement, of the time of `value` over that of `reference`."""
    if len(value.turns_ms) != len(reference.turns_ms) or value.batch_size != reference.batch_size:
        raise EngineError(
            f"{value.label} ({len(value.turns_ms)} turns, batch {value.batch_size}) and {reference.label} "
            f"({len(reference.turns_ms)} turns, batch {reference.batch_size}) were not measured in turn: "
            "give both to one measure_latency"
        )
    return float(np.median(np.divide(value.turns_ms, reference.turns_ms)))


def check_numbers(where: str, *, batch_size: int, warmup: int, runs: int, seconds: float) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("warmup", warmup, 0), ("runs", runs, 1)):
        if value < least:
            raise EngineError(f"{where}: {name} is {value}: it must be {least} or more")
    if not seconds > 0:
        raise EngineError(f"{where}: seconds is {seconds}: it must be above 0")


def _labelled(engines: Mapping[str, Engine] | Sequence[Engine]) -> dict[str, Engine]:
    if not isinstance(engines, (Mapping, Sequence)) or isinstance(engines, str):
        raise EngineError(
            f"engines is a {type(engines).__name__}: give a list of engines, or a mapping of labels to them"
        )
    for engine in engines.values() if isinstance(engines, Mapping) else engines:
        check_engine(engine)
    named = dict(engines) if isinstance(engines, Mapping) else {engine.info.label: engine for engine in engines}
    if len(named) != len(engines):
        labels = [engine.info.label for engine in engines if isinstance(engine, Engine)]
        raise EngineError(f"two engines have one label ({', '.join(labels)}): give a mapping of labels to engines")
    if not named:
        raise EngineError("measure_latency: there is no engine to measure")
    return named


def _inputs(
    engine: Engine,
    label: str,
    batch_size: int,
    given: Mapping[str, NDArray[np.generic]] | None,
    sides: Sequence[int],
) -> Mapping[str, NDArray[np.generic]]:
    for tensor in engine.inputs:
        if tensor.shape[:1] not in ((-1,), (batch_size,)):
            raise EngineError(f"{label}: batch_size is {batch_size} but input {tensor.name!r} takes {tensor.shape}")
    if given is None:
        return random_inputs(engine, label, batch_size, sides)
    for name, array in given.items():
        if len(array) != batch_size:
            raise EngineError(f"{label}: batch_size is {batch_size} but inputs[{name!r}] holds {len(array)} images")
    return given


def random_inputs(
    engine: Engine, label: str, batch_size: int, sides: Sequence[int] = ()
) -> dict[str, NDArray[np.generic]]:
    return {tensor.name: _random(tensor, label, batch_size, sides) for tensor in engine.inputs}


def _random(tensor: TensorInfo, label: str, batch_size: int, sides: Sequence[int]) -> NDArray[np.generic]:
    shape = (batch_size, *tensor.with_sides(sides).shape[1:])
    if -1 in shape:
        raise EngineError(
            f"{label}: input {tensor.name!r} takes {shape_text(tensor.shape)}: say how large its open sides are, with "
            "bench --size 320 or 480x640, or in Python with sides= or arrays as inputs="
        )
    values = np.random.default_rng(_SEED).standard_normal(shape)
    dtype = np.dtype(tensor.dtype)
    return (values if dtype.kind == "f" else values > 0).astype(dtype)


def take_turns(
    timed: Mapping[str, Callable[[], T]], *, runs: int, seconds: float, progress: Progress = _QUIET
) -> dict[str, list[list[T]]]:
    """Call functions (by label) in turn, each round beginning with another; the first call of a turn is not counted.

    `runs` are the counted calls of each, `seconds` the time of all, at most; a round under way is finished. The result
    is a list of turns for each label, each a list of the results of the calls.
    """
    labels = list(timed)
    turns: dict[str, list[list[T]]] = {label: [] for label in labels}
    left, start, task = runs, time.perf_counter(), "latency"
    progress.start(task, -(-runs // RUNS_PER_TURN))
    with _no_garbage_collection():
        while left and (left == runs or time.perf_counter() - start < seconds):
            count = min(left, RUNS_PER_TURN)
            shift = len(turns[labels[0]]) % len(labels)
            for label in labels[shift:] + labels[:shift]:
                turns[label].append([timed[label]() for _ in range(1 + count)][1:])
            left -= count
            progress.advance(task)
    progress.finish(task)
    return turns


def watched_turns(
    timed: Mapping[str, Callable[[], T]], *, runs: int, seconds: float, progress: Progress
) -> tuple[dict[str, list[list[T]]], str]:
    """`take_turns`, and who else used the processor meanwhile, as `disturbance` says it."""
    before = cpu_time()
    turns = take_turns(timed, runs=runs, seconds=seconds, progress=progress)
    return turns, disturbance(before, cpu_time(), cores=os.cpu_count() or 1, usable=core_count())


def _timed_run(engine: Engine, inputs: Mapping[str, NDArray[np.generic]]) -> float:
    """The milliseconds of a run; its result is freed after the clock is read."""
    begin = time.perf_counter_ns()
    result = engine.run(inputs)
    elapsed = (time.perf_counter_ns() - begin) / 1e6
    del result
    return elapsed


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _latency(label: str, engine: Engine, turns: list[list[float]], batch_size: int) -> Latency:
    times = np.concatenate([np.asarray(turn) for turn in turns])
    p50, p90, p99 = (float(q) for q in np.quantile(times, (0.5, 0.9, 0.99), method="linear"))
    mean = float(times.mean())
    return Latency(
        label=label,
        batch_size=batch_size,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        mean_ms=mean,
        images_per_s=batch_size / mean * 1e3,
        runs=len(times),
        float_precision=engine.info.float_precision,
        turns_ms=tuple(float(np.median(turn)) for turn in turns),
    )


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Median time of one run on an engine by layer of the network; 0 for a layer without time of its own."""

    label: str
    ms: Mapping[str, float]
    rest_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values()) + self.rest_ms


def measure_engine_layers(
    files: Mapping[str, Path],
    layers: Sequence[str],
    *,
    engine: str = "openvino",
    batch_size: int = 1,
    precision: str | None = None,
    threads: int | None = None,
    warmup: int = 5,
    runs: int = 30,
    follow: bool = False,
    progress: Progress = _QUIET,
) -> dict[str, LayerTimes]:
    """Time the layers of several ONNX files (by name, of `export_onnx`) of one network, in turn.

    Time of fused nodes goes to the first of the network's layers, module paths, among them; with `follow`, that of
    activations, pools, quantizers and the like to the layer whose result they take.
    """
    if runs < 1:
        raise EngineError(f"measure_engine_layers: runs is {runs}: it must be 1 or more")
    options = {"batch_size": batch_size, "threads": threads, "profile": "yes"}
    with loaded(files, engine, precisions=dict.fromkeys(files, precision), **options) as engines:
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in files}
        progress.start("layer times", runs)
        for turn in range(-warmup, runs):
            for name, built in engines.items():
                built.run(random_inputs(built, name, batch_size))
                if turn >= 0 and not built.remembers_runs:
                    seen[name].append(built.layer_times_ms())
            if turn >= 0:
                progress.advance("layer times")
        progress.finish("layer times")
        seen |= {name: built.layer_runs_ms()[-runs:] for name, built in engines.items() if built.remembers_runs}
        return {
            name: _median(built, seen[name], layers, _owners(built, files[name], layers, follow))
            for name, built in engines.items()
        }


def _owners(engine: Engine, path: Path, layers: Sequence[str], follow: bool) -> dict[str, str]:
    graph = load_onnx(path).graph
    outputs = {value.name for value in graph.output}
    written = {name: node.name for node in graph.node for name in node.output if name in outputs}
    found: dict[str, str] = {}
    followed, last = _followed(graph, layers) if follow else {}, None
    for layer in engine.runtime_layers():
        names = [written.get(name, name) for name in (*layer.original_names, layer.name)]
        # The name of an inserted conversion contains its consumer's.
        owners = [owner for name in names if (owner := find_module(name, layers)) is not None]
        owners += [followed[part] for name in names if (part := _part_of(name, followed)) is not None]
        owners += [last] if follow and last is not None else []  # an engine's own node has no name of the file's
        if owners:
            found[layer.name] = last = owners[0]
    return found


def _followed(graph: Any, layers: Sequence[str]) -> dict[str, str]:
    """The layer that each node belongs to or follows, by the node's name."""
    makers: dict[str, str] = {}
    found: dict[str, str] = {}
    for node in graph.node:
        before = (makers[name] for name in node.input if name in makers)
        owner = find_module(node.name, layers) or next(before, None)
        if owner is not None:
            found[node.name] = owner
            makers |= dict.fromkeys(node.output, owner)
    return found


def _part_of(name: str, nodes: Mapping[str, str]) -> str | None:
    """The longest node name that an engine's name is or begins with."""
    return name if name in nodes else max((node for node in nodes if node and node in name), key=len, default=None)


def _by_owner(times: Mapping[str, float], owners: Mapping[str, str]) -> dict[str, float]:
    """Sum times by the network's layer; "" holds the rest."""
    sums: dict[str, float] = {}
    for name, ms in times.items():
        owner = owners.get(name, "")
        sums[owner] = sums.get(owner, 0.0) + ms
    return sums


def _median(
    engine: Engine, runs: Sequence[Mapping[str, float]], layers: Sequence[str], owners: Mapping[str, str]
) -> LayerTimes:
    sums = [_by_owner(run, owners) for run in runs]

    def of(owner: str) -> float:
        return float(np.median([run.get(owner, 0.0) for run in sums]))

    return LayerTimes(label=engine.info.label, ms={layer: of(layer) for layer in layers}, rest_ms=of(""))


Stage = Literal["decode", "preprocess", "engine", "postprocess"]
STAGES: tuple[Stage, ...] = ("decode", "preprocess", "engine", "postprocess")
TOP = 5

# Content of a JPEG or PNG file, or pixels (H, W, 3) that need no decoding.
Source = bytes | NDArray[np.uint8]
# An image as a run takes it: a file for Pillow, pixels, or a file (bytes,) uint8 for a GPU.
Ready = bytes | Image.Image | Tensor


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """Time of one run of one variant, from images to classes.

    Attributes:
        device: that resizes and normalizes pixels.
        stage_ms: median of each stage over all runs, in order; without `decode` if no image is encoded.
        p50_ms: median of whole runs; may differ from `total_ms`.
    """

    label: str
    batch_size: int
    device: str
    stage_ms: Mapping[Stage, float]
    p50_ms: float
    runs: int
    method: str

    @property
    def total_ms(self) -> float:
        return sum(self.stage_ms.values())

    def share(self, stage: Stage) -> float:
        return self.stage_ms.get(stage, 0.0) / self.total_ms if self.total_ms else 0.0


def measure_end_to_end(
    engines: Mapping[str, Engine],
    images: Sequence[Source],
    *,
    batch_size: int = 1,
    preprocessing: Preprocessing | None = None,
    device: str = "cpu",
    max_pixels: int = IMAGE_PIXELS,
    warmup: int = 2,
    runs: int = 50,
    seconds: float = 3.0,
    progress: Progress = _QUIET,
) -> tuple[EndToEnd, ...]:
    """Time engines with decoding, preprocessing and postprocessing, in turn, on the same images.

    - `engines`: by label; each takes one input, (N, 3, S, S), and its first output is logits (N, classes).
    - `images`: all encoded, or none; the first `batch_size` are used, and repeated if there are fewer.
    - `preprocessing`: None = that of each engine's own file.
    - `device`: that resizes and normalizes pixels, `cpu` or a GPU such as `cuda`, which decodes JPEG files too.
    - `max_pixels`: of the largest image that is decoded.
    - `seconds`: time for each, at most, on average; the first round is always finished.
    """
    check_numbers("measure_end_to_end", batch_size=batch_size, warmup=warmup, runs=runs, seconds=seconds)
    _check(engines, images, device, max_pixels)
    encoded = isinstance(images[0], bytes)
    chosen = [images[i % len(images)] for i in range(batch_size)]
    where = torch.device(device)
    batch = ready([p if isinstance(p, bytes) else Image.fromarray(p) for p in chosen], where)
    by_gpu = any(isinstance(image, Tensor) for image in batch)
    timed = {
        label: partial(_stamps, engine, batch, _prepared(engine, label, batch_size, preprocessing), where, max_pixels)
        for label, engine in engines.items()
    }
    for run in timed.values():
        for _ in range(warmup):
            run()
    turns, disturbed = watched_turns(timed, runs=runs, seconds=seconds * len(engines), progress=progress)
    shown = STAGES if encoded else STAGES[1:]
    results = (
        _result(label, [run for turn in turns[label] for run in turn], batch_size, device, shown, len(engines), by_gpu)
        for label in engines
    )
    warning = f"; {disturbed}: these times are not to be compared" if disturbed else ""
    return tuple(replace(result, method=result.method + warning) for result in results)


def _check(engines: Mapping[str, Engine], images: Sequence[Source], device: str, max_pixels: int) -> None:
    if not engines:
        raise EngineError("measure_end_to_end: there is no engine to measure")
    if device != "cpu" and not (device.split(":")[0] == "cuda" and torch.cuda.is_available()):
        raise EngineError(f"measure_end_to_end: device is {device!r}, and torch sees no such GPU here; give 'cpu'")
    if not images:
        raise DataError("measure_end_to_end: there are no images; give JPEG or PNG files, or arrays of pixels")
    if len({isinstance(image, bytes) for image in images}) > 1:
        raise DataError("measure_end_to_end: some images are encoded and some are pixels; give one kind")
    for index, image in enumerate(images):
        if isinstance(image, bytes):
            decode([image], first=index, max_pixels=max_pixels)
        elif image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise DataError(f"image {index} is {image.dtype} of shape {image.shape}; allowed are uint8 of (H, W, 3)")


def _prepared(
    engine: Engine, label: str, batch_size: int, given: Preprocessing | None
) -> tuple[Preprocessing, TensorInfo]:
    if len(engine.inputs) != 1:
        raise EngineError(f"{label} takes {len(engine.inputs)} inputs; images are made for one")
    text = engine.metadata.get(PREPROCESSING_KEY)
    if given is None and text is None:
        raise EngineError(
            f"{label}: its file does not say how its input is made (no {PREPROCESSING_KEY} in its metadata); give the "
            "folder of a run, which writes it, or in Python preprocessing="
        )
    preprocessing = given if given is not None else Preprocessing.from_json(str(text))
    tensor = engine.inputs[0]
    wanted = (batch_size, *preprocessing.input_shape)
    fits = len(tensor.shape) == 4 and all(a in (-1, b) for a, b in zip(tensor.shape, wanted, strict=True))
    if not fits or not tensor.dtype.startswith("float"):
        raise EngineError(f"{label} takes {tensor.dtype} of {tensor.shape}, and preprocessing makes floats of {wanted}")
    return preprocessing, tensor


def _stamps(
    engine: Engine,
    batch: Sequence[Ready],
    prepared: tuple[Preprocessing, TensorInfo],
    device: torch.device,
    max_pixels: int,
) -> tuple[int, ...]:
    preprocessing, tensor = prepared
    begin = time.perf_counter_ns()
    images = decoded_images(batch, device, max_pixels)
    decoded = time.perf_counter_ns()
    answer = _engine_call(engine, tensor, images, preprocessing, device)
    ready = time.perf_counter_ns()
    logits = answer()
    answered = time.perf_counter_ns()
    top = classes(logits)
    end = time.perf_counter_ns()
    del top
    return decoded - begin, ready - decoded, answered - ready, end - answered


def ready(images: Sequence[bytes | Image.Image], device: torch.device) -> list[Ready]:
    """Images as a run takes them: files that a GPU decodes as tensors (bytes,) uint8, others as they are."""
    if device.type == "cpu":
        return list(images)
    found = [for_decoder(image) if isinstance(image, bytes) else image for image in images]
    try:
        decode_jpegs([image for image in found if isinstance(image, Tensor)], device)
    except RuntimeError:  # a torchvision without nvJPEG, or a file that it fails on
        return list(images)
    return found


def for_decoder(image: bytes) -> bytes | Tensor:
    """A file as a tensor (bytes,) uint8, if nvJPEG reads it as Pillow does; else as it is."""
    content = np.frombuffer(image, dtype=np.uint8)
    with open_image(io.BytesIO(image)) as header:
        return image if refusal(header, content) else torch.from_numpy(content.copy())


def decoded_images(batch: Sequence[Ready], device: torch.device, max_pixels: int) -> list[Image.Image | Tensor]:
    """RGB images: Pillow's, or tensors (3, H, W) uint8 on `device`."""
    files = [image for image in batch if isinstance(image, Tensor)]
    by_device = iter(decode_jpegs(files, device) if files else ())
    images = [
        next(by_device)
        if isinstance(image, Tensor)
        else decode([image], max_pixels=max_pixels)[0]
        if isinstance(image, bytes)
        else image
        for image in batch
    ]
    if files and device.type != "cpu":
        torch.cuda.synchronize(device)
    return images


def _engine_call(
    engine: Engine,
    tensor: TensorInfo,
    images: Sequence[Image.Image | Tensor],
    preprocessing: Preprocessing,
    device: torch.device,
) -> Callable[[], NDArray[np.generic]]:
    """Preprocess; return a function that runs the engine and returns its logits on the host."""
    pixels = preprocess(images, preprocessing, device).to(getattr(torch, tensor.dtype)).contiguous()
    name = engine.outputs[0].name
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        if engine.takes_tensors:
            return lambda: engine.run_tensors({tensor.name: pixels})[name].cpu().numpy()
    array = pixels.cpu().numpy()
    return lambda: engine.run({tensor.name: array})[name]


def decode(images: Sequence[bytes], *, first: int = 0, max_pixels: int = IMAGE_PIXELS) -> list[Image.Image]:
    return [
        read_image(io.BytesIO(content), name=f"image {index}", max_pixels=max_pixels)
        for index, content in enumerate(images, start=first)
    ]


def preprocess(
    images: Sequence[Image.Image | Tensor], preprocessing: Preprocessing, device: torch.device | str
) -> Tensor:
    """(N, 3, height, width) float32 on `device`; Pillow resizes on the CPU, torchvision elsewhere."""
    from torchvision.transforms.v2 import functional  # lazy: it takes seconds, and few commands read images here

    device = torch.device(device)
    tensors = [image for image in images if isinstance(image, Tensor)]
    if len(tensors) == len(images) and (preprocessing.interpolation, preprocessing.resize) == ("bilinear", "crop"):
        size, ratio = preprocessing.height_width, preprocessing.crop_ratio
        windows = [centre_window(image.shape[2], image.shape[1], size, ratio) for image in tensors]
        return preprocessing.normalize(resample(tensors, windows, size).float().div_(255))
    squares = [
        preprocessed(image, preprocessing)
        if device.type == "cpu" and isinstance(image, Image.Image)
        else resized(image if isinstance(image, Tensor) else functional.pil_to_tensor(image).to(device), preprocessing)
        for image in images
    ]
    return preprocessing.normalize(torch.stack(squares).float().div_(255))


def classes(logits: NDArray[np.generic], top: int = TOP) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and softmax probabilities, both (N, top), of the most probable classes of (N, classes) logits."""
    values = np.asarray(logits, dtype=np.float32)
    exponents = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities = exponents / exponents.sum(axis=1, keepdims=True)
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    return best.astype(np.int64), np.take_along_axis(probabilities, best, axis=1)


def _result(
    label: str,
    runs: list[tuple[int, ...]],
    batch_size: int,
    device: str,
    shown: Sequence[Stage],
    among: int,
    by_gpu: bool,
) -> EndToEnd:
    times = np.asarray(runs, dtype=np.float64) / 1e6
    medians = dict(zip(STAGES, np.median(times, axis=0), strict=True))
    kept = [STAGES.index(stage) for stage in shown]
    source = "from JPEG or PNG bytes in memory" if "decode" in shown else "from pixels in memory"
    decoded = "decoded together by the GPU, " if by_gpu else "one after another, "
    place = "by Pillow on the CPU" if device == "cpu" else f"by torch on {device}"
    return EndToEnd(
        label=label,
        batch_size=batch_size,
        device=device,
        stage_ms={stage: float(medians[stage]) for stage in shown},
        p50_ms=float(np.median(times[:, kept].sum(axis=1))),
        runs=len(runs),
        method=(
            f"medians of {len(runs)} runs, {among} variants in turn, the same images in each; {source} "
            f"to softmax and top {TOP}; images {decoded}resized and normalized {place}"
        ),
    )
