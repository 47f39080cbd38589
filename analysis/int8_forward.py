"""ResNet-50's convolutions on INT8 tensor cores with a fused epilogue, beside the present path of QAT's forward pass.

    python analysis/int8_forward.py --budget-s 90 --out results/h200     measure on a GPU; JSON after each shape
    TRITON_INTERPRET=1 python analysis/int8_forward.py --tiny            prove the script on a CPU; times mean nothing

For every shape of convolution at batch 128, 224 px, channels_last (milliseconds of a call):

- conv: cuDNN in bf16, without bias; present: the same and the kernel behind it that adds bias and residual, applies
  ReLU, fake-quantizes, and writes bf16 and a bit an element (`fused_ops`): what QAT does now;
- codes: one Triton kernel that reads INT8 codes and writes codes and bits (`fused_conv`); both: the same that writes
  the values in bf16 as well, which the weight gradient reads; dequantize: what the backward pass does if it has codes
  only; int_mm: `torch._int_mm`, the bare product with INT32 results, for 1 x 1 convolutions.

Codes, bits and values are compared with a float64 convolution of two images before a shape is timed. The first layer's
times hold the rearrangement of the image (`stem_codes`). A shape's tile is the best of a short list, the kernels of
which are compiled beforehand in several processes. Calls run under CUDA graphs; variants are replayed in turn and the
median counts. Operands lie where the last call left them, so small ones come from the L2 cache, as in a network.
Totals weigh each shape by how often ResNet-50 has it.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from int8_shapes import LAST, LAYERS, TINY, Operands, Shape, candidates, check, int8_call, operands, values
from torch import Tensor

from compress.files import write_json
from compress.quantization.fused_conv import Tile
from compress.quantization.fused_ops import fused_quantize

Row = dict[str, Any]
Call = Callable[[], Any]

CALLS, ROUNDS = 10, 7  # calls of a graph, replays of each
BANDWIDTH = 4.8e12  # bytes a second, an H200's data sheet


def present_calls(shape: Shape, o: Operands, dtype: torch.dtype) -> dict[str, Call]:
    """Half precision by cuDNN, alone and with the kernel behind it."""
    x, weight = values(o.x, dtype), values(o.weight, dtype)
    residual = None if o.residual is None else values(o.residual, dtype)

    def conv() -> Tensor:
        return F.conv2d(x, weight, None, shape.geometry.stride, shape.geometry.padding)

    return {
        "conv": conv,
        "present": lambda: fused_quantize(conv(), o.amax, o.epilogue, bias=o.bias, residual=residual, kernels="triton"),
    }


def other_calls(shape: Shape, o: Operands, dtype: torch.dtype) -> dict[str, Call]:
    """Points of reference."""
    out = shape.out_size
    codes = torch.ones(o.x[0].shape[0], shape.outputs, out, out, dtype=torch.int8, device=o.amax.device)
    codes = codes.contiguous(memory_format=LAST)
    scale = (o.amax / 127).to(dtype)
    calls: dict[str, Call] = {"dequantize": lambda: codes * scale}
    if shape.taps == 1 and shape.stride == 1 and o.amax.is_cuda:
        rows = o.x.integers.permute(0, 2, 3, 1).reshape(-1, shape.inputs)
        matrix = o.weight.integers.reshape(shape.outputs, shape.inputs).t()
        calls["int_mm"] = lambda: torch._int_mm(rows, matrix)
    return calls


class Timed:
    """Calls behind one another: a CUDA graph of them on a GPU, one call elsewhere."""

    def __init__(self, call: Call) -> None:
        self.call = call  # a graph records addresses: what the call reads must stay
        self.ms: list[float] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        if not torch.cuda.is_available():
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(CALLS):
                    call()
        self.graph.replay()

    def time(self) -> None:
        """Append the milliseconds of a call."""
        if self.graph is None:
            start = time.perf_counter()
            self.call()
            self.ms.append((time.perf_counter() - start) * 1e3)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.ms.append(begin.elapsed_time(end) / CALLS)


def in_turn(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds of each."""
    timed = {name: Timed(call) for name, call in calls.items()}
    for _ in range(rounds):
        for item in timed.values():
            item.time()
    return {name: statistics.median(item.ms) for name, item in timed.items()}


# Compiling ----------------------------------------------------------------------------------------------------------


def kernel_key(shape: Shape, tile: Tile, writes_values: bool) -> tuple[Any, ...]:
    """Shapes of one key share a compiled kernel."""
    even = shape.inputs % tile.depth == 0
    return shape.taps, shape.stride, shape.residual, shape.inputs < 16, even, tile, writes_values


def compile_one(task: tuple[Shape, Tile, bool]) -> str:
    """Compile a kernel into Triton's cache by running it on a few images; "" or why it cannot be."""
    shape, tile, writes_values = task
    try:
        o = operands(shape, 16, "cuda")
        int8_call(shape, o, tile, torch.bfloat16 if writes_values else None)()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: the tile is left out
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def compile_all(shapes: Iterable[Shape], jobs: int, limit_s: float) -> dict[tuple[Any, ...], str]:
    """Why each kernel cannot be used, "" where it can; those that took too long are left out."""
    tasks = {kernel_key(s, t, v): (s, t, v) for s in shapes for t in candidates(s) for v in (True, False)}
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA is already in use: processes forked now could not use it")
    end = time.monotonic() + limit_s
    pool = multiprocessing.get_context("fork").Pool(min(jobs, len(tasks)))
    pending = {key: pool.apply_async(compile_one, (task,)) for key, task in tasks.items()}
    found = {}
    for key, result in pending.items():
        try:
            found[key] = result.get(max(0.1, end - time.monotonic()))
        except multiprocessing.TimeoutError:
            found[key] = "not compiled in time"
    pool.terminate()
    pool.join()
    return found


# The run ------------------------------------------------------------------------------------------------------------


def measure(shape: Shape, batch: int, device: str, refused: dict[tuple[Any, ...], str]) -> Row:
    """A shape's row."""
    o = operands(shape, batch, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter cuts bfloat16 off
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
    """The rows as Markdown, short."""
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


def machine() -> Row:
    """What it was measured on."""
    found: Row = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    return found


class BudgetSpentError(BaseException):
    """The time is over; not an Exception, so that no library takes it for a failure of its own."""


def main() -> None:
    """Compile, then measure shape after shape until all is done or the time is spent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=90.0, help="seconds, of all")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="layers whose name begins so")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/h200")))
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.budget_s
    shapes = [s for s in (TINY if arguments.tiny else LAYERS) if s.name.startswith(tuple(arguments.only))]
    device, batch = ("cpu", 2) if arguments.tiny else ("cuda", arguments.batch)
    report: Row = {"command": " ".join(["python", *sys.argv]), "rows": [], "missing": []}

    def stop(*_: object) -> None:
        raise BudgetSpentError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, arguments.budget_s)
    left = list(shapes)
    try:
        refused = {} if arguments.tiny else compile_all(shapes, arguments.jobs, 0.6 * arguments.budget_s)
        report["compile_s"] = round(arguments.budget_s - (end - time.monotonic()), 1)
        report["refused"] = [[str(key), why] for key, why in refused.items() if why]
        report["machine"] = machine()
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
    print(table(json.loads((arguments.out / "int8_forward.json").read_text())), flush=True)
    os._exit(0)  # processes of the compiler may still be at work


if __name__ == "__main__":
    main()
