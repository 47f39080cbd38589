"""Theoretical receptive fields of torchvision's convolutional networks, each compared with the gradient's support."""

import csv
import io
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

from analysis.common.study import command_line, option, study_options
from compress.files import write_text
from compress.receptive import ReceptiveField, ReceptiveFieldTable, receptive_field, unproductive_layers
from tests.receptive.support import supports, torchvision_model, without_chance

# torchvision name -> the module whose units are the last that lie on a grid.
ENDS = {
    "alexnet": "features",
    **dict.fromkeys(("vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn"), "features"),
    **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), "layer4"),
    **dict.fromkeys(("resnext50_32x4d", "resnext101_32x8d", "wide_resnet50_2"), "layer4"),
    **dict.fromkeys(("densenet121", "densenet161", "densenet169", "densenet201"), "features"),
    **dict.fromkeys(("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large"), "features"),
    **dict.fromkeys((f"efficientnet_b{i}" for i in range(8)), "features"),
    **dict.fromkeys(("efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l"), "features"),
    "inception_v3": "Mixed_7c",
    "googlenet": "inception5b",
    **dict.fromkeys(("convnext_tiny", "convnext_small", "convnext_base", "convnext_large"), "features"),
    **dict.fromkeys(("regnet_x_400mf", "regnet_x_3_2gf", "regnet_x_8gf", "regnet_y_400mf"), "trunk_output"),
    **dict.fromkeys(("regnet_y_3_2gf", "regnet_y_8gf", "regnet_y_16gf"), "trunk_output"),
    **dict.fromkeys(("mnasnet0_5", "mnasnet1_0"), "layers"),
    **dict.fromkeys(("shufflenet_v2_x0_5", "shufflenet_v2_x1_0"), "conv5"),
    **dict.fromkeys(("squeezenet1_0", "squeezenet1_1"), "features"),
}

SMALL = ((96, 83), (130, 97))
COLUMNS = (
    "model",
    "size, px",
    "effective stride",
    "effective padding",
    "narrowest path",
    "global",
    "macs, 1e9",
    "sees the image from",
    "macs after that, %",
    "on every path, %",
    "autograd",
)


def without_excitation(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "SqueezeExcitation":
                setattr(module, name, nn.Identity())
    return model


def check(name: str, path: str, size: int) -> str:
    length = (size // 32 + 4) * 32
    strip = torch.zeros(1, 3, length, 96 if name == "inception_v3" else 64)
    row = receptive_field(without_excitation(torchvision_model(name)), strip).row(path)
    model = without_chance(without_excitation(torchvision_model(name)))
    unit = (row.units[0] // 2, 0)  # type: ignore[operator]
    ((rows, columns),) = supports(model, torch.rand(strip.shape, dtype=torch.float64), path, [unit])
    if rows is None or (rows, columns) != row.interval(unit) or rows[1] - rows[0] + 1 != size:
        return f"strip of {length}: gradient {rows}, {columns}; table {row.interval(unit)}, size {size}"
    model = without_chance(torchvision_model(name))
    for height, width in SMALL:
        row = receptive_field(torchvision_model(name), torch.zeros(1, 3, height, width)).row(path)
        last = tuple(n - 1 for n in row.units)  # type: ignore[operator]
        units = list(dict.fromkeys([(0, 0), tuple(n // 2 for n in last), last]))
        found = supports(model, torch.rand(1, 3, height, width, dtype=torch.float64), path, units)
        if found != [row.interval(u) for u in units]:
            return f"{height} x {width}: gradient {found}; table {[row.interval(u) for u in units]}"
    return ""


def line(name: str, table: ReceptiveFieldTable, row: ReceptiveField, compared: str) -> list[str]:
    wasted = unproductive_layers(table)
    return [
        name,
        _axes(row.local_size),
        _axes(row.effective_stride),
        _axes(row.effective_padding),
        _axes(row.smallest),
        "squeeze-and-excite" if row.status == "global" else "no",
        f"{wasted.macs / 1e9:.2f}",
        wasted.layers[0].path if wasted.layers else "never",
        f"{100 * wasted.share:.0f}",
        f"{100 * wasted.certain_share:.0f}",
        compared,
    ]


def _axes(values: Sequence[object]) -> str:
    return " x ".join(dict.fromkeys(str(v) for v in values))


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--models", nargs="+", default=list(ENDS), choices=list(ENDS), metavar="MODEL"),
        option("--image-size", type=int, default=224),
        option("--no-check", action="store_true"),
        out="results/receptive_field",
    )
    rows, wrong = [], []
    for name in arguments.models:
        start = time.perf_counter()
        image = torch.zeros(1, 3, arguments.image_size, arguments.image_size)
        table = receptive_field(torchvision_model(name, head=True), image)
        row = table.row(ENDS[name])
        compared = "not run"
        if not arguments.no_check:
            difference = check(name, ENDS[name], row.local_size[0] or 0)
            wrong += [f"{name}: {difference}"] if difference else []
            compared = "differs" if difference else "equal"
        rows.append(line(name, table, row, compared))
        print(" | ".join(rows[-1]), f"({time.perf_counter() - start:.0f} s)", flush=True)
    lines = ["| " + " | ".join(r) + " |" for r in [list(COLUMNS), ["---"] * len(COLUMNS), *rows]]
    about = (
        f"`{command_line()}`. Theoretical receptive fields of torchvision's networks, unit of the last map, images of "
        f"{arguments.image_size} px. Sizes are without borders and without squeeze-and-excite, with which every unit "
        "depends on the whole image (column `global`). `narrowest path`: size along the shortcuts. `sees the image "
        "from`: first convolution whose input covers the image, and the share of the macs in all such convolutions; "
        "`on every path`: share in those whose input covers it along the narrowest path too. `autograd`: comparison "
        "with the support of the gradient on three images."
    )
    write_text(arguments.out / "table.md", "\n".join([about, "", *lines, *wrong]) + "\n")
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([list(COLUMNS), *rows])
    write_text(arguments.out / "table.csv", buffer.getvalue())
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
