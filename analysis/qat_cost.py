"""What a step of quantization-aware training costs: time and peak memory, beside float training and other tools.

    python analysis/qat_cost.py --budget-s 110 --out /tmp/cost        measure on a GPU; JSON is written after each case
    python analysis/qat_cost.py --only resnet50/bf16/compiled         only cases whose name begins so
    python analysis/qat_cost.py --kept resnet50                       bytes kept for backward, counted; needs no GPU
    python analysis/qat_cost.py --draw results/h200/qat_cost/*.json   table and figure from the files of several runs

A step is forward and backward of torchvision's network (random weights, BatchNorm statistics measured) at 224 px with
cross entropy, and SGD with momentum; channels_last, cuDNN's search on, TF32 in fp32. Variants:

- float: the network as it is; folded: BatchNorm folded into the convolutions, the floor of what QAT can cost;
- fused: `compress.quantize`, trained through `compress.fuse_for_training`; fused-int8: convolutions forward on INT8
  tensor cores; plain: the quantized network itself;
- torch-ops: BatchNorm kept, torch's fake-quantize operations on inputs and weights; modelopt, pytorch-quantization:
  where they are installed.

Modes are eager, compiled (torch.compile) and graphs (torch.compile into CUDA graphs, where the host has no part).
Variants of a case are built and warmed up first, then timed in turn (A B C A B C ...); the median round counts, and
ratios are to float in the same round. Peak memory is that of a step above what was allocated before it, plus the
variant's own weights, gradients and optimizer state. `calibration` compares passes with calibrators to plain inference;
what a call costs besides its passes (ranges of the weights, choosing) stands apart.
When the time of `--budget-s` is spent, the script stops where it is, writes what it has, and says what is missing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import operator
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from qat_cost_report import draw, table
from qat_variants import DEVICE, NETWORKS, Network, allocated, as_run, finish, images, machine, pretrained, trained
from torch import Tensor, nn

import compress
from compress.files import write_json, write_text
from compress.graph.fold import fold_batchnorm

Row = dict[str, Any]

PAIR = ("float", "fused")
CASES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("resnet50", "bf16", "eager", ("float", "fused", "plain")),
    ("resnet50", "bf16", "compiled", PAIR),
    ("resnet50", "bf16", "eager", ("float", "fused-int8")),
    ("resnet50", "bf16", "compiled", ("float", "fused-int8")),
    ("resnet50", "bf16", "graphs", ("float", "fused", "fused-int8")),
    ("resnet50", "fp32", "calibration", ("max", "entropy")),
    ("resnet50", "bf16", "compiled", ("float", "folded", "plain")),
    ("resnet50", "bf16", "eager", ("float", "torch-ops", "modelopt", "pytorch-quantization")),
    ("resnet50", "fp32", "eager", ("float", "fused", "torch-ops")),
    ("resnet50", "bf16", "compiled", ("float", "torch-ops")),
    *((name, "bf16", mode, PAIR) for name in list(NETWORKS)[1:5] for mode in ("eager", "compiled")),
    ("vit_s", "bf16", "graphs", PAIR),
    ("resnet50", "fp32", "compiled", PAIR),
    *((name, "fp32", "eager", PAIR) for name in list(NETWORKS)[1:5]),
    (
        "tiny",
        "bf16",
        "eager",
        ("float", "fused", "fused-int8", "plain", "torch-ops", "modelopt", "pytorch-quantization"),
    ),
    ("tiny", "fp32", "compiled", PAIR),
    ("tiny", "fp32", "calibration", ("max", "entropy")),
)
NEEDED_S = {
    "eager": 8.0,
    "compiled": 45.0,
    "graphs": 45.0,
    "calibration": 10.0,
}  # a variant; compiled: until one has been measured


class BudgetSpentError(BaseException):
    """The time is over; not an Exception, so that no library takes it for a failure of its own."""


# What is measured ---------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A training step that can be repeated, and the memory that it holds between steps."""

    run: Callable[[], None]
    first_s: float = 0.0
    own_bytes: int = 0
    ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


def make_step(variant: str, network: Network, precision: str, mode: str) -> Step:
    """Build a variant and take its first steps: compilation, cuDNN's search, optimizer state."""
    before, start = allocated(), time.perf_counter()
    call, owner = trained(variant, pretrained(network), network)
    owner.to(DEVICE, memory_format=torch.channels_last).train()
    call.train()
    optimizer = torch.optim.SGD(owner.parameters(), lr=1e-5, momentum=0.9)
    run = as_run(call, mode)
    x = images(network, network.batch)
    y = torch.randint(0, 10, (network.batch,), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(run(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    finish()
    made = Step(step, first_s=time.perf_counter() - start)
    gc.collect()
    made.own_bytes = allocated() - before
    return made


def time_in_turn(steps: dict[str, Step], rounds: int, repeats: int) -> None:
    """Append a round's milliseconds a step to each, A B C A B C ..., and note the peak memory."""
    for _ in range(rounds):
        for step in steps.values():
            step.run()
            finish()
            resident = allocated()
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(repeats):
                step.run()
            finish()
            step.ms.append((time.perf_counter() - start) / repeats * 1e3)
            if DEVICE.type == "cuda":
                step.peak_bytes = torch.cuda.max_memory_allocated() - resident + step.own_bytes


def calibration(network: Network, calibrators: tuple[str, ...], rounds: int) -> list[Row]:
    """Images a second of plain inference, and of passes with calibrators on every quantizer, in float32.

    Calls of 2 and of 10 batches are timed in turn: a pass costs an eighth of the difference, what is left is what a
    call costs however many images it reads (ranges of the weights, choosing, the first pass that sets widths).
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
        qmodel = compress.insert_quantizers(model, batches[0][:2], spec).to(memory_format=torch.channels_last)
        runs[name] = functools.partial(compress.calibrate, qmodel.to(DEVICE))
    rows: dict[str, Row] = {name: {"variant": name, "short_s": [], "long_s": []} for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            for key, some in (("short_s", batches[:2]), ("long_s", batches)):
                finish()
                start = time.perf_counter()
                run(some)
                finish()
                if i:  # the first is a warm-up
                    rows[name][key].append(time.perf_counter() - start)
    for row in rows.values():
        row["pass_ms"] = statistics.median(map(operator.sub, row["long_s"], row["short_s"])) / 8 * 1e3
        row["fixed_ms"] = statistics.median(row["long_s"]) * 1e3 - 10 * row["pass_ms"]
        row["images_per_s"] = network.batch / row["pass_ms"] * 1e3
        row["throughput_ratio"] = rows["plain"]["pass_ms"] / row["pass_ms"]
    return list(rows.values())


def kept_bytes(variant: str, network: Network) -> int:
    """Bytes that autograd keeps for the backward pass of an eager bf16 forward pass, for each image more."""
    call, owner = trained(variant, pretrained(network), network)
    owner.to(memory_format=torch.channels_last).train()
    return kept_by_pass(call, images(network, 2)) - kept_by_pass(call, images(network, 1))


def kept_by_pass(call: nn.Module, x: Tensor) -> int:
    """Bytes of all tensors that a forward pass keeps, a storage once."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast(DEVICE.type, torch.bfloat16),
    ):
        result = call(x)
    del result
    return sum(size for size, _ in kept.values())


# The run ------------------------------------------------------------------------------------------------------------


class Run:
    """The cases of one call, within its time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out / "qat_cost.json"
        self.rounds, self.repeats = arguments.rounds, arguments.repeats
        self.ends = time.monotonic() + arguments.budget_s
        self.report: Row = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "cases": [],
            "missing": [],
        }
        self.built: dict[tuple[str, str, str, str], Step] = {}
        self.compile_s: list[float] = []

    def measure(self, name: str, precision: str, mode: str, variants: tuple[str, ...]) -> None:
        """One case; what fails or finds no time is noted with the reason."""
        case: Row = {"network": name, "precision": precision, "mode": mode, "batch": NETWORKS[name].batch, "rows": []}
        if mode == "calibration":
            if not self.has_time(NEEDED_S[mode] * len(variants), f"{name}/{precision}/{mode}"):
                return
            case["rows"] = calibration(NETWORKS[name], variants, self.rounds)
            self.keep(case)
            return
        steps: dict[str, Step] = {}
        for variant in variants:
            step = self.step(name, precision, mode, variant)
            if step is not None:
                steps[variant] = step
                step.ms.clear()
                time_in_turn({variant: step}, 1, self.repeats)  # so that something is there if the time ends now
                case["rows"] = [row_of(key, item, steps) for key, item in steps.items()]
                self.write([case])
        if not steps:
            return
        for step in steps.values():
            step.ms.clear()
        time_in_turn(steps, self.rounds, self.repeats)
        if mode == "graphs":
            for step in steps.values():
                step.peak_bytes = None  # a replay asks the allocator for nothing
        case["rows"] = [row_of(key, item, steps) for key, item in steps.items()]
        self.keep(case)

    def step(self, name: str, precision: str, mode: str, variant: str) -> Step | None:
        """A variant, built now or before; None where it cannot be."""
        key = (name, precision, mode, variant)
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
        """Whether `needed` seconds are left; notes it where they are not."""
        left = self.ends - time.monotonic()
        if left < needed:
            self.miss(label, f"no time: {left:.0f} s left, about {needed:.0f} s needed")
        return left >= needed

    def miss(self, label: str, reason: str) -> None:
        """Note what was not measured."""
        self.report["missing"].append({"case": label, "reason": reason[:300]})

    def keep(self, case: Row) -> None:
        """Add a case that is complete."""
        self.report["cases"].append(case)
        self.write([])

    def write(self, unfinished: list[Row]) -> None:
        """Write the file with what is there."""
        write_json(self.out, {**self.report, "unfinished": unfinished})


def row_of(variant: str, step: Step, steps: dict[str, Step]) -> Row:
    """A line of the report; ratios to float in the same round."""
    row: Row = {"variant": variant, "ms": statistics.median(step.ms), "rounds_ms": step.ms, "first_s": step.first_s}
    row["peak_gib"] = None if step.peak_bytes is None else step.peak_bytes / 2**30
    base = steps.get("float")
    if base is not None and len(base.ms) == len(step.ms):
        row["time_ratio"] = statistics.median(a / b for a, b in zip(step.ms, base.ms, strict=True))
        if step.peak_bytes and base.peak_bytes:
            row["memory_ratio"] = step.peak_bytes / base.peak_bytes
    return row


def kept_table(name: str, out: Path) -> str:
    """Bytes kept for backward by each variant of a network, as Markdown; also written to qat_kept.md."""
    rows = {v: kept_bytes(v, NETWORKS[name]) for v in ("float", "folded", "torch-ops", "plain", "fused")}
    lines = [f"Kept for the backward pass of {name} for each image, bf16 autocast, eager, on {DEVICE.type}:", ""]
    lines += ["| variant | MB | of float |", "|---|---|---|"]
    lines += [f"| {v} | {size / 1e6:.1f} | {size / rows['float']:.2f} |" for v, size in rows.items()]
    text = "\n".join([*lines, "", f"Made by `{' '.join(['python', *sys.argv])}`, torch {torch.__version__}."])
    write_text(out / "qat_kept.md", text + "\n")
    return text


def main() -> None:
    """Measure until all is done or the time is spent; or count bytes; or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=110.0, help="seconds, of all")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="such as resnet50/bf16/compiled, tiny")
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="only these, such as float fused")
    parser.add_argument("--rounds", type=int, default=5, help="of each variant, in turn")
    parser.add_argument("--repeats", type=int, default=10, help="steps of a round")
    parser.add_argument("--kept", metavar="NETWORK", help="count bytes kept for backward, measure nothing")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/h200")))
    parser.add_argument("--draw", type=Path, nargs="+", help="measure nothing: table and figure from these JSON files")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.draw:
        draw(arguments.draw, "\n\n".join((__doc__ or "").split("\n\n")[2:5]))
        return
    if arguments.kept:
        print(kept_table(arguments.kept, arguments.out))
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    run = Run(arguments)

    def stop(*_: object) -> None:
        raise BudgetSpentError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, arguments.budget_s)
    asked = arguments.only or [name for name in NETWORKS if name != "tiny"]
    try:
        for case in CASES:
            wanted = tuple(v for v in case[3] if not arguments.variants or v in arguments.variants)
            alone = wanted == ("float",) and arguments.variants != ["float"]
            if "/".join(case[:3]).startswith(tuple(asked)) and wanted and not alone:
                run.measure(*case[:3], wanted)
        run.write([])
    except BudgetSpentError:
        run.miss("/".join(case[:3]), "the time was spent while it was measured")
        left = json.loads(run.out.read_text()).get("unfinished", []) if run.out.is_file() else []
        run.write(left)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(table([json.loads(run.out.read_text())]), flush=True)
    os._exit(0)  # threads of the compiler may still be at work


if __name__ == "__main__":
    main()
