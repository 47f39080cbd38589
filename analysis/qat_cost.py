"""What a step of quantization-aware training costs: time and peak memory, beside float training and other tools.

    python analysis/qat_cost.py --budget-s 110 --out results/h200     measure on a GPU; JSON is written after each case
    python analysis/qat_cost.py --only resnet50/bf16/compiled         only cases whose name begins so
    python analysis/qat_cost.py --kept resnet50                       bytes kept for backward, counted; needs no GPU
    python analysis/qat_cost.py --draw results/h200/qat_cost.json     table and figure from a file

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
import copy
import functools
import gc
import json
import operator
import os
import platform
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import compress
from compress.files import replacing, write_json, write_text
from compress.graph.fold import fold_batchnorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Row = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network, its images and the batch of its cases."""

    make: Callable[[], nn.Module]
    batch: int = 128
    pixels: int = 224


def _vit_s() -> nn.Module:
    sizes = {"patch_size": 16, "num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
    return torchvision.models.VisionTransformer(image_size=224, **sizes)


def _tiny() -> nn.Module:
    """What proves the script on a CPU."""
    layers = (nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16))
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


NETWORKS = {
    "resnet50": Network(torchvision.models.resnet50),
    "resnet18": Network(torchvision.models.resnet18),
    "mobilenet_v2": Network(torchvision.models.mobilenet_v2),
    "vgg16": Network(torchvision.models.vgg16, batch=64),
    "vit_s": Network(_vit_s),
    "tiny": Network(_tiny, batch=4, pixels=16),
}

PAIR = ("float", "fused")
CASES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("resnet50", "bf16", "eager", ("float", "fused", "plain")),
    ("resnet50", "bf16", "compiled", PAIR),
    ("resnet50", "bf16", "eager", ("float", "fused-int8")),
    ("resnet50", "bf16", "compiled", ("float", "fused-int8")),
    ("resnet50", "bf16", "graphs", ("float", "fused", "fused-int8")),
    ("resnet50", "bf16", "calibration", ("max", "entropy")),
    ("resnet50", "bf16", "compiled", ("float", "folded", "plain")),
    ("resnet50", "bf16", "eager", ("float", "torch-ops", "modelopt", "pytorch-quantization")),
    ("resnet50", "fp32", "eager", ("float", "fused", "torch-ops")),
    ("resnet50", "bf16", "compiled", ("float", "torch-ops")),
    *((name, "bf16", mode, PAIR) for name in list(NETWORKS)[1:5] for mode in ("eager", "compiled")),
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


def pretrained(network: Network) -> nn.Module:
    """The network with BatchNorm statistics of its own activations, so that folding leaves their size as it is."""
    torch.manual_seed(0)
    model = network.make().to(DEVICE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and not bool(weight.any()):
            nn.init.normal_(weight, std=0.02)  # a classifier that begins at zero has no range
    with torch.no_grad():
        model.train()(images(network, min(32, network.batch)))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # None would make the compiler break the graph
    return model


def images(network: Network, count: int) -> Tensor:
    """Random images, (count, 3, pixels, pixels)."""
    x = torch.randn(count, 3, network.pixels, network.pixels, device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last)


def trained(variant: str, model: nn.Module, network: Network) -> tuple[nn.Module, nn.Module]:
    """(what a step calls, what holds the parameters)."""
    x = images(network, min(32, network.batch))
    if variant == "float":
        return model, model
    if variant == "folded":
        graph = compress.trace(model.eval(), x[:2])
        fold_batchnorm(graph)
        return graph, graph
    if variant in {"plain", "fused", "fused-int8"}:
        spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="max"))
        qmodel = compress.quantize(model.eval(), x[:2], [x], spec=spec)
        qmodel.to(memory_format=torch.channels_last)
        if variant == "plain":
            return qmodel, qmodel
        return compress.fuse_for_training(qmodel, forward="int8" if variant == "fused-int8" else "float"), qmodel
    made = pytorch_quantization(network) if variant == "pytorch-quantization" else _OTHERS[variant](model, x)
    return made, made


class _Native:
    """Torch's fake-quantize operations on the input and the weight of a layer."""

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self
        weight = layer.weight.float()
        scale = weight.detach().abs().amax(tuple(range(1, weight.dim()))) / 127
        points = torch.zeros(len(scale), dtype=torch.int32, device=x.device)
        weight = torch.fake_quantize_per_channel_affine(weight, scale, points, 0, -127, 127)
        return torch.fake_quantize_per_tensor_affine(x, layer.step, points[0], -128, 127), weight


class NativeConv(nn.Conv2d, _Native):
    """A convolution with both."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W)."""
        return self._conv_forward(*self.quantized(input), self.bias)


class NativeLinear(nn.Linear, _Native):
    """A linear layer with both."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., C)."""
        return F.linear(*self.quantized(input), self.bias)


def torch_ops(model: nn.Module, x: Tensor) -> nn.Module:
    """BatchNorm kept, every convolution and linear layer with torch's own operations."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            twin = {nn.Conv2d: NativeConv, nn.Linear: NativeLinear}.get(type(child))
            if twin is None:
                continue
            layer: Any = twin.__new__(twin)
            layer.__dict__.update(child.__dict__)
            layer.register_buffer("step", torch.tensor(0.03, device=x.device))
            setattr(module, name, layer)
    return model


def modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    """NVIDIA ModelOpt, its INT8 default."""
    import modelopt.torch.quantization as mtq

    return mtq.quantize(model.eval(), copy.deepcopy(mtq.INT8_DEFAULT_CFG), lambda m: m(x[:8]))


def pytorch_quantization(network: Network) -> nn.Module:
    """pytorch-quantization: the network made while its layers stand in the place of torch's."""
    from pytorch_quantization import nn as qnn
    from pytorch_quantization import quant_modules

    quant_modules.initialize()
    try:
        model = network.make()
    finally:
        quant_modules.deactivate()
    for module in model.modules():
        if isinstance(module, qnn.TensorQuantizer):
            module.amax = torch.tensor(3.0)
    return model.to(DEVICE)


_OTHERS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {"torch-ops": torch_ops, "modelopt": modelopt}


def as_run(call: nn.Module, mode: str) -> Callable[[Tensor], Tensor]:
    """What a step calls: the module, compiled, or compiled into CUDA graphs."""
    if mode == "eager":
        return call
    return torch.compile(call, mode="reduce-overhead" if mode == "graphs" else None)


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


def allocated() -> int:
    """Bytes of tensors on the GPU."""
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def finish() -> None:
    """Wait for the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


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


def machine() -> Row:
    """What it was measured on."""
    found: Row = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }
    with suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if DEVICE.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    return found


# What is shown ------------------------------------------------------------------------------------------------------


def table(report: Row) -> str:
    """The cases as Markdown."""
    lines = ["| case | variant | ms a step | time / float | peak GiB | memory / float |", "|---|---|---|---|---|---|"]
    passes = ["| calibration | images/s | of plain inference | ms a pass | ms a call |", "|---|---|---|---|---|"]
    for case in [*report["cases"], *report.get("unfinished", [])]:
        title = f"{case['network']} b{case['batch']} {case['precision']} {case['mode']}"
        for row in case["rows"]:
            if case["mode"] == "calibration":
                cells = (f"{title}: {row['variant']}", row["images_per_s"], row["throughput_ratio"])
                times = f"{row['pass_ms']:.2f} | {row['fixed_ms']:.1f}"
                passes.append(f"| {cells[0]} | {cells[1]:.0f} | {cells[2]:.2f} | {times} |")
                continue
            numbers = (row["ms"], row.get("time_ratio"), row.get("peak_gib"), row.get("memory_ratio"))
            shown = ["" if n is None else f"{n:.1f}" if i in (0, 2) else f"{n:.2f}" for i, n in enumerate(numbers)]
            lines.append(f"| {title} | {row['variant']} | {' | '.join(shown)} |")
    lines += ["", *passes] if len(passes) > 2 else []
    return "\n".join([*lines, "", *(f"Not measured: {m['case']} ({m['reason']})." for m in report["missing"])])


def draw(file: Path) -> None:
    """Write the table and the figure beside a JSON file: time and memory of each variant, float = 1."""
    from matplotlib.figure import Figure

    from compress.report.style import LIGHT, styled, to_png

    report = json.loads(file.read_text())
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    head = ["# The cost of quantization-aware training", "", f"Measured with `{report['command']}`; {about}.", ""]
    body = [*head, *(__doc__ or "").split("\n\n")[2:5], "", table(report)]
    write_text(file.with_suffix(".md"), "\n".join(body) + "\n")
    best: dict[str, Row] = {}
    for case in report["cases"]:
        for row in case["rows"]:
            if "time_ratio" in row and row["variant"] != "float":
                name = f"{case['network']} {case['precision']} {case['mode']}: {row['variant']}"
                best.setdefault(name, row)
    if not best:
        return
    with styled():
        figure = Figure(figsize=(9, 0.9 + 0.27 * len(best)), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        names = list(best)[::-1]
        titles = (("time_ratio", "time of a step"), ("memory_ratio", "peak memory"))
        for axis, (key, title) in zip(axes, titles, strict=True):
            values = [best[name].get(key) or 0.0 for name in names]
            colours = [LIGHT["blue" if "fused" in name else "grey"] for name in names]
            axis.barh(names, values, color=colours, height=0.7)
            axis.axvline(1.0, color=LIGHT["ink"], linewidth=0.8)
            axis.set(title=f"{title}, float = 1")
            for place, value in enumerate(values):
                axis.text(value, place, f" {value:.2f}" if value else " not measured", va="center", fontsize=8)
        image = to_png(figure)
    with replacing(file.with_suffix(".png")) as temporary:
        temporary.write_bytes(image)


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
    parser.add_argument("--draw", type=Path, help="measure nothing: table and figure from this JSON file, beside it")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.draw:
        draw(arguments.draw)
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
    print(table(json.loads(run.out.read_text())), flush=True)
    os._exit(0)  # threads of the compiler may still be at work


if __name__ == "__main__":
    main()
