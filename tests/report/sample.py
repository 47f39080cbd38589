"""A run folder as a whole `qat` run of ResNet-50 leaves it: names and shapes are real, the numbers are drawn."""

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = """\
model:
  name: resnet50
  weights: null
data:
  name: digits
  image_size: 64
  batch_size: 64
quantization:
  target: tensorrt
  calibration_images: 512
  activations: {num_bits: 8, calibrator: entropy}
  rules:
  - {match: fc, enable: true}
qat: {epochs: 2, lr: 0.001, distill: true}
"""

ENVIRONMENT = {
    "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
    "cores": 2,
    "memory_bytes": 16_777_216_000,
    "isa": ["avx2", "avx512f", "avx512_vnni", "amx_int8"],
    "gpus": [],
    "os": "Linux 6.1 x86_64",
    "python": "3.11.8",
    "versions": {
        "compress": "0.1.0",
        "torch": "2.15.0",
        "onnx": "1.21.0",
        "onnxruntime": "1.24.1",
        "openvino": "2026.0",
    },
}

OPENVINO, BF16, ORT = "openvino (f32)", "openvino (bf16)", "onnxruntime"
TORCH = "torch (fake quantization)"


def resnet50_layers() -> list[tuple[str, str, tuple[int, ...], int]]:
    rows: list[tuple[str, str, tuple[int, ...], int]] = [("conv1", "conv", (64, 3, 7, 7), 32)]
    width = 64
    for stage, (blocks, planes) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), start=1):
        side = 16 >> (stage - 1)
        for block in range(blocks):
            base = f"layer{stage}.{block}"
            rows.append((f"{base}.conv1", "conv", (planes, width, 1, 1), side))
            rows.append((f"{base}.conv2", "conv", (planes, planes, 3, 3), side))
            rows.append((f"{base}.conv3", "conv", (planes * 4, planes, 1, 1), side))
            if block == 0:
                rows.append((f"{base}.downsample.0", "conv", (planes * 4, width, 1, 1), side))
            width = planes * 4
    rows.append(("fc", "linear", (10, 2048), 1))
    return rows


def metric(name: str, variant: str, engine: str, value: float | None, unit: str, **more: Any) -> dict[str, Any]:
    row = {"name": name, "variant": variant, "engine": engine, "batch_size": None, "value": value, "unit": unit}
    return row | {"method": "", "status": "complete", "reason": ""} | more


def sample_metrics() -> list[dict[str, Any]]:
    top1 = {"float": 98.61, "ptq": 97.78, "qat": 98.33}
    p50 = {
        (OPENVINO, 1): (11.52, 3.21, 3.19),
        (OPENVINO, 32): (241.0, 61.7, 61.4),
        (BF16, 1): (6.02, 3.14, 3.15),
        (BF16, 32): (118.4, 58.9, 59.2),
        (ORT, 1): (19.83, 9.04, 9.11),
        (ORT, 32): (502.3, 233.1, 234.8),
    }
    accuracy = "all 360 images of the evaluation split, batch 64"
    latency = "variants in turn, 20 warm-up and 200 timed runs, 2 threads"
    rows: list[dict[str, Any]] = []
    for index, (variant, value) in enumerate(top1.items()):
        rows.append(metric("top1", variant, TORCH, value, "%", method=accuracy))
        rows.append(metric("top5", variant, TORCH, 100.0, "%", method=accuracy))
        for engine in (OPENVINO, BF16, ORT):
            shift = 0.28 if (engine, variant) == (BF16, "ptq") else 0.0
            rows.append(metric("top1", variant, engine, value - shift, "%", method=accuracy))
            rows.append(metric("top5", variant, engine, 100.0, "%", method=accuracy))
            if variant != "float":
                rows.append(
                    metric("agreement", variant, engine, 99.72, "%", method="arg max against fake quantization")
                )
                rows.append(
                    metric("sqnr_db", variant, engine, 38.2 - index, "dB", method="logits, signal over difference")
                )
            for batch_size in (1, 32):
                ms = p50[engine, batch_size][index]
                at = {"batch_size": batch_size, "method": latency}
                rows.append(metric("p50_ms", variant, engine, ms, "ms", **at))
                rows.append(metric("p90_ms", variant, engine, ms * 1.06, "ms", **at))
                rows.append(metric("p99_ms", variant, engine, ms * 1.21, "ms", **at))
                rows.append(metric("images_per_s", variant, engine, 1000 * batch_size / ms, "images/s", **at))
        size = (94_281_113, 24_187_402, 24_187_402)[index]
        rows.append(metric("file_bytes", variant, "", size, "bytes", method="size of the ONNX file"))
        rows.append(metric("weight_bytes", variant, "", size - 300_000, "bytes", method="initializers of weights"))
        missing = {"status": "unavailable", "reason": "the tensorrt package is not installed"}
        rows.append(metric("p50_ms", variant, "tensorrt", None, "ms", batch_size=1, **missing))
        rows.append(metric("top1", variant, "tensorrt", None, "%", **missing))
    return rows


def sample_layers() -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    rows = []
    for depth, (name, kind, shape, side) in enumerate(resnet50_layers()):
        elements = int(np.prod(shape))
        dip = {"conv1": 7.0, "layer1.0.downsample.0": 9.0, "layer4.2.conv2": 6.0}.get(name, 0.0)
        rows.append(
            {
                "name": name,
                "kind": kind,
                "macs": elements * side * side,
                "weight_elements": elements,
                "float_weight_bytes": 4 * elements,
                "quantized_weight_bytes": elements + 4 * shape[0],
                "weight_sqnr_db": round(float(41 - dip + rng.normal(0, 1.6)), 3),
                "activation_sqnr_db": round(float(36 - 0.14 * depth - 0.8 * dip + rng.normal(0, 1.2)), 3),
            }
        )
    return rows


def sample_histograms() -> list[dict[str, Any]]:
    rng = np.random.default_rng(4)
    rows = []
    for name, _, _, _ in resnet50_layers():
        values = np.abs(rng.standard_t(rng.uniform(3, 12), 20_000)) * rng.uniform(0.3, 2.0)
        counts, edges = np.histogram(values, bins=512, range=(0, values.max()))
        rows.append(
            {
                "name": f"quantizers.{name.replace('.', '_')}",
                "counts": counts.tolist(),
                "bin_edges": [float(edges[0]), float(edges[-1])],
                "amax": round(float(np.quantile(values, rng.uniform(0.995, 1.0))), 6),
            }
        )
    return rows


def sample_placement() -> list[dict[str, Any]]:
    rows = []
    quantized = {"decision": "quantize", "num_bits": 8, "signed": True}
    for name, kind, _, _ in resnet50_layers():
        node = name.replace(".", "_")
        reason = f"a {'convolution' if kind == 'conv' else 'matrix product'} computes in INT8 when both inputs are"
        rows.append(
            {
                "tensor": f"{node}_in",
                "layer": name,
                "quantizer": f"quantizers.{node}",
                "axis": None,
                "rule": "inputs",
            }
            | {"reason": reason}
            | quantized
        )
        rows.append(
            {"tensor": f"{name}.weight", "layer": name, "quantizer": f"{name}.weight_quantizer", "axis": 0}
            | {"rule": "weights", "reason": "per output channel, symmetric"}
            | quantized
        )
    stays = {"decision": "float", "quantizer": "", "num_bits": None, "axis": None, "signed": None}
    rows += [
        {"tensor": f"{n}_relu", "layer": f"{n}.relu", "rule": "fusion", "reason": "fuses with the layer before"} | stays
        for n, *_ in resnet50_layers()[:40]
    ]
    rows.append({"tensor": "maxpool", "layer": "maxpool", "rule": "commutes", "reason": "max pooling commutes"} | stays)
    rows.append(
        {"tensor": "fc", "layer": "fc", "rule": "output", "reason": "the classifier's output stays float"} | stays
    )
    return rows


def sample_block() -> dict[str, Any]:
    # A bottleneck without a shortcut layer, as TensorRT takes it.
    outside, pill = {"detail": "", "kind": "outside"}, {"title": "int8", "detail": "scale 0.031", "kind": "quantizer"}
    pill = pill | {"integers": True}
    layer = {"detail": "conv, weight int8 per channel", "kind": "int8"}
    chain = ["before", "q0", "conv1", "q1", "conv2", "q2", "conv3", "after"]
    titles = {"conv1": "conv1 + relu", "conv2": "conv2 + relu", "conv3": "conv3 + add + relu"}
    boxes = {
        name: pill
        if name[0] == "q"
        else {"title": titles[name]} | layer
        if name in titles
        else {"title": name} | outside
        for name in chain
    }
    edges = [*pairwise(chain), ("q0", "conv3")]
    return {"block": "layer1.1", "target": "tensorrt", "boxes": boxes, "edges": edges}


def sample_epochs(epochs: int, *, lr: float, start: float, end: float, steps: int = 23) -> list[dict[str, Any]]:
    rng = np.random.default_rng(epochs)
    rows = []
    for epoch in range(1, epochs + 1):
        share = (epoch - 1) / max(1, epochs - 1)
        top1 = start + (end - start) * (1 - (1 - share) ** 3)
        rows.append(
            {
                "epoch": epoch,
                "step": epoch * steps,
                "lr": round(lr * 0.5 * (1 + np.cos(np.pi * share)), 8),
                "train_loss": round(float(2.2 * (1 - top1) + 0.05 + rng.uniform(0, 0.02)), 5),
                "train_top1": round(float(top1 - 0.01 + rng.uniform(0, 0.01)), 5),
                "val_top1": "" if epoch == 3 else round(float(top1), 5),
                "val_top5": "" if epoch == 3 else 0.999,
                "val_loss": "" if epoch == 3 else round(float(2.4 * (1 - top1) + 0.04), 5),
                "images_per_s": 84.2,
                "seconds": 17.1,
            }
        )
    return rows


def sample_audit() -> list[dict[str, Any]]:
    rows = []
    for variant in ("ptq", "qat"):
        for name, kind, shape, _ in resnet50_layers():
            left = name == "conv1"
            rows.append(
                {"variant": variant, "name": name, "op_type": "Conv" if kind == "conv" else "Gemm", "int8": not left}
                | {"weight_elements": int(np.prod(shape)), "input_type": "int8", "weight_type": "int8"}
                | {"reason": "its input is float: rule 'conv1' leaves it so" if left else ""}
            )
    return rows


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_sample(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    for name, value in {
        "environment": ENVIRONMENT,
        "metrics": sample_metrics(),
        "layers": sample_layers(),
        "histograms": sample_histograms(),
        "block": sample_block(),
        "audit": sample_audit(),
        "notes": ["3 images of the training split could not be read and were left out"],
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    write_csv(folder / "placement.csv", sample_placement())
    write_csv(folder / "train.csv", sample_epochs(8, lr=0.05, start=0.62, end=0.9861))
    write_csv(folder / "qat.csv", sample_epochs(2, lr=0.001, start=0.9806, end=0.9833))
    return folder
