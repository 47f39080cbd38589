"""Draw the picture of the first page from the tables of the demo, of our engine on a GPU and of the cost of QAT."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.common.study import Row, option, study_options
from compress.plots.style import LIGHT, MARKERS, bare, caption, save_figure, styled

NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet18": "ResNet-18",
    "mobilenet_v2": "MobileNetV2",
    "mobilenet_v3_large": "MobileNetV3-L",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "vgg16": "VGG-16",
    "regnet_x_3_2gf": "RegNetX-3.2GF",
    "vit_small_patch16_224": "ViT-S/16",
    "convnext_tiny": "ConvNeXt-T",
    "swin_t": "Swin-T",
}
TOOLS = {
    "float": "float",
    "compress, target openvino": "compress",
    "ONNX Runtime's quantizer": "ONNX Runtime's quantizer",
    "NNCF, OpenVINO": "NNCF",
    "ModelOpt, ONNX": "ModelOpt",
}
KEPT = ("metrics.json", "environment.json", "report.html")
# Each beside float training in the same mode.
STEPS = {
    ("fused", "recorded"): "compress, CUDA graph",
    ("fused", "eager"): "compress",
    ("torch-ops", "eager"): "torch's fake-quantize ops",
    ("modelopt", "eager"): "ModelOpt",
    ("pytorch-quantization", "eager"): "pytorch-quantization",
}


def cpu_points(rows: Sequence[Row]) -> list[tuple[str, float, float, float]]:
    """(tool, p50 in ms at batch 1, top-1 in percent, half its paired 95 % interval to float) on OpenVINO."""
    found = {row["method"]: row["openvino"] for row in rows if row["network"] == "EfficientNet-Lite0"}
    right = {method: np.array(found[method]["right"]) for method in TOOLS}
    spread = {method: 196 * (right[method] - right["float"]).std() / len(right["float"]) ** 0.5 for method in TOOLS}
    return [(name, found[m]["p50_ms"], found[m]["top1"], spread[m]) for m, name in TOOLS.items()]


def gpu_bars(networks: Sequence[Row]) -> list[tuple[str, float, float]]:
    """(network, images/s in fp16, in INT8) at batch 128, of networks that have both."""
    rows = {row["network"]: row for row in networks if row["batch"] == 128}
    both = [rows[name] for name in NETWORKS if rows.get(name, {}).get("fp16_images_per_s")]
    return [(NETWORKS[row["network"]], row["fp16_images_per_s"], row["images_per_s"]) for row in both]


def step_speeds(runs: Sequence[Row]) -> dict[str, float]:
    """Speed of a bf16 step of ResNet-50, float training in the same mode = 1, in the newest run of each variant."""
    found: dict[tuple[str, str], float] = {}
    for run in sorted(runs, key=lambda run: str(run["recorded"])):
        for case in run["cases"]:
            if (case["network"], case["precision"]) == ("resnet50", "bf16"):
                for row in case["rows"]:
                    if "time_ratio" in row:
                        found[row["variant"], case["mode"]] = 1 / row["time_ratio"]
    return {STEPS[key]: found[key] for key in STEPS}


def keep(run: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for source, name in (*((run / n, n) for n in KEPT), (run / "figures" / "accuracy_latency.png", "tradeoff.png")):
        shutil.copyfile(source, out / name)


def draw(
    points: Sequence[tuple[str, float, float, float]],
    bars: Sequence[tuple[str, float, float]],
    speeds: Mapping[str, float],
    machine: str,
) -> Figure:
    with styled():
        figure = Figure(figsize=(12.4, 4.1), layout="constrained")
        cpu, gpu, steps = figure.subplots(ncols=3, width_ratios=(1.15, 1.25, 1))
        _cpu(cpu, points)
        _gpu(gpu, bars)
        _steps(steps, speeds)
        caption(
            figure,
            f"Left: {machine}, ImageNet weights, 400 photographs, one thread, batch 1; lines: 95 % intervals of the "
            "difference to float on the same images. Middle: one NVIDIA H200, 224 px, random weights (speed alone), "
            "fp16 in one CUDA graph too. Right: one NVIDIA H200, bf16, batch 128, float launched in the same way.",
        )
    return figure


def _cpu(axes: Axes, points: Sequence[tuple[str, float, float, float]]) -> None:
    for k, (tool, ms, score, half) in enumerate(points):
        colour = LIGHT["blue" if tool == "compress" else "grey"]
        axes.errorbar([ms], [score], yerr=[half], fmt=MARKERS[k], color=colour, markersize=8)
        side = -1 if tool == "compress" else 1
        axes.annotate(
            tool,
            (ms, score),
            xytext=(8 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=8,
            color=colour,
        )
    axes.set_xlim(0, 1.3 * max(ms for _, ms, *_ in points))
    axes.set_ylim(84.5, 88.5)
    bare(axes, grid="y")
    axes.set(xlabel="latency on OpenVINO, ms", ylabel="top-1 on OpenVINO, %")
    axes.set_title("EfficientNet-Lite0 on a CPU: INT8 files")


def _gpu(axes: Axes, bars: Sequence[tuple[str, float, float]]) -> None:
    rows = range(len(bars))
    axes.barh(
        [i - 0.19 for i in rows], [b[1] / 1e3 for b in bars], 0.36, color=LIGHT["grey"], label="fp16, torch.compile"
    )
    axes.barh(
        [i + 0.19 for i in rows], [b[2] / 1e3 for b in bars], 0.36, color=LIGHT["blue"], label="INT8, engine cuda"
    )
    for i, (_, before, after) in enumerate(bars):
        axes.annotate(
            f"{after / before:.2f}×",
            (after / 1e3, i + 0.19),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(list(rows), [b[0] for b in bars])
    axes.invert_yaxis()
    bare(axes, grid="x")
    axes.set_xlim(0, 1.2 * max(max(b[1:]) for b in bars) / 1e3)
    axes.set_xlabel("thousand images a second (batch 128)")
    axes.legend(loc="lower right")
    axes.set_title("INT8 on a GPU without TensorRT")


def _steps(axes: Axes, speeds: Mapping[str, float]) -> None:
    names = list(speeds)
    colours = [LIGHT["blue" if name.startswith("compress") else "grey"] for name in names]
    axes.barh(names, list(speeds.values()), 0.6, color=colours)
    for name, speed in speeds.items():
        axes.annotate(
            f"{speed:.2f}×", (speed, name), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.axvline(1.0, color=LIGHT["ink"], linewidth=0.9)
    axes.annotate(
        "float training",
        (1.0, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=LIGHT["muted"],
    )
    axes.set_ylim(len(names) - 0.5, -0.8)
    bare(axes, grid="x")
    axes.set_xlim(0, 1.2 * max(speeds.values()))
    axes.set_xlabel("steps a second, float training = 1")
    axes.set_title("A step of QAT, ResNet-50")


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--demo", type=Path, help="a run of the recipe resnet50, whose figures become results/demo"),
        out="results",
    )
    if arguments.demo is not None:
        keep(arguments.demo, arguments.out / "demo")

    def table(path: str) -> Any:
        place = arguments.out / path
        return json.loads((place if place.exists() else Path("results") / path).read_text())

    peers = table("onnx_in_peers.json")
    figure = draw(
        cpu_points(peers["rows"]),
        gpu_bars(table("h200/cuda_engine.json")["networks"]),
        step_speeds(table("h200/qat_cost.json")["runs"]),
        f"{peers['machine']['cpu']} (AVX512-VNNI)",
    )
    print(save_figure(figure, arguments.out / "overview.png"))


if __name__ == "__main__":
    main()
