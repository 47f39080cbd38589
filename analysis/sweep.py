"""Every classifier and segmentation network of torchvision, and a list of timm's that covers its families, quantized.

    python analysis/sweep.py                       # all that results/sweep.jsonl does not hold yet, small ones first
    python analysis/sweep.py --models resnet18 timm:deit_tiny_patch16_224     # these again
    python analysis/sweep.py --report              # only write results/sweep.md again

Each model has random weights (seeded; BatchNorm statistics from a few batches, so that activations have a sane range)
and small images where it allows. It is quantized for targets openvino and onnxruntime, exported, and the engine's
outputs are compared with those of fake quantization; placement for tensorrt is checked too. The latency ratio to the
float file of the same engine is taken in turn, one thread, batch 1. Random networks say nothing of accuracy: top-1
agreement is a check of the export, not of quantization.

Each model runs in a process of its own with a time limit, so that a crash is a row and not the end. One line of JSON a
model in results/sweep.jsonl makes it resumable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGETS = ("openvino", "onnxruntime")
SEGMENTATION = (
    "lraspp_mobilenet_v3_large",
    "fcn_resnet50",
    "fcn_resnet101",
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50",
    "deeplabv3_resnet101",
)
TIMM = tuple(
    """
test_resnet test_vit test_efficientnet test_convnext lcnet_050 tinynet_e mobilenetv3_small_050 mobilenetv4_conv_small
mnasnet_small starnet_s050 regnetx_002 regnety_002 convnext_atto convnextv2_atto efficientvit_b0 efficientvit_m0
ghostnet_100 ghostnetv2_100 repghostnet_050 hardcorenas_a fbnetc_100 spnasnet_100 mixnet_s tf_efficientnet_lite0
efficientnet_es tf_efficientnetv2_b0 fasternet_t0 fastvit_t8 inception_next_atto mambaout_femto mobilevit_xxs
mobilevitv2_050 mobileone_s0 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 swiftformer_xs shvit_s1
repvit_m0_9 rexnet_100 hgnetv2_b0 ese_vovnet19b_dw dla34 dpn68 densenet121 cs3darknet_m cspresnet50 selecsls42b
legacy_seresnet18 skresnet18 resnest14d gcresnet33ts ecaresnet26t resnetblur50 res2net50_26w_4s resnetv2_18
resnetv2_50x1_bit nf_resnet50 eca_nfnet_l0 repvgg_a0 gernet_s tresnet_m hrnet_w18_small xception41 inception_v4
inception_resnet_v2 regnetz_b16 poolformer_s12 caformer_s18 convmixer_768_32 vit_tiny_patch16_224 deit_tiny_patch16_224
deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224 cait_xxs24_224 xcit_nano_12_p16_224 pit_ti_224
levit_128s pvt_v2_b0 twins_svt_small tnt_s_patch16_224 coat_lite_tiny convit_tiny crossvit_tiny_240 visformer_tiny
vit_relpos_small_patch16_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_ns_224
maxvit_nano_rw_256 coatnet_nano_rw_224 davit_tiny gcvit_xxtiny focalnet_tiny_srf nest_tiny hiera_tiny_224
mvitv2_tiny tiny_vit_5m_224 volo_d1_224 botnet26t_256 halonet26t lambda_resnet26t sequencer2d_s resmlp_12_224
mixer_s32_224 gmixer_12_224 gmlp_ti16_224 nextvit_small vitamin_small_224 rdnet_tiny vgg11
""".split()  # noqa: SIM905  (a list of so many would be a page)
)


LEGEND = (
    "W and A: quantizers of weights and of activations. SQNR: of fake quantization to the float model, and of the "
    "engine to fake quantization, in dB, over 16 images that calibration did not see; top-1: share of equal decisions "
    "of engine and fake quantization. Latency: INT8 over float in the same engine, in turn (OpenVINO's float is its "
    "default, bf16 where the CPU has it). Random networks tell nothing about accuracy after training. Left float: how "
    "many operations, by rule; the reasons stand below."
)


def main() -> None:
    """Run what is asked and is not there yet; write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="these, also where they have a row; default: all without one")
    parser.add_argument("--retry", action="store_true", help="also those whose row is a failure")
    parser.add_argument("--limit", type=int, help="at most so many models")
    parser.add_argument("--timeout", type=int, default=900, help="seconds a model")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "sweep")
    parser.add_argument("--report", action="store_true", help="write the table and run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print("\n" + json.dumps(study(arguments.one)))
        return
    log = arguments.out.with_suffix(".jsonl")
    if not arguments.report:
        for name in queue(arguments.models, read(log), retry=arguments.retry)[: arguments.limit]:
            row = in_process(name, arguments.timeout)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name}: {row['status']} {row.get('error', '')} ({row['seconds']:.0f} s)", flush=True)
            write(arguments.out, read(log))
    write(arguments.out, read(log))


# --- the list and its rows -----------------------------------------------------------------------------------------


def names() -> list[str]:
    """All models of the sweep, torchvision's sorted by size."""
    import torchvision

    def size(name: str) -> int:
        return int(next(iter(torchvision.models.get_model_weights(name))).meta["num_params"])

    known = sorted(torchvision.models.list_models(module=torchvision.models), key=size)
    segmentation = [f"segmentation:{name}" for name in SEGMENTATION]
    timm = [f"timm:{name}" for name in TIMM]
    big = [name for name in known if size(name) > 60_000_000]
    small = [name for name in known if name not in big]
    half = len(small) // 2
    return small[:half] + timm[:30] + small[half:] + segmentation + timm[30:] + big


def queue(models: list[str] | None, rows: dict[str, dict[str, Any]], *, retry: bool) -> list[str]:
    """What is to be run, in order."""
    if models:
        return models
    done = {name for name, row in rows.items() if row["status"] == "ok" or not retry}
    return [name for name in names() if name not in done]


def read(log: Path) -> dict[str, dict[str, Any]]:
    """The newest row of each model."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return {row["model"]: row for row in map(json.loads, lines)}


def in_process(name: str, timeout: int) -> dict[str, Any]:
    """Study one model in a process of its own; a crash or a run past the limit becomes a row."""
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        row: dict[str, Any] = {"status": "failed", "stage": "?", "error": f"not done after {timeout} s"}
    else:
        last = done.stdout.strip().rpartition("\n")[2]
        row = json.loads(last) if last.startswith("{") else {}
        if not row:
            text = (done.stderr.strip().splitlines() or [""])[-1][:300]
            row = {"status": "failed", "stage": "?", "error": f"process ended with {done.returncode}: {text}"}
    return {"model": name, **row, "seconds": round(time.monotonic() - start, 1)}


# --- one model -----------------------------------------------------------------------------------------------------


def study(name: str) -> dict[str, Any]:
    """Everything about one model; an error is written down with the stage that it happened in."""
    row: dict[str, Any] = {"status": "ok", "stage": "build"}
    try:
        _study(name, row)
        del row["stage"]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        row |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "at": f"{Path(where.filename).name}:{where.lineno}",
        }
    return row


def _study(name: str, row: dict[str, Any]) -> None:
    import torch

    import compress

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, size = build(name)
    images = pictures(32, size)
    settle(model, images)
    row |= {"image": size, "parameters": sum(p.numel() for p in model.parameters())}
    with torch.no_grad():
        reference = first(model(images[16:]))
    row["stage"] = "tensorrt: placement"
    placed = compress.insert_quantizers(model, images[:2], compress.QuantSpec(target="tensorrt"))
    row["tensorrt"] = described(placed)
    with tempfile.TemporaryDirectory() as folder:
        for target in TARGETS:
            row["stage"] = f"{target}: quantize"
            spec = compress.QuantSpec(target=target)  # type: ignore[arg-type]
            qmodel = compress.quantize(model, images[:2], [images[:8], images[8:16]], spec=spec)
            row[target] = described(qmodel)
            with torch.no_grad():
                expected = first(qmodel(images[16:]))
            row[target]["sqnr_float_db"] = decibel(reference, expected)
            row["stage"] = f"{target}: export"
            file = compress.export_onnx(qmodel, images[:1], Path(folder) / f"{target}.onnx")
            row["stage"] = f"{target}: engine"
            row[target] |= parity(file, target, images[16:], expected)
            row["stage"] = f"{target}: latency"
            row[target] |= speed(model, images[:1], Path(folder), target)
            file.unlink()


def build(name: str) -> tuple[Any, int]:
    """The model in evaluation mode and the smallest image that it was found to run on."""
    import torch

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


def choices(name: str) -> list[tuple[dict[str, Any], int]]:
    """(options, image size) pairs to try."""
    if name.startswith("timm:"):
        small: list[tuple[dict[str, Any], int]] = [({"img_size": 64}, 64), ({"img_size": 128}, 128)]
        return [*small, *(({}, size) for size in (64, 96, 128, 224, 240, 256))]
    if name.startswith("vit_"):
        size = 56 if name.endswith("14") else 64
        return [({"image_size": size}, size)]
    auxiliary = {"aux_logits": False, "init_weights": False} if name in {"inception_v3", "googlenet"} else {}
    return [(auxiliary, size) for size in (64, 96, 224)]


def make(name: str, options: dict[str, Any]) -> Any:
    """A network with random weights."""
    source, _, rest = name.rpartition(":")
    if source == "timm":
        import timm

        return timm.create_model(rest, num_classes=100, **options)
    import torchvision

    if source == "segmentation":
        return torchvision.models.get_model_builder(rest)(weights=None, weights_backbone=None, num_classes=21)
    return torchvision.models.get_model_builder(rest)(num_classes=100, **options)


def pictures(count: int, size: int) -> Any:
    """Seeded images with large and small structure, (count, 3, size, size), mean 0 and deviation about 1."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(count, 3, 6, 6, generator=generator)
    fine = torch.randn(count, 3, size, size, generator=generator)
    return F.interpolate(coarse, size=(size, size), mode="bilinear") + 0.3 * fine


def settle(model: Any, images: Any) -> None:
    """BatchNorm statistics of these images; no parameter that training begins at nought or next to it.

    A classifier or residual branch that begins at zero (ViT's head, layer scale, the last BatchNorm of a block) would
    leave nothing to compare.
    """
    import torch
    from torch import nn

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.abs().max() < 1e-3:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.02 if parameter.dim() > 1 else torch.ones_like(parameter)
                )
        for module in model.modules():
            biased = isinstance(module, (nn.Conv2d, nn.Linear, nn.LayerNorm)) or hasattr(module, "running_mean")
            if biased and getattr(module, "bias", None) is not None:
                module.bias.normal_(std=0.02)
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.momentum = None  # the mean of all batches
            norm.train()
        for batch in images.split(16):
            model(batch)
    model.eval()


def first(output: Any) -> Any:
    """The first tensor of an output, (images, classes); of a map, its pixels are images."""
    import torch

    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.movedim(1, -1).flatten(0, -2) if output.dim() > 2 else output


def decibel(reference: Any, value: Any) -> float:
    """SQNR, rounded for the table."""
    from compress.measure.parity import sqnr_db

    return round(sqnr_db(reference.numpy(), value.numpy()), 1)


def described(qmodel: Any) -> dict[str, Any]:
    """Quantizers placed, and what stays float with its reasons (how many, and one of them)."""
    from compress.graph.trace import leaves_of

    left: dict[str, dict[str, Any]] = {}
    for row in qmodel.placement.decisions:
        if row.decision == "float":
            entry = left.setdefault(row.rule, {"count": 0, "example": row.layer, "reason": row.reason})
            entry["count"] += 1
    return {
        "weights": len(qmodel.placement.weights),
        "activations": len(qmodel.placement.activations),
        "float": left,
        "leaves": [f"{leaf.path} ({leaf.kind}): {leaf.reason}" for leaf in leaves_of(qmodel)],
    }


def parity(file: Path, engine: str, images: Any, expected: Any) -> dict[str, float]:
    """The engine against fake quantization on the same images; the remainder in float32."""
    import torch

    import compress
    from compress.measure.parity import agreement, sqnr_db

    precision = "f32" if engine == "openvino" else None
    with compress.build_engine(file, engine, threads=1, precision=precision) as built:
        result = next(iter(built.run({built.inputs[0].name: images.numpy()}).values()))
    got = first(torch.from_numpy(result))
    return {
        "top1_agreement": round(agreement(expected.numpy(), got.numpy()), 4),
        "sqnr_engine_db": round(sqnr_db(expected.numpy(), got.numpy()), 1),
    }


def speed(model: Any, image: Any, folder: Path, engine: str) -> dict[str, Any]:
    """Latency of the INT8 file over that of the float file, in turn, batch 1, one thread; the engine's own defaults."""
    import compress
    from compress.measure import latency_ratio, measure_latency

    reference = folder / "float.onnx"
    if not reference.is_file():
        if sum(p.numel() * p.element_size() for p in model.parameters()) >= 2**31:
            return {"latency_ratio": None, "latency_note": "a float file of 2 GiB and more is not ONNX of one piece"}
        compress.export_onnx(model, image, reference)
    with (
        compress.build_engine(reference, engine, batch_size=1, threads=1) as plain,
        compress.build_engine(folder / f"{engine}.onnx", engine, batch_size=1, threads=1) as quantized,
    ):
        timed = measure_latency({"float": plain, "int8": quantized}, runs=40, seconds=2)
    return {"latency_ratio": round(latency_ratio(timed[1], timed[0]), 3), "int8_ms": round(timed[1].p50_ms, 3)}


# --- the table -----------------------------------------------------------------------------------------------------


def write(out: Path, rows: dict[str, dict[str, Any]]) -> None:
    """results/sweep.md: one line a model, failures first."""
    from compress.files import write_text
    from compress.measure import describe_machine

    machine = describe_machine().to_dict()
    order = {name: i for i, name in enumerate(names())}
    models = sorted(rows, key=lambda name: (rows[name]["status"] == "ok", order.get(name, len(order))))
    failed = [name for name in models if rows[name]["status"] != "ok"]
    lines = [
        "# Every architecture: placement, export, parity, latency",
        "",
        f"`python analysis/sweep.py`; {machine['cpu']}, one thread, batch 1, random weights. {len(rows)} of "
        f"{len(order)} models done, {len(failed)} failed.",
        "",
        LEGEND,
        "",
        "| model | px | target | W | A | SQNR to float | engine SQNR | top-1 | latency | left float |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name in models:
        lines += table_rows(name, rows[name])
    lines += ["", "## Why what is float is float", "", "| rule | models | reason (first seen) |", "|---|---:|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows.values():
        for rule, entry in {r: e for t in TARGETS for r, e in row.get(t, {}).get("float", {}).items()}.items():
            reasons.setdefault(rule, []).append(entry["reason"])
    lines += [f"| {rule} | {len(found)} | {found[0]} |" for rule, found in sorted(reasons.items())]
    leaves = {name: row["openvino"]["leaves"] for name, row in rows.items() if row.get("openvino", {}).get("leaves")}
    lines += ["", "## Kept whole (torch.fx cannot trace them)", ""]
    lines += [f"- {name}: {len(found)} modules, first {found[0]}" for name, found in leaves.items()] or ["None."]
    write_text(out.with_suffix(".md"), "\n".join(lines) + "\n")


def table_rows(name: str, row: dict[str, Any]) -> list[str]:
    """Markdown lines of one model."""
    lines = []
    for target in TARGETS:
        cells = row.get(target, {})
        if "top1_agreement" not in cells:
            continue
        left = ", ".join(f"{entry['count']} {rule}" for rule, entry in cells["float"].items()) or "none"
        figures = [cells[key] for key in ("sqnr_float_db", "sqnr_engine_db", "top1_agreement")]
        ratio = cells.get("latency_ratio")
        lines.append(
            f"| {name} | {row['image']} | {target} | {cells['weights']} | {cells['activations']} | {figures[0]} | "
            f"{figures[1]} | {figures[2]:.3f} | {'-' if ratio is None else f'{ratio:.2f}'} | {left} |"
        )
    if row["status"] != "ok":
        error = row["error"].replace("|", "/")
        lines.append(f"| {name} | {row.get('image', '')} | **failed**, {row['stage']} | | | | | | | {error} |")
    return lines


if __name__ == "__main__":
    main()
