"""Depthwise convolutions of codes as launches of kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from compress.engines.cuda.bind.common import Bindings, Results, channels_last, whole_parts
from compress.engines.cuda.executor import Candidate, Tensors
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.steps import Convolution
from compress.engines.cuda.tiles import depthwise_tiles, rows_tiles
from compress.kernels.triton.int8_depthwise import DepthwiseTile, depthwise, pack_depthwise
from compress.kernels.triton.int8_depthwise_rows import WORD, RowsTile, depthwise_rows, pack_dots
from compress.kernels.triton.int8_epilogue import Finish, Outputs
from compress.kernels.triton.int8_product import Geometry, Weight

Shape = tuple[int, int, int, int]


def bind_depthwise(
    step: Convolution, layout: Layout, bindings: Bindings, shape: Shape, finish: Finish, geometry: Geometry
) -> list[Candidate]:
    """Candidates of a depthwise convolution.

    Args:
        step: of the plan.
        layout: of the plan.
        bindings: what steps keep.
        shape: (N, C, OH, OW) of the result.
        finish: its epilogue.
        geometry: of the filter.
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
    """Candidates by products of four bytes that compute several rows at a time."""
    zero = _zero(step)
    weight: Weight = bindings.keep((step.name, "words"), lambda: pack_dots(step.weight, zero, device=bindings.device))

    def candidate(tile: RowsTile) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            size = (shape[2], shape[3])
            depthwise_rows(x, weight, finish, outputs, shape[1], geometry, size, tile, zero=zero)

        text = f"triton depthwise rows {tile.high}x{tile.strip} chunk {tile.chunk} w{tile.warps}"
        return _candidate(step, text, launch)

    return [candidate(tile) for tile in rows_tiles(shape, _taps(step), step.stride, weight.codes.shape[-1])]
