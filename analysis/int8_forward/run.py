"""ResNet-50's convolutions on INT8 tensor cores with a fused epilogue, beside the bf16 forward pass of QAT."""

from __future__ import annotations

import gc
import os
import signal
import time
from dataclasses import asdict
from typing import Any

import torch

from analysis.common.study import Row, command_line, gpu_software, listed, study_parser
from analysis.int8_forward.shapes import LAYERS, TINY, Shape, candidates, check, int8_call, operands
from analysis.int8_forward.timing import Call, compile_all, in_turn, kernel_key, other_calls, present_calls
from compress.files import write_json, write_text

ROUNDS = 7  # timed rounds of each variant
BANDWIDTH = 4.8e12  # bytes a second, data sheet of an H200


def measure(shape: Shape, batch: int, device: str, refused: dict[tuple[Any, ...], str]) -> Row:
    """Choose the best tile of a shape, compare its result with float64, and time all variants."""
    o = operands(shape, batch, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter truncates bfloat16
    row: Row = {**asdict(shape), "tiles": {}, "tuning": []}
    calls: dict[str, Call] = {}
    for name, out_type in (("both", dtype), ("codes", None)):
        usable = [t for t in candidates(shape) if not refused.get(kernel_key(shape, t, out_type is not None), "")]
        tuned: dict[str, Call] = {str(list(t)): int8_call(shape, o, t, out_type) for t in usable}
        if not tuned:
            raise ValueError(f"no tile of {shape.name} could be compiled: {set(refused.values())}")
        times = in_turn(tuned, 3)
        best = min(times, key=lambda tile: times[tile])
        calls[name] = tuned[best]
        row["tiles"][name] = best
        row["tuning"].append(times)
        check(shape, o, calls[name]())
    calls |= present_calls(shape, o, dtype) | other_calls(shape, o, dtype)
    row["ms"] = in_turn(calls, ROUNDS)
    inputs, outputs = o.x.integers.numel(), batch * shape.outputs * shape.out_size**2
    row["floor_ms"] = (inputs + outputs * (1 + 2 + 1 / 8 + shape.residual)) / BANDWIDTH * 1e3
    row["tops"] = 2e-9 * outputs * shape.inputs * shape.taps**2 / row["ms"]["both"]
    return row


def table(report: Row) -> str:
    """Return the rows as Markdown; totals weigh each shape by how often ResNet-50 has it."""
    names = ("conv", "present", "codes", "both", "dequantize", "int_mm")
    head = ["| layer | n | " + " | ".join(names) + " | both/present | floor | TOPS | tile of both |", "|---" * 12 + "|"]
    lines, totals = [], dict.fromkeys(names, 0.0)
    for row in report["rows"]:
        cells = [f"{row['ms'][n]:.3f}" if n in row["ms"] else "" for n in names]
        ratio = row["ms"]["both"] / row["ms"]["present"]
        lines.append(
            f"| {row['name']} | {row['count']} | {' | '.join(cells)} | {ratio:.2f} | {row['floor_ms']:.3f} |"
            f" {row['tops']:.0f} | {row['tiles']['both']} |"
        )
        for n in names:
            totals[n] += row["count"] * row["ms"].get(n, 0.0)
    if lines:
        cells = [f"{totals[n]:.2f}" for n in names[:-1]]
        ratio, floor = totals["both"] / totals["present"], sum(r["count"] * r["floor_ms"] for r in report["rows"])
        layers = sum(row["count"] for row in report["rows"])
        lines.append(f"| **all** | {layers} | {' | '.join(cells)} | | {ratio:.2f} | {floor:.2f} | | |")
    return "\n".join([*head, *lines, "", *(f"Not measured: {m}." for m in report["missing"])])


class BudgetSpentError(BaseException):
    """The time has run out; not an Exception, so that no library takes it for a failure of its own."""


def main() -> None:
    """Compile, then measure shape after shape until all are done or the time has run out."""
    parser = study_parser(__doc__, out="results/h200")
    parser.add_argument("--budget-s", type=float, default=90.0, help="seconds for all shapes")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="layers whose name begins with NAME")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.budget_s
    shapes = [s for s in (TINY if arguments.tiny else LAYERS) if s.name.startswith(tuple(arguments.only))]
    device, batch = ("cpu", 2) if arguments.tiny else ("cuda", arguments.batch)
    report: Row = {"command": command_line(), "rows": [], "missing": []}

    def stop(*_: object) -> None:
        raise BudgetSpentError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, arguments.budget_s)
    left = list(shapes)
    try:
        refused = {} if arguments.tiny else compile_all(shapes, arguments.jobs, 0.6 * arguments.budget_s)
        report["compile_s"] = round(arguments.budget_s - (end - time.monotonic()), 1)
        report["refused"] = [[str(key), why] for key, why in refused.items() if why]
        report["machine"] = gpu_software("triton")
        torch.backends.cudnn.benchmark = True
        while left:
            try:
                report["rows"].append(measure(left[0], batch, device, refused))
            except (ValueError, RuntimeError) as error:  # a shape that fails is noted, the next one is measured
                report["missing"].append(f"{left[0].name} ({type(error).__name__}: {str(error)[:200]})")
            left.pop(0)
            gc.collect()
            write_json(arguments.out / "int8_forward.json", report)
    except BudgetSpentError:
        report["missing"] += [f"{shape.name} (no time left)" for shape in left]
        write_json(arguments.out / "int8_forward.json", report)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    about = f"`{report['command']}`; {listed(report.get('machine', {}))}; batch {batch}."
    page = f"# ResNet-50's convolutions on INT8 tensor cores\n\n{about}\n\n{table(report)}\n"
    print(write_text(arguments.out / "int8_forward.md", page).read_text(), flush=True)
    os._exit(0)  # processes of the compiler may still be at work


if __name__ == "__main__":
    main()
