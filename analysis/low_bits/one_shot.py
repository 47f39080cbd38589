"""2:4 masks without training on CIFAR-10: the smallest magnitudes beside second-order information, float and W8A8.

Every row is written as it is measured, and the same command goes on after a stop.
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import torch

import compress
from analysis.common.study import Row, command_line, gpu_software, listed, read_rows, study_parser
from analysis.low_bits.opened import opened
from analysis.low_bits.ptq import hidden, logits, on_device, top1
from analysis.real_accuracy.networks import cifar
from analysis.real_accuracy.statistics import figures
from compress.files import write_text
from compress.quantization.spec import ActivationSpec, QuantSpec
from compress.sparsity.spec import Saliency, SparsitySpec
from compress.training.recalibrate import recalibrate_batchnorm


def main() -> None:
    """Measure the rows that are missing, and write the table."""
    parser = study_parser(__doc__, out="results/low_bits")
    parser.add_argument("--data", required=True, help="folder of cifar-10-batches-py")
    parser.add_argument("--weights", type=Path, required=True, help="file of analysis.low_bits")
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--limit", type=int, help="number of test pictures")
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    file = o.out / "one_shot.jsonl"
    rows = read_rows(file)
    done = {(row["network"], row["saliency"]) for row in rows}
    subject = on_device(cifar(o.network, o.data, o.weights, o.limit, calibration=o.images))
    expected = logits(subject.model, subject.images)
    batches = list(subject.calibration.split(64))
    for saliency in get_args(Saliency):
        if (o.network, saliency) in done:
            continue
        start = time.process_time()
        model = opened(copy.deepcopy(subject.model), batches[0][:2])
        spec = SparsitySpec(saliency=saliency, kernels="any", calibration_images=o.images)
        report = compress.sparsify(model, spec, example_inputs=batches[0][:2], batches=batches)
        compress.squash_masks(model)
        masked = figures(expected, logits(model, subject.images), subject.targets)
        recalibrate_batchnorm(model, batches)
        ready = figures(expected, logits(model, subject.images), subject.targets)
        quant = QuantSpec(target="any", activations=ActivationSpec())
        with torch.no_grad():
            qmodel = compress.quantize(model, batches[0][:2], batches, spec=quant)
        seen = figures(expected, logits(qmodel, subject.images), subject.targets)
        row = {"network": o.network, "saliency": saliency, "cpu_seconds": round(time.process_time() - start, 1)}
        row |= {"masked_layers": len(report.masked), "density": report.density, "images": o.images}
        row |= {"float_top1": top1(expected, subject.targets), "evaluated": len(subject.images)}
        row |= {"masked": asdict(masked), "recalibrated": asdict(ready), "w8a8": asdict(seen)}
        row |= {"software": gpu_software(), "command": command_line(hidden())}
        rows.append(row)
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    print(page(o.out, rows))


def page(folder: Path, rows: list[Row]) -> str:
    """Write `one_shot.md` and return it."""
    lines = [
        "# 2:4 masks without training and without labels on CIFAR-10",
        "",
        "Points to the float network, in brackets 95 % intervals of a paired bootstrap over pictures: masked (second "
        "order also updates the weights that stay), with BatchNorm's statistics measured again, and then quantized "
        "(W8A8, target `any`, fake quantization in torch). All layers are masked whose input channels 4 divides, but "
        "the first and the last.",
        "",
        "| network | saliency | float % | masked | statistics measured again | W8A8 | density | CPU s | command |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = []
        for part in ("masked", "recalibrated", "w8a8"):
            f = row[part]["points"]
            shown.append(f"{f['value']:.2f} [{f['low']:.2f}, {f['high']:.2f}]")
        cells = [row["network"], row["saliency"], f"{row['float_top1']:.2f}", *shown, f"{row['density']:.3f}"]
        lines.append(f"| {' | '.join([*cells, str(row['cpu_seconds']), '`' + row['command'] + '`'])} |")
    lines += ["", "; ".join(dict.fromkeys(listed(row["software"]) for row in rows)) + "."]
    return write_text(folder / "one_shot.md", "\n".join(lines) + "\n").read_text()


if __name__ == "__main__":
    main()
