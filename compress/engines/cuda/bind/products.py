"""Convolutions and matrix products of codes as launches of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from compress.engines.cuda.bind.common import (
    Bindings,
    Results,
    channels_last,
    function_of,
    output_grid,
    pixel_rows,
)
from compress.engines.cuda.executor import Candidate, Tensors
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.steps import Convolution, Linear, Product
from compress.engines.cuda.tiles import depthwise_tiles, product_tiles
from compress.kernels.triton.int8_depthwise import DepthwiseTile, depthwise, pack_depthwise
from compress.kernels.triton.int8_epilogue import Finish, Residual
from compress.kernels.triton.int8_product import Geometry, Tile, Weight, pack_weight, product, tiles_of, workspace


def _product_finish(step: Product, bindings: Bindings) -> Finish:
    e = step.epilogue
    residual = None
    if e.residual.name:
        g = e.residual.grid
        residual = Residual(1.0, 0, False) if g is None else Residual(g.scale[0], g.zero, True)
    return bindings.finish(
        step, factor=e.factor, bias=e.bias, first=function_of(e.first), middle=output_grid(e.middle), residual=residual,
        second=function_of(e.second), grid=output_grid(e.out.grid) if e.out.codes else None, value=bool(e.out.value),
    )  # fmt: skip


def _product(
    step: Product,
    bindings: Bindings,
    weight: Weight,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
    taps: int,
    read: Callable[[Tensors], Tensor],
    axis: int,
) -> list[Candidate]:
    """Candidates of the implicit matrix product.

    Args:
        step: of the plan.
        bindings: what steps keep.
        weight: packed.
        shape: (N, O, OH, OW) of the result.
        geometry: of the filter.
        taps: of the filter.
        read: gives the input as (N, C, H, W).
        axis: of the channels in the plan's tensors.
    """
    finish = _product_finish(step, bindings)
    zero = step.x.grid.zero if step.x.grid else 0
    images, columns, *size = shape
    rows = images * size[0] * size[1]
    e = step.epilogue

    def candidate(tile: Tile) -> Candidate:
        def run(tensors: Tensors) -> None:
            results = Results(e.out, e.residual.name, tensors, axis)
            space = None
            if tile.splits > 1:
                count = weight.groups * tiles_of(rows, columns // weight.groups, tile)
                key = ("workspace", count, tile.rows * tile.columns)
                space = bindings.keep(key, lambda: workspace(bindings.device, count, tile.rows * tile.columns))
            product(
                read(tensors), weight, finish, results.outputs, columns, geometry, (size[0], size[1]), tile, zero=zero,
                space=space,
            )  # fmt: skip
            results.finish()

        return Candidate(f"triton product {tile_text(tile)}", run)

    channels = weight.codes.shape[-1]
    return [candidate(tile) for tile in product_tiles(rows, channels, columns // weight.groups, taps, weight.groups)]


def tile_text(tile: Tile) -> str:
    """A tile in a few characters, such as 128x64x64 s3 w4."""
    text = f"{tile.rows}x{tile.columns}x{tile.depth} s{tile.stages} w{tile.warps} p{tile.part}"
    text += f" r{tile.registers}" if tile.registers else ""
    return text + (f" k{tile.splits}" if tile.splits > 1 else "")


def bind_convolution(step: Convolution, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of a convolution: implicit matrix product, grouped or depthwise."""
    shape = layout.plan.tensors[step.epilogue.out.names[0]].shape
    geometry = Geometry(*step.stride, step.padding[0][0], step.padding[1][0], *step.dilation)
    zero = step.x.grid.zero if step.x.grid else 0
    if step.weight.shape[1] == 1 and step.weight.shape[0] == step.groups > 1:
        return _depthwise(step, cast(Any, shape), bindings, geometry, zero)
    weight: Weight = bindings.keep(
        (step.name, "weight"), lambda: pack_weight(step.weight, zero, step.groups, bindings.device)
    )
    room = (weight.groups - 1) * weight.step + weight.codes.shape[-1]
    taps = step.weight.shape[2] * step.weight.shape[3]
    return _product(
        step,
        bindings,
        weight,
        cast(Any, shape),
        geometry,
        taps,
        lambda tensors: _readable(tensors[step.x.name], room),
        1,
    )


def _readable(x: Tensor, channels: int) -> Tensor:
    """`x` (N, C, H, W) with neighbouring channels, and room for `channels` of them in every pixel."""
    x = channels_last(x)
    if x.stride(3) >= channels or x.shape[1] == channels:
        return x
    wide = torch.zeros((x.shape[0], x.shape[2], x.shape[3], channels), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[1]].copy_(x.permute(0, 2, 3, 1))
    return wide.permute(0, 3, 1, 2)[:, : x.shape[1]]


def bind_linear(step: Linear, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of a matrix product."""
    shape = layout.plan.tensors[step.epilogue.out.names[0]].shape
    zero = step.x.grid.zero if step.x.grid else 0
    weight: Weight = bindings.keep((step.name, "weight"), lambda: pack_weight(step.weight, zero, 1, bindings.device))
    room = weight.codes.shape[-1]

    def read(tensors: Tensors) -> Tensor:
        x = tensors[step.x.name]
        rows = pixel_rows(x, -1)
        rows = x.reshape(-1, x.shape[-1]) if rows is None else rows
        if rows.stride(0) < room and rows.shape[0] > 1:
            rows = torch.nn.functional.pad(rows, (0, room - rows.shape[1]))
        pitch = max(rows.stride(0), room)
        return rows.as_strided((rows.shape[0], rows.shape[1], 1, 1), (pitch, 1, pitch, pitch))

    rows = torch.Size(shape[:-1]).numel()
    return _product(step, bindings, weight, (rows, shape[-1], 1, 1), Geometry(), 1, read, -1)


def _depthwise(
    step: Convolution, shape: tuple[int, int, int, int], bindings: Bindings, geometry: Geometry, zero: int
) -> list[Candidate]:
    finish, e = _product_finish(step, bindings), step.epilogue
    weight: Weight = bindings.keep(
        (step.name, "weight"), lambda: pack_depthwise(step.weight, zero, device=bindings.device)
    )

    def candidate(tile: DepthwiseTile) -> Candidate:
        def run(tensors: Tensors) -> None:
            results = Results(e.out, e.residual.name, tensors, 1)
            x = channels_last(tensors[step.x.name])
            depthwise(
                x, weight, finish, results.outputs, shape[1], geometry, (shape[2], shape[3]), tile, zero=zero
            )  # fmt: skip
            results.finish()

        text = f"{tile.positions}x{tile.channels} strip {tile.strip} w{tile.warps}"
        return Candidate(f"triton depthwise {text}", run)

    return [candidate(tile) for tile in depthwise_tiles(shape, cast(Any, tuple(step.weight.shape[2:])), step.stride)]
