"""Scenes of twelve shapes among clutter, as a COCO data set; `python examples/scenes.py scenes` writes it to ./scenes.

Shapes are told apart by their outline alone: 10 to 150 pixels of 320, at any angle, stretched, of any colour, behind
one another and beside clutter that looks alike. A scene depends on the seed and its number alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

SIZE = 320
Points = NDArray[np.float64]
Row = dict[str, Any]
Drawn = tuple[int, int, int, NDArray[np.bool_]]  # class, left, top, mask


def around(*radii: float, repeat: int = 1) -> Points:
    """Return points (n, 2) at these distances, in turn, at equal angles."""
    lengths = np.tile(radii, repeat)
    angles = np.arange(len(lengths)) * 2 * np.pi / len(lengths)
    return lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)


_DISC = around(1.0, repeat=40)
_CROSS = np.array([(1, 0.3), (0.3, 0.3), (0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3)])
# For each class its outline and the hole in it.
OUTLINES: dict[str, tuple[Points, Points | None]] = {
    **{
        f"{name}gon": (around(1.0, repeat=n), None) for n, name in ((3, "tri"), (4, "tetra"), (5, "penta"), (6, "hexa"))
    },
    **{f"star {n}": (around(1.0, 0.5, repeat=n), None) for n in (4, 5, 6, 7)},
    "cross": (np.concatenate([_CROSS, -_CROSS]), None),
    "ring": (_DISC, 0.55 * _DISC),
    "crescent": (_DISC, 0.85 * _DISC + (0.5, 0)),
    "half": (_DISC[:21], None),
}
CLASSES = tuple(OUTLINES)


def scene(seed: int, index: int) -> tuple[Image.Image, list[Row]]:
    """Return an image and, of each shape, its class, its box (left, top, width, height) and if it is mostly hidden."""
    rng = np.random.default_rng([seed, index])
    light = rng.uniform(40, 215, 3) + rng.uniform(-50, 50, (6, 6, 3))
    canvas = Image.fromarray(light.clip(0, 255).astype(np.uint8)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    owners = np.zeros((SIZE, SIZE), np.int32)
    shapes = [(True, int(kind)) for kind in rng.integers(len(CLASSES), size=rng.integers(3, 15))]
    clutter = [(False, -1)] * int(rng.integers(5, 25))
    drawn: list[Drawn] = []
    for counts, kind in rng.permutation(np.array(shapes + clutter, dtype=np.int64)):
        radius = float(np.exp(rng.uniform(np.log(6.0), np.log(75.0 if counts else 45.0))))
        outline = OUTLINES[CLASSES[kind]] if counts else (around(*rng.uniform(0.1, 1.2, rng.integers(5, 10))), None)
        left, top, mask = _mask(*outline, radius, rng)
        inside = mask > 127
        if inside.any():
            rows, columns = slice(top, top + mask.shape[0]), slice(left, left + mask.shape[1])
            colour = _colour(np.asarray(canvas.crop((left, top, columns.stop, rows.stop)))[inside].mean(0), rng)
            canvas.paste(colour, (left, top), Image.fromarray((mask * rng.uniform(0.6, 1)).astype(np.uint8)))
            drawn.append((int(kind), left, top, inside))
            owners[rows, columns][inside] = len(drawn)
    grey = canvas.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.2)))
    pixels = np.asarray(grey) + rng.normal(0, rng.uniform(2, 14), (SIZE, SIZE, 1))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), list(_rows(drawn, owners))


def _mask(
    outline: Points, hole: Points | None, radius: float, rng: np.random.Generator
) -> tuple[int, int, NDArray[np.uint8]]:
    """Return left and top edge and the opacity of a shape that is turned, stretched and put anywhere."""
    turn, lean = (_rotation(rng.uniform(0, 2 * np.pi)) for _ in range(2))
    stretch = np.exp(rng.uniform(-0.3, 0.3))
    matrix = radius * lean @ np.diag([stretch, 1 / stretch]) @ lean.T @ turn
    centre = rng.uniform(0.1 * SIZE, 0.9 * SIZE, 2)
    placed = outline @ matrix.T + centre
    left, top = placed.min(0).clip(0, SIZE - 1).astype(int).tolist()
    right, bottom = np.ceil(placed.max(0)).clip((left + 1, top + 1), SIZE).astype(int).tolist()
    image = Image.new("L", (2 * (right - left), 2 * (bottom - top)))
    for points, value in ((outline, 255), (hole, 0)):
        if points is not None:
            corners = 2 * (points @ matrix.T + centre - (left, top))
            ImageDraw.Draw(image).polygon(list(map(tuple, corners.tolist())), fill=value)
    return left, top, np.asarray(image.reduce(2))


def _rotation(angle: float) -> Points:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def _colour(behind: Points, rng: np.random.Generator) -> tuple[int, int, int]:
    """Return a colour that differs by 30 to 110 grey levels from the mean of what it covers."""
    away = rng.normal(size=3)
    away *= rng.uniform(30, 110) / np.abs(away).max()
    away = np.where((behind + away < 0) | (behind + away > 255), -away, away)
    red, green, blue = (behind + away).clip(0, 255).astype(int).tolist()
    return red, green, blue


def _rows(drawn: list[Drawn], owners: NDArray[np.int32]) -> Iterator[Row]:
    for number, (kind, left, top, inside) in enumerate(drawn, start=1):
        if kind >= 0:
            y, x = inside.nonzero()
            hidden = (owners[top + y, left + x] == number).mean() < 0.4
            box = [left + x.min(), top + y.min(), x.max() + 1 - x.min(), y.max() + 1 - y.min()]
            yield {"category_id": kind, "bbox": [int(side) for side in box], "iscrowd": int(hidden)}


def _write(index: int, *, seed: int, folder: Path) -> list[Row]:
    image, rows = scene(seed, index)
    image.save(folder / f"{index:06}.jpg", quality=92)
    return [{**row, "image_id": index, "area": row["bbox"][2] * row["bbox"][3]} for row in rows]


def write(root: Path, *, train: int = 6000, val: int = 1000, seed: int = 0) -> Path:
    """Write `train` and `val` scenes below `root` as a COCO data set, and return it."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, first, count in (("train", 0, train), ("val", 1_000_000, val)):
        (root / split).mkdir(exist_ok=True)
        with ProcessPoolExecutor() as pool:
            found = list(
                pool.map(partial(_write, seed=seed, folder=root / split), range(first, first + count), chunksize=20)
            )
        content = {
            "images": [
                {"id": i, "file_name": f"{i:06}.jpg", "width": SIZE, "height": SIZE}
                for i in range(first, first + count)
            ],
            "annotations": [{"id": i, **row} for i, row in enumerate(row for rows in found for row in rows)],
            "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES)],
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content), encoding="utf-8")
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=6000, help="training images")
    parser.add_argument("--val", type=int, default=1000, help="evaluation images")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, train=options.train, val=options.val, seed=options.seed)
