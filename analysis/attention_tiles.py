"""Attention of quantization-aware training on a GPU: one operation against the operations one by one, and its tiles.

    python analysis/attention_tiles.py                          ViT-S at batch 128, bfloat16: about 2 minutes on a GPU
    python analysis/attention_tiles.py --heads 16 49 32 --batch 2048    another shape: heads, tokens, width

For each way, compiled, the milliseconds of a forward pass, and of a forward and backward pass, of one layer from what
the linear layer before it wrote to what the one behind it reads; then for each of the three kernels the milliseconds
with each tile. Every time is the median of Triton's `do_bench_cudagraph`: replays of CUDA graphs, in which the host has
no part, one behind the other, so that what fits into the cache stays there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

from compress.quantization.fused_attention_launch import Tile, Tiles, attention, default_tiles
from compress.quantization.fused_attention_packed import Grid, packed_attention
from compress.quantization.fused_ops import Epilogue, fused_quantize

FORWARD = (Tile(64, 256, True, 4, 2), Tile(64, 64, False, 4, 3), Tile(64, 32, False, 4, 2), Tile(64, 32, False, 4, 3),
           Tile(64, 32, False, 4, 4), Tile(128, 64, False, 8, 3))  # fmt: skip
QUERIES = (Tile(32, 256, True, 4, 2), Tile(64, 64, False, 4, 3), Tile(64, 32, False, 4, 3), Tile(64, 32, False, 4, 4),
           Tile(64, 16, False, 4, 3), Tile(32, 64, False, 4, 3), Tile(128, 64, False, 8, 3))  # fmt: skip
KEYS = (Tile(64, 32, False, 4, 2), Tile(64, 32, False, 4, 3), Tile(64, 64, False, 4, 2), Tile(64, 16, False, 4, 3),
        Tile(64, 16, False, 4, 2), Tile(128, 32, False, 8, 3), Tile(32, 32, False, 4, 3))  # fmt: skip


INT8 = (-128, 127)
RANGES = (3.0, 3.1, 3.2, 0.3, 0.4)  # of q, k, v, the probabilities and the result
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def apart(x: Tensor, heads: int, attend: Attend, grids: Sequence[Grid] = ()) -> Tensor:
    """(B, T, H D) of what the linear layer wrote, (B, T, 3 H D): parts and result rounded one by one, if at all."""
    parts = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if grids:
        parts = tuple(rounded(part, grid) for part, grid in zip(parts, grids[:3], strict=True))
    y = attend(*parts)
    return (rounded(y, grids[4]) if grids else y).transpose(1, 2).flatten(2)


def rounded(x: Tensor, grid: Grid) -> Tensor:
    """What a fused chain without a layer computes when it is compiled."""
    return fused_quantize(x, grid.amax, Epilogue(grid.low, grid.high), kernels="torch")


def one_by_one(q: Tensor, k: Tensor, v: Tensor, grid: Grid, scaling: float) -> Tensor:
    """What the fused chains compute without the operation, under autocast."""
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scaling, dim=-1, dtype=torch.float32)
    return torch.matmul(rounded(weights, grid).to(v.dtype), v)


def together(
    x: Tensor,
    heads: int,
    scaling: float,
    grids: Sequence[Grid],
    parts: bool = True,
    result: bool = True,
    tiles: Tiles | None = None,
) -> Tensor:
    """`apart`, with one operation that reads what the linear layer wrote; `parts`, `result`: which it rounds."""
    q, k, v, weights, out = grids
    qkv = x.unflatten(-1, (3, heads, -1))
    y = packed_attention(qkv, weights, scaling, (q, k, v) if parts else None, out if result else None, tiles)
    return (y if result or not parts else rounded(y, out)).flatten(2)


def milliseconds(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[float, float]:
    """(forward, forward and backward)."""

    def step() -> None:
        torch.autograd.grad(run(x), x, grad)

    measured = [
        do_bench_cudagraph(lambda: run(x), return_mode="median"),
        do_bench_cudagraph(step, return_mode="median"),
    ]
    return float(measured[0]), float(measured[1])


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
    scaling = width**-0.5
    grids = tuple(Grid(torch.tensor(value, device="cuda"), *INT8) for value in RANGES)
    best = default_tiles(tokens, tokens, width, dtype)
    ours: dict[str, Any] = {"heads": heads, "scaling": scaling, "grids": grids}
    plain = partial(one_by_one, grid=grids[3], scaling=scaling)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, grids[3].amax, scaling, INT8[1])

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "one by one": partial(apart, heads=heads, attend=plain, grids=grids),
        "scores in one operation": partial(apart, heads=heads, attend=fused, grids=grids),
        "and what is read": partial(together, result=False, **ours),
        "and the result: all": partial(together, **ours),
        "no q, k, v, result rounded": partial(together, parts=False, result=False, **ours),
        "float: flash attention": partial(apart, heads=heads, attend=F.scaled_dot_product_attention),
    }
    print(f"{torch.cuda.get_device_name()}, {options.batch} x {heads} heads of {tokens} x {width}, {options.dtype}")
    for name, way in ways.items():
        torch.compiler.reset()
        run = torch.compile(way, fullgraph=True)
        print("{:28s} forward {:.3f} ms, and backward {:.3f} ms".format(name, *milliseconds(run, x, grad)), flush=True)
    for part, tiles in (("forward", FORWARD), ("queries", QUERIES), ("keys", KEYS)):
        for tile in tiles:
            if tile.whole and tile.columns < tokens:
                continue
            chosen = best._replace(**{part: tile})
            try:
                both = milliseconds(partial(together, tiles=chosen, **ours), x, grad)
            except Exception as error:  # a tile that does not fit into shared memory
                print(f"{part:8s} {tile}: {type(error).__name__}")
                continue
            print(f"{part:8s} {tuple(tile)}: forward {both[0]:.3f} ms, and backward {both[1]:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
