"""Networks of CIFAR-10 at few bits without training and without labels: calibration alone beside reconstructed blocks.

Every row is written as it is measured, and the same command goes on after a stop.
"""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

import compress
from analysis.common.study import Row, append_row, command_line, gpu_software, listed, option, read_rows, study_options
from analysis.real_accuracy.methods import figures
from analysis.real_accuracy.networks import Subject, cifar
from compress.files import write_text
from compress.quantization import ActivationSpec, QuantSpec, ReconstructSpec, WeightSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = {"W8A8": (8, 8), "W4A8": (4, 8), "W4A4": (4, 4), "W3A3": (3, 3), "W2A4": (2, 4)}
METHODS = ("calibration", "blocks")


def main() -> None:
    o = study_options(
        __doc__,
        option("--data", required=True, help="folder of cifar-10-batches-py"),
        option("--weights", type=Path, required=True, help="float.safetensors of a run"),
        option("--network", default="resnet20"),
        option("--bits", nargs="+", choices=BITS, default=["W4A8", "W4A4"]),
        option("--methods", nargs="+", choices=METHODS, default=list(METHODS)),
        option("--steps", type=int, default=300),
        option("--images", type=int, default=512),
        option("--limit", type=int, help="number of test pictures"),
        out="results/low_bits",
    )
    file = o.out / "ptq.jsonl"
    rows = read_rows(file)
    done = {(row["network"], row["bits"], row["method"]) for row in rows}
    subject = on_device(cifar(o.network, o.data, o.weights, o.limit, calibration=o.images))
    expected = logits(subject.model, subject.images)
    float_top1 = round(100 * (expected.argmax(1) == subject.targets).double().mean().item(), 2)
    batches = list(subject.calibration.split(64))
    for bits in o.bits:
        for method in o.methods:
            if (o.network, bits, method) in done:
                continue
            spec = specification(*BITS[bits], o.steps if method == "blocks" else 0, o.images)
            start = time.process_time()
            qmodel = compress.quantize(subject.model, batches[0][:2], batches, spec=spec)
            seconds = time.process_time() - start
            seen = figures(expected, logits(qmodel, subject.images), subject.targets)
            row = {"network": o.network, "bits": bits, "method": method, "cpu_seconds": round(seconds, 1)}
            row |= {"float_top1": float_top1, "figures": asdict(seen)}
            row |= {"steps": o.steps, "images": o.images, "evaluated": len(subject.images)}
            row |= {"software": gpu_software(), "command": command_line(data="DIR", weights="FILE")}
            rows.append(row)
            append_row(file, row)
    print(page(o.out, rows))


def on_device(subject: Subject) -> Subject:
    torch.backends.cudnn.allow_tf32 = False
    moved = subject.calibration.to(DEVICE), subject.images.to(DEVICE)
    return Subject(subject.model.to(DEVICE), *moved, subject.targets)


def specification(weights: int, activations: int, steps: int, images: int) -> QuantSpec:
    return QuantSpec(
        target="any",
        weights=WeightSpec(num_bits=weights, calibrator="mse"),
        activations=ActivationSpec(num_bits=activations),
        first_last_bits=8,
        reconstruct=ReconstructSpec(steps=steps, images=images) if steps else None,
    )


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(part).cpu() for part in images.split(250)])


def page(folder: Path, rows: list[Row]) -> str:
    lines = [
        "# Few bits without training and without labels on CIFAR-10",
        "",
        "Fake quantization in torch, target `any`, first and last layers at 8 bits; in brackets 95 % intervals of a "
        "paired bootstrap over pictures.",
        "",
        "| network | bits | method | top-1 % | float % | points | agreement % | SQNR dB | CPU s | command |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        f = row["figures"]
        shown = [
            f"{f[k]['value']:.2f} [{f[k]['low']:.2f}, {f[k]['high']:.2f}]" for k in ("points", "agreement", "sqnr_db")
        ]
        cells = [row["network"], row["bits"], row["method"], f"{f['top1']['value']:.2f}", f"{row['float_top1']:.2f}"]
        lines.append(f"| {' | '.join([*cells, *shown, str(row['cpu_seconds']), '`' + row['command'] + '`'])} |")
    lines += ["", "; ".join(dict.fromkeys(listed(row["software"]) for row in rows)) + "."]
    return write_text(folder / "ptq.md", "\n".join(lines) + "\n").read_text()


if __name__ == "__main__":
    main()
