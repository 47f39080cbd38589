"""Measures the latency of several engines in turn, so that other load meets all; judges whether times compare."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from compress.engines import build_engine
from compress.engines.base import Engine, TensorInfo, load_onnx, shape_text
from compress.errors import EngineError
from compress.export.names import find_module
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


def first_quiet(measure: Callable[[], Sequence[Latency]], *, tries: int = 2) -> Sequence[Latency]:
    """The first measurement whose times are all to be compared, or the last of `tries`."""
    for _ in range(tries - 1):
        timed = measure()
        if not any(row.unquiet for row in timed):
            return timed
    return measure()


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
    with ExitStack() as stack:
        engines = {}
        for label, path in files.items():
            built = build_engine(
                path, engine, batch_size=batch_size, threads=threads, precision=(precisions or {}).get(label)
            )
            engines[label] = stack.enter_context(built)
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
    array: NDArray[np.generic] = (values if dtype.kind == "f" else values > 0).astype(dtype)
    return array


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
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                build_engine(path, engine, batch_size=batch_size, precision=precision, threads=threads, profile="yes")
            )
            for name, path in files.items()
        }
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
    written, found = _node_of_output(graph), {}
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


def _node_of_output(graph: Any) -> dict[str, str]:
    outputs = {value.name for value in graph.output}
    return {name: node.name for node in graph.node for name in node.output if name in outputs}


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
