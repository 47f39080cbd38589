"""Rooflines of torchvision networks on several devices: one figure a network, one table for all."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from analysis.common.study import command_line, option, study_options
from compress.files import write_text
from compress.graph.trace import trace
from compress.models import ModelSpec
from compress.models.by_name import build_model
from compress.plots.roofline import draw_roofline, draw_rooflines
from compress.plots.style import save_figure
from compress.roofline_model import Workload, devices_text, find_device, roofline_of, what_if, what_if_text
from compress.roofline_model.counting import count
from compress.roofline_model.tables import quantity, table

NETWORKS = ("resnet50", "vgg16", "mobilenet_v2", "vit_b_16")
DEVICES = ("t4", "a100", "h200", "orin")
PRECISIONS = ("fp16", "int8", "int8-2:4")
HEADERS = ("network", "device", "precision", "flop/B", "ridge", "bytes/image", "images/s", "bound by memory")


def bounds(work: Workload, devices: Sequence[str]) -> list[list[str]]:
    rows = []
    for name in devices:
        for precision in PRECISIONS:
            head = [work.model, find_device(name).title, precision]
            if precision not in find_device(name).precisions:
                rows.append([*head, "-", "-", "-", "-", "the device lacks it"])
                continue
            r = roofline_of(work, device=name, precision=precision)
            moved = quantity((r.weight_bytes + r.activation_bytes) / r.batch_size, "B")
            figures = [f"{r.arithmetic_intensity:.0f}", f"{r.ridge_point:.0f}", moved, f"{r.images_per_s:,.0f}"]
            rows.append([*head, *figures, f"{r.memory_bound_share:.0%}"])
    return rows


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--networks", nargs="+", default=NETWORKS),
        option("--devices", nargs="+", default=DEVICES),
        option("--batch", type=int, default=32),
        option("--image", type=int, default=224),
        out="results/roofline",
    )
    shown = arguments.devices[-2:][0]  # the device of the figures and scenarios of one network
    rows, parts = [], []
    for network in arguments.networks:
        x = torch.randn(1, 3, arguments.image, arguments.image)
        graph_module = trace(build_model(ModelSpec(name=network), num_classes=1000).eval(), x)
        work = replace(count(graph_module, x, fused=True).with_batch(arguments.batch), model=network)
        panels = {name: roofline_of(work, device=name, precision="int8") for name in arguments.devices}
        save_figure(draw_rooflines(list(panels.values())), arguments.out / f"{network}.png")
        save_figure(draw_roofline(panels[shown]), arguments.out / f"{network}_{shown}.png")
        rows += bounds(work, arguments.devices)
        title = f"## What compression could buy: {network}, {find_device(shown).title}"
        parts += [title, "", what_if_text(what_if(graph_module, x, device=shown)), ""]
        print(network, flush=True)
    notes = [f"- {d.title}: {d.note}." for d in map(find_device, arguments.devices) if d.note]
    lines = [
        HEAD.format(command=command_line(), batch=arguments.batch, image=arguments.image),
        table(HEADERS, rows),
        "",
        *parts,
        "## Devices",
        "",
        "Tera-operations a second, dense, and with 2:4 sparsity.",
        "",
        devices_text(),
        "",
        *notes,
    ]
    write_text(arguments.out / "roofline.md", "\n".join(lines) + "\n")


HEAD = """# Rooflines

`{command}`. Batch {batch}, {image}x{image}, fused as an engine does (convolution, BatchNorm, activation and residual
addition in one kernel). The bounds come from the makers' dense peaks and bandwidths: no engine can beat them from main
memory, and none reaches them. Kernel launches, which dominate small batches on a large GPU, are not part of them.
`flop/B` is the arithmetic intensity of the whole network; where it exceeds the ridge point of the device, single layers
may still be bound by memory, and the last column gives their share of the time.
"""


if __name__ == "__main__":
    main()
