"""Channel permutation search: how much of the gap between 2:4 and unstructured it closes, and in what time.

    python analysis/permutation_search.py --threads 2 --out results

1. One matrix, 64 columns by 128 rows of uniform numbers with seed 1: the one whose table apex's README prints (its
   permutation_tests folder; times there are of a V100, with CUDA kernels). Gap closed is apex's efficacy: 0 % = 2:4 in
   the given order, 100 % = the largest half of every row.
2. Larger matrices of normal numbers: the more rows share one order, the less any order can do for each of them.
3. torchvision's ResNet-50 (random weights, as nothing is downloaded) as a whole: time with tracing, applying and
   checking, magnitude kept before and after, and how far the outputs moved.

Writes permutation.json and permutation.md; a short table comes last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from compress.files import write_json, write_text
from compress.measure.machine import describe_machine
from compress.sparsity.masks import kept_magnitude, unstructured_mask
from compress.sparsity.permutation import search_permutation
from compress.sparsity.permute import permute_channels
from compress.sparsity.spec import SparsitySpec

APEX = (
    ("channel swaps", 32.1, 0.214),
    ("channel swaps, 100 escapes", 32.5, 2.249),
    ("channel swaps, 1000 escapes", 36.0, 20.248),
    ("stripe pairs", 35.5, 0.013),
    ("stripe pairs, 1000 escapes", 35.6, 1.387),
    ("stripe triples", 36.6, 0.860),
)
"""Strategy, gap closed in percent, seconds on a V100: from the README of apex's permutation_tests."""
Row = dict[str, Any]


def apex_matrix() -> Tensor:
    """128 rows by 64 columns, as apex's permutation_test.py makes it."""
    np.random.seed(1)
    return torch.from_numpy(np.random.rand(128, 64)).float()


def searched(matrix: Tensor, seconds: float, seeds: int) -> Row:
    """Searches with several seeds: mean, smallest and largest gap closed, and the median of their times."""
    found = [search_permutation(matrix, 2, 4, seconds=seconds, seed=seed) for seed in range(seeds)]
    gaps = [100 * f.gap_closed for f in found]
    return {
        "columns": matrix.shape[1],
        "rows": matrix.shape[0],
        "limit_s": seconds,
        "seconds": statistics.median(f.seconds for f in found),
        "rounds": round(statistics.median(f.rounds for f in found)),
        "gap_closed_percent": statistics.mean(gaps),
        "lowest_percent": min(gaps),
        "highest_percent": max(gaps),
        "seeds": seeds,
    }


def resnet50(seconds: float) -> Row:
    """The whole network, layer by layer."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # fresh ones would hide a wrong order
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = model(x)
        start, cpu = time.perf_counter(), time.process_time()
        report = permute_channels(model, SparsitySpec(permute_seconds=seconds), example_inputs=x)
        total, cpu = time.perf_counter() - start, time.process_time() - cpu
        moved = ((model(x) - expected).abs().max() / expected.abs().max()).item()
    weights = {row.layer: model.get_submodule(row.layer).weight.detach() for row in report.rows}
    bounds = {path: kept_magnitude(w, unstructured_mask(w, 0.5)) for path, w in weights.items()}
    layers = [
        {
            "layer": row.layer,
            "shape": list(weights[row.layer].shape),
            "kept_before": row.before,
            "kept_after": row.after,
            "kept_unstructured": bounds[row.layer],
            "searched": row.searched,
            "reason": row.reason,
        }
        for row in report.rows
    ]
    sizes = [weights[row.layer].abs().sum().item() for row in report.rows]
    shares = {
        name: sum(size * layer[name] for size, layer in zip(sizes, layers, strict=True)) / sum(sizes)
        for name in ("kept_before", "kept_after", "kept_unstructured")
    }
    return {
        "limit_s": seconds,
        "seconds": total,
        "cpu_seconds": cpu,
        "groups": report.groups,
        "relative_output_change": moved,
        **shares,
        "layers": layers,
    }


def text(report: Row) -> str:
    """The tables in Markdown."""
    machine = report["machine"]
    about = f"{machine['cpu']}, load {machine['load_average']} at the end, torch {torch.__version__}"
    lines = [
        "# Channel permutation search",
        "",
        f"`{report['command']}`",
        "",
        f"{about}; one thread a matrix. Gap closed: 0 % = 2:4 in the given order, 100 % = the best half of every row.",
        "",
        "| matrix | search | s | gap closed % | lowest to highest |",
        "| --- | --- | --- | --- | --- |",
        *(f"| 64 x 128 | apex, {name} (V100, published) | {s:.3f} | {gap:.1f} | |" for name, gap, s in APEX),
    ]
    lines += [
        f"| {row['columns']} x {row['rows']} | compress, {row['rounds']} rounds | {row['seconds']:.2f} | "
        f"{row['gap_closed_percent']:.1f} | {row['lowest_percent']:.1f} to {row['highest_percent']:.1f} "
        f"({row['seeds']} seeds) |"
        for row in report["matrices"]
    ]
    net = report["resnet50"]
    lines += [
        "",
        f"ResNet-50, {net['groups']} groups on {report['threads']} threads: {net['seconds']:.1f} s in all for a limit "
        f"of {net['limit_s']:g} s ({net['cpu_seconds']:.1f} s of processor time); magnitude kept "
        f"{net['kept_before']:.4f} -> {net['kept_after']:.4f} (unstructured "
        f"{net['kept_unstructured']:.4f}); the outputs moved by {net['relative_output_change']:.1e} of the largest.",
        "",
        "| layer | weight | 2:4 | permuted | unstructured |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {r['layer']} | {' x '.join(map(str, r['shape']))} | {r['kept_before']:.4f} | {r['kept_after']:.4f} | "
            f"{r['kept_unstructured']:.4f} |"
            for r in net["layers"]
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write, print the tables without the layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limits", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 5, 20])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--network-seconds", type=float, default=55)
    parser.add_argument("--out", type=Path, default=Path("results"))
    a = parser.parse_args()
    torch.set_num_threads(1)  # as `permute_channels` searches each matrix
    generator = torch.Generator().manual_seed(0)
    search_permutation(torch.randn(64, 64, generator=generator), 2, 4, seconds=0.5)  # first calls are slow
    matrices = [searched(apex_matrix(), limit, a.seeds if limit < 10 else 2) for limit in a.limits]
    for rows, columns in ((512, 128), (1152, 128), (1024, 256), (4608, 512)):
        matrices.append(searched(torch.randn(rows, columns, generator=generator), 5.0, 1))
    torch.set_num_threads(a.threads)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "threads": a.threads,
        "machine": describe_machine().to_dict(),
        "matrices": matrices,
        "resnet50": resnet50(a.network_seconds),
    }
    write_json(a.out / "permutation.json", report)
    write_text(a.out / "permutation.md", text(report))
    print(text(report).partition("| layer |")[0])


if __name__ == "__main__":
    main()
