"""Dense against 2:4 matrix products on an NVIDIA GPU, for the layer shapes of ResNet-50, VGG-16 and ViT-B/16.

    python analysis/sparse_kernels.py --batches 1 32 --out results/sparsity     measure: needs a CUDA GPU
    python analysis/sparse_kernels.py --draw results/sparsity/sparse_kernels.json     table and figure from a file

Each convolution is measured as the matrix product that it contains: positions (batch * height * width) by outputs, over
in channels * kernel; unfolding is not measured, for either side, as engines do it inside their kernels. Inputs are
positions by channels (NHWC) and so are outputs, as in a network. Dense products are torch's (cuBLAS), the better of
two layouts; 2:4 products are cuSPARSELt's through torch, with the algorithm, split and mode that its own search finds
and with its default, the better of both. INT8 is measured with INT32 results on both sides, which is all that torch
offers for dense, and for 2:4 also with FP16 results, as a network would write them.

Everything runs under a CUDA graph of many calls; variants are replayed in turn and the median round counts. Results
of each variant are compared with the dense product of the masked weight before anything is timed. Operands stay where
the last call left them, so small ones come from the L2 cache, as they do in a network.

Measuring imports nothing of compress, so that a bare machine can run it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NETWORKS = ("resnet50", "vgg16", "vit_b_16")
CALLS, ROUNDS = 20, 15  # calls in a graph, replays of each graph
MULTIPLE = {"fp16": 16, "int8": 32}  # of outputs and inputs that cuSPARSELt takes
PRECISIONS = ("fp16", "int8")
Row = dict[str, Any]
Call = Callable[[], Tensor]


def shapes(network: str) -> list[Row]:
    """A torchvision network's distinct products at 224 px: layer, count, outputs, inputs and positions an image."""
    import torchvision

    found: dict[tuple[int, int, int], Row] = {}

    def note(name: str, outputs: int, inputs: int, positions: int) -> None:
        row = found.setdefault((outputs, inputs, positions), {"layer": name, "count": 0})
        row["count"] += 1

    def hook(name: str, module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
        if isinstance(module, nn.Conv2d):
            note(name, module.out_channels, module.weight[0].numel(), result.shape[2] * result.shape[3])
        elif isinstance(module, nn.MultiheadAttention):
            width = module.embed_dim
            note(f"{name}.in_proj", 3 * width, width, args[0].shape[1])
            note(f"{name}.out_proj", width, width, args[0].shape[1])
        elif isinstance(module, nn.Linear):
            note(name, module.out_features, module.in_features, result[..., 0].numel())

    with torch.device("meta"):
        model = torchvision.models.get_model(network, weights=None).eval()
        for name, module in model.named_modules():
            module.register_forward_hook(lambda m, args, result, name=name: hook(name, m, args, result))
        model(torch.zeros(1, 3, 224, 224))
    keys = ("outputs", "inputs", "positions")
    return [{**row, **dict(zip(keys, key, strict=True))} for key, row in found.items()]


def masked(weight: Tensor) -> Tensor:
    """The weight with the two smaller of every four inputs zero."""
    groups = weight.unflatten(1, (-1, 4))
    keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(2, groups.abs().float().topk(2, dim=2).indices, True)
    return (groups * keep).flatten(1)


def searched(packed: Tensor, x: Tensor, dtype: torch.dtype) -> dict[str, int]:
    """The algorithm, split and mode that cuSPARSELt's own search finds fastest."""
    algorithm, split, mode, _ = torch._C._cusparselt.mm_search(packed, x.t(), None, None, dtype, True)
    return {"alg_id": algorithm, "split_k": split, "split_k_mode": mode}


@dataclass(frozen=True)
class Variant:
    """A way to compute a product: kind, detail, what makes the call, and what it must return."""

    kind: str
    detail: str
    prepare: Callable[[], Call]
    reference: Tensor


def sparse_variants(kind: str, weight: Tensor, x: Tensor, dtype: torch.dtype, reference: Tensor) -> list[Variant]:
    """2:4 products with results (positions, outputs) of a type: default algorithm, and what the search finds."""

    def prepare(search: bool) -> Call:
        packed = torch._cslt_compress(weight)
        options: dict[str, Any] = {"out_dtype": dtype, "transpose_result": True}
        options |= searched(packed, x, dtype) if search else {}
        return lambda: torch._cslt_sparse_mm(packed, x.t(), **options)

    details = (("default", False), ("searched", True))
    return [Variant(kind, detail, partial(prepare, search), reference) for detail, search in details]


def dense_variants(multiply: Callable[[Tensor, Tensor], Tensor], weight: Tensor, x: Tensor) -> list[Variant]:
    """Dense products with the weight in either layout."""
    other = weight.t().contiguous()
    reference = multiply(x, weight.t())
    return [
        Variant("dense", "outputs by inputs", lambda: lambda: multiply(x, weight.t()), reference),
        Variant("dense", "inputs by outputs", lambda: lambda: multiply(x, other), reference),
    ]


def variants(precision: str, outputs: int, inputs: int, positions: int) -> list[Variant]:
    """All ways to compute a product of this size; each call returns (positions, outputs)."""
    if precision == "fp16":
        weight = masked(torch.randn(outputs, inputs, device="cuda", dtype=torch.float16))
        x = torch.randn(positions, inputs, device="cuda", dtype=torch.float16) / inputs**0.5
        dense = dense_variants(torch.mm, weight, x)
        return [*dense, *sparse_variants("2:4", weight, x, torch.float16, dense[0].reference)]
    weight = masked(torch.randint(-127, 128, (outputs, inputs), device="cuda", dtype=torch.int8))
    x = torch.randint(-127, 128, (positions, inputs), device="cuda", dtype=torch.int8)
    dense = dense_variants(torch._int_mm, weight, x)
    small = x // 64  # FP16 holds no larger sums
    return [
        *dense,
        *sparse_variants("2:4", weight, x, torch.int32, dense[0].reference),
        *sparse_variants("2:4 fp16 out", weight, small, torch.float16, torch._int_mm(small, weight.t())),
    ]


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """A graph of CALLS calls, warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def measure(precision: str, outputs: int, inputs: int, positions: int) -> Row:
    """Median milliseconds of the better variant of each kind, with what it was, and what failed."""
    if outputs % MULTIPLE[precision] or inputs % MULTIPLE[precision]:
        return {"skipped": f"outputs and inputs must be multiples of {MULTIPLE[precision]}"}
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    failed = []
    try:
        ways = variants(precision, outputs, inputs, positions)
    except RuntimeError as error:
        return {"failed": [" ".join(str(error).split())[:160]]}
    for variant in ways:
        try:
            call = variant.prepare()
            torch.testing.assert_close(call().float(), variant.reference.float(), rtol=2e-2, atol=2e-2)
            graphs[variant.kind, variant.detail] = captured(call)
        except (RuntimeError, AssertionError) as error:
            failed.append(f"{variant.kind}, {variant.detail}: {' '.join(str(error).split())[:160]}")
    times: dict[tuple[str, str], list[float]] = {key: [] for key in graphs}
    for _ in range(ROUNDS):
        for key, graph in graphs.items():
            times[key].append(replay_ms(graph))
    row: Row = {"failed": failed} if failed else {}
    for kind in dict.fromkeys(kind for kind, _ in graphs):
        best = min((statistics.median(t), detail) for (k, detail), t in times.items() if k == kind)
        row[kind] = {"ms": best[0], "how": best[1]}
    return row


def machine() -> Row:
    """What the figures were measured on."""
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cusparselt": torch.backends.cusparselt.version(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
        "python": platform.python_version(),
    }


def run(batches: list[int], networks: list[str]) -> Row:
    """Measure all shapes of all networks; a shape that networks share is measured once."""
    torch.manual_seed(0)
    cache: dict[tuple[Any, ...], Row] = {}
    rows = []
    for network in networks:
        for batch in batches:
            for shape in shapes(network):
                positions = -(-batch * shape["positions"] // 32) * 32  # filled up to what kernels take
                for precision in PRECISIONS:
                    key = (precision, shape["outputs"], shape["inputs"], positions)
                    if key not in cache:
                        cache[key] = measure(*key)
                        torch.cuda.empty_cache()
                    sizes = {"network": network, "batch": batch, "precision": precision}
                    rows.append({**sizes, **shape, "positions": positions, **cache[key]})
    return {"machine": machine(), "calls": CALLS, "rounds": ROUNDS, "rows": rows}


def speedup(row: Row) -> float | None:
    """Dense time over 2:4 time, of the same result type; None where either is missing."""
    return row["dense"]["ms"] / row["2:4"]["ms"] if "dense" in row and "2:4" in row else None


def summary(rows: list[Row]) -> list[str]:
    """A Markdown table: a network's products together, all 2:4, and 2:4 only where it is faster."""
    lines = [
        "| network | batch | precision | dense ms | 2:4 ms | gain | the faster of both ms | gain | layers that gain |",
        "| --- " * 9 + "|",
    ]
    for key in dict.fromkeys((r["network"], r["batch"], r["precision"]) for r in rows):
        own = [r for r in rows if (r["network"], r["batch"], r["precision"]) == key and "dense" in r]
        dense = sum(r["count"] * r["dense"]["ms"] for r in own)
        sparse = sum(r["count"] * r.get("2:4", r["dense"])["ms"] for r in own)
        best = sum(r["count"] * min(r["dense"]["ms"], r.get("2:4", r["dense"])["ms"]) for r in own)
        gaining = sum(r["count"] for r in own if (speedup(r) or 0) > 1.02)
        total = sum(r["count"] for r in own)
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {dense:.3f} | {sparse:.3f} | {dense / sparse:.2f} | {best:.3f} | "
            f"{dense / best:.2f} | {gaining} of {total} |"
        )
    return lines


def details(rows: list[Row]) -> list[str]:
    """A Markdown table of every shape."""
    lines = [
        "| network | batch | precision | layer | times | outputs | inputs | positions | dense ms | 2:4 ms | gain |"
        " 2:4, FP16 out ms |",
        "| --- " * 12 + "|",
    ]
    for r in rows:
        gain = speedup(r)
        cells = [
            r["network"],
            r["batch"],
            r["precision"],
            r["layer"],
            r["count"],
            r["outputs"],
            r["inputs"],
            r["positions"],
        ]
        if "skipped" in r:
            cells += ["-", "-", r["skipped"], "-"]
        else:
            cells += [f"{r[kind]['ms']:.4f}" if kind in r else "failed" for kind in ("dense", "2:4")]
            cells += [f"{gain:.2f}" if gain else "-", f"{r['2:4 fp16 out']['ms']:.4f}" if "2:4 fp16 out" in r else "-"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def draw(report: Row, folder: Path) -> None:
    """Write sparse_kernels.md and .png: what 2:4 brings to each shape, by its multiply-accumulates."""
    from matplotlib.figure import Figure

    from compress.files import replacing, write_text
    from compress.report.style import LIGHT, compact, styled, to_png

    about = ", ".join(f"{name} {value}" for name, value in report["machine"].items() if value)
    command = f"Measured with `{report['command']}`; {about}."
    head = ["# Dense against 2:4 matrix products", "", (__doc__ or "").split("\n\n")[2], "", command, ""]
    body = [*summary(report["rows"]), "", *details(report["rows"])]
    write_text(folder / "sparse_kernels.md", "\n".join([*head, *body]) + "\n")
    looks = dict(zip(NETWORKS, (("o", "blue"), ("s", "amber"), ("^", "green")), strict=True))
    with styled():
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        for axis, precision in zip(figure.subplots(1, len(PRECISIONS), sharey=True), PRECISIONS, strict=True):
            for network, (mark, colour) in looks.items():
                own = [
                    r for r in report["rows"] if (r["network"], r["precision"]) == (network, precision) and speedup(r)
                ]
                macs = [r["outputs"] * r["inputs"] * r["positions"] for r in own]
                axis.scatter(macs, [speedup(r) for r in own], marker=mark, s=22, label=network, color=LIGHT[colour])
            axis.axhline(1.0, color=LIGHT["ink"], linewidth=0.8)
            axis.axhline(2.0, color=LIGHT["muted"], linewidth=0.8, linestyle=":")
            axis.set(xscale="log", title=precision.upper(), xlabel="multiply-accumulates of the dense product")
            axis.xaxis.set_major_formatter(compact)
        figure.axes[0].set_ylabel("dense time / 2:4 time")
        figure.axes[0].legend()
        image = to_png(figure)
    with replacing(folder / "sparse_kernels.png") as temporary:
        temporary.write_bytes(image)


def main() -> None:
    """Measure and write JSON, or draw from one; a short table comes last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/sparsity")))
    parser.add_argument("--draw", type=Path, help="do not measure: table and figure from this JSON file, beside it")
    a = parser.parse_args()
    if a.draw is not None:
        report = json.loads(a.draw.read_text())
        draw(report, a.draw.parent)
    else:
        if not torch.cuda.is_available() or not torch.backends.cusparselt.is_available():
            raise SystemExit("sparse_kernels: needs a CUDA GPU and a torch built with cuSPARSELt; --draw needs neither")
        report = {"command": " ".join(["python", *sys.argv]), **run(a.batches, a.networks)}
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "sparse_kernels.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(summary(report["rows"])))


if __name__ == "__main__":
    main()
