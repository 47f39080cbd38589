"""How long calibration of ResNet-50 takes: compress against pytorch-quantization, ModelOpt and NNCF.

    python analysis/calibration_speed.py [--rounds 5] [--patience 3600] [--out results]

Peers are measured where they can be imported; the others are listed as missing. What is timed:

- a plain forward pass of the torchvision network (random weights) over 32 images at 224 px, in 4 batches;
- the same pass with a calibrator on the input of each of its 54 convolutions and linear layers, and then the choice
  of amax for all of them: the calibrators of compress and of pytorch-quantization, fed by the same hooks;
- whole calls, from float network to calibrated one: `compress.quantize`, ModelOpt's `mtq.quantize`, and NNCF's
  `nncf.quantize` (on the OpenVINO network, whose forward pass is a faster one).

Variants run in turn (A B C ... A B C ...) after a warm-up of each, and the median counts. pytorch-quantization takes
minutes to choose amax by entropy: that is timed once. On a shared machine, `--patience 3600` waits for others to be
calm before each run and repeats it when they were not.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from compress.files import write_json, write_text
from compress.quantization.calibrate import quantize
from compress.quantization.calibrators import CALIBRATORS, make_calibrator
from compress.quantization.spec import ActivationSpec, QuantSpec

Timing = dict[str, float]
"""Seconds: `collect_s` and `compute_s`, or `total_s`; `others`, the share of processors that others used meanwhile."""
Variant = Callable[[], Timing]

BATCHES, BATCH_SIZE, PIXELS = 4, 8, 224
PLAIN, ONCE = "plain forward", "pytorch-quantization entropy"


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forward(model: nn.Module, batches: list[Tensor]) -> Callable[[], None]:
    """A pass over all batches."""

    def work() -> None:
        with torch.inference_mode():
            for batch in batches:
                model(batch)

    return work


def weighted(model: nn.Module) -> list[nn.Module]:
    """The 54 layers whose input is calibrated."""
    return [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


def watched(
    model: nn.Module, batches: list[Tensor], make: Callable[[], Any], choice: dict[str, Any], chosen: list[float]
) -> Timing:
    """A pass with a calibrator from `make` on the input of each layer, then `compute_amax(**choice)` of each.

    The amax of all layers are put into `chosen`.
    """
    calibrators = [make() for _ in weighted(model)]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, c=calibrator: c.collect(inputs[0]))
        for layer, calibrator in zip(weighted(model), calibrators, strict=True)
    ]
    try:
        collect = seconds(forward(model, batches))
    finally:
        for handle in handles:
            handle.remove()

    def choose() -> None:
        chosen[:] = [float(c.compute_amax(**choice)) for c in calibrators]

    return {"collect_s": collect, "compute_s": seconds(choose)}


def our_call(model: nn.Module, batches: list[Tensor], name: str) -> Timing:
    """`compress.quantize` as a user calls it: trace, fold, place, insert, calibrate."""
    spec = QuantSpec(activations=ActivationSpec(calibrator=name))  # type: ignore[arg-type]
    return {"total_s": seconds(lambda: quantize(model, batches[0][:1], batches, spec=spec))}


def pytorch_quantization_variants(
    model: nn.Module, batches: list[Tensor], chosen: dict[str, list[float]]
) -> dict[str, Variant]:
    """Its calibrators; its mse mode is left out, as it calls for a GPU."""
    from pytorch_quantization import calib

    choices: dict[str, tuple[type, dict[str, Any]]] = {
        "max": (calib.MaxCalibrator, {}),
        "percentile": (calib.HistogramCalibrator, {"method": "percentile", "percentile": 99.99}),
        "entropy": (calib.HistogramCalibrator, {"method": "entropy"}),
    }
    return {
        name: partial(watched, model, batches, partial(kind, 8, None, False), choice, chosen.setdefault(name, []))
        for name, (kind, choice) in choices.items()
    }


def modelopt_variants(model: nn.Module, batches: list[Tensor]) -> dict[str, Variant]:
    """`mtq.quantize` with its INT8 configuration; its torch path has no entropy or percentile mode."""
    import modelopt.torch.quantization as mtq

    def run(algorithm: str) -> Timing:
        config = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
        config["algorithm"] = algorithm
        network = copy.deepcopy(model)

        def loop(module: nn.Module) -> None:
            forward(module, batches)()

        return {"total_s": seconds(lambda: mtq.quantize(network, config, loop))}

    return {"max": lambda: run("max"), "mse": lambda: run("mse")}


def nncf_variants(model: nn.Module, batches: list[Tensor]) -> dict[str, Variant]:
    """`nncf.quantize` of the OpenVINO network, with its default statistics."""
    import nncf
    import openvino

    network = openvino.convert_model(model, example_input=batches[0])
    network.reshape([-1, 3, PIXELS, PIXELS])

    def run() -> Timing:
        data = nncf.Dataset([batch.numpy() for batch in batches])
        return {"total_s": seconds(lambda: nncf.quantize(network, data, subset_size=len(batches)))}

    return {"default": run}


def available(tool: str, make: Callable[[], dict[str, Variant]], missing: dict[str, str]) -> dict[str, Variant]:
    """Variants of a peer by title; none, with the reason kept, where it is not installed."""
    try:
        return {f"{tool} {name}": run for name, run in make().items()}
    except ImportError as error:
        missing[tool] = str(error)
        return {}


def measure(rounds: int, quiet: QuietMachine) -> dict[str, Any]:
    """Time all variants in turn."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50().eval()
    batches = [torch.randn(BATCH_SIZE, 3, PIXELS, PIXELS) for _ in range(BATCHES)]
    missing: dict[str, str] = {}
    ours: dict[str, list[float]] = {name: [] for name in CALIBRATORS}
    theirs: dict[str, list[float]] = {}
    variants: dict[str, Variant] = {PLAIN: lambda: {"collect_s": seconds(forward(model, batches))}}
    for name in CALIBRATORS:
        variants[f"compress {name}"] = partial(watched, model, batches, partial(make_calibrator, name), {}, ours[name])
    for name in CALIBRATORS:
        variants[f"compress.quantize {name}"] = partial(our_call, model, batches, name)
    variants |= available(
        "pytorch-quantization", lambda: pytorch_quantization_variants(model, batches, theirs), missing
    )
    variants |= available("ModelOpt", lambda: modelopt_variants(model, batches), missing)
    variants |= available("NNCF", lambda: nncf_variants(model, batches), missing)
    runs = run_in_turn(variants, rounds, quiet)
    return {
        "machine": machine(),
        "rounds": rounds,
        "discarded_runs": quiet.discarded,
        "tolerated_share_of_others": quiet.limit,
        "missing": missing,
        "same_amax": {name: same(ours[name], theirs[name]) for name in theirs},
        "runs": runs,
    }


class QuietMachine:
    """Tells how much of the processors other processes took: what decides whether a timing on a shared machine counts.

    Args:
        limit: the share that is tolerated, of all processors.
        patience_s: seconds to wait in all, for calm or for another try; then timings are kept as they are.
    """

    def __init__(self, limit: float, patience_s: float) -> None:
        self.limit = limit
        self.ends = time.monotonic() + patience_s
        self.discarded = 0

    def timed(self, variant: Variant) -> Timing:
        """Run when others are calm, again if they were not meanwhile; with `others`, their share during the run."""
        while True:
            while self.patient() and self.others_during(lambda: time.sleep(2))[1] > self.limit:
                pass
            timing, others = self.others_during(variant)
            if others <= self.limit or not self.patient():
                return {**timing, "others": others}
            self.discarded += 1

    def patient(self) -> bool:
        """Whether there is time left to wait."""
        return time.monotonic() < self.ends

    @staticmethod
    def others_during(work: Callable[[], Any]) -> tuple[Any, float]:
        """What `work` returns, and the share of processor time that other processes used meanwhile."""
        start, own = cpu_seconds(), time.process_time()
        result = work()
        (busy, total), own = cpu_seconds(), time.process_time() - own
        return result, max(0.0, busy - start[0] - own) / (total - start[1])


def cpu_seconds() -> tuple[float, float]:
    """Busy and total time of all processors since start, as Linux counts it."""
    user, nice, system, idle, wait, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    busy = user + nice + system + sum(interrupts)
    ticks = os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + wait) / ticks


def run_in_turn(variants: dict[str, Variant], rounds: int, quiet: QuietMachine) -> dict[str, list[Timing]]:
    """Timings by title: a warm-up of each, then A B C ... A B C ..., and last what runs once."""
    often = [title for title in variants if title != ONCE]
    for title in often:
        variants[title]()
    order = often * rounds + [ONCE] * (ONCE in variants)
    runs: dict[str, list[Timing]] = {title: [] for title in variants}
    for title in order:
        runs[title].append(quiet.timed(variants[title]))
    return runs


def same(ours: list[float], theirs: list[float]) -> dict[str, int | float]:
    """How many tensors got the same amax to 1e-5, and the largest relative difference."""
    apart = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    return {"tensors": len(apart), "same": sum(d < 1e-5 for d in apart), "largest_relative_difference": max(apart)}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    names = ("torch", "torchvision", "pytorch-quantization", "nvidia-modelopt", "nncf", "openvino")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
    }


def total(run: Timing) -> float:
    """Pass and choice together, or the whole call."""
    return sum(value for name, value in run.items() if name.endswith("_s"))


def median(values: list[float], spec: str) -> str:
    """The median as text; empty where there is none."""
    return format(statistics.median(values), spec) if values else ""


def markdown(result: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    runs, where = result["runs"], result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    others = [run["others"] for timings in runs.values() for run in timings]
    lines = [
        "# Calibration of ResNet-50: time",
        "",
        f"32 images at 224 px in 4 batches, random weights, 54 tensors, {where['threads']} threads of {where['cpu']}.",
        f"Python {where['python']}, {versions}.",
        f"Variants in turn, medians of {result['rounds']} rounds, ratios within a round; pytorch-quantization entropy "
        "ran once. While a run was timed, other processes took "
        f"{statistics.median(others):.1%} of the processors in the median and {max(others):.1%} at most; "
        f"{result['discarded_runs']} runs were repeated because it was more than "
        f"{result['tolerated_share_of_others']:.0%}.",
        "",
        "| variant | pass, s | pass / plain forward | choosing amax, s | together, s | each round, s |",
        "|---|---|---|---|---|---|",
    ]
    plain = [run["collect_s"] for run in runs[PLAIN]]
    for title, timings in runs.items():
        passes = [run["collect_s"] for run in timings if "collect_s" in run]
        ratios = [a / b for a, b in zip(passes, plain, strict=False)]
        cells = (
            title,
            median(passes, ".2f"),
            median(ratios, ".2f"),
            median([run["compute_s"] for run in timings if "compute_s" in run], ".3f"),
            median([total(run) for run in timings], ".2f"),
            " ".join(f"{total(run):.2f}" for run in timings),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"Not measured: {tool} ({reason})." for tool, reason in result["missing"].items())]
    lines += [
        f"Same amax as pytorch-quantization, {name}: {found['same']} of {found['tensors']} tensors; the largest "
        f"relative difference is {found['largest_relative_difference']:.1e}.  "
        for name, found in result["same_amax"].items()
    ]
    lines += [
        "",
        "Passes of compress and pytorch-quantization run the same network and calibrate the input of each of its 54",
        "convolutions and linear layers. `compress.quantize`, ModelOpt and NNCF are whole calls, with tracing and, for",
        "compress and NNCF, folding. NNCF runs the network on OpenVINO, whose forward pass is faster than torch's.",
        "pytorch-quantization's mse mode is missing, as it needs a GPU.",
        "",
        "Made by `python analysis/calibration_speed.py`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write calibration_speed.json and .md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help="to wait for a quiet machine")
    parser.add_argument("--others", type=float, default=0.05, metavar="SHARE", help="of other processes, tolerated")
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    result = measure(arguments.rounds, QuietMachine(arguments.others, arguments.patience))
    write_json(arguments.out / "calibration_speed.json", result)
    write_text(arguments.out / "calibration_speed.md", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
