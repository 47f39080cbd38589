"""Duration of the calibration of ResNet-50: compress beside pytorch-quantization, ModelOpt and NNCF."""

import copy
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openvino
import torch
import torchvision
from torch import Tensor, nn

from analysis.calibration_speed import report
from analysis.calibration_speed.report import PLAIN, Timing
from analysis.common.study import Row, command_line, option, software, study_options
from compress.files import write_json
from compress.measure.machine import describe_machine
from compress.quantization import ActivationSpec, QuantSpec
from compress.quantization.calibration.calibrators import CALIBRATORS, make_calibrator
from compress.quantization.ptq.quantize import quantize

Variant = Callable[[], Timing]

BATCHES, BATCH_SIZE, PIXELS = 4, 8, 224
ONCE = "pytorch-quantization entropy"  # it takes minutes, so it is timed in one round only
PEERS = ("torch", "torchvision", "pytorch-quantization", "nvidia-modelopt", "nncf", "openvino")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.inference_mode()
def forward(model: nn.Module, batches: list[Tensor]) -> None:
    for batch in batches:
        model(batch)


def weighted(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]


def calibrated(
    model: nn.Module, batches: list[Tensor], make: Callable[[], Any], choice: dict[str, Any], chosen: list[float]
) -> Timing:
    """Time a pass with a calibrator on the input of each layer, and then the choice of amax.

    Args:
        model: network that the batches pass through.
        batches: images.
        make: returns a new calibrator.
        choice: arguments of the calibrators' `compute_amax`.
        chosen: receives the amax of all layers.
    """
    calibrators = [make() for _ in weighted(model)]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, c=calibrator: c.collect(inputs[0]))
        for layer, calibrator in zip(weighted(model), calibrators, strict=True)
    ]
    try:
        collect = seconds(partial(forward, model, batches))
    finally:
        for handle in handles:
            handle.remove()

    def choose() -> None:
        chosen[:] = [float(c.compute_amax(**choice)) for c in calibrators]

    return {"collect_s": collect, "compute_s": seconds(choose)}


def our_call(model: nn.Module, batches: list[Tensor], name: str) -> Timing:
    spec = QuantSpec(activations=ActivationSpec(calibrator=name))  # type: ignore[arg-type]
    return {"total_s": seconds(lambda: quantize(model, batches[0][:1], batches, spec=spec))}


def pytorch_quantization_variants(
    model: nn.Module, batches: list[Tensor], chosen: dict[str, list[float]]
) -> dict[str, Variant]:
    from pytorch_quantization import calib  # optional: a peer that is measured where it is installed

    choices: dict[str, tuple[type, dict[str, Any]]] = {
        "max": (calib.MaxCalibrator, {}),
        "percentile": (calib.HistogramCalibrator, {"method": "percentile", "percentile": 99.99}),
        "entropy": (calib.HistogramCalibrator, {"method": "entropy"}),
    }
    return {
        name: partial(calibrated, model, batches, partial(kind, 8, None, False), choice, chosen.setdefault(name, []))
        for name, (kind, choice) in choices.items()
    }


def modelopt_variants(model: nn.Module, batches: list[Tensor]) -> dict[str, Variant]:
    """Return `mtq.quantize` with its INT8 configuration; its torch path has no entropy or percentile mode."""
    import modelopt.torch.quantization as mtq  # optional: a peer that is measured where it is installed

    def run(algorithm: str) -> Timing:
        config = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
        config["algorithm"] = algorithm
        network = copy.deepcopy(model)
        return {"total_s": seconds(lambda: mtq.quantize(network, config, partial(forward, batches=batches)))}

    return {"max": lambda: run("max"), "mse": lambda: run("mse")}


def nncf_variants(model: nn.Module, batches: list[Tensor]) -> dict[str, Variant]:
    import nncf  # optional: a peer that is measured where it is installed

    network = openvino.convert_model(model, example_input=batches[0])
    network.reshape([-1, 3, PIXELS, PIXELS])

    def run() -> Timing:
        data = nncf.Dataset([batch.numpy() for batch in batches])
        return {"total_s": seconds(lambda: nncf.quantize(network, data, subset_size=len(batches)))}

    return {"default": run}


def available(tool: str, make: Callable[[], dict[str, Variant]], missing: dict[str, str]) -> dict[str, Variant]:
    try:
        return {f"{tool} {name}": run for name, run in make().items()}
    except ImportError as error:
        missing[tool] = str(error)
        return {}


class QuietMachine:
    """Measures the load of other processes, and repeats timings that they disturbed.

    Args:
        limit: tolerated share of all processors.
        patience_s: seconds to wait for a quiet machine, in all; after that every timing counts.
    """

    def __init__(self, limit: float, patience_s: float) -> None:
        self.limit = limit
        self.ends = time.monotonic() + patience_s
        self.discarded = 0

    def timed(self, variant: Variant) -> Timing:
        while True:
            while self.patient() and self.others_during(lambda: time.sleep(2))[1] > self.limit:
                pass
            timing, others = self.others_during(variant)
            if others <= self.limit or not self.patient():
                return {**timing, "others": others}
            self.discarded += 1

    def patient(self) -> bool:
        return time.monotonic() < self.ends

    @staticmethod
    def others_during(work: Callable[[], Any]) -> tuple[Any, float]:
        start, own = cpu_seconds(), time.process_time()
        result = work()
        (busy, total), own = cpu_seconds(), time.process_time() - own
        return result, max(0.0, busy - start[0] - own) / (total - start[1])


def cpu_seconds() -> tuple[float, float]:
    user, nice, system, idle, wait, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    busy = user + nice + system + sum(interrupts)
    ticks = os.sysconf("SC_CLK_TCK")
    return busy / ticks, (busy + idle + wait) / ticks


def measure(rounds: int, quiet: QuietMachine) -> Row:
    torch.manual_seed(0)
    model = torchvision.models.resnet50().eval()
    batches = [torch.randn(BATCH_SIZE, 3, PIXELS, PIXELS) for _ in range(BATCHES)]
    missing: dict[str, str] = {}
    ours: dict[str, list[float]] = {name: [] for name in CALIBRATORS}
    theirs: dict[str, list[float]] = {}
    variants: dict[str, Variant] = {PLAIN: lambda: {"collect_s": seconds(partial(forward, model, batches))}}
    for name in CALIBRATORS:
        variants[f"compress {name}"] = partial(
            calibrated, model, batches, partial(make_calibrator, name), {}, ours[name]
        )
    for name in CALIBRATORS:
        variants[f"compress.quantize {name}"] = partial(our_call, model, batches, name)
    variants |= available(
        "pytorch-quantization", lambda: pytorch_quantization_variants(model, batches, theirs), missing
    )
    variants |= available("ModelOpt", lambda: modelopt_variants(model, batches), missing)
    variants |= available("NNCF", lambda: nncf_variants(model, batches), missing)
    runs = run_in_turn(variants, rounds, quiet)
    versions = software(*PEERS)
    machine = {"cpu": describe_machine().cpu, "threads": torch.get_num_threads(), "python": versions.pop("python")}
    machine["versions"] = {name: versions.get(name, "missing") for name in PEERS}
    return {
        "command": command_line(),
        "machine": machine,
        "rounds": rounds,
        "discarded_runs": quiet.discarded,
        "tolerated_share_of_others": quiet.limit,
        "missing": missing,
        "same_amax": {name: same(ours[name], theirs[name]) for name in theirs},
        "runs": runs,
    }


def run_in_turn(variants: dict[str, Variant], rounds: int, quiet: QuietMachine) -> dict[str, list[Timing]]:
    """Return timings by title: after a warm-up of each, A B C ... A B C ..., and last the variant that runs once."""
    often = [title for title in variants if title != ONCE]
    for title in often:
        variants[title]()
    order = often * rounds + [ONCE] * (ONCE in variants)
    runs: dict[str, list[Timing]] = {title: [] for title in variants}
    for title in order:
        runs[title].append(quiet.timed(variants[title]))
    return runs


def same(ours: list[float], theirs: list[float]) -> Row:
    apart = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    return {"tensors": len(apart), "same": sum(d < 1e-5 for d in apart), "largest_relative_difference": max(apart)}


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--rounds", type=int, default=5),
        option("--patience", type=float, default=0.0, metavar="SECONDS", help="time to wait for a quiet machine"),
        option("--others", type=float, default=0.05, metavar="SHARE", help="tolerated load of other processes"),
        out="results",
    )
    warnings.filterwarnings("ignore")
    result = measure(arguments.rounds, QuietMachine(arguments.others, arguments.patience))
    report.write(write_json(arguments.out / "calibration_speed.json", result))


if __name__ == "__main__":
    main()
