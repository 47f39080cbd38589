"""Convolutions and matrix products of codes as launches of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.bind.common import (
    Bindings,
    Results,
    channels_last,
    pixel_rows,
    product_finish,
    whole_parts,
)
from compress.engines.cuda.executor import FLOAT_KERNEL, Candidate, Tensors
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.steps import NO_PADDING, Convolution, Linear, Product
from compress.engines.cuda.tiles import (
    deep_tiles,
    depthwise_tiles,
    pointwise_tiles,
    product_tiles,
    rows_tiles,
    wide_tiles,
    window_tiles,
)
from compress.kernels.triton.int8_depthwise import DepthwiseTile, depthwise, pack_depthwise
from compress.kernels.triton.int8_depthwise_rows import WORD, RowsTile, depthwise_rows, pack_dots
from compress.kernels.triton.int8_descriptors import LEAST_CAPABILITY, PointwiseTile, deep, pointwise
from compress.kernels.triton.int8_epilogue import Finish, Outputs
from compress.kernels.triton.int8_product import (
    ALIGNED,
    Geometry,
    Tile,
    Weight,
    pack_weight,
    product,
    tiles_of,
    workspace,
)
from compress.kernels.triton.int8_wide import WideTile, wide
from compress.kernels.triton.int8_window import WindowTile, window

Shape = tuple[int, int, int, int]


def bind_depthwise(
    step: Convolution, layout: Layout, bindings: Bindings, shape: Shape, finish: Finish, geometry: Geometry
) -> list[Candidate]:
    """Candidates of a depthwise convolution.

    - `shape`: (N, C, OH, OW) of the result.
    """
    rest = (step, bindings, shape, finish, geometry)
    dilated = geometry.dilation_x > 1 or geometry.dilation_y > 1
    plain = dilated or finish.vectors.inverse is not None or finish.kind.residual or shape[1] % WORD
    return (_rows(*rest) if whole_parts(step.x.name, layout) and not plain else []) or _plain(*rest)


def _plain(step: Convolution, bindings: Bindings, shape: Shape, finish: Finish, geometry: Geometry) -> list[Candidate]:
    zero = _zero(step)

    def candidate(tile: DepthwiseTile) -> Candidate:
        weight: Weight = bindings.keep(
            (step.name, "weight", tile.floats),
            lambda: pack_depthwise(step.weight, zero, floats=tile.floats, device=bindings.device),
        )

        def launch(x: Tensor, outputs: Outputs) -> None:
            size = (shape[2], shape[3])
            depthwise(channels_last(x), weight, finish, outputs, shape[1], geometry, size, tile, zero=zero)

        text = f"{tile.positions}x{tile.channels} strip {tile.strip} w{tile.warps}{' f32' if tile.floats else ''}"
        return _candidate(step, f"triton depthwise {text}", launch)

    return [candidate(tile) for tile in depthwise_tiles(shape, _taps(step), step.stride)]


def _candidate(step: Convolution, text: str, launch: Callable[[Tensor, Outputs], None]) -> Candidate:
    """Return a candidate of one kernel; `launch` is called with the input and the tensors that are written."""
    e = step.epilogue

    def run(tensors: Tensors) -> None:
        results = Results(e.out, e.residual.name, tensors, 1)
        launch(tensors[step.x.name], results.outputs)
        results.finish()

    return Candidate(text, run)


def _zero(step: Convolution) -> int:
    return step.x.grid.zero if step.x.grid else 0


def _taps(step: Convolution) -> tuple[int, int]:
    return step.weight.shape[2], step.weight.shape[3]


def _rows(step: Convolution, bindings: Bindings, shape: Shape, finish: Finish, geometry: Geometry) -> list[Candidate]:
    zero = _zero(step)
    weight: Weight = bindings.keep((step.name, "words"), lambda: pack_dots(step.weight, zero, device=bindings.device))

    def candidate(tile: RowsTile) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            size = (shape[2], shape[3])
            depthwise_rows(x, weight, finish, outputs, shape[1], geometry, size, tile, zero=zero)

        text = f"triton depthwise rows {tile.high}x{tile.strip} chunk {tile.chunk} w{tile.warps}"
        return _candidate(step, text, launch)

    return [candidate(tile) for tile in rows_tiles(shape, _taps(step), step.stride, weight.codes.shape[-1])]


def _product(
    step: Product,
    bindings: Bindings,
    weight: Weight,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
    read: Callable[[Tensors], Tensor],
    axis: int,
) -> list[Candidate]:
    finish = product_finish(step, bindings)
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
                key = (count, tile.rows * tile.columns)
                if key not in bindings.workspaces:
                    bindings.workspaces[key] = workspace(bindings.device, *key)
                space = bindings.workspaces[key]
            product(
                read(tensors),
                weight,
                finish,
                results.outputs,
                columns,
                geometry,
                (size[0], size[1]),
                tile,
                zero=zero,
                space=space,
            )
            results.finish()

        return Candidate(f"triton product {tile_text(tile)}", run)

    channels = weight.codes.shape[-1]
    taps = weight.codes.shape[1] * weight.codes.shape[2]
    tiles = product_tiles(rows, channels, columns // weight.groups, taps, weight.groups)
    return [candidate(tile) for tile in tiles]


def _of_rows(
    step: Product, layout: Layout, bindings: Bindings, weight: Weight, columns: int, axes: tuple[int, int]
) -> list[Candidate]:
    """Candidates for a product of rows that lie evenly."""
    rest = (step, layout, bindings, weight, columns, axes)
    return _pointwise(*rest) + _deep(*rest) + _wide(*rest)


def _pointwise(
    step: Product, layout: Layout, bindings: Bindings, weight: Weight, columns: int, axes: tuple[int, int]
) -> list[Candidate]:
    """Persistent candidates that load by descriptors; none for rows that do not lie evenly."""
    e, channels = step.epilogue, weight.codes.shape[-1]
    names = [name for name in (e.residual.name, *e.out.names) if name]
    rows = [_even_rows(step.x.name, layout, axes[0]), *(_even_rows(name, layout, axes[1]) for name in names)]
    values = e.residual.name and e.residual.grid is None
    if bindings.capability < LEAST_CAPABILITY or weight.groups > 1 or e.out.value or values:
        return []
    if rows[0] is None or None in rows:
        return []
    if columns % ALIGNED:  # the copy engine would write to the end of the last 16 bytes, where another tensor may begin
        return []
    finish = product_finish(step, bindings)
    zero = step.x.grid.zero if step.x.grid else 0
    count, pitch = rows[0]
    if pitch < channels:
        return []

    def candidate(tile: PointwiseTile) -> Candidate:
        def run(tensors: Tensors) -> None:
            x = tensors[step.x.name].as_strided((count, channels), (pitch, 1))
            outputs = Results(e.out, e.residual.name, tensors, axes[1]).outputs
            pointwise(x, weight, finish, outputs, columns, tile, bindings.multiprocessors, zero=zero)

        text = f"{tile.rows}x{tile.columns}x{tile.depth} s{tile.stages} w{tile.warps} x{tile.programs}"
        return Candidate(f"triton pointwise {text}", run)

    return [candidate(tile) for tile in pointwise_tiles(count, channels, columns)]


def _deep(
    step: Product, layout: Layout, bindings: Bindings, weight: Weight, columns: int, axes: tuple[int, int]
) -> list[Candidate]:
    """Candidates that load by descriptors, for a product of many channels; see `_pointwise`."""
    e, channels, rows = step.epilogue, weight.codes.shape[-1], _even_rows(step.x.name, layout, axes[0])
    if bindings.capability < LEAST_CAPABILITY or weight.groups > 1 or rows is None or rows[1] < channels:
        return []
    finish, zero = product_finish(step, bindings), step.x.grid.zero if step.x.grid else 0
    count, pitch = rows

    def candidate(tile: Tile) -> Candidate:
        def run(tensors: Tensors) -> None:
            results = Results(e.out, e.residual.name, tensors, axes[1])
            x = tensors[step.x.name].as_strided((count, channels), (pitch, 1))
            deep(x, weight, finish, results.outputs, columns, tile, zero=zero)
            results.finish()

        return Candidate(f"triton deep {tile_text(tile)}", run)

    return [candidate(tile) for tile in deep_tiles(count, channels, columns)]


def _wide(
    step: Product, layout: Layout, bindings: Bindings, weight: Weight, columns: int, axes: tuple[int, int]
) -> list[Candidate]:
    """Persistent candidates that hold the weight."""
    e, channels, rows = step.epilogue, weight.codes.shape[-1], _even_rows(step.x.name, layout, axes[0])
    finish, zero = product_finish(step, bindings), step.x.grid.zero if step.x.grid else 0
    if weight.groups > 1 or rows is None or rows[1] < channels or finish.vectors.inverse is not None:
        return []
    if columns % ALIGNED:  # rows of results that begin anywhere are stored in small parts: 3 to 4 times as long
        return []
    count, pitch = rows

    def candidate(tile: WideTile) -> Candidate:
        def run(tensors: Tensors) -> None:
            results = Results(e.out, e.residual.name, tensors, axes[1])
            x = tensors[step.x.name].as_strided((count, channels), (pitch, 1))
            wide(x, weight, finish, results.outputs, columns, tile, bindings.multiprocessors, zero=zero)
            results.finish()

        widths = "+".join(map(str, tile.widths))
        text = f"{tile.rows}x{widths}x{tile.depth} s{tile.stages} w{tile.warps} x{tile.programs}"
        return Candidate(f"triton wide {text}", run)

    return [candidate(tile) for tile in wide_tiles(count, channels, columns)]


def _window(
    step: Convolution,
    layout: Layout,
    bindings: Bindings,
    weight: Weight,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
) -> list[Candidate]:
    """Candidates that load boxes of the image by descriptors."""
    e, zero, finish = step.epilogue, step.x.grid.zero if step.x.grid else 0, product_finish(step, bindings)
    taps = step.weight.shape[2] * step.weight.shape[3]
    names = [name for name in (e.residual.name, *e.out.names) if name]
    even = whole_parts(step.x.name, layout) and None not in [_even_rows(name, layout, 1) for name in names]
    moves = (geometry.stride_y, geometry.stride_x) != (1, 1)
    if bindings.capability < LEAST_CAPABILITY or weight.groups > 1 or moves or zero or not even or e.out.value:
        return []  # the copy engine fills in zeros, and moves by one
    if shape[1] % ALIGNED or finish.vectors.inverse is not None or finish.kind.residual == 2:
        return []

    def candidate(tile: WindowTile) -> Candidate:
        def run(tensors: Tensors) -> None:
            outputs = Results(e.out, e.residual.name, tensors, 1).outputs
            window(tensors[step.x.name], weight, finish, outputs, shape[1], geometry, (shape[2], shape[3]), tile)

        text = f"{tile.images}x{tile.high}x{tile.wide}x{tile.columns}x{tile.depth} s{tile.stages} w{tile.warps}"
        return Candidate(f"triton window {text}", run)

    return [candidate(tile) for tile in window_tiles(shape, weight.codes.shape[-1], taps)]


def _even_rows(name: str, layout: Layout, axis: int) -> tuple[int, int] | None:
    """(rows, elements from one to the next) of codes that descriptors can describe."""
    place = layout.places.get(name)
    rows = None if place is None else pixel_rows(place.meta(), axis)
    if place is None or rows is None or place.dtype != torch.int8 or rows.dim() != 2:
        return None
    pitch = rows.stride(0)
    return None if pitch % ALIGNED or place.offset % ALIGNED or rows.stride(1) != 1 else (rows.shape[0], pitch)


def tile_text(tile: Tile) -> str:
    """A tile in a few characters, such as 128x64x64 s3 w4."""
    text = f"{tile.rows}x{tile.columns}x{tile.depth} s{tile.stages} w{tile.warps} p{tile.part}"
    text += f" r{tile.registers}" if tile.registers else ""
    return text + (f" k{tile.splits}" if tile.splits > 1 else "")


def bind_convolution(step: Convolution, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of a convolution: implicit matrix product, grouped or depthwise."""
    images, columns, height, width = layout.plan.tensors[step.epilogue.out.names[0]].shape
    shape = (images, columns, height, width)
    geometry = Geometry(*step.stride, step.padding[0][0], step.padding[1][0], *step.dilation)
    zero = step.x.grid.zero if step.x.grid else 0
    if step.weight.shape[1] == 1 and step.weight.shape[0] == step.groups > 1:
        return bind_depthwise(step, layout, bindings, shape, product_finish(step, bindings), geometry)
    weight: Weight = bindings.keep(
        (step.name, "weight"), lambda: pack_weight(step.weight, zero, step.groups, bindings.device)
    )
    room = (weight.groups - 1) * weight.step + weight.codes.shape[-1]
    taps = step.weight.shape[2] * step.weight.shape[3]

    def read(tensors: Tensors) -> Tensor:
        return _readable(tensors[step.x.name], room)

    found = _product(step, bindings, weight, shape, geometry, read, 1)
    flat = taps == 1 and step.stride == (1, 1) and step.padding == NO_PADDING
    if flat:
        return found + _of_rows(step, layout, bindings, weight, columns, (1, 1))
    return found + _window(step, layout, bindings, weight, shape, geometry)


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
        rows = x.reshape(-1, x.shape[-1]).contiguous() if rows is None else rows
        if rows.stride(0) < room and rows.shape[0] > 1:
            rows = torch.nn.functional.pad(rows, (0, room - rows.shape[1]))
        pitch = max(rows.stride(0), room)
        return rows.as_strided((rows.shape[0], rows.shape[1], 1, 1), (pitch, 1, pitch, pitch))

    columns = shape[step.axis]
    rows = torch.Size(shape).numel() // columns
    found = _product(step, bindings, weight, (rows, columns, 1, 1), Geometry(), read, step.axis)
    return found + _of_rows(step, layout, bindings, weight, columns, (-1, step.axis))


_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def float_product(step: Convolution | Linear, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """The candidate of a product by torch's libraries, where the result is values alone."""
    e, dtype = step.epilogue, layout.plan.dtype
    if not bindings.floats or dtype not in _TYPES or e.out.codes or e.residual.name:
        return []
    zero = step.x.grid.zero if step.x.grid else 0

    def make() -> tuple[Tensor, Tensor]:
        factor = e.factor.expand(len(step.weight)).reshape(-1, *[1] * (step.weight.dim() - 1))
        weight = (step.weight.double() * factor).to(bindings.device, dtype)
        last = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
        return weight.contiguous(memory_format=last), e.bias.to(bindings.device, dtype)

    weight, bias = bindings.keep((step.name, "floats"), make)

    def run(tensors: Tensors) -> None:
        x = tensors[step.x.name].to(dtype)
        x = x - zero if zero else x
        y = _convolved(step, x, weight, bias) if isinstance(step, Convolution) else F.linear(x, weight, bias)
        y = y.movedim(-1, step.axis) if isinstance(step, Linear) else y
        tensors[e.out.value].copy_(e.first(y))

    return [Candidate(f"{FLOAT_KERNEL}{_TYPES[dtype]}", run)]


def _convolved(step: Convolution, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    (above, below), (left, right) = step.padding
    if (above, left) != (below, right):
        x = F.pad(x, (left, right, above, below))
        above = left = 0
    return F.conv2d(x, weight, bias, step.stride, (above, left), step.dilation, step.groups)
