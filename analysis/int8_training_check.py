"""Whether QAT on INT8 tensor cores computes what the plain path does, on a GPU: five lines.

    python analysis/int8_training_check.py                 about 90 s on a GPU
    python analysis/int8_training_check.py --modes eager   about 20 s

ResNet-50, random weights, 16 images of 128 x 128, channels_last; one forward and backward pass of each path from the
same weights. A line shows the greatest difference of the logits over the greatest logit, and the mean and smallest
cosine similarity of the parameters' gradients; beside them, in bf16, the same between the fused float path and the
plain one, which differ by rounding only. With TRITON_INTERPRET=1, on a CPU, a tiny network proves the script.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import qat_variants
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compress

Result = tuple[Tensor, dict[str, Tensor]]


def one_pass(run: Callable[[Tensor], Tensor], qmodel: nn.Module, x: Tensor, dtype: torch.dtype) -> Result:
    """(logits, gradients of the parameters)."""
    qmodel.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        logits = run(x)
    F.cross_entropy(logits.float(), torch.arange(len(x), device=x.device) % 10).backward()
    return logits.detach().float(), {n: p.grad.float() for n, p in qmodel.named_parameters() if p.grad is not None}


def steady(model: nn.Module) -> nn.Module:
    """`model` with biases of 1 in BatchNorm; with 0, random weights make other logits of the smallest rounding."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.bias)
    return model


def differences(one: Result, other: Result) -> str:
    """The numbers of a line."""
    logits = ((one[0] - other[0]).abs().max() / other[0].abs().max()).item()
    missing = set(other[1]) ^ set(one[1])
    cosines = {n: F.cosine_similarity(one[1][n].flatten(), g.flatten(), 0).item() for n, g in other[1].items()}
    worst = min(cosines, key=lambda n: cosines[n])
    mean = sum(cosines.values()) / len(cosines)
    return f"logits {logits:.1e}, gradients' cosine: mean {mean:.4f}, least {cosines[worst]:.4f} ({worst})" + (
        f", MISSING {sorted(missing)[:3]}" if missing else ""
    )


def main() -> None:
    """Print a line for each path and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name, batch, pixels = ("resnet50", 16, 128) if qat_variants.DEVICE.type == "cuda" else ("tiny", 2, 16)
    network = qat_variants.Network(lambda: steady(qat_variants.NETWORKS[name].make()), batch, pixels)
    x = qat_variants.images(network, batch)
    spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="max"))
    qmodel = compress.quantize(qat_variants.pretrained(network).eval(), x[:2], [x], spec=spec)
    qmodel.to(memory_format=torch.channels_last)
    fused = compress.fuse_for_training(qmodel, forward="float")
    coded = compress.fuse_for_training(qmodel, forward="int8")
    print(f"{sum(chain.int8 for chain in coded.chains)} of {len(coded.chains)} chains on codes", flush=True)
    for dtype in (getattr(torch, name) for name in arguments.types):
        plain = one_pass(qmodel, qmodel, x, dtype)
        if dtype != torch.float32:
            print(f"{dtype} float, fused: {differences(one_pass(fused, qmodel, x, dtype), plain)}", flush=True)
        for mode in arguments.modes:
            run = torch.compile(coded) if mode == "compiled" else coded
            print(f"{dtype} int8, {mode}: {differences(one_pass(run, qmodel, x, dtype), plain)}", flush=True)
    os._exit(0)  # threads of the compiler may still be at work


if __name__ == "__main__":
    main()
