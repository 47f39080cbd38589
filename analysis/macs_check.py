"""Count macs of ten networks in four ways: compress, torch's flop counter, fvcore, and (two of them) by hand.

    python analysis/macs_check.py --out results/roofline/macs_check.md

torch's counter watches what torch dispatches and calls a multiply-accumulate two flops; fvcore watches a jit trace
and calls it one. fvcore is no dependency of compress: pip install fvcore.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
import torchvision
from fvcore.nn import FlopCountAnalysis
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compress.files import write_text
from compress.graph.layers import layers, total_macs
from compress.graph.trace import trace
from compress.roofline.tables import table

NETWORKS = (
    ("alexnet", 224),
    ("vgg16", 224),
    ("resnet50", 224),
    ("googlenet", 224),
    ("inception_v3", 299),
    ("densenet121", 224),
    ("mobilenet_v2", 224),
    ("efficientnet_b0", 224),
    ("regnet_y_400mf", 224),
    ("convnext_tiny", 224),
    ("vit_b_16", 224),
    ("swin_t", 224),
)
PRODUCTS = {"conv", "linear", "matmul", "addmm", "bmm", "einsum"}
FUSED = "_native_multi_head_attention"


def build(name: str) -> nn.Module:
    """A torchvision network without auxiliary heads, in evaluation mode."""
    options = {"aux_logits": False, "init_weights": False} if name in {"googlenet", "inception_v3"} else {}
    return getattr(torchvision.models, name)(weights=None, **options).eval()


def by_torch(model: nn.Module, x: Tensor) -> int:
    """torch.utils.flop_counter, with attention written out: it has no formula for the fused fast path."""
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x)
    torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops() // 2


def by_fvcore(model: nn.Module, x: Tensor) -> tuple[int, int, list[str]]:
    """(macs of convolutions and matrix products, all that fvcore counts, operators that it does not know)."""
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        analysis = FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        counts = analysis.by_operator()
        unknown = sorted(analysis.unsupported_ops())
    torch.backends.mha.set_fastpath_enabled(True)
    return int(sum(n for op, n in counts.items() if op in PRODUCTS)), int(sum(counts.values())), unknown


def why(ours: int, products: int, everything: int, unknown: list[str]) -> str:
    """One line on a difference to fvcore."""
    notes = []
    if products != ours:
        missing = [op for op in unknown if "attention" in op or "linear" in op or "matmul" in op]
        cause = f"it has no formula for {', '.join(missing)}" if missing else "of its operator formulas"
        notes.append(f"products differ by {products - ours:+,}: {cause}")
    if everything != products:
        notes.append(f"it counts {everything - products:,} more for norms and pools, which are no multiply-accumulates")
    return "; ".join(notes) or "equal"


def main() -> None:
    """Count, compare, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/roofline/macs_check.md"))
    arguments = parser.parse_args()
    logging.getLogger("fvcore").setLevel(logging.ERROR)
    rows = []
    for name, size in NETWORKS:
        model, x = build(name), torch.randn(1, 3, size, size)
        ours, unknown = total_macs(layers(trace(model, x)))
        theirs = by_torch(model, x)
        products, everything, foreign = by_fvcore(model, x)
        difference = "equal" if theirs == ours else f"{theirs - ours:+,}"
        rows.append(
            [name, f"{ours:,}", f"{theirs:,}", difference, f"{products:,}", why(ours, products, everything, foreign)]
        )
        print(" | ".join(rows[-1]), flush=True)
        if unknown:
            print(f"  unknown to compress: {', '.join(unknown)}")
    headers = ["network", "compress", "torch flop counter", "difference", "fvcore, products", "fvcore: why it differs"]
    write_text(arguments.out, HEAD.format(torch=torch.__version__) + table(headers, rows) + "\n" + TAIL)


HEAD = """# macs of twelve networks, counted in three ways

Batch 1, 224x224 (Inception v3: 299x299), torch {torch}, `python analysis/macs_check.py`. macs are
multiply-accumulates of convolutions and matrix products; flops = 2 * macs. ResNet-50 and VGG-16 are also summed by hand
from their papers' tables in `tests/roofline/test_counting.py`, and give the same figures.

"""

TAIL = """
What to know of the other counters:

- torch's counter has no formula for the fused attention that `nn.MultiheadAttention` runs in evaluation mode: counted
  as it runs, ViT-B/16 comes out at 11.27 G instead of 17.56 G. Here that fast path is off.
- torch's counter speaks of flops and counts two for a multiply-accumulate; fvcore says flops and counts one.
- fvcore adds BatchNorm, LayerNorm and adaptive pooling to its total; they are left out of its column here.
"""


if __name__ == "__main__":
    main()
