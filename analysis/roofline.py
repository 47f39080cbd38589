"""Rooflines of torchvision networks on several devices: one figure a network, one table for all.

    python analysis/roofline.py                         # ResNet-50, VGG-16, MobileNetV2, ViT-B on T4, A100, H200, Orin
    python analysis/roofline.py --networks resnet18 --devices l4 h100 --batch 8 --out /tmp/rooflines

Writes NETWORK.png (one panel a device, int8), NETWORK_DEVICE.png for the first network on the last-but-one device with
its longest layers, and roofline.md: bounds at fp16, int8 and int8 2:4, what each step of compression could buy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torchvision

from compress.errors import RooflineError
from compress.files import write_text
from compress.graph.trace import trace
from compress.report.roofline_figures import draw_roofline, draw_rooflines, save_figure
from compress.roofline import Workload, devices_text, find_device, place, what_if, what_if_text
from compress.roofline.counting import count
from compress.roofline.tables import quantity, table

NETWORKS = ("resnet50", "vgg16", "mobilenet_v2", "vit_b_16")
DEVICES = ("t4", "a100", "h200", "orin")
PRECISIONS = ("fp16", "int8", "int8-2:4")


def bounds(work: Workload, devices: Sequence[str]) -> list[list[str]]:
    """A row for each device and precision of a fused network; what a device lacks is said."""
    rows = []
    for name in devices:
        for precision in PRECISIONS:
            head = [work.model, find_device(name).title, precision]
            try:
                r = place(work, device=name, precision=precision)
            except RooflineError:
                rows.append([*head, "-", "-", "-", "-", "the device lacks it"])
                continue
            moved = quantity((r.weight_bytes + r.activation_bytes) / r.batch_size, "B")
            figures = [f"{r.arithmetic_intensity:.0f}", f"{r.ridge_point:.0f}", moved, f"{r.images_per_s:,.0f}"]
            rows.append([*head, *figures, f"{r.memory_bound_share:.0%}"])
    return rows


def main() -> None:
    """Count, place, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--devices", nargs="+", default=DEVICES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--out", type=Path, default=Path("results/roofline"))
    arguments = parser.parse_args()
    rows, parts = [], []
    for network in arguments.networks:
        model = getattr(torchvision.models, network)(weights=None).eval()
        x = torch.randn(1, 3, arguments.image, arguments.image)
        graph_module = trace(model, x)
        work = replace(count(graph_module, x, fused=True).with_batch(arguments.batch), model=network)
        panels = [place(work, device=name, precision="int8") for name in arguments.devices]
        save_figure(draw_rooflines(panels), arguments.out / f"{network}.png")
        shown = arguments.devices[-2:][0]
        save_figure(
            draw_roofline(place(work, device=shown, precision="int8")), arguments.out / f"{network}_{shown}.png"
        )
        rows += bounds(work, arguments.devices)
        scenarios = what_if(graph_module, x, device=shown)
        parts.append(
            f"## What compression could buy: {network}, {find_device(shown).title}\n\n{what_if_text(scenarios)}\n"
        )
        print(network, flush=True)
    headers = ["network", "device", "precision", "flop/B", "ridge", "bytes/image", "images/s", "bound by memory"]
    write_text(
        arguments.out / "roofline.md",
        HEAD.format(batch=arguments.batch, image=arguments.image)
        + table(headers, rows)
        + "\n\n"
        + "\n".join(parts)
        + f"\n## Devices\n\nTera-operations a second, dense, and with 2:4 sparsity.\n\n{devices_text()}\n\n"
        + "\n".join(f"- {d.title}: {d.note}." for d in map(find_device, arguments.devices) if d.note)
        + "\n",
    )


HEAD = """# Rooflines

`python analysis/roofline.py`. Batch {batch}, {image}x{image}, fused as an engine does (convolution, BatchNorm,
activation, residual addition in one kernel). Bounds from the makers' dense peaks and bandwidths: no engine beats them
from main memory, and none reaches them. Kernel launches, which dominate small batches on a large GPU, are not in them.
`flop/B` is the whole network's arithmetic intensity; where it exceeds the ridge of the device single layers may still
wait for memory, which the last column counts by time.

"""


if __name__ == "__main__":
    main()
