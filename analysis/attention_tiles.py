"""Attention of quantization-aware training on a GPU: one operation against the operations one by one, and its tiles.

    python analysis/attention_tiles.py                          ViT-S at batch 128, bfloat16: about 2 minutes on a GPU
    python analysis/attention_tiles.py --heads 16 49 32 --batch 2048    another shape: heads, tokens, width

For each way, compiled, the milliseconds of a forward pass, and of a forward and backward pass, of one layer from what
the linear layer before it wrote to what the one behind it reads; then for each of the three kernels the milliseconds
with each tile. Every time is the median of Triton's `do_bench`, which empties the cache in between.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from compress.quantization.fused_attention_launch import Tile, Tiles, attention, default_tiles, packed_attention
from compress.quantization.fused_ops import Epilogue, fused_quantize

FORWARD = (Tile(64, 256, True, 4, 2), Tile(64, 256, True, 8, 2), Tile(32, 256, True, 4, 2), Tile(64, 64, False, 4, 2),
           Tile(64, 64, False, 4, 3), Tile(64, 32, False, 4, 3), Tile(128, 64, False, 8, 2))  # fmt: skip
QUERIES = (Tile(32, 256, True, 8, 2), Tile(32, 256, True, 4, 2), Tile(16, 256, True, 4, 2), Tile(64, 64, False, 4, 2),
           Tile(64, 32, False, 4, 3), Tile(64, 128, False, 8, 2), Tile(128, 64, False, 8, 2))  # fmt: skip
KEYS = (Tile(64, 32, False, 4, 2), Tile(64, 32, False, 4, 3), Tile(64, 64, False, 4, 2), Tile(64, 64, False, 8, 2),
        Tile(128, 32, False, 8, 2), Tile(128, 32, False, 8, 3), Tile(32, 64, False, 4, 2))  # fmt: skip


INT8 = (-128, 127)
AMAX = 0.3  # of the probabilities
RANGES = (3.0, 3.1, 3.2)  # of q, k and v
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def apart(x: Tensor, heads: int, attend: Attend, ranges: Sequence[Tensor] = ()) -> Tensor:
    """(B, T, H D) of what the linear layer wrote, (B, T, 3 H D): parts rounded one by one, if at all, and attended."""
    parts = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if ranges:
        pairs = zip(parts, ranges, strict=True)
        parts = tuple(fused_quantize(part, amax, Epilogue(*INT8), kernels="torch") for part, amax in pairs)
    return attend(*parts).transpose(1, 2).flatten(2)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, amax: Tensor, scaling: float) -> Tensor:
    """What the fused chains compute without the operation, under autocast."""
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scaling, dim=-1, dtype=torch.float32)
    weights = fused_quantize(weights, amax, Epilogue(*INT8), kernels="torch")
    return torch.matmul(weights.to(v.dtype), v)


def together(
    x: Tensor,
    heads: int,
    amax: Tensor,
    scaling: float,
    ranges: tuple[Tensor, Tensor, Tensor] | None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`apart`, with one operation that reads what the linear layer wrote."""
    return packed_attention(x.unflatten(-1, (3, heads, -1)), amax, scaling, *INT8, ranges, INT8, tiles).flatten(2)


def milliseconds(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[float, float]:
    """(forward, forward and backward)."""

    def step() -> None:
        torch.autograd.grad(run(x), x, grad)

    return (float(do_bench(lambda: run(x), return_mode="median")), float(do_bench(step, return_mode="median")))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--heads", type=int, nargs=3, default=(6, 197, 64), help="heads, tokens, width")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    heads, tokens, width = options.heads
    dtype = getattr(torch, options.dtype)
    make: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.randn(options.batch, tokens, 3 * heads * width, **make).requires_grad_()
    grad = torch.randn(options.batch, tokens, heads * width, **make)
    amax, scaling = torch.tensor(AMAX, device="cuda"), width**-0.5
    a, b, c = (torch.tensor(value, device="cuda") for value in RANGES)
    best = default_tiles(tokens, tokens, width, dtype)
    ours: dict[str, Any] = {"heads": heads, "amax": amax, "scaling": scaling}
    plain = partial(one_by_one, amax=amax, scaling=scaling)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, amax, scaling, *INT8)

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "rounded, one by one": partial(apart, heads=heads, attend=plain, ranges=(a, b, c)),
        "rounded, scores in one operation": partial(apart, heads=heads, attend=fused, ranges=(a, b, c)),
        "rounded, all in one operation": partial(together, ranges=(a, b, c), **ours),
        "q, k, v not rounded, one operation": partial(together, ranges=None, **ours),
        "float: flash attention": partial(apart, heads=heads, attend=F.scaled_dot_product_attention),
    }
    print(f"{torch.cuda.get_device_name()}, {options.batch} x {heads} heads of {tokens} x {width}, {options.dtype}")
    for name, way in ways.items():
        torch.compiler.reset()
        run = torch.compile(way, fullgraph=True)
        print("{:36s} forward {:.3f} ms, and backward {:.3f} ms".format(name, *milliseconds(run, x, grad)), flush=True)
    for part, tiles in (("forward", FORWARD), ("queries", QUERIES), ("keys", KEYS)):
        for tile in tiles:
            if tile.whole and tile.columns < tokens:
                continue
            chosen = best._replace(**{part: tile})
            try:
                both = milliseconds(partial(together, ranges=(a, b, c), tiles=chosen, **ours), x, grad)
            except Exception as error:  # a tile that does not fit into shared memory
                print(f"{part:8s} {tile}: {type(error).__name__}")
                continue
            print(f"{part:8s} {tuple(tile)}: forward {both[0]:.3f} ms, and backward {both[1]:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
