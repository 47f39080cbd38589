"""Whether fused training is the same training: loss curves of the fused and of the plain path, and the scales exported.

    python analysis/qat_curve.py --out results/h200                                     on a GPU, about a minute
    python analysis/qat_curve.py --network tiny --steps 20 --pixels 16 --batch 16       proves the script on a CPU
    python analysis/qat_curve.py --draw results/h200/qat_curve.json                     table and figure from a file

For each seed a network (ResNet-18 for 64 px, `shapes`) is trained in float for some steps, then quantized. From that
state quantization-aware training runs four times over the same batches, in bf16 autocast on a GPU: on the plain path,
on the plain path again, fused, and fused with convolutions on INT8 tensor cores (on a CPU these fall back). On a GPU
the two plain runs differ too, because sums of gradients end in another order each time, and rounding turns that into
other integers: their distance is the noise that the fused path is measured against. In half precision the fused path
also rounds less often (compress.quantization.fused).

The scales compared are those in the exported ONNX files: of activations fixed at calibration, and of weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import onnx
import qat_variants
import torch
import torch.nn.functional as F
import torchvision
from onnx import numpy_helper
from torch import Tensor, nn

import compress
from compress.data import BatchPlan, DataSpec, load_data
from compress.files import replacing, write_json, write_text

DEVICE = qat_variants.DEVICE
RUNS: dict[str, Literal["float", "int8"] | None] = {  # how its convolutions run forward where chains are fused
    "plain": None,
    "plain again": None,
    "fused": "float",
    "fused, INT8": "int8",
}
WINDOW = 20  # steps that a curve is smoothed over
Row = dict[str, Any]


def small_resnet18(classes: int) -> nn.Module:
    """ResNet-18 with a 3x3 stem, for small images."""
    model = torchvision.models.resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
    return model


def tiny(classes: int) -> nn.Module:
    """What proves the script on a CPU."""
    sizes = ((3, 16), (16, 32))
    layers = [m for a, b in sizes for m in (nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


NETWORKS = {"resnet18": small_resnet18, "tiny": tiny}


def train(call: nn.Module, owner: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float) -> list[float]:
    """Losses of SGD with momentum, a step a batch; read at the end, so that the GPU never waits."""
    optimizer = torch.optim.SGD(owner.parameters(), lr=lr, momentum=0.9)
    owner.train()
    call.train()
    losses = []
    for x, y in batches:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = F.cross_entropy(call(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def exported_scales(qmodel: nn.Module, x: Tensor) -> dict[str, list[float]]:
    """The scales in the exported ONNX file, by name."""
    with tempfile.TemporaryDirectory() as folder:
        model = copy.deepcopy(qmodel).cpu().eval()
        file = compress.export_onnx(model, x.cpu(), Path(folder) / "model.onnx")
        graph = onnx.load(file).graph
    values = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    names = {n.input[1] for n in graph.node if n.op_type in {"QuantizeLinear", "DequantizeLinear"}}
    return {name: values[name].reshape(-1).tolist() for name in sorted(names)}


def measure(seed: int, arguments: argparse.Namespace) -> Row:
    """The runs of a seed."""
    torch.manual_seed(seed)
    spec = DataSpec(name="shapes", image_size=arguments.pixels, num_classes=20, seed=seed, train_images=20_000)
    split = load_data(spec).train
    count = arguments.float_steps + arguments.steps
    batches: list[tuple[Tensor, Tensor]] = []
    epoch = 0
    while len(batches) < count:
        plan = BatchPlan(batch_size=arguments.batch, epoch=epoch, drop_last=True)
        for x, y in split.batches(plan, device=DEVICE):
            batches.append((x.contiguous(memory_format=torch.channels_last), y))
            if len(batches) == count:
                break
        epoch += 1
    model = NETWORKS[arguments.network](20).to(DEVICE).to(memory_format=torch.channels_last)
    float_losses = train(model, model, batches[: arguments.float_steps], arguments.lr)
    x = batches[0][0]
    quant_spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="mse"))
    start = compress.quantize(model.eval(), x[:2], [batch for batch, _ in batches[:4]], spec=quant_spec)
    start.to(memory_format=torch.channels_last)
    row: Row = {"seed": seed, "float_losses": float_losses, "losses": {}, "seconds": {}}
    scales = {}
    for run, forward in RUNS.items():
        qmodel = copy.deepcopy(start)
        call = compress.fuse_for_training(qmodel, forward=forward) if forward else qmodel
        qat_variants.finish()
        began = time.perf_counter()
        row["losses"][run] = train(call, qmodel, batches[arguments.float_steps :], arguments.lr / 4)
        row["seconds"][run] = time.perf_counter() - began
        scales[run] = exported_scales(qmodel, x[:2])
    row["scales"] = sum(map(len, scales["plain"].values()))
    row["same_scales"] = {run: scales[run] == scales["plain"] for run in list(RUNS)[1:]}
    return row


# What is shown ------------------------------------------------------------------------------------------------------


def smoothed(losses: list[float]) -> list[float]:
    """Means over the last `WINDOW` steps; the first ones over fewer."""
    return [statistics.fmean(losses[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(losses))]


def distance(one: list[float], other: list[float]) -> float:
    """Mean distance of two smoothed curves."""
    return statistics.fmean(abs(a - b) for a, b in zip(smoothed(one), smoothed(other), strict=True))


def table(report: Row) -> str:
    """The seeds as Markdown."""
    others = list(RUNS)[1:]
    titles = ["seed", "first loss", *(f"last loss: {run}" for run in RUNS), *(f"plain to {run}" for run in others)]
    titles += ["scales compared", "the same"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in report["seeds"]:
        curves = row["losses"]
        last = [statistics.fmean(curves[run][-WINDOW:]) for run in RUNS]
        cells = [f"{curves['plain'][0]:.3f}", *(f"{value:.3f}" for value in last)]
        cells += [f"{distance(curves['plain'], curves[run]):.4f}" for run in others]
        cells += [str(row["scales"]), "yes" if all(row["same_scales"].values()) else "no"]
        lines.append(f"| {row['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(file: Path) -> None:
    """Write the table and the figure beside a JSON file."""
    from matplotlib.figure import Figure

    from compress.report.style import LIGHT, styled, to_png

    report = json.loads(file.read_text())
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    head = ["# Fused and plain training", "", f"Measured with `{report['command']}`; {about}.", ""]
    body = [
        *head,
        *(__doc__ or "").split("\n\n")[2:],
        "",
        f"Curves are means over {WINDOW} steps; distances are their mean absolute differences.",
        "",
        table(report),
    ]
    write_text(file.with_suffix(".md"), "\n".join(body) + "\n")
    # curves that lie on each other stay visible
    looks = (("grey", 3.0, "-"), ("amber", 1.4, "-"), ("blue", 1.2, "--"), ("alarm", 1.0, ":"))
    with styled():
        figure = Figure(figsize=(3.4 * len(report["seeds"]), 3.2), layout="constrained")
        panels = figure.subplots(1, len(report["seeds"]), sharey=True, squeeze=False)[0]
        for axis, row in zip(panels, report["seeds"], strict=True):
            for run, (colour, width, style) in zip(RUNS, looks, strict=True):
                curve = smoothed(row["losses"][run])
                axis.plot(curve, color=LIGHT[colour], label=run, linewidth=width, linestyle=style)
            axis.set(title=f"seed {row['seed']}", xlabel="step")
        panels[0].set_ylabel(f"training loss, mean of {WINDOW} steps")
        panels[-1].legend()
        image = to_png(figure)
    with replacing(file.with_suffix(".png")) as temporary:
        temporary.write_bytes(image)


def main() -> None:
    """Measure seed after seed; the files are written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18", choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of quantization-aware training")
    parser.add_argument("--float-steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.04, help="of float training; a quarter of it for the rest")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/h200")))
    parser.add_argument("--draw", type=Path, help="measure nothing: table and figure from this JSON file, beside it")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    file: Path = arguments.draw or arguments.out / "qat_curve.json"
    if not arguments.draw:
        report: Row = {"command": " ".join(["python", *sys.argv]), "machine": qat_variants.machine(), "seeds": []}
        for seed in range(arguments.seeds):
            report["seeds"].append(measure(seed, arguments))
            write_json(file, report)
            print(f"seed {seed}: {report['seeds'][-1]['seconds']}", flush=True)
    draw(file)
    print(table(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
