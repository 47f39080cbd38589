"""Attention of quantization-aware training on a GPU: one operation beside the operations one by one, and its tiles."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

from analysis.common.study import command_line, gpu_software, listed, study_parser
from compress.files import write_text
from compress.kernels.epilogue import Epilogue, IntegerGrid
from compress.kernels.fake_quantize import fused_quantize
from compress.kernels.triton.attention_launch import AttentionTile as Tile
from compress.kernels.triton.attention_launch import AttentionTiles as Tiles
from compress.kernels.triton.attention_launch import attention, default_tiles
from compress.kernels.triton.attention_packed import packed_attention

FORWARD = (Tile(64, 256, True, 4, 2), Tile(64, 64, False, 4, 3), Tile(64, 32, False, 4, 2), Tile(64, 32, False, 4, 3),
           Tile(64, 32, False, 4, 4), Tile(128, 64, False, 8, 3))  # fmt: skip
QUERIES = (Tile(32, 256, True, 4, 2), Tile(64, 64, False, 4, 3), Tile(64, 32, False, 4, 3), Tile(64, 32, False, 4, 4),
           Tile(64, 16, False, 4, 3), Tile(32, 64, False, 4, 3), Tile(128, 64, False, 8, 3))  # fmt: skip
KEYS = (Tile(64, 32, False, 4, 2), Tile(64, 32, False, 4, 3), Tile(64, 64, False, 4, 2), Tile(64, 16, False, 4, 3),
        Tile(64, 16, False, 4, 2), Tile(128, 32, False, 8, 3), Tile(32, 32, False, 4, 3))  # fmt: skip


INT8 = (-128, 127)
RANGES = (3.0, 3.1, 3.2, 0.3, 0.4)  # amax of q, k, v, the probabilities and the result
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def separate(x: Tensor, heads: int, attend: Attend, grids: Sequence[IntegerGrid] = ()) -> Tensor:
    """Compute attention as separate operations.

    Args:
        x: result of the linear layer before attention, (B, T, 3 * H * D).
        heads: number of heads H.
        attend: operation that computes attention from q, k and v, each (B, H, T, D).
        grids: quantizers of q, k, v, the probabilities and the result; empty for float attention.

    Returns:
        Input of the linear layer after attention, (B, T, H * D).
    """
    parts = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if grids:
        parts = tuple(quantized(part, grid) for part, grid in zip(parts, grids[:3], strict=True))
    y = attend(*parts)
    return (quantized(y, grids[4]) if grids else y).transpose(1, 2).flatten(2)


def quantized(x: Tensor, grid: IntegerGrid) -> Tensor:
    """Fake-quantize as a compiled chain without a layer does."""
    return fused_quantize(x, grid.amax, Epilogue(grid.low, grid.high), kernels="torch")


def one_by_one(q: Tensor, k: Tensor, v: Tensor, grid: IntegerGrid, scaling: float) -> Tensor:
    """Compute scores, softmax, quantizer and product as separate operations under autocast."""
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scaling, dim=-1, dtype=torch.float32)
    return torch.matmul(quantized(weights, grid).to(v.dtype), v)


def fused(
    x: Tensor,
    heads: int,
    scaling: float,
    grids: Sequence[IntegerGrid],
    inputs: bool = True,
    result: bool = True,
    tiles: Tiles | None = None,
) -> Tensor:
    """Compute `separate` with one operation that reads the linear layer's result without a copy.

    Args:
        x: result of the linear layer before attention, (B, T, 3 * H * D).
        heads: number of heads H.
        scaling: factor of the scores.
        grids: quantizers of q, k, v, the probabilities and the result.
        inputs: the operation quantizes q, k and v.
        result: the operation quantizes the result.
        tiles: tiles of its three kernels; None takes the defaults.
    """
    q, k, v, weights, out = grids
    qkv = x.unflatten(-1, (3, heads, -1))
    y = packed_attention(qkv, weights, scaling, (q, k, v) if inputs else None, out if result else None, tiles)
    return (y if result or not inputs else quantized(y, out)).flatten(2)


def milliseconds(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Return the times of a forward pass, and of a forward and a backward pass."""

    def step() -> None:
        torch.autograd.grad(run(x), x, grad)

    measured = [
        do_bench_cudagraph(lambda: run(x), return_mode="median"),
        do_bench_cudagraph(step, return_mode="median"),
    ]
    return float(measured[0]), float(measured[1])


def ways(heads: int, scaling: float, grids: Sequence[IntegerGrid]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the ways to compute attention that are compared, by name."""
    plain = partial(one_by_one, grid=grids[3], scaling=scaling)
    ours: dict[str, Any] = {"heads": heads, "scaling": scaling, "grids": grids}

    def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, grids[3].amax, scaling, INT8[1])

    return {
        "one by one": partial(separate, heads=heads, attend=plain, grids=grids),
        "scores in one operation": partial(separate, heads=heads, attend=scores, grids=grids),
        "and q, k, v": partial(fused, result=False, **ours),
        "and the result: everything": partial(fused, **ours),
        "q, k, v, result not quantized": partial(fused, inputs=False, result=False, **ours),
        "float: flash attention": partial(separate, heads=heads, attend=F.scaled_dot_product_attention),
    }


def measured(options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each way, and then for each tile of each kernel."""
    heads, tokens, width = options.heads
    dtype = getattr(torch, options.dtype)
    make: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.randn(options.batch, tokens, 3 * heads * width, **make).requires_grad_()
    grad = torch.randn(options.batch, tokens, heads * width, **make)
    scaling = width**-0.5
    grids = tuple(IntegerGrid(torch.tensor(value, device="cuda"), *INT8) for value in RANGES)
    for name, way in ways(heads, scaling, grids).items():
        torch.compiler.reset()
        forward, both = milliseconds(torch.compile(way, fullgraph=True), x, grad)
        yield f"{name:30s} forward {forward:.3f} ms, with backward {both:.3f} ms"
    best = default_tiles(tokens, tokens, width, dtype)
    for part, tiles in (("forward", FORWARD), ("queries", QUERIES), ("keys", KEYS)):
        for tile in tiles:
            if tile.whole and tile.columns < tokens:
                continue
            chosen = best._replace(**{part: tile})
            run = partial(fused, heads=heads, scaling=scaling, grids=grids, tiles=chosen)
            try:
                forward, both = milliseconds(run, x, grad)
            except Exception as error:  # a tile that does not fit into shared memory
                yield f"{part:8s} {tile}: {type(error).__name__}"
                continue
            yield f"{part:8s} {tuple(tile)}: forward {forward:.3f} ms, with backward {both:.3f} ms"


def main() -> None:
    """Measure, print and write."""
    parser = study_parser(__doc__, out="results/h200")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--heads", type=int, nargs=3, default=(6, 197, 64), help="heads, tokens, width of a head")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    heads, tokens, width = options.heads
    lines = [f"{options.batch} x {heads} heads of {tokens} x {width}, {options.dtype}"]
    for line in measured(options):
        lines.append(line)
        print(line, flush=True)
    about = f"`{command_line()}`; {listed(gpu_software('triton'))}."
    page = ["# Attention of quantization-aware training, one layer", "", about, "", "```", *lines, "```"]
    write_text(options.out / "attention_tiles.md", "\n".join(page) + "\n")


if __name__ == "__main__":
    main()
