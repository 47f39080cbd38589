"""Losses and exported scales of the fused and the plain path for the ten measured networks, each at its full width.

    python -m analysis.qat_curve.families

Both paths start from one quantized network and train over the same batches with the same random numbers. On the CPU
they train in float64, where no value is so near to a tie that a sum in another order rounds to the other side: what
differs is then an error of the rewriting. On a GPU they train in bf16, the plain path twice, which shows the noise.
"""

from __future__ import annotations

import argparse
import copy
import functools
import multiprocessing
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import compress
from analysis.common.qat_variants import DEVICE, machine
from analysis.common.study import Row, command_line, listed, study_parser
from analysis.qat_curve.run import exported_scales
from compress.data import BatchPlan, DataSpec, load_data
from compress.files import write_json, write_text

CLASSES = 20
FAMILIES = (
    "resnet50", "resnet18", "regnet_y_3_2gf", "efficientnet_v2_s", "mobilenet_v3_large", "mobilenet_v2",
    "densenet121", "convnext_tiny", "swin_t", "vit_s",
)  # fmt: skip
LAYER_SCALE = 0.1
"""First layer scale of ConvNeXt's blocks. With 1e-6, the default, a block would add too little to differ."""


def made(name: str, pixels: int) -> nn.Module:
    """Return a network whose BatchNorm layers hold the statistics of one batch, with no layer of zeros."""
    if name == "vit_s":
        sizes: dict[str, Any] = {"num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
        model: nn.Module = torchvision.models.VisionTransformer(pixels, 16, **sizes, num_classes=CLASSES)
    elif name == "tiny":
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))
    else:
        make: Callable[..., nn.Module] = getattr(torchvision.models, name)
        model = make(num_classes=CLASSES)
    for key, parameter in model.named_parameters():
        if key.endswith("layer_scale"):
            nn.init.constant_(parameter, LAYER_SCALE)
        elif not isinstance(parameter, nn.UninitializedParameter) and key.endswith("weight") and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def batches_of(arguments: argparse.Namespace, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of drawn shapes."""
    spec = DataSpec(name="shapes", image_size=arguments.pixels, num_classes=CLASSES, train_images=20_000)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(count):
            yield from load_data(spec).train.batches(BatchPlan(batch_size=arguments.batch, epoch=epoch), device=DEVICE)

    return [batch for batch, _ in zip(endless(), range(count), strict=False)]


def train(call: nn.Module, owner: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> list[float]:
    """Take a step a batch; dropout and stochastic depth draw from the step's own seed."""
    optimizer = torch.optim.SGD(owner.parameters(), lr=lr, momentum=0.9)
    owner.train()
    call.train()
    kind, losses = next(owner.parameters()).dtype, []
    for step, (x, y) in enumerate(batches):
        torch.manual_seed(step)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            result = call(x.to(kind))
        loss = F.cross_entropy(result if kind == torch.float64 else result.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def measure(name: str, arguments: argparse.Namespace) -> Row:
    """Train a network on both paths; return the losses and the differences of the scales."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    batches = batches_of(arguments, arguments.steps)
    x = batches[0][0]
    model = made(name, arguments.pixels).to(DEVICE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.cat([batch for batch, _ in batches[:4]]))
    start = compress.quantize(model.eval(), x[:2], [batch for batch, _ in batches[:4]])
    start.to(memory_format=torch.channels_last)
    runs = ("plain", "plain again", "fused") if DEVICE.type == "cuda" else ("plain", "fused")
    if DEVICE.type == "cpu":
        start.double()
    row: Row = {"network": name, "losses": {}, "scales": {}}
    scales: dict[str, list[float]] = {}
    for run in runs:
        qmodel = copy.deepcopy(start)
        call: Any = compress.fuse_for_training(qmodel) if run == "fused" else qmodel
        if run == "fused":
            called = [call.get_submodule(node.target) for node in call.graph.nodes if node.op == "call_module"]
            row["fused"] = sum(type(module).__module__.startswith("compress.qat_fusion") for module in called)
        row["losses"][run] = train(call, qmodel, batches, arguments.lr)
        found = exported_scales(qmodel.float(), x[:2].float())
        scales[run] = [value for values in found.values() for value in values]
        apart = [abs(a - b) / abs(b) for a, b in zip(scales[run], scales["plain"], strict=True)]
        row["scales"][run] = {
            "count": len(apart), "same": sum(value == 0 for value in apart), "largest_relative": max(apart),
        }  # fmt: skip
    return row


def table(document: Row) -> str:
    """Return a line for each network as Markdown."""
    titles = [
        "network",
        "fused modules",
        "first loss",
        "last loss: plain",
        "last loss: fused",
        "largest difference of losses",
    ]
    titles += ["mean difference", "scales", "of them the same", "largest relative difference of scales"]
    again = any("plain again" in row["losses"] for row in document["rows"])
    titles += ["plain to plain again: losses", "scales"] if again else []
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in document["rows"]:
        plain, fused = row["losses"]["plain"], row["losses"]["fused"]
        apart, scales = _apart(plain, fused), row["scales"]["fused"]
        cells = [
            row["network"],
            str(row["fused"]),
            f"{plain[0]:.4f}",
            f"{plain[-1]:.4f}",
            f"{fused[-1]:.4f}",
            f"{max(apart):.1e}",
        ]
        cells += [f"{statistics.fmean(apart):.1e}", str(scales["count"]), str(scales["same"])]
        cells += [f"{scales['largest_relative']:.1e}"]
        if again:
            other = row["losses"]["plain again"]
            cells += [f"{max(_apart(plain, other)):.1e}", f"{row['scales']['plain again']['largest_relative']:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def write(document: Row, out: Path) -> None:
    """Write the JSON file and the page."""
    write_json(out / "qat_families.json", document)
    kind = "float64" if document["device"] == "cpu" else "bf16 (autocast)"
    text = (
        f"`{document['command']}`; {listed(document['machine'])}. Trained in {kind}, "
        f"{document['steps']} steps of {document['batch']} pictures of {document['pixels']} pixels of the data set "
        "`shapes`, from one quantized network, over the same batches, with dropout and stochastic depth drawn from the "
        f"same seeds; ConvNeXt's layer scales begin with {LAYER_SCALE}. Scales are those in the exported ONNX files."
    )
    page = f"# Fused and plain training, network by network\n\n{text}\n\n{table(document)}\n"
    page += f"\n{document['note']}\n" if "note" in document else ""
    write_text(out / "qat_families.md", page)


def main() -> None:
    """Measure each network in a process of its own; the files are written after each."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--networks", nargs="+", default=list(FAMILIES), choices=[*FAMILIES, "tiny"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--jobs", type=int, default=1, help="processes beside each other")
    parser.add_argument("--threads", type=int, default=1, help="of each process on the CPU")
    arguments = parser.parse_args()
    document: Row = {"command": command_line(), "machine": machine(), "device": DEVICE.type, "rows": []}
    document |= {key: getattr(arguments, key) for key in ("steps", "batch", "pixels", "lr")}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = [pool.submit(functools.partial(measure, name, arguments)) for name in arguments.networks]
        for done in as_completed(waiting):
            document["rows"].append(done.result())
            document["rows"].sort(key=lambda row: arguments.networks.index(row["network"]))
            write(document, arguments.out)
            print(table(document).splitlines()[-1], flush=True)
    print(table(document), flush=True)


if __name__ == "__main__":
    main()
