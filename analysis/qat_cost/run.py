"""Time and peak memory of a step of quantization-aware training, beside float training and other tools."""

import argparse
import datetime
import functools
import gc
import operator
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import compress
from analysis.common.qat_variants import (
    DEVICE,
    NETWORKS,
    Network,
    TrainingStep,
    allocated,
    fast_arithmetic,
    finish,
    images,
    machine,
    pretrained,
)
from analysis.common.study import BudgetSpentError, Row, command_line, option, study_options, time_limit
from analysis.qat_cost.report import read_runs, table
from compress.files import write_json
from compress.graph.fold import fold_batchnorm

Case = tuple[str, str, str, tuple[str, ...]]
PAIR = ("float", "fused")
OTHERS = ["resnet18", "mobilenet_v2", "vgg16", "vit_s"]
FAMILIES = ["resnet50", "regnet_y_3_2gf", "convnext_tiny", "vit_s", "efficientnet_v2_s", "mobilenet_v3_large", "swin_t"]
FAMILIES += ["densenet121", "mobilenet_v2", "resnet18"]
FAMILY_VARIANTS = ("float", "fused", "fused-int8", "folded")
TOOLS = ("torch-ops", "modelopt", "pytorch-quantization")
CASES: tuple[Case, ...] = (
    ("resnet50", "bf16", "eager", ("float", "fused", "plain")),
    ("resnet50", "bf16", "compiled", PAIR),
    ("resnet50", "bf16", "eager", ("float", "fused-int8")),
    ("resnet50", "bf16", "compiled", ("float", "fused-int8")),
    ("resnet50", "bf16", "graphs", ("float", "fused", "fused-int8")),
    ("resnet50", "fp32", "calibration", ("max", "entropy")),
    ("resnet50", "bf16", "compiled", ("float", "folded", "plain")),
    ("resnet50", "bf16", "eager", ("float", *TOOLS)),
    ("resnet50", "fp32", "eager", ("float", "fused", "torch-ops")),
    ("resnet50", "bf16", "compiled", ("float", "torch-ops")),
    *((name, "bf16", mode, PAIR) for name in OTHERS for mode in ("eager", "compiled")),
    ("vit_s", "bf16", "graphs", PAIR),
    ("resnet50", "fp32", "compiled", PAIR),
    *((name, "fp32", "eager", PAIR) for name in OTHERS),
    ("tiny", "bf16", "eager", ("float", "fused", "fused-int8", "plain", *TOOLS)),
    ("tiny", "fp32", "compiled", PAIR),
    ("tiny", "fp32", "calibration", ("max", "entropy")),
)
PEERS = dict.fromkeys(("resnet50", "regnet_y_3_2gf", "convnext_tiny", "vit_s"), ("torch-ops", "modelopt"))
LIBRARY = {"convnext_tiny": ("fused-cudnn",)}
FAMILY_CASES: tuple[Case, ...] = (
    *((n, "bf16", m, FAMILY_VARIANTS) for m in ("compiled", "regions", "graphs") for n in FAMILIES),
    *((n, "bf16", "eager", (*FAMILY_VARIANTS, *LIBRARY.get(n, ()), *PEERS.get(n, ()))) for n in FAMILIES),
    *((n, "bf16", "recorded", (*FAMILY_VARIANTS, *LIBRARY.get(n, ()))) for n in FAMILIES),
    ("tiny", "bf16", "eager", (*FAMILY_VARIANTS, "fused-cudnn", "torch-ops", "modelopt")),
    ("tiny", "bf16", "recorded", FAMILY_VARIANTS),
    ("tiny", "bf16", "compiled", FAMILY_VARIANTS),
)
# Seconds that a variant needs; with compilation, until one has been measured.
NEEDED_S = {"eager": 8.0, "recorded": 8.0, "compiled": 45.0, "regions": 45.0, "graphs": 45.0, "calibration": 10.0}


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


class Run:
    """The cases of one call, within its time. They are appended to the runs in qat_cost.json."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.file: Path = arguments.out / "qat_cost.json"
        self.earlier = read_runs(self.file) if self.file.is_file() else []
        self.rounds, self.repeats = arguments.rounds, arguments.repeats
        self.profile, self.profiled = arguments.profile, arguments.profiled
        self.ends = time.monotonic() + arguments.budget_s
        self.report: Row = {
            "run": len(self.earlier) + 1,
            "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": command_line(),
            "machine": machine(),
            "cases": [],
            "missing": [],
        }
        self.unfinished: list[Row] = []
        self.built: dict[tuple[str, str, str, str], Step] = {}
        self.compile_s: list[float] = []

    def measure(self, name: str, precision: str, mode: str, variants: tuple[str, ...]) -> None:
        case: Row = {"network": name, "precision": precision, "mode": mode, "batch": NETWORKS[name].batch, "rows": []}
        if mode == "calibration":
            if self.has_time(NEEDED_S[mode] * len(variants), f"{name}/{precision}/{mode}"):
                case["rows"] = calibration(NETWORKS[name], variants, self.rounds)
                self.add(case)
            return
        label = f"{name}/{precision}/{mode}"
        steps: dict[str, Step] = {}
        for variant in variants:
            step = self.step(name, precision, mode, variant)
            if step is not None:
                steps[variant] = step
                step.ms.clear()
                step.time(self.repeats)  # one row at least if the time ends now
                case["rows"] = [row_of(key, item, steps) for key, item in steps.items()]
                self.unfinished = [case]
                self.write()
        if not steps:
            return
        for step in steps.values():
            step.ms.clear()
        for _ in range(self.rounds):
            for step in steps.values():
                step.time(self.repeats)
        case["rows"] = [row_of(key, item, steps) for key, item in steps.items()]
        self.add(case)
        for row in case["rows"] if self.profile else ():
            if any(fnmatch(f"{label}/{row['variant']}", pattern) for pattern in self.profiled):
                found = profiled(steps[row["variant"]])
                row |= {"kernels": found[: self.profile], "kernels_ms": sum(kernel["ms"] for kernel in found)}
                self.write()

    def step(self, name: str, precision: str, mode: str, variant: str) -> Step | None:
        key = (name, precision, mode, variant)
        if mode == "recorded":
            eager = self.step(name, precision, "eager", variant)
            return None if eager is None else recorded(eager)
        if key in self.built:
            return self.built[key]
        if any(other[0] != name for other in self.built):
            self.built.clear()
            torch.compiler.reset()
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        label = "/".join(key)
        needed = NEEDED_S[mode] if mode == "eager" else max(self.compile_s, default=NEEDED_S[mode])
        if not self.has_time(needed, label):
            return None
        try:
            made = make_step(variant, NETWORKS[name], precision, mode)
        except Exception as error:  # a tool that is missing, or fails, must not end the run
            self.miss(label, f"{type(error).__name__}: {error}")
            return None
        if mode != "eager":
            self.compile_s.append(made.first_s)
        self.built[key] = made
        return made

    def has_time(self, needed: float, label: str) -> bool:
        left = self.ends - time.monotonic()
        if left < needed:
            self.miss(label, f"no time: {left:.0f} s left, about {needed:.0f} s needed")
        return left >= needed

    def miss(self, label: str, reason: str) -> None:
        self.report["missing"].append({"case": label, "reason": reason[:300]})

    def add(self, case: Row) -> None:
        self.report["cases"].append(case)
        self.unfinished = []
        self.write()
        if case["mode"] != "calibration":
            times = ", ".join(f"{row['variant']} {row['ms']:.2f}" for row in case["rows"])
            print(f"{self.ends - time.monotonic():.0f} s left, {case['network']} {case['mode']}: {times}", flush=True)

    def write(self) -> None:
        write_json(self.file, {"runs": [*self.earlier, self.report | {"unfinished": self.unfinished}]})


def wanted_cases(cases: Sequence[Case], asked: Sequence[str], variants: Sequence[str]) -> Iterator[Case]:
    """Yield the cases that were asked for, in the order in which they were, each with the variants that were.

    Args:
        cases: that are known.
        asked: beginnings of their names; `:float,fused` after one asks for these variants of it.
        variants: of the others; none = all.
    """
    beginnings = {text.partition(":")[0]: text.partition(":")[2] for text in asked}
    for prefix, own in beginnings.items():
        for case in cases:
            names = own.split(",") if own else variants
            wanted = tuple(v for v in case[3] if not names or v in names)
            alone = wanted == ("float",) and list(names) != ["float"]
            first = next(p for p in [*beginnings, ""] if "/".join(case[:3]).startswith(p)) == prefix
            if first and wanted and not alone:
                yield (*case[:3], wanted)


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--budget-s", type=float, default=110.0, help="seconds for all cases"),
        option("--only", nargs="+", default=[], metavar="CASE", help="such as tiny, vit_s/bf16/eager:float,fused"),
        option("--families", action="store_true", help="ten networks, four variants, five modes"),
        option("--variants", nargs="+", default=[], metavar="NAME", help="such as float fused"),
        option("--rounds", type=int, default=5, help="rounds of each variant, in turn"),
        option("--repeats", type=int, default=10, help="steps of a round"),
        option("--profile", type=int, default=0, metavar="N", help="the N longest kernels of each variant too"),
        option("--profiled", nargs="+", default=["*"], metavar="PATTERN", help="of which; default: all"),
        out="results/h200",
    )
    warnings.filterwarnings("ignore")
    fast_arithmetic()
    run = Run(arguments)
    asked = arguments.only or [""]
    known = FAMILY_CASES if arguments.families else CASES
    known = known if arguments.only else tuple(case for case in known if case[0] != "tiny")
    cases = [*wanted_cases(known, asked, arguments.variants)]
    case = cases[0] if cases else ("none", "", "", ())
    try:
        with time_limit(arguments.budget_s):
            while cases:
                case = cases.pop(0)
                run.measure(*case)
    except BudgetSpentError:
        run.miss("/".join(case[:3]), "the time ran out while it was measured")
    run.write()
    print(table(read_runs(run.file)[-1:]), flush=True)
    os._exit(0)  # threads of the compiler may still be at work


if __name__ == "__main__":
    main()
