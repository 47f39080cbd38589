"""Methods of quantization, each from a float model to a file: ours by specification, and peers that are installed."""

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import compress
from analysis.common.peers import INPUT, nncf_file, onnxruntime_file
from analysis.real_accuracy.networks import Subject
from compress.engines.executorch import INFORMATION
from compress.quantization import ActivationSpec, AdaRoundSpec, QuantSpec, ReconstructSpec, Target, WeightSpec

BATCH, RESAMPLES = 10, 2000


@dataclass(frozen=True)
class Made:
    """A quantized file, and what its maker says about it: methods that were taken back, warnings."""

    file: Path
    note: str = ""


Make = Callable[[Subject, Path, Path], Made]


@dataclass(frozen=True)
class Method:
    """A method, the engines that run its files, and which network it is for.

    Attributes:
        make: writes the file.
        engines: that are measured.
        bits: of weights and activations, such as W8A8.
        version: package whose version is in the row.
        only: names of networks; empty = all.
    """

    make: Make
    engines: tuple[str, ...]
    bits: str = "W8A8"
    version: str = ""
    only: tuple[str, ...] = field(default_factory=tuple)


def ours(spec: QuantSpec) -> Make:
    def make(subject: Subject, _: Path, folder: Path) -> Made:
        batches, example = list(subject.calibration.split(BATCH)), subject.calibration[:2]
        qmodel = compress.quantize(subject.model, example, batches, spec=spec)
        back = qmodel.report.comparison.taken_back if qmodel.report.comparison else ()
        file = compress.export_onnx(qmodel.cpu(), example.cpu(), folder / "ours.onnx")
        return Made(file, f"{' and '.join(back).replace('_', ' ')} taken back" if back else "")

    return make


def exported(model: nn.Module, example: Tensor, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (example,),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=[INPUT],
            output_names=["logits"],
            dynamic_axes={INPUT: {0: "batch"}, "logits": {0: "batch"}},
        )
    return path


def onnxruntime(calibration: str, subject: Subject, path: Path, folder: Path) -> Made:
    from onnxruntime.quantization import CalibrationMethod  # optional: a peer's part of the engine

    batches = subject.calibration.split(BATCH)
    return Made(onnxruntime_file(path, batches, folder, calibrate_method=CalibrationMethod[calibration]))


def nncf(best: bool, subject: Subject, path: Path, folder: Path) -> Made:
    return Made(nncf_file(path, subject.calibration.split(BATCH), folder, fast_bias_correction=not best))


def modelopt(config: str, subject: Subject, _: Path, folder: Path) -> Made:
    import modelopt.torch.quantization as package  # optional: a peer

    def calibrate(network: nn.Module) -> None:
        for batch in subject.calibration.split(BATCH):
            network(batch)

    model = package.quantize(copy.deepcopy(subject.model), getattr(package, config), calibrate)
    return Made(exported(model, subject.calibration[:2], folder / "modelopt.onnx"))


def xnnpack(subject: Subject, _: Path, folder: Path) -> Made:
    from executorch.backends.xnnpack.partition import xnnpack_partitioner  # optional: a peer's part of the engine
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as package
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e import quantize_pt2e

    images = subject.calibration.split(1)
    quantizer = package.XNNPACKQuantizer().set_global(package.get_symmetric_quantization_config(is_per_channel=True))
    network = quantize_pt2e.prepare_pt2e(torch.export.export(subject.model, images[:1]).module(), quantizer)
    with torch.no_grad():
        for image in images:
            network(image)
    program = torch.export.export(quantize_pt2e.convert_pt2e(network), images[:1])
    names = torch.frombuffer(
        bytearray(json.dumps({"inputs": [INPUT], "outputs": ["logits"], "metadata": {}}).encode()), dtype=torch.uint8
    )
    edge = to_edge_transform_and_lower(
        program, partitioner=[xnnpack_partitioner.XnnpackPartitioner()], constant_methods={INFORMATION: names}
    )
    file = folder / "xnnpack.pte"
    file.write_bytes(edge.to_executorch().buffer)
    return Made(file)


def _ours_for(target: Target) -> dict[str, Method]:
    base = QuantSpec(target=target)
    w4 = replace(base, weights=WeightSpec(num_bits=4, calibrator="mse"))
    fast = AdaRoundSpec(steps=500, images=200)
    blocks = ReconstructSpec(steps=500, images=200, batch_size=16, positions=8192)
    specs: dict[str, tuple[QuantSpec, str]] = {
        "default (mse)": (base, "W8A8"),
        "max": (replace(base, activations=ActivationSpec(calibrator="max")), "W8A8"),
        "percentile 99.99": (replace(base, activations=ActivationSpec(calibrator="percentile")), "W8A8"),
        "entropy": (replace(base, activations=ActivationSpec(calibrator="entropy")), "W8A8"),
        "weights mse": (replace(base, weights=WeightSpec(calibrator="mse")), "W8A8"),
        "bias correction": (replace(base, bias_correction="empirical"), "W8A8"),
        "relu6 to relu, equalize, bias correction": (
            replace(base, relu6="relu", equalize=True, bias_correction="empirical"),
            "W8A8",
        ),
        "AdaRound": (replace(base, adaround=fast), "W8A8"),
        "nearest": (w4, "W4A8"),
        "nearest, bias correction": (replace(w4, bias_correction="empirical"), "W4A8"),
        "AdaRound, 4 bits": (replace(w4, adaround=fast), "W4A8"),
        "blocks": (replace(w4, reconstruct=blocks), "W4A8"),
    }
    return {
        f"compress: {name}, {target}": Method(ours(spec), (target,), bits, "") for name, (spec, bits) in specs.items()
    }


METHODS: dict[str, Method] = {
    **_ours_for("openvino"),
    "NNCF: default": Method(partial(nncf, False), ("openvino",), version="nncf"),
    "NNCF: fast_bias_correction=False": Method(partial(nncf, True), ("openvino",), version="nncf"),
    "ONNX Runtime's quantizer: MinMax": Method(
        partial(onnxruntime, "MinMax"), ("onnxruntime", "openvino"), version="onnxruntime"
    ),
    "ONNX Runtime's quantizer: Percentile": Method(
        partial(onnxruntime, "Percentile"), ("onnxruntime",), version="onnxruntime"
    ),
    **{
        f"ModelOpt: {config}": Method(partial(modelopt, config), ("openvino", "onnxruntime"), version="nvidia-modelopt")
        for config in ("INT8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG")
    },
    **_ours_for("onnxruntime"),
    "compress: default, litert": Method(ours(QuantSpec(target="litert")), ("litert", "executorch")),
    "ExecuTorch's XNNPACKQuantizer": Method(xnnpack, ("executorch",), version="executorch"),
}


def logits_of(path: Path, engine: str, images: Tensor, threads: int) -> Tensor:
    options: dict[str, Any] = {"threads": threads, "precision": "f32"} if engine == "openvino" else {"threads": threads}
    if engine == "executorch" and not path.with_suffix(".pte").exists():
        compress.export_executorch(path, path.with_suffix(".pte"))
    with compress.build_engine(path, engine, **options) as made:
        name = made.inputs[0].name
        parts = [next(iter(made.run({name: batch.numpy()}).values())) for batch in images.split(BATCH)]
    return torch.cat([torch.from_numpy(part) for part in parts])


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Figures:
    """Accuracy in percent, difference to float in points, agreement with float's class in percent, SQNR in dB."""

    top1: Interval
    points: Interval
    agreement: Interval
    sqnr_db: Interval


def figures(expected: Tensor, logits: Tensor, targets: Tensor, *, seed: int = 0) -> Figures:
    """Compare logits (N, classes) with the float network's on the same pictures.

    Each resample draws N pictures with replacement and takes both networks' results on them (paired bootstrap, Efron
    and Tibshirani, An Introduction to the Bootstrap, chapter 13: percentile intervals).
    """
    right = (logits.argmax(1) == targets).double()
    gain = right - (expected.argmax(1) == targets).double()
    agree = (logits.argmax(1) == expected.argmax(1)).double()
    signal, noise = expected.double().square().sum(1), (logits - expected).double().square().sum(1)
    rows = torch.stack([right, gain, agree, signal, noise]).numpy()
    draws = np.random.default_rng(seed).integers(0, len(targets), (RESAMPLES, len(targets)))
    means = np.stack([row[draws].mean(1) for row in rows])

    def interval(value: float, samples: np.ndarray) -> Interval:
        low, high = np.percentile(samples, [2.5, 97.5])
        return Interval(float(value), float(low), float(high))

    def decibel(s: np.ndarray, n: np.ndarray) -> np.ndarray:
        return 10 * np.log10(np.maximum(s, 1e-300) / np.maximum(n, 1e-300))

    whole = rows.mean(1)
    found = [interval(100 * whole[i], 100 * means[i]) for i in range(3)]
    ratio = interval(float(decibel(whole[3], whole[4])), decibel(means[3], means[4]))
    return Figures(found[0], found[1], found[2], ratio)
