"""What each way to better post-training quantization brings, alone and together, on networks trained here.

    python analysis/ptq_ablation.py --threads 2 --out results

Three networks, each trained from three seeds on scikit-learn's digits (1,348 to train on, 449 to evaluate):

1. MobileNetV2, W8A8 with one scale a weight tensor: the case of "Data-Free Quantization" (arXiv 1906.04721). Networks
   trained for minutes do not get the channel ranges of ImageNet's MobileNetV2, which differ by two orders of
   magnitude; so besides the network as trained, the same network is quantized after its channels were rescaled by
   log-normal factors (sigma 1, the inverse of equalization, exact behind ReLU), which changes nothing it computes.
2. ResNet-18, W4A8, one scale a weight tensor and one a channel: the case of AdaRound (arXiv 2004.10568). Four bits
   cost a network of ten digits little, so W3A8 and MobileNetV2 at W4A8 stand beside it.
3. A small ViT, W8A8: the case of SmoothQuant (arXiv 2211.10438), as trained and with outliers: 3 channels of each
   LayerNorm's result times 100, taken back in the weights that read it.

Accuracy is of fake quantization in torch on the evaluation split; SQNR is of the logits against the float network that
was quantized. "Recovered" is the share of the top-1 that rounding to nearest loses against float which a row gives
back. Float weights and finished rows are kept in --cache, and a second run goes on from there. Writes
ptq_ablation.md, .json and .png.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import compress
from compress.data.base import BatchPlan, DataSet
from compress.data.spec import DataSpec
from compress.files import replacing, write_json, write_text
from compress.graph.fold import fold_batchnorm, foldable_pair
from compress.graph.ops import node_module
from compress.graph.trace import trace
from compress.measure.machine import describe_machine
from compress.quantization.compare import sqnr
from compress.quantization.equalize import find_pairs, replace_relu6
from compress.quantization.ranges import scale_inputs
from compress.quantization.smoothquant import find_norms
from compress.quantization.spec import ActivationSpec, AdaRoundSpec, QuantSpec, WeightSpec
from compress.training.checkpoint import load_model, save_model
from compress.training.loop import fit
from compress.training.spec import TrainSpec

Row = dict[str, Any]
CALIBRATION, CLASSES = 256, 10
ADAROUND = AdaRoundSpec(steps=250, images=256)
WHOLE = ActivationSpec(calibrator="max")  # activations keep their range, so that what is compared is the weights
PER_TENSOR = QuantSpec(weights=WeightSpec(axis=None), activations=WHOLE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network as it is quantized.

    Attributes:
        title: for the tables.
        network: key of NETWORKS.
        base: quantization by rounding to nearest.
        rows: name and what is switched on.
        change: what is done to the float network first; it computes the same afterwards.
    """

    title: str
    network: str
    base: QuantSpec
    rows: dict[str, dict[str, Any]]
    change: Callable[[nn.Module, Tensor, int], nn.Module] | None = None


def mobilenet() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Width 0.5, at 32 pixels."""
    model = compress.build_model(
        compress.ModelSpec(name="mobilenet_v2", options={"width_mult": 0.5}), num_classes=CLASSES
    )
    return model, _data(32), TrainSpec(epochs=16, lr=0.05, warmup_epochs=1)


def resnet() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Half as wide as usual, at 32 pixels."""
    spec = compress.ModelSpec(name="timm:resnet18", options={"channels": [32, 64, 128, 256]})
    return compress.build_model(spec, num_classes=CLASSES), _data(32), TrainSpec(epochs=6, lr=0.02, warmup_epochs=1)


def vit() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Four blocks of width 64 on 4 by 4 patches of 8 pixels."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4}
    spec = compress.ModelSpec(name="timm:vit_tiny_patch16_224", options=options)
    training = TrainSpec(epochs=24, optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_grad_norm=1.0)
    return compress.build_model(spec, num_classes=CLASSES), _data(32), training


NETWORKS: dict[str, Callable[[], tuple[nn.Module, DataSpec, TrainSpec]]] = {
    "mobilenet_v2": mobilenet,
    "resnet18": resnet,
    "vit": vit,
}


def _data(size: int) -> DataSpec:
    return DataSpec(name="digits", image_size=size)


def widen(model: nn.Module, example: Tensor, seed: int, sigma: float = 1.0) -> nn.Module:
    """Multiply channels by log-normal factors and divide what reads them: the same function, ranges far apart.

    The factor enters through the BatchNorm of the layer, so that BatchNorm statistics stay true.
    """
    graph_module = trace(model, example)
    replace_relu6(graph_module)
    folded = copy.deepcopy(graph_module)
    fold_batchnorm(folded)
    norms = {str(p[0].target): p[1] for n in graph_module.graph.nodes if (p := foldable_pair(n)) is not None}
    generator = torch.Generator().manual_seed(seed)
    for pair in find_pairs(folded)[0]:
        norm: Any = node_module(norms[pair.first])
        factor = torch.exp(sigma * torch.randn(len(norm.weight), generator=generator))
        with torch.no_grad():
            norm.weight.mul_(factor)
            norm.bias.mul_(factor)
        scale_inputs(graph_module.get_submodule(pair.second), 1 / factor.repeat_interleave(pair.repeat))
    return graph_module


def with_outliers(model: nn.Module, example: Tensor, seed: int, channels: int = 3, factor: float = 100.0) -> nn.Module:
    """Multiply a few channels of what each norm returns and divide the weights that read them: the same function."""
    graph_module = trace(model, example)
    generator = torch.Generator().manual_seed(seed)
    for norm in find_norms(graph_module)[0]:
        parameters = [graph_module.get_parameter(path) for path in norm.parameters]
        scale = torch.ones(len(parameters[0]))
        scale[torch.randperm(len(scale), generator=generator)[:channels]] = factor
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(scale)
        for reader in norm.readers:
            scale_inputs(graph_module.get_submodule(reader), 1 / scale)
    return graph_module


_EQUALIZE = {"relu6": "relu", "equalize": True}
MOBILENET_ROWS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "nearest, a scale a channel": {"weights": WeightSpec()},
    "ReLU6 to ReLU": {"relu6": "relu"},
    "bias correction, analytic": {"bias_correction": "analytic"},
    "bias correction, empirical": {"bias_correction": "empirical"},
    "equalization": _EQUALIZE,
    "equalization + analytic": {**_EQUALIZE, "bias_correction": "analytic"},
    "equalization + empirical": {**_EQUALIZE, "bias_correction": "empirical"},
}
RESNET_ROWS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "bias correction, analytic": {"bias_correction": "analytic"},
    "bias correction, empirical": {"bias_correction": "empirical"},
    "equalization": {"equalize": True},
    "equalization + empirical": {"equalize": True, "bias_correction": "empirical"},
    "AdaRound": {"adaround": ADAROUND},
    "AdaRound + empirical": {"adaround": ADAROUND, "bias_correction": "empirical"},
}
VIT_ROWS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "SmoothQuant 0.5": {"smooth": 0.5},
    "SmoothQuant 0.75": {"smooth": 0.75},
    "bias correction, empirical": {"bias_correction": "empirical"},
    "SmoothQuant 0.5 + empirical": {"smooth": 0.5, "bias_correction": "empirical"},
}
_FEW = ("nearest", "bias correction, empirical", "AdaRound", "AdaRound + empirical")
_WIDE = {k: v for k, v in MOBILENET_ROWS.items() if "AdaRound" not in k and k != "ReLU6 to ReLU"}
_LOW = {k: RESNET_ROWS[k] for k in _FEW}
CASES: dict[str, Case] = {
    "mobilenet_v2": Case(
        title="MobileNetV2 (width 0.5, 32 px), W8A8, one scale a weight tensor",
        network="mobilenet_v2",
        base=PER_TENSOR,
        rows={k: MOBILENET_ROWS[k] for k in ("nearest", "ReLU6 to ReLU", "equalization", "equalization + empirical")},
    ),
    "mobilenet_v2-wide": Case(
        title="the same, ReLU, channels rescaled (sigma 1)",
        network="mobilenet_v2",
        base=PER_TENSOR,
        rows=_WIDE,
        change=widen,
    ),
    "mobilenet_v2-4bit": Case(
        title="MobileNetV2 as trained, W4A8, one scale a weight tensor",
        network="mobilenet_v2",
        base=QuantSpec(weights=WeightSpec(num_bits=4, axis=None), activations=WHOLE),
        rows={k: _LOW[k] for k in _FEW[:3]} | {"equalization + empirical": MOBILENET_ROWS["equalization + empirical"]},
    ),
    "resnet18": Case(
        title="ResNet-18 (half width, 32 px), W4A8, one scale a weight tensor",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=4, axis=None), activations=WHOLE),
        rows=RESNET_ROWS,
    ),
    "resnet18-channel": Case(
        title="ResNet-18, W4A8, a scale a channel",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=4), activations=WHOLE),
        rows={k: _LOW[k] for k in _FEW[:3]},
    ),
    "resnet18-3bit": Case(
        title="ResNet-18, W3A8, a scale a channel (mse)",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=3, calibrator="mse"), activations=WHOLE),
        rows=_LOW,
    ),
    "vit": Case(
        title="ViT (4 blocks of 64, 32 px), W8A8, a scale a channel",
        network="vit",
        base=QuantSpec(activations=WHOLE),
        rows=VIT_ROWS,
    ),
    "vit-outliers": Case(
        title="the same, 3 channels of each LayerNorm times 100",
        network="vit",
        base=QuantSpec(activations=WHOLE),
        rows=VIT_ROWS,
        change=with_outliers,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Arguments of the command that change what is computed."""

    epochs: float
    steps: int


def trained(network: str, seed: int, setup: Setup, cache: Path) -> tuple[nn.Module, DataSet]:
    """The float network, from the cache or trained now, and its data."""
    torch.manual_seed(seed)
    model, data_spec, training = NETWORKS[network]()
    data = compress.load_data(data_spec)
    training = replace(training, seed=seed, epochs=max(1, round(training.epochs * setup.epochs)), evaluate_every=100)
    path = cache / f"{network}-{seed}-{training.epochs}.safetensors"
    if path.is_file():
        load_model(model, path)
    else:
        start = time.perf_counter()
        report = fit(model, data, training, batch_size=64, folder=cache, resume=True, name=path.stem)
        save_model(model, path)
        print(
            f"{network} seed {seed}: top-1 {report.final.top1:.4f} in {time.perf_counter() - start:.0f} s", flush=True
        )
    return model.eval(), data


def measure(case: Case, row: str, seed: int, setup: Setup, cache: Path) -> Row:
    """One row, of one seed."""
    model, data = trained(case.network, seed, setup, cache)
    example = next(iter(data.val.batches(BatchPlan(batch_size=8, limit=8))))[0]
    if case.change is not None:
        model = case.change(model, example, seed).eval()
    spec, seconds = None, 0.0
    network: nn.Module = model
    if row != "float":
        changes = dict(case.rows[row])
        if "adaround" in changes:
            changes["adaround"] = replace(changes["adaround"], steps=setup.steps)
        spec = replace(case.base, **changes)
        batches = [x for x, _ in data.train.batches(BatchPlan(batch_size=64, limit=CALIBRATION))]
        start = time.perf_counter()
        network = compress.quantize(model, example[:2], batches, spec=spec)
        seconds = time.perf_counter() - start
    correct, logits, reference = 0, [], []
    with torch.no_grad():
        for images, targets in data.val.batches(BatchPlan(batch_size=100)):
            logits.append(network(images))
            reference.append(model(images))
            correct += int((logits[-1].argmax(1) == targets).sum())
    noise = sqnr(torch.cat(reference), torch.cat(logits)) if spec is not None else None
    notes = network.improvements.notes() if isinstance(network, fx.GraphModule) and spec is not None else []
    return {"top1": correct / len(data.val), "sqnr_db": noise, "seconds": seconds, "notes": notes}


def summary(case: Case, rows: dict[str, Row], name: str, seeds: int) -> list[Row]:
    """Mean, spread and share recovered of each row of a case."""
    table = []
    of: dict[str, list[Row]] = {r: [rows[f"{name}/{r}/{s}"] for s in range(seeds)] for r in ("float", *case.rows)}
    top1 = {r: [100 * x["top1"] for x in found] for r, found in of.items()}
    lost = statistics.mean(top1["float"]) - statistics.mean(top1["nearest"])
    for row, found in of.items():
        mean = statistics.mean(top1[row])
        gained = (mean - statistics.mean(top1["nearest"])) / lost if lost > 0.5 and row != "float" else None
        noise = [x["sqnr_db"] for x in found if x["sqnr_db"] is not None]
        table.append(
            {
                "row": row,
                "top1_percent": mean,
                "top1_lowest": min(top1[row]),
                "top1_highest": max(top1[row]),
                "sqnr_db": statistics.mean(noise) if noise else None,
                "recovered": None if row == "nearest" else gained,
                "seconds": statistics.median(x["seconds"] for x in found),
                "notes": found[0]["notes"],
            }
        )
    return table


def text(report: Row) -> str:
    """The tables in Markdown."""
    machine = report["machine"]
    lines = [
        "# What each way to better post-training quantization brings",
        "",
        f"`{report['command']}`",
        "",
        f"{machine['cpu']}, torch {torch.__version__}; {report['seeds']} seeds, means with the lowest and the highest; "
        f"449 evaluation images, {CALIBRATION} for calibration; AdaRound "
        f"{report['setup']['steps']} steps a layer. Recovered: share of the top-1 lost by rounding to nearest (blank "
        "where it loses half a point or less). Seconds are of `quantize` as a whole, the machine perhaps being busy.",
    ]
    for case in report["cases"]:
        lines += ["", f"## {case['title']}", ""]
        lines += [
            "| | top-1 % | lowest to highest | SQNR dB | recovered % | s |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in case["rows"]:
            noise = "" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
            gained = "" if row["recovered"] is None else f"{100 * row['recovered']:.0f}"
            lines.append(
                f"| {row['row']} | {row['top1_percent']:.2f} | {row['top1_lowest']:.2f} to {row['top1_highest']:.2f} | "
                f"{noise} | {gained} | {row['seconds']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def draw(report: Row, path: Path) -> None:
    """A panel a case: top-1 of each row with the spread of its seeds, the float network as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = report["cases"]
    heights = [len(case["rows"]) for case in cases]
    figure, panels = plt.subplots(
        len(cases), 1, figsize=(8, 0.32 * sum(heights) + 0.9 * len(cases)), height_ratios=heights, squeeze=False
    )
    for case, axes in zip(cases, panels[:, 0], strict=True):
        rows = [row for row in case["rows"] if row["row"] != "float"][::-1]
        whole = next(row["top1_percent"] for row in case["rows"] if row["row"] == "float")
        means = [row["top1_percent"] for row in rows]
        spread = [
            [m - row["top1_lowest"] for m, row in zip(means, rows, strict=True)],
            [row["top1_highest"] - m for m, row in zip(means, rows, strict=True)],
        ]
        colours = ["#9aa5b1" if row["row"].startswith("nearest") else "#3366aa" for row in rows]
        axes.barh([row["row"] for row in rows], means, xerr=spread, color=colours, height=0.7, ecolor="#222222")
        axes.axvline(whole, color="#aa3333", linewidth=1)
        axes.set_title(f"{case['title']} (line: float, {whole:.1f} %)", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, 100)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[-1, 0].set_xlabel("top-1, %", fontsize=8)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)


def main() -> None:
    """Train, quantize, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="one seed, a quarter of the epochs, few steps")
    parser.add_argument("--cache", type=Path, default=Path("runs/ptq_ablation"))
    parser.add_argument("--out", type=Path, default=Path("results"))
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    setup = Setup(epochs=0.25, steps=50) if a.quick else Setup(epochs=1.0, steps=ADAROUND.steps)
    seeds = 1 if a.quick else a.seeds
    a.cache.mkdir(parents=True, exist_ok=True)
    kept = a.cache / f"rows-{setup.steps}-{setup.epochs:g}.json"
    rows: dict[str, Row] = json.loads(kept.read_text()) if kept.is_file() else {}
    cases = {name: CASES[name] for name in a.cases}
    for seed in range(seeds):
        for name, case in cases.items():
            for row in ("float", *case.rows):
                key = f"{name}/{row}/{seed}"
                if key in rows:
                    continue
                rows[key] = found = measure(case, row, seed, setup, a.cache)
                write_json(kept, rows)
                noise = "" if found["sqnr_db"] is None else f", {found['sqnr_db']:.1f} dB"
                print(f"{key}: {100 * found['top1']:.2f} %{noise}, {found['seconds']:.1f} s", flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine().to_dict(),
        "seeds": seeds,
        "setup": asdict(setup),
        "cases": [
            {"name": name, "title": case.title, "rows": summary(case, rows, name, seeds)}
            for name, case in cases.items()
        ],
    }
    write_json(a.out / "ptq_ablation.json", report)
    write_text(a.out / "ptq_ablation.md", text(report))
    draw(report, a.out / "ptq_ablation.png")
    print(text(report))


if __name__ == "__main__":
    main()
