"""Mixed precision: the front of accuracy against latency on OpenVINO, beside simpler ways to spend the same time.

    python analysis/mixed_precision.py --out results

Networks trained here on scikit-learn's digits (1,348 images to train on, 449 to evaluate), quantized so that it costs
points: ResNet-18 with 4-bit weights and one scale a tensor (an engine holds them as INT8, so its time is that of INT8),
and MobileNetV2 in INT8 with one scale a tensor. Each layer's format, float or quantized, is chosen by the integer
program of compress.quantization.mixed from noises measured in torch and layer times measured on the engine. Beside
it stand the ways that need no measurement: everything quantized, and the first or the last layers left float.

Accuracy and latency are the engine's: the whole evaluation split, medians of runs in turn. A way is compared with the
best of the front that is no slower than it (by more than 2 %, the noise of a median). The run folder (--runs) keeps the
trained network and the sensitivities; a second run goes on from there. Writes mixed_precision.md, .json and .png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from compress.files import write_json, write_text
from compress.measure.machine import describe_machine
from compress.pipeline.mixed import Point, mixed_front
from compress.pipeline.sensitivity import Measured, plain, sensitivity_run
from compress.quantization.mixed import FLOAT
from compress.recipe import Recipe, parse_recipe
from compress.report.roofline_figures import save_figure
from compress.report.style import LIGHT, WIDE, bare, new_figure, styled

NOISE = 1.02  # two medians that differ by less are taken for equal
EVERY_IMAGE = 10**9
WAYS = ("everything", "first layers float", "last layers float")

_MAX = {"num_bits": 8, "calibrator": "max"}
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {
        "model": {"name": "resnet18"},
        "data": {"name": "digits", "image_size": 64, "batch_size": 32},
        "train": {"epochs": 8, "lr": 0.02},
        "quantization": {
            "target": "openvino",
            "weights": {"num_bits": 4, "axis": None, "calibrator": "mse"},
            "activations": _MAX,
        },
    },
    "mobilenet_v2": {
        "model": {"name": "mobilenet_v2"},
        "data": {"name": "digits", "image_size": 64, "batch_size": 32},
        "train": {"epochs": 16, "lr": 0.03},
        "quantization": {"target": "openvino", "weights": {"num_bits": 8, "axis": None}, "activations": _MAX},
    },
}


def recipe_of(name: str, quick: bool) -> Recipe:
    """The recipe of a network; `quick` trains for one epoch on small images."""
    tree = dict(NETWORKS[name])
    if quick:
        tree["data"] = {**tree["data"], "image_size": 32, "val_images": 64, "train_images": 256}
        tree["train"] = {**tree["train"], "epochs": 1}
    return parse_recipe(tree)


def simple_ways(measured: Measured) -> dict[str, dict[str, str]]:
    """Formats by layer of what needs no measurement: the first or the last quarter, half, three quarters float."""
    layers = [row.layer for row in measured.reports[measured.base].rows]
    found = {}
    for quarter in (1, 2, 3):
        count = len(layers) * quarter // 4
        for way, kept in (("first", layers[:count]), ("last", layers[len(layers) - count :])):
            found[f"{way} {count} float"] = {name: FLOAT if name in kept else measured.base for name in layers}
    return found


def study(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one network, as JSON holds it."""
    folder = options.runs / f"{name}{'-quick' if options.quick else ''}"
    recipe = recipe_of(name, options.quick)
    measured = sensitivity_run(recipe, folder, images=options.images, resume=folder.is_dir(), device="cpu")
    points, table = mixed_front(
        measured,
        batch_size=options.batch_size,
        precision="f32",
        images=EVERY_IMAGE,
        points=3 if options.quick else options.points,
        seconds=0.3 if options.quick else options.seconds,
        others=simple_ways(measured),
    )
    rows = [row_of(point, points[0]) for point in points]
    return {
        "network": name,
        "format": measured.base,
        "recipe": recipe.to_yaml(),
        "method": table.method,
        "points": rows,
        "against": against(rows, measured.base),
    }


def row_of(point: Point, reference: Point) -> dict[str, Any]:
    """One point with what it loses against float."""
    return plain(
        {
            **{k: v for k, v in asdict(point).items() if k != "spec"},
            "float_layers": sum(name == FLOAT for name in point.formats.values()),
            "lost_points": 100 * (reference.top1 - point.top1),
            "latency_ratio": point.ms / reference.ms,
        }
    )


def way_of(row: Mapping[str, Any], base: str) -> str:
    """Which of the ways a row belongs to."""
    if row["label"] == base:
        return WAYS[0]
    return {"first": WAYS[1], "last": WAYS[2]}.get(row["label"].split()[0], "mixed precision")


def against(rows: Sequence[Mapping[str, Any]], base: str) -> list[dict[str, Any]]:
    """For each simpler way, the point of the front that is no slower and of the highest SQNR."""
    front = [row for row in rows if row["label"].startswith("mixed")]
    found = []
    for row in rows:
        if way_of(row, base) not in WAYS:
            continue
        fitting = [other for other in front if other["latency_ms"] <= NOISE * row["latency_ms"]]
        best = max(fitting, key=lambda other: float(other["sqnr_db"]), default=None)
        found.append({"way": row, "mixed": best})
    return found


def markdown(studies: Sequence[Mapping[str, Any]], command: str, machine: Mapping[str, Any]) -> str:
    """The study for readers."""
    lines = ["# Mixed precision: accuracy against latency on OpenVINO", ""]
    lines += [f"    {command}", "", f"{machine['cpu']}, {machine['usable_cores']} cores; versions in the .json.", ""]
    lines += ["![](mixed_precision.png)", ""]
    for study_ in studies:
        lines += [f"## {study_['network']}, {study_['format']}, one scale a weight tensor", "", *_points(study_), ""]
        lines += ["Each simpler way beside the best of the front that is no slower (2 % are noise):", ""]
        lines += [*_against(study_), "", _won_back(study_), ""]
    return "\n".join(lines)


def _points(study_: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Formats chosen by {study_['method']}, and by the noise of each layer alone.",
        "",
        "| network | float layers | latency, ms | of float | top-1, % | points lost | agrees, % | SQNR, dB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows = sorted(study_["points"], key=lambda row: row["latency_ms"])
    return lines + [
        f"| {row['label']} | {row['float_layers']} | {row['latency_ms']:.3f} | {row['latency_ratio']:.2f} | "
        f"{100 * row['top1']:.2f} | {row['lost_points']:.2f} | {100 * row['agreement']:.2f} | "
        f"{float(row['sqnr_db']):.1f} |"
        for row in rows
    ]


def _against(study_: Mapping[str, Any]) -> list[str]:
    lines = [
        "| way | latency, ms | points lost | SQNR, dB | of the front | latency, ms | points lost | SQNR, dB |",
        "|---|--:|--:|--:|---|--:|--:|--:|",
    ]
    for pair in study_["against"]:
        way, best = pair["way"], pair["mixed"]
        own = f"| {way['label']} | {way['latency_ms']:.3f} | {way['lost_points']:.2f} | {float(way['sqnr_db']):.1f} |"
        other = "none is as fast | | | |"
        if best is not None:
            other = (
                f"{best['label']} | {best['latency_ms']:.3f} | {best['lost_points']:.2f} | "
                f"{float(best['sqnr_db']):.1f} |"
            )
        lines.append(f"{own} {other}")
    return lines


def _won_back(study_: Mapping[str, Any]) -> str:
    """What the fastest point of the front costs and brings that loses at most half of what quantizing all loses."""
    rows = sorted(study_["points"], key=lambda row: row["latency_ms"])
    (whole,) = (row for row in rows if row["label"] == study_["format"])
    lost = f"{whole['lost_points']:.2f} points"
    text = f"Everything quantized takes {whole['latency_ratio']:.2f} of float's time and loses {lost}"
    if whole["lost_points"] <= 0:
        return f"{text}: there is nothing to win back in top-1 here, and SQNR tells the rest."
    half = [r for r in rows if r["label"].startswith("mixed") and r["lost_points"] <= whole["lost_points"] / 2]
    if not half:
        return f"{text}; no point of the front halves that."
    best = half[0]
    return (
        f"{text}; {best['label']}, with {best['float_layers']} layers float, takes {best['latency_ratio']:.2f} "
        f"({best['latency_ms'] / whole['latency_ms'] - 1:+.1%} on everything quantized) and loses "
        f"{best['lost_points']:.2f}."
    )


def draw(studies: Sequence[Mapping[str, Any]]) -> Figure:
    """Points lost and SQNR over latency, a row of panels a network."""
    figure = new_figure(WIDE, 2.9 * len(studies))
    panels = figure.subplots(len(studies), 2, squeeze=False)
    looks = {
        "mixed precision": ("o", LIGHT["blue"]),
        WAYS[0]: ("s", LIGHT["alarm"]),
        WAYS[1]: ("^", LIGHT["amber"]),
        WAYS[2]: ("v", LIGHT["green"]),
    }
    for row, study_ in zip(panels, studies, strict=True):
        for axes, key, text in zip(row, ("lost_points", "sqnr_db"), ("points of top-1 lost", "SQNR, dB"), strict=True):
            for way, (marker, colour) in looks.items():
                own = [r for r in study_["points"] if way_of(r, study_["format"]) == way and r["label"] != FLOAT]
                own.sort(key=lambda r: r["latency_ms"])
                line = "-" if way == "mixed precision" else ":"
                xs, ys = [r["latency_ms"] for r in own], [float(r[key]) for r in own]
                axes.plot(xs, ys, line, marker=marker, color=colour, label=way, markersize=5)
            reference = study_["points"][0]
            axes.axvline(reference["latency_ms"], color=LIGHT["grey"], linestyle="--", linewidth=1, label="float")
            axes.set_xlabel("latency on OpenVINO, ms")
            axes.set_ylabel(text)
            bare(axes)
        row[0].set_title(f"{study_['network']}, {study_['format']}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def main() -> None:
    """Parse, study, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--runs", type=Path, default=Path("runs/mixed_precision"))
    parser.add_argument("--images", type=int, default=256, help="that the sensitivities are measured on")
    parser.add_argument("--points", type=int, default=10, help="of the front, at most")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6.0, help="time for the latency of each")
    parser.add_argument("--quick", action="store_true", help="one epoch, small images: proves that it runs")
    options = parser.parse_args()
    studies = [study(name, options) for name in options.networks]
    machine = describe_machine().to_dict()
    command = f"python {' '.join(sys.argv)}"
    write_json(options.out / "mixed_precision.json", {"command": command, "machine": machine, "studies": studies})
    write_text(options.out / "mixed_precision.md", markdown(studies, command, machine))
    with styled():
        figure = draw(studies)
    save_figure(figure, options.out / "mixed_precision.png")


if __name__ == "__main__":
    main()
