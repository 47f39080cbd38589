"""Counts the instructions of kernels without a GPU: each is compiled for SM 90 and disassembled.

    python -m analysis.cuda_engine.instructions

For some layers prints a row for each candidate that is asked for by its name: registers of a thread, instructions of a
thread, and how many those are for each result (of one pass through the loop that a program repeats).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from triton.backends import nvidia

from compress.kernels.triton import ahead
from compress.kernels.triton.int8_depthwise_dot import DotTile, depthwise_dot, pack_dots
from compress.kernels.triton.int8_depthwise_rows import RowsTile, depthwise_rows
from compress.kernels.triton.int8_epilogue import Finish, Function, OutputGrid, Outputs, finish_of
from compress.kernels.triton.int8_pointwise import PointwiseTile, pointwise
from compress.kernels.triton.int8_product import Geometry, pack_weight
from compress.kernels.triton.int8_wide import WideTile, wide

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?[A-Z]")
_THREADS = 128
_SM90 = (9, 0)
Row = tuple[str, float, ahead.Request]
"""The names of a layer and its kernel, the results that a thread computes, and the request to compile it."""


def main() -> None:
    """Compile, count and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    rows = [*_depthwise(144, 56), *_expanding(32, 96), *_expanding(32, 144)]
    ahead._start(_SM90)
    print(f"{'layer, kernel':86s} registers instructions of each result")
    for text, results, request in rows:
        registers, count = _counted(request)
        print(f"{text:86s} {registers:9d} {count:12d} {count / results:14.1f}", flush=True)


def _requested(launch: Callable[[], None]) -> ahead.Request:
    with ahead.recorded() as recording:
        launch()
    (request,) = recording.requests
    return request


def _finish(columns: int) -> Finish:
    one = torch.ones(columns).double()
    return finish_of(one, one, first=Function("clip", 0.0), grid=OutputGrid(torch.tensor([0.1], dtype=torch.float64)))


def _depthwise(channels: int, side: int) -> Iterator[Row]:
    """A filter of 3 x 3; one of more taps is a loop, whose passes are not counted."""
    x = torch.zeros(2, side, side, channels, dtype=torch.int8).permute(0, 3, 1, 2)
    weight = pack_dots(torch.ones(channels, 1, 3, 3, dtype=torch.int8))
    outputs = Outputs(None, torch.zeros(2 * side * side, channels, dtype=torch.int8), None, 0, channels)
    rest = (_finish(channels), outputs, channels, Geometry(1, 1, 1, 1), (side, side))
    dot, text = DotTile(64, 2, channels // 16), f"depthwise 3x3 of {channels}, "
    yield (
        text + str(dot),
        dot.units * 16 * dot.strip // _THREADS,
        _requested(partial(depthwise_dot, x, weight, *rest, dot)),
    )
    for tile in (RowsTile(4, 2, 12), RowsTile(7, 2, 12), RowsTile(4, 4, 12)):
        request = _requested(partial(depthwise_rows, x, weight, *rest, tile))
        yield text + str(tile), 4 * tile.high * tile.strip, request


def _expanding(channels: int, columns: int) -> Iterator[Row]:
    """A product of few channels; results of columns that are not there are computed in vain."""
    count = 401408
    x, weight = (
        torch.zeros(count, channels, dtype=torch.int8),
        pack_weight(torch.ones(columns, channels).to(torch.int8)),
    )
    outputs = Outputs(None, torch.zeros(count, columns, dtype=torch.int8), None, 0, columns)
    rest, text = (_finish(columns), outputs, columns), f"{channels} -> {columns}, "
    strip = PointwiseTile(128, 64, 32, 2, 4, 4)
    wanted = 128 * columns / (-(-columns // strip.columns) * _THREADS)
    yield text + str(strip), wanted, _requested(partial(pointwise, x, weight, *rest, strip, 132))
    tile = WideTile(128, (64, 32) if columns == 96 else (64, 64, 16), 32, 3, 4, 3)
    yield text + str(tile), columns, _requested(partial(wide, x, weight, *rest, tile, 132))


def _counted(request: ahead.Request) -> tuple[int, int]:
    """(registers, instructions) of a thread; no-operations are not counted."""
    arguments: Sequence[Any] = request.arguments
    if request.name in {"_dot_kernel", "_rows_kernel"}:
        arguments = (*arguments[:-1], True)  # as on a GPU
    kernel = getattr(import_module(request.module), request.name)
    compiled = kernel.warmup(*map(ahead._stand_in, arguments), grid=(1,), **dict(request.options))
    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if _INSTRUCTION.search(line) and " NOP" not in line]
    return ahead._resources(compiled.asm["cubin"])[0], len(lines)


if __name__ == "__main__":
    main()
