"""Channel permutation search for 2:4: share of the gap to unstructured pruning that it closes, and its time."""

from __future__ import annotations

import json
import statistics
import time

import numpy as np
import torch
import torchvision
from torch import Tensor, nn

from analysis.common.study import Row, command_line, study_parser
from compress.files import write_json, write_text
from compress.measure.machine import describe_machine
from compress.sparsity.channel_permutation import permute_channels
from compress.sparsity.masks import kept_magnitude, unstructured_mask
from compress.sparsity.permutation_search import search_permutation
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


def apex_matrix() -> Tensor:
    """Return 128 rows by 64 columns of uniform numbers, as apex's permutation_test.py makes them."""
    np.random.seed(1)
    return torch.from_numpy(np.random.rand(128, 64)).float()


def searched(matrix: Tensor, seconds: float, seeds: int) -> Row:
    """Search with several seeds; return the mean, smallest and largest gap closed, and the median of the times."""
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
    """Search torchvision's ResNet-50 (random weights) as a whole, and report its layers one by one."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # the statistics of a fresh one do not reveal a wrong order
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.running_mean = torch.randn(module.num_features) / 10
            module.running_var = 0.5 + 1.5 * torch.rand(module.num_features)
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
    """Return the tables in Markdown."""
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
    """Measure, write, and print the tables without the layers."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limits", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 5, 20])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--network-seconds", type=float, default=55)
    a = parser.parse_args()
    torch.set_num_threads(1)  # `permute_channels` searches each matrix with one thread
    generator = torch.Generator().manual_seed(0)
    search_permutation(torch.randn(64, 64, generator=generator), 2, 4, seconds=0.5)  # first calls are slow
    matrices = [searched(apex_matrix(), limit, a.seeds if limit < 10 else 2) for limit in a.limits]
    for rows, columns in ((512, 128), (1152, 128), (1024, 256), (4608, 512)):
        matrices.append(searched(torch.randn(rows, columns, generator=generator), 5.0, 1))
    torch.set_num_threads(a.threads)
    report = {
        "command": command_line(),
        "threads": a.threads,
        "machine": describe_machine().to_dict(),
        "matrices": matrices,
        "resnet50": resnet50(a.network_seconds),
    }
    file = write_json(a.out / "permutation.json", report)
    page = text(json.loads(file.read_text()))
    write_text(file.with_suffix(".md"), page)
    print(page.partition("| layer |")[0])


if __name__ == "__main__":
    main()
