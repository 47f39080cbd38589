"""Loss curves and exported scales of quantization-aware training on the fused and on the plain path."""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from pathlib import Path
from typing import Literal

import onnx
import torch
import torch.nn.functional as F
import torchvision
from onnx import numpy_helper
from torch import Tensor, nn

import compress
from analysis.common.qat_variants import DEVICE, finish, machine
from analysis.common.study import Row, command_line, study_parser
from analysis.qat_curve import report
from analysis.qat_curve.report import RUNS
from compress.data import BatchPlan, DataSpec, load_data
from compress.files import write_json

FORWARD: dict[str, Literal["float", "int8"]] = {"fused": "float", "fused, INT8": "int8"}
"""Runs through fused chains, and how their convolutions run forward."""


def small_resnet18(classes: int) -> nn.Module:
    """Return ResNet-18 with a 3x3 stem, for small images."""
    model = torchvision.models.resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
    return model


def tiny(classes: int) -> nn.Module:
    """Return a network for trying the study on a CPU."""
    sizes = ((3, 16), (16, 32))
    layers = [m for a, b in sizes for m in (nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


NETWORKS = {"resnet18": small_resnet18, "tiny": tiny}


def train(call: nn.Module, owner: nn.Module, batches: list[tuple[Tensor, Tensor]], lr: float) -> list[float]:
    """Train with SGD and momentum, a step a batch; return the losses, read at the end so that the GPU never waits."""
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
    """Return the scales in the exported ONNX file, by name."""
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
    """Train a network in float, and from there in every way; return the losses and compare the exported scales."""
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
    for run in RUNS:
        qmodel = copy.deepcopy(start)
        call = compress.fuse_for_training(qmodel, forward=FORWARD[run]) if run in FORWARD else qmodel
        finish()
        began = time.perf_counter()
        row["losses"][run] = train(call, qmodel, batches[arguments.float_steps :], arguments.lr / 4)
        row["seconds"][run] = time.perf_counter() - began
        scales[run] = exported_scales(qmodel, x[:2])
    row["scales"] = sum(map(len, scales["plain"].values()))
    row["same_scales"] = {run: scales[run] == scales["plain"] for run in RUNS[1:]}
    return row


def main() -> None:
    """Measure seed after seed; the files are written after each."""
    parser = study_parser(__doc__, out="results/h200")
    parser.add_argument("--network", default="resnet18", choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="steps of quantization-aware training")
    parser.add_argument("--float-steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.04, help="of float training; QAT takes a quarter of it")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    document: Row = {"command": command_line(), "machine": machine(), "seeds": []}
    for seed in range(arguments.seeds):
        document["seeds"].append(measure(seed, arguments))
        report.write(write_json(arguments.out / "qat_curve.json", document))
        print(f"seed {seed}: {document['seeds'][-1]['seconds']}", flush=True)
    print(report.table(document))


if __name__ == "__main__":
    main()
