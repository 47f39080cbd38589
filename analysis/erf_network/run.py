"""The receptive fields of one network: picture, page, animation and table; with `--cost` the time of a field."""

import statistics
import time

import torch
from torch import Tensor, nn

from analysis.common.study import command_line, listed, option, software, study_options
from compress.files import write_text
from compress.measure.machine import describe_machine
from compress.models import ModelSpec
from compress.models.by_name import build_model
from compress.receptive import ErfOptions, effective_receptive_field
from compress.receptive.effective import SOURCES, probe_images
from compress.report.receptive_field import erf_report, receptive_field_report


def plain_passes(model: nn.Module, images: Tensor, batch_size: int) -> None:
    for batch in images.split(batch_size):
        x = batch.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)


def measure(model: nn.Module, images: Tensor, options: ErfOptions, *, rounds: int) -> list[str]:
    model.eval().requires_grad_(False)
    lines, ratios = [], []
    for turn in range(rounds + 1):
        start = time.perf_counter()
        plain_passes(model, images, options.batch_size)
        middle = time.perf_counter()
        effective_receptive_field(model, images, options=options)
        end = time.perf_counter()
        if turn:
            ratios.append((end - middle) / (middle - start))
            lines.append(f"plain {middle - start:.2f} s, field {end - middle:.2f} s, ratio {ratios[-1]:.3f}")
    return [*lines, f"median ratio over {rounds} rounds, {len(images)} images: {statistics.median(ratios):.3f}"]


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--model", default="resnet50", help="name of a torchvision or timm network, fresh weights"),
        option("--image-size", type=int, default=224),
        option("--images", type=int, default=16),
        option("--source", choices=SOURCES, default="photographs"),
        option("--cost", action="store_true", help="time the field beside plain passes instead"),
        option("--rounds", type=int, default=2, help="rounds of --cost"),
        out="results/receptive_field",
    )
    torch.manual_seed(0)
    model = build_model(ModelSpec(name=arguments.model), num_classes=1000)
    images = probe_images(arguments.source, arguments.images, (arguments.image_size,) * 2)
    options = ErfOptions(batch_size=8)
    if arguments.cost:
        lines = measure(model, images, options, rounds=arguments.rounds)
        machine = describe_machine()
        about = [command_line(), f"{machine.usable_cores:g} cores of {machine.cpu}, {listed(software('torch'))}"]
        print(write_text(arguments.out / "cost.txt", "\n".join([*about, *lines]) + "\n").read_text())
        return
    folder = arguments.out / arguments.model.replace(":", "_").replace("/", "_")
    erf = erf_report(model, images, out=folder, name=arguments.model, count=8, options=options)
    table = receptive_field_report(model, images[:1], out=folder, name=arguments.model)
    for path in (erf.picture, erf.page, erf.animation, erf.numbers, *table.paths):
        print(path)


if __name__ == "__main__":
    main()
