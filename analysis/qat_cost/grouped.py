"""Grouped 3 x 3 convolutions of RegNetY-3.2GF in bf16 and channels_last, as they are and with groups merged into one.

    python -m analysis.qat_cost.grouped

A merged group's filter holds zeros between the groups, as `compress.qat_fusion.product` makes it. Writes grouped.json
and grouped.md: milliseconds of the forward pass, of the gradient of the input and of that of the filter.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from analysis.common.qat_variants import DEVICE, fast_arithmetic, machine
from analysis.common.study import Row, command_line, listed, study_parser
from compress.files import write_json, write_text
from compress.qat_fusion.product import groups_together

WIDTH = 24
"""Channels of a group."""
SHAPES = (
    (576, 14, 1, 12),
    (216, 28, 1, 4),
    (72, 56, 1, 1),
    (72, 112, 2, 1),
    (216, 56, 2, 1),
    (576, 28, 2, 1),
    (1512, 14, 2, 1),
)
"""Channels, side of the input, stride, and how often the network has it."""
COUNTS = (1, 2, 3, 4, 6, 8, 9)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Return the median of three rounds."""
    for _ in range(2):
        run()
    rounds = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / repeats)
    return statistics.median(rounds)


def measured(channels: int, side: int, stride: int, count: int, merged: int, batch: int) -> Row:
    """Return the times of one convolution with `merged` groups as one."""
    last = torch.channels_last

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).contiguous(memory_format=last)

    groups = channels // WIDTH // merged
    x, weight = tensor(batch, channels, side, side), tensor(channels, WIDTH * merged, 3, 3)
    grad = tensor(batch, channels, side // stride, side // stride)

    def backward(*mask: bool) -> object:
        numbers = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], groups, list(mask))
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *numbers)

    ms = [
        milliseconds(lambda: F.conv2d(x, weight, None, stride, 1, 1, groups)),
        milliseconds(lambda: backward(True, False, False)),
        milliseconds(lambda: backward(False, True, False)),
    ]
    numbers = {"channels": channels, "side": side, "stride": stride, "count": count}
    return {**numbers, "merged": merged, "width": WIDTH * merged, "ms": ms}


def write(document: Row, out: Path) -> None:
    """Write the JSON file and the page."""
    write_json(out / "grouped.json", document)
    lines = ["# Grouped convolutions of RegNetY-3.2GF, as they are and merged", ""]
    lines += [
        f"`{document['command']}`; {listed(document['machine'])}; bf16, channels_last, batch 128, in ms. Bold: what",
        "",
    ]
    lines[-2] += " `compress.qat_fusion.product` computes. cuDNN tried all of its algorithms."
    lines += [
        "| input | stride | in the network | channels of a group | forward, ms | of the input | of the filter | sum |"
    ]
    lines += ["|" + "---|" * 8]
    usual = chosen = 0.0
    for row in document["rows"]:
        takes = groups_together(row["channels"] // WIDTH, WIDTH) == row["merged"]
        total = sum(row["ms"])
        usual += total * row["count"] if row["merged"] == 1 else 0.0
        chosen += total * row["count"] if takes else 0.0
        cells = [f"{value:.3f}" for value in (*row["ms"], total)]
        cells[-1] = f"**{cells[-1]}**" if takes else cells[-1]
        where = f"{row['channels']} x {row['side']} x {row['side']} | {row['stride']} | {row['count']} | {row['width']}"
        lines.append(f"| {where} | {' | '.join(cells)} |")
    lines += ["", f"All of the network's: {usual:.1f} ms as they are, {chosen:.1f} ms merged.", ""]
    write_text(out / "grouped.md", "\n".join(lines))


def main() -> None:
    """Measure every shape with every number of groups that divides it."""
    arguments = study_parser(__doc__, out="results/h200").parse_args()
    fast_arithmetic()
    torch.backends.cudnn.benchmark_limit = 0  # all of cuDNN's algorithms; a training tries ten
    document: Row = {"command": command_line(), "machine": machine(), "rows": []}
    for channels, side, stride, count in SHAPES:
        for merged in (number for number in COUNTS if channels // WIDTH % number == 0):
            document["rows"].append(measured(channels, side, stride, count, merged, 128))
            print(document["rows"][-1], flush=True)
    write(document, arguments.out)


if __name__ == "__main__":
    main()
