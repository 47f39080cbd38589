"""Dense against 2:4 matrix products on an NVIDIA GPU, for the layer shapes of ResNet-50, VGG-16 and ViT-B/16.

    python analysis/sparse_kernels.py --batches 32 1 --out results/sparsity     measure: needs a CUDA GPU
    python analysis/sparse_kernels.py --draw results/sparsity/sparse_kernels.json     table and figure from a file

Each convolution is measured as the matrix product that it contains: positions (batch * height * width) by outputs, over
in channels * kernel; unfolding is not measured, for either side, as engines do it inside their kernels. Inputs are
positions by channels (NHWC) and so are outputs, as in a network. Dense products are torch's (cuBLAS), the better of
two layouts; 2:4 products are cuSPARSELt's through torch, with the algorithm, split and mode that its own search finds
and with its default, the better of both; in FP16 with its default alone, since the search ends with an internal error
there (cuSPARSELt 0.8, H200), so FP16's rows are no verdict on what the hardware could do. INT8 is measured with INT32
results on both sides, which is all that torch offers for dense, and for 2:4 also with FP16 results, as a network would
write them.

Calls run under a CUDA graph of many; variants are replayed in turn and the median round counts. Results of each
variant are compared with the dense product of the masked weight before anything is timed. Operands stay where the last
call left them, so small ones come from the L2 cache, as they do in a network.

Each product is measured in a process of its own with a time limit (analysis/isolated.py), so that one that crashes
spoils no other; it is tried again without the search, then without a graph (calls launched one behind the other, as
the row says). The file is written anew after each row. A graph records addresses, not tensors, and capturing one
returns free memory to the device: whatever a captured call reads is held until its last replay.

Measuring imports nothing of compress, so that a bare machine can run it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from isolated import run_isolated
from sparse_kernels_report import draw, speedup, summary
from torch import Tensor, nn

NETWORKS = ("resnet50", "vgg16", "vit_b_16")
CALLS, ROUND_MS, ROUNDS = 20, 4.0, 15  # most calls in a round, about how long one lasts, rounds of each variant
ATTEMPTS = {
    "int8": (("graph", True), ("graph", False), ("launches", False)),
    "fp16": (("graph", False), ("launches", False)),
}
"""How calls are timed, and whether algorithms are searched: the next one is tried where one fails.

In FP16 the process does not outlive the search (cuSPARSELt 0.8, H200)."""
LIMIT_S = 12.0  # of one attempt
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


def searched(packed: Tensor, x: Tensor, dtype: torch.dtype | None) -> dict[str, int]:
    """The algorithm, split and mode that cuSPARSELt's own search finds fastest."""
    algorithm, split, mode, _ = torch._C._cusparselt.mm_search(packed, x.t(), None, None, dtype, True)
    torch.cuda.synchronize()
    return {"alg_id": algorithm, "split_k": split, "split_k_mode": mode}


@dataclass(frozen=True)
class Variant:
    """A way to compute a product: kind, detail, what makes the call, and what it must return."""

    kind: str
    detail: str
    prepare: Callable[[], Call]
    reference: Tensor


def sparse_variants(
    kind: str, weight: Tensor, x: Tensor, dtype: torch.dtype | None, reference: Tensor, *, search: bool
) -> list[Variant]:
    """2:4 products with results (positions, outputs): default algorithm, and what the search finds.

    `dtype` is the results' and goes with INT8 operands only; None = the operands'.
    """

    def prepare(search: bool) -> Call:
        packed = torch._cslt_compress(weight)
        found = searched(packed, x, dtype) if search else {}
        return lambda: torch._cslt_sparse_mm(packed, x.t(), out_dtype=dtype, transpose_result=True, **found)

    details = (("default", False), ("searched", True))[: 1 + search]
    return [Variant(kind, detail, partial(prepare, wanted), reference) for detail, wanted in details]


def dense_variants(multiply: Callable[[Tensor, Tensor], Tensor], weight: Tensor, x: Tensor) -> list[Variant]:
    """Dense products with the weight in either layout."""
    other = weight.t().contiguous()
    reference = multiply(x, weight.t())
    return [
        Variant("dense", "outputs by inputs", lambda: lambda: multiply(x, weight.t()), reference),
        Variant("dense", "inputs by outputs", lambda: lambda: multiply(x, other), reference),
    ]


def variants(precision: str, outputs: int, inputs: int, positions: int, *, search: bool) -> list[Variant]:
    """All ways to compute a product of this size; each call returns (positions, outputs)."""
    if precision == "fp16":
        weight = masked(torch.randn(outputs, inputs, device="cuda", dtype=torch.float16))
        x = torch.randn(positions, inputs, device="cuda", dtype=torch.float16) / inputs**0.5
        dense = dense_variants(torch.mm, weight, x)
        return [*dense, *sparse_variants("2:4", weight, x, None, dense[0].reference, search=search)]
    weight = masked(torch.randint(-127, 128, (outputs, inputs), device="cuda", dtype=torch.int8))
    x = torch.randint(-127, 128, (positions, inputs), device="cuda", dtype=torch.int8)
    dense = dense_variants(torch._int_mm, weight, x)
    small = x.sign()  # FP16 holds no larger sums
    sums = torch._int_mm(small, weight.t())
    return [
        *dense,
        *sparse_variants("2:4", weight, x, torch.int32, dense[0].reference, search=search),
        *sparse_variants("2:4 fp16 out", weight, small, torch.float16, sums, search=search),
    ]


@dataclass(frozen=True)
class Timed:
    """A round of a variant: `calls` calls of `call`, replayed from a graph or launched; holds what the calls read."""

    call: Call
    calls: int
    graph: torch.cuda.CUDAGraph | None

    def round_ms(self) -> float:
        """Milliseconds of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(self.calls):
                self.call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.calls


def warmed_up(call: Call, mode: str) -> Timed:
    """A round, warmed up on a side stream, captured there for mode `graph`, and run once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        once = Timed(call, 1, None).round_ms()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    calls = min(CALLS, max(2, round(ROUND_MS / max(once, 1e-3))))
    graph = torch.cuda.CUDAGraph() if mode == "graph" else None
    if graph is not None:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    timed = Timed(call, calls, graph)
    timed.round_ms()
    torch.cuda.synchronize()
    return timed


def usable() -> bool:
    """Whether the device still answers: an illegal access stays with the process for good."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


Key = tuple[str, int, int, int]
"""Precision, outputs, inputs, positions."""


def start_device() -> None:
    """Make the process's context and load cuBLAS."""
    x = torch.ones(32, 32, device="cuda", dtype=torch.float16)
    torch.mm(x, x)
    torch.cuda.synchronize()


def measure(item: tuple[Key, int]) -> Row:
    """Median milliseconds of the better variant of each kind, with what it was, and what failed."""
    key, attempt = item
    mode, search = ATTEMPTS[key[0]][attempt]
    torch.manual_seed(0)
    rounds: dict[tuple[str, str], Timed] = {}
    failed = []
    for variant in variants(*key, search=search):
        try:
            call = variant.prepare()
            torch.testing.assert_close(call().float(), variant.reference.float(), rtol=2e-2, atol=2e-2)
            rounds[variant.kind, variant.detail] = warmed_up(call, mode)
        except (RuntimeError, AssertionError) as error:
            failed.append(f"{mode}, {variant.kind}, {variant.detail}: {' '.join(str(error).split())[:160]}")
            if not usable():
                raise RuntimeError(failed[-1]) from error
    times: dict[tuple[str, str], list[float]] = {which: [] for which in rounds}
    for _ in range(ROUNDS):
        for which, timed in rounds.items():
            times[which].append(timed.round_ms())
    row: Row = {"timed": mode, "failed": failed}
    for kind in dict.fromkeys(kind for kind, _ in rounds):
        best = min((statistics.median(t), detail) for (k, detail), t in times.items() if k == kind)
        row[kind] = {"ms": best[0], "how": best[1]}
    return row


def machine() -> Row:
    """What the figures were measured on."""
    if not torch.cuda.is_available() or not torch.backends.cusparselt.is_available():
        raise RuntimeError("needs a CUDA GPU and a torch built with cuSPARSELt; --draw needs neither")
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cusparselt": torch.backends.cusparselt.version(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
        "python": platform.python_version(),
    }


def products(batches: list[int], networks: list[str]) -> list[Row]:
    """Every product of every network, batch and precision; those that networks share are alike in their sizes."""
    rows = []
    for batch in batches:
        for network in networks:
            for shape in shapes(network):
                positions = -(-batch * shape["positions"] // 32) * 32  # filled up to what kernels take
                for precision in PRECISIONS:
                    sizes = {"network": network, "batch": batch, "precision": precision}
                    rows.append({**sizes, **shape, "positions": positions})
    return rows


def key_of(row: Row) -> Key:
    """What a row shares with others of the same product."""
    return row["precision"], row["outputs"], row["inputs"], row["positions"]


def run(batches: list[int], networks: list[str], *, seconds: float, workers: int, path: Path) -> Row:
    """Measure all products, each in its own process, and write the report to `path` after each."""
    began = time.monotonic()
    rows = products(batches, networks)
    found: dict[Key, Row] = {}
    for key in map(key_of, rows):
        multiple = MULTIPLE[key[0]]
        if key[1] % multiple or key[2] % multiple:
            found[key] = {"skipped": f"outputs and inputs must be multiples of {multiple}"}
    queue: deque[Any] = deque((key, 0) for key in dict.fromkeys(map(key_of, rows)) if key not in found)
    (_, about), *_ = run_isolated(deque(["machine"]), lambda _: machine(), prepare=int, limit_s=60, budget_s=60)
    if "failed" in about:
        raise SystemExit(f"sparse_kernels: {about['failed'][0]}")
    report: Row = {"command": " ".join(["python", *sys.argv]), "machine": about, "rounds": ROUNDS}
    left = seconds - (time.monotonic() - began)
    for (key, attempt), row in run_isolated(
        queue, measure, prepare=start_device, limit_s=LIMIT_S, budget_s=left, workers=workers
    ):
        before = found.get(key, {"failed": []})
        found[key] = {**before, **row, "failed": [*before["failed"], *row["failed"]]}
        if attempt + 1 < len(ATTEMPTS[key[0]]) and not {"dense", "2:4"} <= found[key].keys():
            queue.append((key, attempt + 1))
        report["rows"] = [{**row, **found[key_of(row)]} for row in rows if key_of(row) in found]
        report["seconds"] = time.monotonic() - began
        write(report, path)
    return report


def write(report: Row, path: Path) -> None:
    """Write JSON, whole or not at all."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def main() -> None:
    """Measure and write JSON, or draw from one; a short table comes last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=85.0, help="of all; what is left then is not measured")
    parser.add_argument("--workers", type=int, default=6, help="processes that start at once; one at a time measures")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results/sparsity")))
    parser.add_argument("--note", help="what a reader should know of this measurement; stands in the table's file")
    parser.add_argument("--draw", type=Path, help="do not measure: table and figure from this JSON file, beside it")
    a = parser.parse_args()
    path = a.draw or a.out / "sparse_kernels.json"
    if a.draw is not None:
        report = json.loads(a.draw.read_text())
    else:
        a.out.mkdir(parents=True, exist_ok=True)
        report = run(a.batches, a.networks, seconds=a.seconds, workers=a.workers, path=path)
    if a.note is not None:
        report["note"] = a.note
        write(report, path)
    if a.draw is not None:
        draw(report, path.parent, method="\n\n".join((__doc__ or "").split("\n\n")[2:5]))
    rows = report["rows"]
    print("\n".join(summary(rows)))
    measured = [r for r in rows if speedup(r)]
    launched = sum(r["timed"] != "graph" for r in measured)
    skipped = sum("skipped" in r for r in rows)
    print(
        f"{len(measured)} of {len(rows)} rows measured ({launched} without a graph), {skipped} of sizes without a 2:4 "
        f"kernel, {report['seconds']:.0f} s"
    )
    failed = {reason for r in rows if not speedup(r) for reason in r.get("failed", [])}
    print("\n".join(f"failed: {reason}" for reason in sorted(failed)[:4]))


if __name__ == "__main__":
    main()
