"""Memory of a step of quantization-aware training, by the sizes of its tensors, without a GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx, nn

import compress
from analysis.common.qat_variants import NETWORKS, Network, pretrained, trained
from analysis.common.study import command_line, study_parser
from analysis.qat_memory.sizes import Maker, StepSizes, step_sizes
from compress.files import write_text

VARIANTS = ("float", "torch-ops", "plain", "inputs kept", "fused")
FAMILIES: tuple[str, ...] = (
    "resnet50",
    "regnet_y_3_2gf",
    "efficientnet_v2_s",
    "mobilenet_v3_large",
    "densenet121",
    "convnext_tiny",
)
FAMILIES += ("vit_s", "swin_t")
_SMALL = 2  # images with which a network is calibrated


def sizes_of(variant: str, network: Network) -> StepSizes:
    """Return the bytes of a step of a variant, with the batch of the study of QAT's cost."""
    small = Network(network.make, batch=_SMALL, pixels=network.pixels)
    ours = variant in {"fused", "inputs kept"}
    call, owner = trained("plain" if ours else variant, pretrained(small), small)
    if ours:
        fused = compress.fuse_for_training(call, kernels="triton")
        call = keeping_inputs(fused) if variant == "inputs kept" else fused
    owner.to(memory_format=torch.channels_last).train()
    call.train()
    return step_sizes(call, owner, network.batch, network.pixels)


def keeping_inputs(fused: fx.GraphModule) -> nn.Module:
    """Return the fused graph with layers that keep their inputs, instead of computing them again."""
    for node in fused.graph.nodes:
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "recipe"}
    fused.recompile()
    return fused


def table(rows: dict[str, dict[str, StepSizes]]) -> list[str]:
    """Return the lines of the table of all networks."""
    lines = [f"| network | {' | '.join(VARIANTS)} |", "|---|" + "---|" * len(VARIANTS)]
    for name, sizes in rows.items():
        base = sizes["float"].total
        cells = [f"{one.total / 2**30:.2f} ({one.total / base:.2f})" for one in sizes.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def kept_table(sizes: dict[str, StepSizes], least: float = 0.01) -> list[str]:
    """Return the lines of the table of what a network keeps; parts below a share `least` of float's are added up."""
    base = sum(sizes["float"].kept.values())
    lines = ["| | made by | type | MiB | of float's |", "|---|---|---|---|---|"]
    for variant in ("float", "fused"):
        parts: Counter[Maker] = Counter()
        for maker, size in sizes[variant].kept.items():
            parts[maker if size >= least * base else Maker("others", "")] += size
        for maker, size in parts.most_common():
            lines.append(f"| {variant} | {maker.module} | {maker.dtype} | {size / 2**20:.0f} | {size / base:.2f} |")
    return lines


def page(rows: dict[str, dict[str, StepSizes]]) -> str:
    """Return the page."""
    lines = [
        "# Memory of a step of QAT, by sizes",
        "",
        f"`{command_line()}`, torch {torch.__version__}. Peak of a bf16 step at batch 128 in GiB, with weights,",
        "gradients and momentum, and its share of float training's: sizes of tensors, counted while nothing is",
        "computed. Inputs kept: the fused path with layers that keep their quantized inputs instead of computing them",
        "again.",
        "",
        *table(rows),
        "",
        "Workspaces of cuDNN and cuBLAS, and gaps of the allocator, are not in it; [qat_cost](h200/qat_cost.md) has",
        "the peaks of a GPU. What made a kept tensor is the module that ran last: sums of a residual stream, for",
        "example, count for the dropout before them.",
    ]
    for name in ("vit_s", "swin_t", "convnext_tiny", "densenet121"):
        if name in rows:
            lines += ["", f"## What {name} keeps for the backward pass", "", *kept_table(rows[name])]
    return "\n".join(lines) + "\n"


def main(names: Sequence[str] = FAMILIES) -> None:
    """Count, print and write."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--networks", nargs="+", default=names, choices=list(NETWORKS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = {name: {v: sizes_of(v, NETWORKS[name]) for v in VARIANTS} for name in arguments.networks}
    print(write_text(arguments.out / "qat_memory.md", page(rows)).read_text())


if __name__ == "__main__":
    main()
