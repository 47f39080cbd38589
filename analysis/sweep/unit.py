"""One model of the sweep: quantized for each target, exported, its engine compared with fake quantization.

`python -m analysis.sweep.unit timm:deit_tiny_patch16_224` prints the row of a model as a line of JSON. `cpu_s` holds
the processor time of each stage; torch's ONNX exporter, which runs three times for a model, takes the largest part.
"""

import json
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

import compress
from analysis.common.study import Row
from compress.graph.report import leaves_of
from compress.measure.latency import latency_ratio, measure_latency
from compress.measure.parity import agreement, sqnr_db
from compress.quantization.report import placement_of

TARGETS = ("openvino", "onnxruntime")


def study(name: str) -> Row:
    row: Row = {"status": "ok", "cpu_s": {}}
    try:
        _study(name, row)
        _stage(row, None)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        row |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "at": f"{Path(where.filename).name}:{where.lineno}",
        }
    return row


def _stage(row: Row, name: str | None) -> None:
    """Begin a stage, or none; the processor time of the stage before is added under the last word of its name."""
    now = time.process_time()
    before, since = row.pop("stage", None), row.pop("since", 0.0)
    if before is not None:
        task = before.rpartition(": ")[2]
        row["cpu_s"][task] = round(row["cpu_s"].get(task, 0.0) + now - since, 1)
    if name is not None:
        row |= {"stage": name, "since": now}


def _study(name: str, row: Row) -> None:

    _stage(row, "build")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, size = build(name)
    images = pictures(32, size)
    settle(model, images)
    row |= {"image": size, "parameters": sum(p.numel() for p in model.parameters())}
    with torch.no_grad():
        reference = first(model(images[16:]))
    _stage(row, "tensorrt: place")
    placed = compress.insert_quantizers(model, images[:2], compress.QuantSpec(target="tensorrt"))
    row["tensorrt"] = described(placed)
    with tempfile.TemporaryDirectory() as folder:
        for target in TARGETS:
            _stage(row, f"{target}: quantize")
            spec = compress.QuantSpec(target=target)  # type: ignore[arg-type]
            qmodel = compress.quantize(model, images[:2], [images[:8], images[8:16]], spec=spec)
            row[target] = described(qmodel)
            moved = images[16:] + 1e-5 * torch.randn(images[16:].shape, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                expected, beside = first(qmodel(images[16:])), first(qmodel(moved))
            row[target]["sqnr_float_db"] = decibel(reference, expected)
            row[target]["sqnr_moved_db"] = decibel(expected, beside)
            _stage(row, f"{target}: export")
            file = compress.export_onnx(qmodel, images[:1], Path(folder) / f"{target}.onnx")
            _stage(row, f"{target}: engine")
            row[target] |= parity(file, target, images[16:], expected)
            _stage(row, f"{target}: latency")
            row[target] |= speed(model, images[:1], Path(folder), target)
            file.unlink()


def build(name: str) -> tuple[nn.Module, int]:
    error: Exception | None = None
    for options, size in choices(name):
        try:
            model = make(name, options).eval()
            with torch.no_grad():
                model(torch.zeros(2, 3, size, size))
            return model, size
        except Exception as problem:
            error = problem
    raise RuntimeError(f"runs on no image size that was tried: {error}")


def choices(name: str) -> list[tuple[Row, int]]:
    if name.startswith("timm:"):
        small: list[tuple[Row, int]] = [({"img_size": 64}, 64), ({"img_size": 128}, 128)]
        return [*small, *(({}, size) for size in (64, 96, 128, 224, 240, 256))]
    if name.startswith("vit_"):
        size = 56 if name.endswith("14") else 64
        return [({"image_size": size}, size)]
    auxiliary = {"aux_logits": False, "init_weights": False} if name in {"inception_v3", "googlenet"} else {}
    return [(auxiliary, size) for size in (64, 96, 224)]


def make(name: str, options: Row) -> nn.Module:
    source, _, rest = name.rpartition(":")
    if source == "timm":
        return timm.create_model(rest, num_classes=100, **options)

    if source == "segmentation":
        return torchvision.models.get_model_builder(rest)(weights=None, weights_backbone=None, num_classes=21)
    return torchvision.models.get_model_builder(rest)(num_classes=100, **options)


def pictures(count: int, size: int) -> Tensor:
    """Return seeded images with large and small structure, (count, 3, size, size), of mean 0 and deviation about 1."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(count, 3, 6, 6, generator=generator)
    fine = torch.randn(count, 3, size, size, generator=generator)
    return F.interpolate(coarse, size=(size, size), mode="bilinear") + 0.3 * fine


def settle(model: nn.Module, images: Tensor) -> None:
    """Give BatchNorm the statistics of these images, and parameters that start at zero other values.

    With a classifier or residual branch of zeros (ViT's head, layer scale, the last BatchNorm of a block) there is
    nothing to compare. BatchNorm's biases are 1: with biases of 0 and random weights a deep network is chaotic, as no
    trained one is, and amplifies any difference (ResNet-50 quantized: inputs that differ by 1e-4 gave 7 dB, and 35 dB
    with biases of 1; to float 6 dB and 30 dB), so that neither rounding nor engines could be compared.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.abs().max() < 1e-3:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.02 if parameter.dim() > 1 else torch.ones_like(parameter)
                )
        for module in model.modules():
            normalizes = isinstance(module, nn.modules.batchnorm._BatchNorm)
            biased = isinstance(module, (nn.Conv2d, nn.Linear, nn.LayerNorm)) or normalizes
            bias = getattr(module, "bias", None)
            if biased and bias is not None:
                bias.normal_(mean=float(normalizes), std=0.02)
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.momentum = None  # the mean of all batches
            norm.train()
        for batch in images.split(16):
            model(batch)
        for norm in norms:
            if norm.running_var is not None:  # it is 0 for a dead channel, whose next other value would overflow
                norm.running_var.clamp_(min=1e-2)
    model.eval()


def first(output: Any) -> Tensor:
    """Return the first tensor of an output, (images, classes); each pixel of a map counts as an image."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.movedim(1, -1).flatten(0, -2) if output.dim() > 2 else output


def decibel(reference: Tensor, value: Tensor) -> float:
    return round(sqnr_db(reference.numpy(), value.numpy()), 1)


def described(qmodel: fx.GraphModule) -> Row:
    left: dict[str, Row] = {}
    placement = placement_of(qmodel)
    for row in placement.decisions:
        if row.decision == "float":
            entry = left.setdefault(row.rule, {"count": 0, "example": row.layer, "reason": row.reason})
            entry["count"] += 1
    return {
        "weights": len(placement.weights),
        "activations": len(placement.activations),
        "float": left,
        "leaves": [f"{leaf.path} ({leaf.kind}): {leaf.reason}" for leaf in leaves_of(qmodel)],
    }


def parity(file: Path, engine: str, images: Tensor, expected: Tensor) -> dict[str, float]:
    precision = "f32" if engine == "openvino" else None
    with compress.build_engine(file, engine, threads=1, precision=precision) as built:
        result = next(iter(built.run({built.inputs[0].name: images.numpy()}).values()))
    got = first(torch.from_numpy(result))
    return {
        "top1_agreement": round(agreement(expected.numpy(), got.numpy()), 4),
        "sqnr_engine_db": round(sqnr_db(expected.numpy(), got.numpy()), 1),
    }


def speed(model: nn.Module, image: Tensor, folder: Path, engine: str) -> Row:
    reference = folder / "float.onnx"
    if not reference.is_file():
        if sum(p.numel() * p.element_size() for p in model.parameters()) >= 2**31:
            return {
                "latency_ratio": None,
                "latency_note": "a float file of 2 GiB does not fit into one ONNX file",
            }
        compress.export_onnx(model, image, reference)
    with (
        compress.build_engine(reference, engine, batch_size=1, threads=1) as plain,
        compress.build_engine(folder / f"{engine}.onnx", engine, batch_size=1, threads=1) as quantized,
    ):
        timed = measure_latency({"float": plain, "int8": quantized}, runs=25, seconds=1)
    return {"latency_ratio": round(latency_ratio(timed[1], timed[0]), 3), "int8_ms": round(timed[1].p50_ms, 3)}


def main() -> None:
    row = study(sys.argv[1])
    row.pop("since", None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    print("\n" + json.dumps(row | {"peak_memory_bytes": peak}))


if __name__ == "__main__":
    main()
