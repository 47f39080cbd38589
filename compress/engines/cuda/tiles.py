"""Tiles that tuning measures for a step; the first is a guess from the step's shapes."""

from __future__ import annotations

from compress.kernels.triton.int8_depthwise import MOST_FLOAT_TAPS, DepthwiseTile, RowsTile
from compress.kernels.triton.int8_descriptors import PointwiseTile, WindowTile
from compress.kernels.triton.int8_product import Tile, WideTile

_PROGRAMS = 132  # multiprocessors of the GPUs that the guesses were made for
_MOST_SPLITS = 32
_MOST_STAGES = 8
# Small tiles up to which a GPU has too few programs to hide the time of a load.
_FEW = 4 * _PROGRAMS
# Input channels up to which a persistent program holds all of a tile, or of the weight.
_SHALLOW = 256
# Columns whose factors and biases a program keeps in registers.
_MOST_HELD = 192
# Largest side of a box of pixels; a tile's rest spans images, so that neighbouring programs share pixels.
_MOST_SIDE = 8
# Side of a filter up to which all of its products are written out.
_MOST_UNROLLED = 7
_WARP = 32
# Words of 4 bytes in a line of the cache, and in a sector, the least that is read of a line.
_LINE_WORDS, _SECTOR_WORDS = 32, 8
# Tiles of a product that are measured, without those that load far ahead; with fewer, H100 lost up to 11 % a layer.
_MOST_TILES = 11
# Products for each byte moved from which INT8 products, not memory, are about the nearer roof of an H100 (295).
_LEAST_INTENSITY = 280
# Bytes of a weight that a program of 128 threads keeps in registers at most: 32 registers of each thread.
_MOST_WEIGHT_BYTES = 16 << 10


# Every tile costs its compilation and its measurement in a first build. Left out are those that were the fastest in
# none of 552 measurements, of the layers of ten networks on an H100 (commit d6350b09).


def product_tiles(rows: int, channels: int, columns: int, taps: int, groups: int = 1) -> list[Tile]:
    """Tiles of a product of (rows, taps x channels) and (taps x channels, columns), the guess first."""
    width = max(16, 1 << (columns - 1).bit_length())
    deep = 128 if channels % 128 == 0 else 64 if channels % 64 == 0 or channels > 96 else 32
    found: list[Tile] = []
    for high in (128, 64, 256, 32, 16):
        for wide in (128, 64, 32, 16):
            if wide > max(32, width) or high > max(16, 2 * rows) or high * wide > 256 * 128 or high * wide < 16 * 32:
                continue
            found += _variants(high, wide, deep)
    found = [_with_splits(tile, rows, channels, columns, taps, groups) for tile in found]
    ordered = sorted(dict.fromkeys(found), key=lambda tile: _cost(tile, rows, channels, columns, taps, groups))
    ahead = _ahead_tiles(rows, channels, columns, taps, groups, deep)
    return list(dict.fromkeys([*ordered[: _MOST_TILES - 2 * len(ahead) // 3], *ahead]))


def _variants(high: int, wide: int, deep: int) -> list[Tile]:
    warps = 8 if high * wide >= 128 * 128 else 4
    found = [Tile(high, wide, deep, 3, warps, min(wide, 64))]
    if deep == 128 and high in {16, 32, 128} and wide > 16:
        found.append(Tile(high, wide, 64, 4, warps, min(wide, 64)))
    if deep < 128 and high * wide == 128 * 64 and high > wide:
        found.append(Tile(high, wide, deep, 4, 8, 64))
    return found


def _ahead_tiles(rows: int, channels: int, columns: int, taps: int, groups: int, deep: int) -> list[Tile]:
    """Tiles for few programs (batch 1): nearly all of their loads are under way."""
    if rows * columns * groups > _FEW * 32 * 32:
        return []
    steps, found = taps * -(-channels // deep), []
    for high, wide in ((16, 32), (32, 32), (16, 64)):
        tile = _with_splits(Tile(high, wide, deep, part=wide), rows, channels, columns, taps, groups)
        for splits in dict.fromkeys((max(1, tile.splits // 2), tile.splits)):
            stages = min(_MOST_STAGES, -(-steps // splits))
            found += [tile._replace(stages=stages, splits=splits)] if stages > 3 else []
    return found


def _with_splits(tile: Tile, rows: int, channels: int, columns: int, taps: int, groups: int) -> Tile:
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns) * groups
    steps = taps * -(-channels // tile.depth)
    splits = 1
    while tiles * splits * 2 <= 2 * _PROGRAMS and steps // (2 * splits) >= 2 and splits < _MOST_SPLITS:
        splits *= 2
    return tile._replace(splits=splits)


def _cost(tile: Tile, rows: int, channels: int, columns: int, taps: int, groups: int) -> float:
    """A rough time: waves of programs, each as long as its products, its reads and its writes."""
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns) * groups * tile.splits
    depth = taps * -(-channels // tile.depth) * tile.depth / tile.splits
    products = tile.rows * tile.columns * depth / 2048
    moved = (tile.rows + tile.columns) * depth / 32 + tile.rows * tile.columns / 8 * (1 + 4 * (tile.splits > 1))
    at_once = _PROGRAMS * max(1, min(4, 128 * 128 * 2 // (tile.rows * tile.columns)))
    alone = 1.35 if tile.rows * tile.columns > 128 * 128 else 1.0  # nothing hides the waiting of such a large one
    return alone * -(-tiles // at_once) * (products + moved + 400) * at_once / _PROGRAMS


def pointwise_tiles(rows: int, channels: int, columns: int) -> list[PointwiseTile]:
    """Tiles of persistent programs for a product of few channels and many rows; none where that cannot pay."""
    if channels > _SHALLOW or columns < 64 or rows * columns < 4 * _PROGRAMS * 64 * 128:
        return []
    deep = 128 if channels > 64 else 64 if channels > 32 else 32
    shapes = [(64, 128, 2, 4), (64, 128, 3, 3), (128, 64, 2, 4)]
    if deep == 128:
        shapes.append((64, 256, 2, 2))
    found = [PointwiseTile(r, c, deep, stages, 4, at_once) for r, c, stages, at_once in shapes]
    return [tile for tile in found if tile.columns <= max(64, columns)]


def deep_tiles(rows: int, channels: int, columns: int) -> list[Tile]:
    """Tiles for many channels, loaded by tensor descriptors; none where tiles would not fill the GPU."""
    if channels <= _SHALLOW or columns < 64 or rows * columns < _PROGRAMS * 128 * 128:
        return []
    tile = Tile(128, 128, 128, 3, 8)
    return [tile, tile._replace(registers=128)]  # of which two run on a multiprocessor


def depthwise_tiles(
    shape: tuple[int, int, int, int], taps: tuple[int, int], stride: tuple[int, int]
) -> list[DepthwiseTile]:
    """The guess first; `shape` is (N, C, OH, OW) of the result."""
    wide = min(64, max(16, 1 << (shape[1] - 1).bit_length()))
    large = stride[1] == 1 and taps[1] > 3  # a pixel is widened once for many products: long strips, float32
    strips = [8, 4] if large else [4, 2, 1] if stride[1] == 1 else [2, 4, 1]
    strips = [strip for strip in strips if strip <= max(1, shape[3])] or [1]
    floats = 16 < taps[0] * taps[1] <= MOST_FLOAT_TAPS
    widths = (wide, 32) if wide == 64 else (wide,)
    return [
        DepthwiseTile(count // columns, columns, strip, 4, floats)
        for columns in widths
        for count in (1024, 512)
        for strip in strips[: 2 if wide == 64 else None]
    ]


def rows_tiles(
    shape: tuple[int, int, int, int], taps: tuple[int, int], stride: tuple[int, int], words: int
) -> list[RowsTile]:
    """Tiles of products of four bytes, of several rows at a time; none for large filters."""
    if max(taps) > _MOST_UNROLLED:
        return []
    divisors = [n for n in range(1, min(words, 2 * _LINE_WORDS) + 1) if words % n == 0]
    chunk = min(divisors, key=lambda n: (n % _SECTOR_WORDS > 0, abs(n - _LINE_WORDS)))
    images, _, height, width = shape
    shared = taps[0] >= 3 * stride[0]  # a row of pixels is part of three rows of results
    most = (7 if shared else 4) if max(taps) <= 3 else 4 if max(taps) <= 5 or shared else 2
    found = [RowsTile(high, strip, chunk) for high in (most, 4, 2) for strip in ((2,) if shared else (1, 2))]
    threads = {tile: images * -(-height // tile.high) * -(-width // tile.strip) * words for tile in found}
    fitting = [tile for tile in found if tile.high < 2 * height and threads[tile] >= _PROGRAMS * _WARP * tile.warps]
    # more rows were always faster (24 kinds of layers on an H200), where enough programs are left
    return fitting[: 1 if shared else 2] or [RowsTile(2, 1, chunk), RowsTile(1, 1, chunk)]


def window_tiles(shape: tuple[int, int, int, int], channels: int, taps: int) -> list[WindowTile]:
    """Tiles of convolutions that load boxes; none where they do not pay. `shape` is (N, O, OH, OW) of the result."""
    images, columns, height, width = shape
    if images * height * width * columns < _PROGRAMS * 64 * 128 or columns < 64:
        return []
    if taps * channels * columns < _LEAST_INTENSITY * (channels + columns):
        return []
    deep = 128 if channels > 64 else 64 if channels > 32 else 32
    wide, high = (min(_MOST_SIDE, side & -side) for side in (width, height))
    rows = 128 if columns > 64 else 256
    box = max(1, rows // (wide * high))
    tile = WindowTile(box, min(high, rows // wide), wide, min(128, columns), deep)
    return [tile] if box <= images else []


def wide_tiles(rows: int, channels: int, columns: int) -> list[WideTile]:
    """Tiles of persistent programs that hold the whole weight of few input channels; none where that cannot pay."""
    depth = max(32, 1 << (channels - 1).bit_length())
    strips = -(-columns // _MOST_HELD)
    each = -(-columns // strips)
    if columns < 2 * channels or rows * columns < 4 * _PROGRAMS * 64 * 128 or depth * each > _MOST_WEIGHT_BYTES:
        return []
    found = [
        WideTile(high, _widths(each, most), depth, stages, warps, programs)
        for high, most, stages, warps, programs in ((128, 64, 3, 4, 3), (64, 64, 3, 4, 4), (64, 128, 3, 4, 3))
    ]
    return list(dict.fromkeys(found))


def _widths(columns: int, most: int) -> tuple[int, ...]:
    found: list[int] = []
    left = -(-columns // 16) * 16
    while left:
        found.append(min(most, 1 << (left.bit_length() - 1)))
        left -= found[-1]
    return tuple(found)
