"""Draw the picture of the first page from the tables of the demo, of our engine on a GPU and of the cost of QAT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.common.study import Row, study_parser
from compress.plots.style import LIGHT, MARKERS, bare, caption, save_figure, styled, variant_colours
from compress.support.text import display

NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet18": "ResNet-18",
    "mobilenet_v2": "MobileNetV2",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "vgg16": "VGG-16",
    "regnet_x_3_2gf": "RegNetX-3.2GF",
    "vit_small_patch16_224": "ViT-S/16",
    "convnext_tiny": "ConvNeXt-T",
}
KEPT = ("metrics.json", "environment.json", "report.html")
STEPS = {
    "fused": "compress",
    "torch-ops": "torch's fake-quantize ops",
    "modelopt": "ModelOpt",
    "pytorch-quantization": "pytorch-quantization",
}


def cpu_points(metrics: Sequence[Row]) -> list[tuple[str, str, float, float]]:
    """(variant, engine, p50 in ms at batch 1, top-1 in percent) of a run's metrics."""

    def values(name: str, batch: int | None) -> dict[tuple[str, str], float]:
        rows = (m for m in metrics if m["name"] == name and m["batch_size"] == batch and m["value"] is not None)
        return {(m["variant"], m["engine"]): m["value"] for m in rows}

    times, scores = values("p50_ms", 1), values("top1", None)
    return [(*key, times[key], scores[key]) for key in times if key in scores]


def gpu_bars(networks: Sequence[Row]) -> list[tuple[str, float, float]]:
    """(network, images/s in fp16, in INT8) at batch 128, of networks that have both."""
    rows = {row["network"]: row for row in networks if row["batch"] == 128}
    both = [rows[name] for name in NETWORKS if rows.get(name, {}).get("fp16_images_per_s")]
    return [(NETWORKS[row["network"]], row["fp16_images_per_s"], row["images_per_s"]) for row in both]


def step_ratios(runs: Sequence[Row]) -> dict[str, float]:
    """Time of an eager bf16 step of ResNet-50 over that of float training, by variant, of the newest run of each."""
    found: dict[str, float] = {}
    for run in sorted(runs, key=lambda run: str(run["recorded"])):
        for case in run["cases"]:
            if (case["network"], case["precision"], case["mode"]) == ("resnet50", "bf16", "eager"):
                for row in case["rows"]:
                    if "time_ratio" in row:
                        found[row["variant"]] = row["time_ratio"]
    return {STEPS[name]: found[name] for name in STEPS}


def machine_of(environment: Row) -> str:
    """The machine of a run in a few words."""
    cores = environment.get("cores")
    vector = [name for name in ("avx512_vnni", "amx_int8") if name in environment.get("isa", ())]
    name = str(environment.get("cpu", "a CPU")).replace("(R)", "")
    return f"{cores} cores of {name}" + (f" ({', '.join(vector)})" if vector else "")


def keep(run: Path, out: Path) -> None:
    """Copy the figures of a finished run that the pages show."""
    out.mkdir(parents=True, exist_ok=True)
    for source, name in (*((run / n, n) for n in KEPT), (run / "figures" / "accuracy_latency.png", "tradeoff.png")):
        shutil.copyfile(source, out / name)


def draw(
    points: Sequence[tuple[str, str, float, float]],
    bars: Sequence[tuple[str, float, float]],
    ratios: Mapping[str, float],
    machine: str,
) -> Figure:
    """Draw three panels: CPU (of `machine`), GPU, training."""
    with styled():
        figure = Figure(figsize=(12.4, 4.1), layout="constrained")
        cpu, gpu, steps = figure.subplots(ncols=3, width_ratios=(1.15, 1.25, 1))
        _cpu(cpu, points)
        _gpu(gpu, bars)
        _steps(steps, ratios)
        caption(
            figure,
            f"Left: {machine}, digits at 64 px, one run, each engine with the file made for it; one picture of 449 is "
            "0.22 points. "
            "Middle: one NVIDIA H200, random weights, 224 px, fp16 = torch.compile, cuDNN's search, one CUDA graph. "
            "Right: one NVIDIA H200, eager, bf16, batch 128.",
        )
    return figure


def _cpu(axes: Axes, points: Sequence[tuple[str, str, float, float]]) -> None:
    variants, engines = (tuple(dict.fromkeys(names)) for names in zip(*((p[0], p[1]) for p in points), strict=True))
    colours = variant_colours(variants)
    for variant, engine, ms, score in points:
        axes.plot([ms], [score], color=colours[variant], **_marker(engines.index(engine)))
    for variant in variants:
        axes.plot([], [], "s", color=colours[variant], markersize=7, label=display(variant))
    for k, engine in enumerate(engines):
        axes.plot([], [], color=LIGHT["muted"], linestyle="", label=display(engine), **_marker(k))
    scores = [score for *_, score in points]
    axes.set_xlim(0, 1.08 * max(ms for _, _, ms, _ in points))
    axes.set_ylim(min(scores) - 0.8, 100.2)
    axes.set_yticks([99.0, 99.5, 100.0] if min(scores) > 99 else axes.get_yticks())
    axes.set(xlabel="latency of the engine, ms (batch 1)", ylabel="top-1 of the engine, %")
    axes.legend(loc="lower right", ncols=2)
    axes.set_title("ResNet-50 on a CPU: accuracy and latency")


def _marker(k: int) -> dict[str, Any]:
    """The mark of an engine: the first one's is small and full, the others' are open, one round the other."""
    full = k == 0
    return {
        "marker": MARKERS[k],
        "markersize": 6 if full else 9 + 2 * k,
        "fillstyle": "full" if full else "none",
        "markeredgewidth": 0 if full else 1.6,
    }


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


def _steps(axes: Axes, ratios: Mapping[str, float]) -> None:
    names = list(ratios)
    axes.barh(names, list(ratios.values()), 0.6, color=[LIGHT["blue"]] + [LIGHT["grey"]] * (len(names) - 1))
    for name, ratio in ratios.items():
        inside = ratio < 1.0  # the line of float training passes to the right of it
        axes.annotate(
            f"{ratio:.2f}",
            (ratio, name),
            xytext=(-4 if inside else 4, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            fontsize=8,
            color=LIGHT["paper" if inside else "ink"],
        )
    axes.axvline(1.0, color=LIGHT["ink"], linewidth=0.9)
    axes.annotate("float training", (1.0, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -10),
                  textcoords="offset points", fontsize=8, color=LIGHT["muted"])  # fmt: skip
    axes.set_ylim(len(names) - 0.5, -0.8)
    bare(axes, grid="x")
    axes.set_xlim(0, 1.15 * max(ratios.values()))
    axes.set_xlabel("time of a QAT step, float training = 1")
    axes.set_title("A step of QAT, ResNet-50")


def main() -> None:
    """Read the three tables and write the picture."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--demo", type=Path, help="a run of the recipe resnet50, whose figures become results/demo")
    arguments = parser.parse_args()
    if arguments.demo is not None:
        keep(arguments.demo, arguments.out / "demo")

    def table(path: str) -> Any:
        place = arguments.out / path
        return json.loads((place if place.exists() else Path("results") / path).read_text())

    figure = draw(
        cpu_points(table("demo/metrics.json")),
        gpu_bars(table("h200/cuda_engine.json")["networks"]),
        step_ratios(table("h200/qat_cost.json")["runs"]),
        machine_of(table("demo/environment.json")),
    )
    print(save_figure(figure, arguments.out / "overview.png"))


if __name__ == "__main__":
    main()
