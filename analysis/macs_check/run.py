"""Multiply-accumulates of twelve networks as compress, torch's flop counter and fvcore count them."""

from __future__ import annotations

import logging

import torch
import torchvision
from fvcore.nn import FlopCountAnalysis
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from analysis.common.study import command_line, listed, software, study_parser
from compress.files import write_text
from compress.graph.layers import layers, total_macs
from compress.graph.trace import trace
from compress.roofline.tables import table

NETWORKS = {
    **{"alexnet": 224, "vgg16": 224, "resnet50": 224, "googlenet": 224, "inception_v3": 299, "densenet121": 224},
    **{"mobilenet_v2": 224, "efficientnet_b0": 224, "regnet_y_400mf": 224, "convnext_tiny": 224},
    **{"vit_b_16": 224, "swin_t": 224},
}
"""torchvision name -> side of the image, pixels."""
PRODUCTS = {"conv", "linear", "matmul", "addmm", "bmm", "einsum"}


def build(name: str) -> nn.Module:
    """Return a torchvision network without auxiliary heads, in evaluation mode."""
    options = {"aux_logits": False, "init_weights": False} if name in {"googlenet", "inception_v3"} else {}
    model: nn.Module = getattr(torchvision.models, name)(weights=None, **options)
    return model.eval()


def by_torch(model: nn.Module, x: Tensor) -> int:
    """Count with torch.utils.flop_counter, with attention as separate products: the fused form has no formula."""
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    torch.backends.mha.set_fastpath_enabled(True)
    return int(counter.get_total_flops()) // 2


def by_fvcore(model: nn.Module, x: Tensor) -> tuple[int, int, list[str]]:
    """Count with fvcore: macs of convolutions and matrix products, its whole count, operators that it cannot count."""
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        analysis = FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        counts = analysis.by_operator()
        unknown = sorted(analysis.unsupported_ops())
    torch.backends.mha.set_fastpath_enabled(True)
    return int(sum(n for op, n in counts.items() if op in PRODUCTS)), int(sum(counts.values())), unknown


def reason(ours: int, products: int, everything: int, unknown: list[str]) -> str:
    """Return the reason of a difference to fvcore, or `equal`."""
    notes = []
    if products != ours:
        missing = [op for op in unknown if "attention" in op or "linear" in op or "matmul" in op]
        cause = f"it has no formula for {', '.join(missing)}" if missing else "of its operator formulas"
        notes.append(f"products differ by {products - ours:+,}: {cause}")
    if everything != products:
        notes.append(f"it counts {everything - products:,} more for norms and pools, which are no multiply-accumulates")
    return "; ".join(notes) or "equal"


def main() -> None:
    """Count, compare, and write the table."""
    arguments = study_parser(__doc__, out="results/roofline").parse_args()
    logging.getLogger("fvcore").setLevel(logging.ERROR)
    rows = []
    for name, size in NETWORKS.items():
        model, x = build(name), torch.randn(1, 3, size, size)
        ours, unknown = total_macs(layers(trace(model, x)))
        theirs = by_torch(model, x)
        products, everything, foreign = by_fvcore(model, x)
        difference = "equal" if theirs == ours else f"{theirs - ours:+,}"
        found = [f"{ours:,}", f"{theirs:,}", difference, f"{products:,}", reason(ours, products, everything, foreign)]
        rows.append([name, *found])
        print(" | ".join(rows[-1]), flush=True)
        if unknown:
            print(f"  compress cannot count: {', '.join(unknown)}")
    headers = ["network", "compress", "torch flop counter", "difference", "fvcore, products", "difference to fvcore"]
    about = f"`{command_line()}`; {listed(software('torch', 'torchvision', 'fvcore'))}. Batch 1."
    page = f"# macs of twelve networks, counted in three ways\n\n{about}\n\n{table(headers, rows)}\n"
    write_text(arguments.out / "macs_check.md", page)


if __name__ == "__main__":
    main()
