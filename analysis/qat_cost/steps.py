"""The measurements of the study of QAT's cost: training steps and calibration passes."""

import functools
import gc
import operator
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import compress
from analysis.common.qat_variants import DEVICE, Network, TrainingStep, allocated, finish, images, pretrained
from analysis.common.study import Row
from compress.graph.fold import fold_batchnorm


@dataclass
class Step:
    """A training step that can be repeated, and the memory that it holds between steps.

    Attributes:
        run: takes a step.
        first_s: seconds of building the variant and of its first three steps.
        own_bytes: bytes of weights, gradients, optimizer state and images.
        replays: its passes are a CUDA graph, which allocates nothing: the peak is that of its recording, if known.
        ms: milliseconds of a step, one value a round.
        peak_bytes: peak memory of a step; None where it is not known.
    """

    run: Callable[[], None]
    first_s: float = 0.0
    own_bytes: int = 0
    replays: bool = False
    ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    def time(self, repeats: int) -> None:
        self.run()
        finish()
        resident = allocated()
        reset_peak()
        start = time.perf_counter()
        for _ in range(repeats):
            self.run()
        finish()
        self.ms.append((time.perf_counter() - start) / repeats * 1e3)
        if not self.replays:
            self.peak_bytes = peak_above(resident, self)


def make_step(variant: str, network: Network, precision: str, mode: str) -> Step:
    before, start = allocated(), time.perf_counter()
    step = TrainingStep(variant, network, precision, mode)
    made = Step(step, first_s=time.perf_counter() - start, replays=mode == "graphs")
    gc.collect()
    made.own_bytes = allocated() - before
    return made


def recorded(step: Step) -> Step:
    reset_peak()
    resident = allocated()
    run = cast(TrainingStep, step.run).recorded()
    return Step(
        run, first_s=step.first_s, own_bytes=step.own_bytes, replays=True, peak_bytes=peak_above(resident, step)
    )


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_above(resident: int, step: Step) -> int | None:
    return torch.cuda.max_memory_allocated() - resident + step.own_bytes if DEVICE.type == "cuda" else None


def profiled(step: Step, steps: int = 2) -> list[Row]:
    step.run()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step.run()
        finish()
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key, "ms": event.self_device_time_total / 1e3 / steps, "count": event.count / steps}
        for event in events
    ]


def row_of(variant: str, step: Step, steps: Mapping[str, Step]) -> Row:
    row: Row = {"variant": variant, "ms": statistics.median(step.ms), "rounds_ms": step.ms, "first_s": step.first_s}
    row["peak_gib"] = None if step.peak_bytes is None else step.peak_bytes / 2**30
    base = steps.get("float")
    if base is not None and len(base.ms) == len(step.ms):
        row["time_ratio"] = statistics.median(a / b for a, b in zip(step.ms, base.ms, strict=True))
        if step.peak_bytes and base.peak_bytes:
            row["memory_ratio"] = step.peak_bytes / base.peak_bytes
    return row


def calibration(network: Network, calibrators: tuple[str, ...], rounds: int) -> list[Row]:
    """Compare plain inference with passes that have a calibrator on every quantizer, in float32.

    Calls with 2 and with 10 batches are timed in turn: a pass costs an eighth of the difference, and the remainder is
    the cost of a call with any number of images (ranges of weights, choice of amax, first pass with its bin widths).
    """
    model = pretrained(network).eval()
    batches = [images(network, network.batch) for _ in range(10)]
    runs: dict[str, Callable[[list[Tensor]], object]] = {}
    graph = compress.trace(model, batches[0][:2])
    fold_batchnorm(graph)
    plain = graph.to(memory_format=torch.channels_last)

    def infer(some: list[Tensor]) -> None:
        with torch.no_grad():
            for batch in some:
                plain(batch)

    runs["plain"] = infer
    for name in calibrators:
        spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator=name))  # type: ignore[arg-type]
        qmodel = compress.insert_quantizers(model, batches[0][:2], spec)
        qmodel.to(memory_format=torch.channels_last).to(DEVICE)
        runs[name] = functools.partial(compress.calibrate, qmodel)
    rows: dict[str, Row] = {name: {"variant": name, "short_s": [], "long_s": []} for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            for key, some in (("short_s", batches[:2]), ("long_s", batches)):
                finish()
                start = time.perf_counter()
                run(some)
                finish()
                if i:  # the first round is a warm-up
                    rows[name][key].append(time.perf_counter() - start)
    for row in rows.values():
        row["pass_ms"] = statistics.median(map(operator.sub, row["long_s"], row["short_s"])) / 8 * 1e3
        row["fixed_ms"] = statistics.median(row["long_s"]) * 1e3 - 10 * row["pass_ms"]
        row["images_per_s"] = network.batch / row["pass_ms"] * 1e3
        row["throughput_ratio"] = rows["plain"]["pass_ms"] / row["pass_ms"]
    return list(rows.values())
