"""Dense against 2:4 matrix products on an NVIDIA GPU, for the layer shapes of ResNet-50, VGG-16 and ViT-B/16.

This file imports nothing of compress, so that a machine with torch alone can measure. A CUDA graph records addresses
and not tensors, and capturing one returns free memory to the device, so a captured call holds its operands until its
last replay.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from analysis.common.study import Row, command_line, gpu_software, study_parser
from analysis.sparse_kernels.isolated import run_isolated
from analysis.sparse_kernels.table import speedup, summary

NETWORKS = ("resnet50", "vgg16", "vit_b_16")
CALLS, ROUND_MS, ROUNDS = 20, 4.0, 15  # limit of calls in a round, target duration of a round, rounds of each variant
ATTEMPTS = {
    "int8": (("graph", True), ("graph", False), ("launches", False)),
    "fp16": (("graph", False), ("launches", False)),
}
"""Way of timing, and True if cuSPARSELt searches for its algorithm. Where one attempt fails, the next one is made.

In FP16 the search ends the process (cuSPARSELt 0.8, H200), so there is no attempt with it."""
LIMIT_S = 12.0  # of one attempt
MULTIPLE = {"fp16": 16, "int8": 32}  # cuSPARSELt needs multiples of it in outputs and inputs
PRECISIONS = ("fp16", "int8")
Call = Callable[[], Tensor]


def shapes(network: str) -> list[Row]:
    """Return a network's distinct products at 224 px: layer, count, outputs, inputs and positions an image."""
    import torchvision  # lazy: the forked processes that measure do not need it

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
    """Return the weight with the two smaller of every four inputs set to zero."""
    groups = weight.unflatten(1, (-1, 4))
    keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(2, groups.abs().float().topk(2, dim=2).indices, True)
    return (groups * keep).flatten(1)


def searched(packed: Tensor, x: Tensor, dtype: torch.dtype | None) -> dict[str, int]:
    """Return the algorithm, split and mode that cuSPARSELt's own search finds fastest."""
    algorithm, split, mode, _ = torch._C._cusparselt.mm_search(  # type: ignore[attr-defined]
        packed, x.t(), None, None, dtype, True
    )
    torch.cuda.synchronize()
    return {"alg_id": algorithm, "split_k": split, "split_k_mode": mode}


@dataclass(frozen=True)
class Variant:
    """A way to compute a product: kind, detail, a function that prepares the call, and the expected result."""

    kind: str
    detail: str
    prepare: Callable[[], Call]
    reference: Tensor


def sparse_variants(
    kind: str, weight: Tensor, x: Tensor, dtype: torch.dtype | None, reference: Tensor, *, search: bool
) -> list[Variant]:
    """Return 2:4 products with results (positions, outputs): default algorithm, and with `search` the searched one too.

    `dtype` is the type of the results, for INT8 operands only; None is the type of the operands.
    """

    def prepare(search: bool) -> Call:
        packed = torch._cslt_compress(weight)
        found: Row = searched(packed, x, dtype) if search else {}
        return lambda: torch._cslt_sparse_mm(packed, x.t(), out_dtype=dtype, transpose_result=True, **found)

    details = (("default", False), ("searched", True))[: 1 + search]
    return [Variant(kind, detail, partial(prepare, wanted), reference) for detail, wanted in details]


def dense_variants(multiply: Callable[[Tensor, Tensor], Tensor], weight: Tensor, x: Tensor) -> list[Variant]:
    """Return dense products with the weight in either layout."""
    other = weight.t().contiguous()
    reference = multiply(x, weight.t())
    return [
        Variant("dense", "outputs by inputs", lambda: lambda: multiply(x, weight.t()), reference),
        Variant("dense", "inputs by outputs", lambda: lambda: multiply(x, other), reference),
    ]


def variants(precision: str, outputs: int, inputs: int, positions: int, *, search: bool) -> list[Variant]:
    """Return all ways to compute a product of this size; each call returns (positions, outputs)."""
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
    """A round of a variant: `calls` calls of `call`, replayed from a graph or launched; it holds the operands."""

    call: Call
    calls: int
    graph: torch.cuda.CUDAGraph | None

    def round_ms(self) -> float:
        """Return the milliseconds of one call."""
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
    """Return a round, warmed up on a side stream, captured there for mode `graph`, and run once."""
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
    """Return True if the device still works: after an illegal access it is unusable in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


Key = tuple[str, int, int, int]
"""Precision, outputs, inputs, positions."""


def start_device() -> None:
    """Create the CUDA context of the process and load cuBLAS."""
    x = torch.ones(32, 32, device="cuda", dtype=torch.float16)
    torch.mm(x, x)
    torch.cuda.synchronize()


def measure(item: tuple[Key, int]) -> Row:
    """Return the median milliseconds of the better variant of each kind, its detail, and the variants that failed."""
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
    """Return GPU, driver and versions.

    Raises:
        RuntimeError: there is no GPU, or this torch has no cuSPARSELt.
    """
    if not torch.cuda.is_available() or not torch.backends.cusparselt.is_available():
        raise RuntimeError("this study needs a CUDA GPU and a torch built with cuSPARSELt")
    driver = Path("/proc/driver/nvidia/version")
    return gpu_software() | {
        "cuda": torch.version.cuda,
        "cusparselt": torch.backends.cusparselt.version(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
    }


def products(batches: list[int], networks: list[str]) -> list[Row]:
    """Return every product of every network, batch and precision; products that networks share have equal sizes."""
    rows = []
    for batch in batches:
        for network in networks:
            for shape in shapes(network):
                positions = (
                    -(-batch * shape["positions"] // 32) * 32
                )  # rounded up to the multiple that the kernels need
                for precision in PRECISIONS:
                    sizes = {"network": network, "batch": batch, "precision": precision}
                    rows.append({**sizes, **shape, "positions": positions})
    return rows


def key_of(row: Row) -> Key:
    """Return the sizes by which rows of the same product are found."""
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
    report: Row = {"command": command_line(), "machine": about, "rounds": ROUNDS}
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
    """Write JSON, whole or not at all, without compress.files (see above)."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def main() -> None:
    """Measure and write JSON; a short table comes last."""
    parser = study_parser(__doc__, out="results/sparsity")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seconds", type=float, default=85.0, help="time for all; the remainder is not measured")
    parser.add_argument("--workers", type=int, default=6, help="processes that start at once; one at a time measures")
    parser.add_argument("--note", help="a remark on this measurement, printed beside the command in the report")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.out / "sparse_kernels.json"
    report = run(a.batches, a.networks, seconds=a.seconds, workers=a.workers, path=path)
    if a.note is not None:
        write(report | {"note": a.note}, path)
    rows = report["rows"]
    measured = [r for r in rows if speedup(r)]
    launched = sum(r["timed"] != "graph" for r in measured)
    skipped = sum("skipped" in r for r in rows)
    failed = {reason for r in rows if not speedup(r) for reason in r.get("failed", [])}
    print(
        *summary(rows),
        f"{len(measured)} of {len(rows)} rows measured ({launched} without a graph), {skipped} of sizes without a 2:4 "
        f"kernel, {report['seconds']:.0f} s",
        *(f"failed: {reason}" for reason in sorted(failed)[:4]),
        sep="\n",
    )


if __name__ == "__main__":
    main()
