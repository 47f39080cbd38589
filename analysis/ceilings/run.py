"""Measure the roofs of this machine, and time torch's layers under them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torchvision

from analysis.common.study import study_parser
from compress.files import write_json
from compress.plots.roofline import draw_ceilings, draw_roofline
from compress.plots.style import save_figure
from compress.roofline import (
    Ceilings,
    Device,
    Roofline,
    ceilings_text,
    load_ceilings,
    measure_ceilings,
    measure_torch_times,
    roofline,
    rows_text,
    summary_text,
)
from compress.roofline.model import Row


def layers(ceilings: Ceilings, network: str, batch_size: int) -> Roofline:
    """Time a torchvision network node by node (fp16 on a GPU, fp32 on a CPU), and place it under measured roofs."""
    cuda = ceilings.backend == "cuda"
    dtype = torch.float16 if cuda else torch.float32
    device = ceilings.backend
    model = getattr(torchvision.models, network)(weights=None).eval().to(device, dtype)
    x = torch.randn(batch_size, 3, 224, 224, device=device, dtype=dtype)
    if cuda:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    times = measure_torch_times(model, x, repeats=20)
    bound = roofline(model, x, device=ceilings.as_device(), precision="fp16" if cuda else "fp32", name=network)
    return bound.with_times(times)


def draw_again(folder: Path, name: str, network: str) -> None:
    """Draw the figures from the JSON files of an earlier measurement."""
    save_figure(draw_ceilings(load_ceilings(folder / f"ceilings_{name}.json")), folder / f"ceilings_{name}.png")
    stem = f"layers_{name}_{network}"
    found = json.loads((folder / f"{stem}.json").read_text())
    rows = tuple(Row(**row) for row in found.pop("rows"))
    found.pop("totals")
    measured = Roofline(**(found | {"device": Device(**found["device"]), "rows": rows}))
    save_figure(draw_roofline(measured), folder / f"{stem}.png")


def main() -> None:
    """Measure and write; a short table comes last."""
    parser = study_parser(__doc__, out="results/roofline")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--network", default="resnet50", help="torchvision name; 'none' measures the roofs alone")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--draw", metavar="NAME", help="measure nothing; draw the JSON files of NAME")
    arguments = parser.parse_args()
    if arguments.draw:
        draw_again(arguments.out, arguments.draw, arguments.network)
        return
    measured = measure_ceilings(arguments.device, rounds=arguments.rounds)
    measured.save()
    measured.save(arguments.out / f"ceilings_{arguments.device}.json")
    save_figure(draw_ceilings(measured), arguments.out / f"ceilings_{arguments.device}.png")
    if arguments.network != "none":
        timed = layers(measured, arguments.network, arguments.batch)
        stem = f"layers_{arguments.device}_{arguments.network}"
        write_json(arguments.out / f"{stem}.json", timed.as_dict())
        save_figure(draw_roofline(timed), arguments.out / f"{stem}.png")
        print(summary_text(timed), rows_text(timed, top=10), sep="\n\n", end="\n\n")
    print(ceilings_text(measured))


if __name__ == "__main__":
    main()
