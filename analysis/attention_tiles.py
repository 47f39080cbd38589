"""Attention of quantization-aware training on a GPU: one operation against the operations one by one, and its tiles.

    python analysis/attention_tiles.py                          ViT-S at batch 128, bfloat16: about 2 minutes on a GPU
    python analysis/attention_tiles.py --heads 16 49 32 --batch 2048    another shape: heads, tokens, width

For each way the milliseconds of a forward pass, and of a forward and backward pass, of one layer; then for each of the
three kernels the milliseconds with each tile. Every time is the median of Triton's `do_bench`, which empties the cache
in between.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from compress.quantization.fused_attention_launch import Tile, Tiles, attention, default_tiles
from compress.quantization.fused_ops import Epilogue, fused_quantize

FORWARD = (Tile(64, 256, True, 4, 2), Tile(64, 256, True, 8, 2), Tile(32, 256, True, 4, 2), Tile(64, 64, False, 4, 2),
           Tile(64, 64, False, 4, 3), Tile(64, 32, False, 4, 3), Tile(128, 64, False, 8, 2))  # fmt: skip
QUERIES = (Tile(32, 256, True, 8, 2), Tile(32, 256, True, 4, 2), Tile(16, 256, True, 4, 2), Tile(64, 64, False, 4, 2),
           Tile(64, 32, False, 4, 3), Tile(64, 128, False, 8, 2), Tile(128, 64, False, 8, 2))  # fmt: skip
KEYS = (Tile(64, 32, False, 4, 2), Tile(64, 32, False, 4, 3), Tile(64, 64, False, 4, 2), Tile(64, 64, False, 8, 2),
        Tile(128, 32, False, 8, 2), Tile(128, 32, False, 8, 3), Tile(32, 64, False, 4, 2))  # fmt: skip


def plain(q: Tensor, k: Tensor, v: Tensor, amax: Tensor, scaling: float) -> Tensor:
    """What the fused chains compute without the operation, under autocast."""
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scaling, dim=-1, dtype=torch.float32)
    weights = fused_quantize(weights, amax, Epilogue(-128, 127), kernels="torch")
    return torch.matmul(weights.to(v.dtype), v)


def milliseconds(run: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """(forward, forward and backward)."""

    def step() -> None:
        torch.autograd.grad(run(*tensors), tensors, grad)

    return (float(do_bench(lambda: run(*tensors), return_mode="median")), float(do_bench(step, return_mode="median")))


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
    q, k, v = (torch.randn(options.batch, heads, tokens, width, **make).requires_grad_() for _ in range(3))
    grad = torch.randn(options.batch, heads, tokens, width, **make)
    amax, scaling = torch.tensor(0.3, device="cuda"), width**-0.5
    best = default_tiles(tokens, tokens, width, dtype)

    def fused(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles = best) -> Tensor:
        return attention(q, k, v, amax, scaling, -128, 127, tiles)

    ways: dict[str, Callable[..., Tensor]] = {
        "one by one, compiled": torch.compile(partial(plain, amax=amax, scaling=scaling)),
        "one operation": fused,
        "float: flash attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    }
    print(f"{torch.cuda.get_device_name()}, {options.batch} x {heads} heads of {tokens} x {width}, {options.dtype}")
    for name, run in ways.items():
        print("{:24s} forward {:.3f} ms, and backward {:.3f} ms".format(name, *milliseconds(run, [q, k, v], grad)))
    for part, tiles in (("forward", FORWARD), ("queries", QUERIES), ("keys", KEYS)):
        for tile in tiles:
            if tile.whole and tile.columns < tokens:
                continue
            chosen = best._replace(**{part: tile})
            try:
                both = milliseconds(partial(fused, tiles=chosen), [q, k, v], grad)
            except Exception as error:  # a tile that does not fit into shared memory
                print(f"{part:8s} {tile}: {type(error).__name__}")
                continue
            print(f"{part:8s} {tuple(tile)}: forward {both[0]:.3f} ms, and backward {both[1]:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
