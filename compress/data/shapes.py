"""Shapes among clutter, drawn on the device; an image depends on (seed, index) alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.data import NORMALIZATION, DataSpec
from compress.data.base import Batch, DataSet, Preprocessing, hash_seed, random_bits, uniform
from compress.data.memory import DRAWS, Drawn, DrawnSplit, Movement, affine_grid, to_device

EXTENT = 1.3
BANK_SIZE = 96
OUTLINES = ("circle", "triangle", "square", "star", "cross", "heart", "crescent", "ring", "arrow", "bow tie")
BLOBS = 8

_BLOB_SEED = 5

Point = tuple[float, float]


@functools.lru_cache(maxsize=1)
def outline_bank() -> Tensor:
    at = bank_coordinates()
    return torch.stack([*(_DISTANCES[name](at) for name in OUTLINES), *blobs(at)]).float()


def bank_coordinates() -> Tensor:
    line = ((torch.arange(BANK_SIZE, dtype=torch.float64) * 2 + 1) / BANK_SIZE - 1) * EXTENT
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack((x, y), dim=-1)


def polygon(at: Tensor, corners: list[Point]) -> Tensor:
    """Distance of points (..., 2) to the nearest edge, negative inside (even-odd rule)."""
    nearest = torch.full(at.shape[:-1], math.inf, dtype=at.dtype)
    inside = torch.zeros(at.shape[:-1], dtype=torch.bool)
    x, y = at.unbind(-1)
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        dx, dy = x1 - x0, y1 - y0
        along = (((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)).clamp(0, 1)
        nearest = torch.minimum(nearest, torch.hypot(x - x0 - along * dx, y - y0 - along * dy))
        if dy:
            crosses = ((y0 > y) != (y1 > y)) & (x < x0 + (y - y0) * dx / dy)
            inside ^= crosses
    return torch.where(inside, -nearest, nearest)


def disc(at: Tensor, centre: Point, radius: float) -> Tensor:
    return (at - at.new_tensor(centre)).norm(dim=-1) - radius


def blobs(at: Tensor) -> list[Tensor]:
    """Lumps whose radius varies in three random waves."""
    angle, radius = torch.atan2(at[..., 1], at[..., 0]), at.norm(dim=-1)
    lumps = []
    for draws in uniform(_BLOB_SEED, torch.arange(BLOBS), 6).tolist():
        edge = torch.full_like(angle, 0.78)
        for wave, (height, phase) in enumerate(zip(draws[::2], draws[1::2], strict=True), start=2):
            edge += (0.08 + 0.1 * height) * torch.cos(wave * angle + 2 * math.pi * phase)
        lumps.append(radius - edge)
    return lumps


def _around(radii: list[float], *, start: float = -90.0) -> list[Point]:
    angles = [math.radians(start + 360 * i / len(radii)) for i in range(len(radii))]
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _cross(at: Tensor) -> Tensor:
    a, b = 0.32, 1.0
    return polygon(
        at, [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
    )


def _heart(at: Tensor) -> Tensor:
    lobes = torch.minimum(disc(at, (-0.46, -0.32), 0.54), disc(at, (0.46, -0.32), 0.54))
    return torch.minimum(lobes, polygon(at, [(-0.87, 0.03), (0.0, -0.45), (0.87, 0.03), (0.0, 1.02)]))


_DISTANCES = {
    "circle": lambda at: disc(at, (0.0, 0.0), 0.9),
    "triangle": lambda at: polygon(at, _around([1.15] * 3)),
    "square": lambda at: polygon(at, _around([1.1] * 4, start=-45.0)),
    "star": lambda at: polygon(at, _around([1.15, 0.48] * 5)),
    "cross": _cross,
    "heart": _heart,
    "crescent": lambda at: torch.maximum(disc(at, (0.12, 0.0), 1.0), -disc(at, (0.62, 0.0), 0.85)),
    "ring": lambda at: (disc(at, (0.0, 0.0), 0.72)).abs() - 0.27,
    "arrow": lambda at: polygon(
        at, [(-1.05, -0.26), (0.0, -0.26), (0.0, -0.8), (1.05, 0.0), (0.0, 0.8), (0.0, 0.26), (-1.05, 0.26)]
    ),
    "bow tie": lambda at: polygon(at, [(-1.0, -0.8), (0.0, -0.12), (1.0, -0.8), (1.0, 0.8), (0.0, 0.12), (-1.0, 0.8)]),
}


PATTERNS = ("stripes", "checks", "dots", "circles", "waves")
VERSIONS = 8

_SEED = 7
_SPACING = (0.42, 0.62)
_SHARPNESS = 3.0


@functools.lru_cache(maxsize=1)
def pattern_bank() -> Tensor:
    """Return every version of every pattern, grouped by pattern: (5 * 8, 96, 96) float32."""
    at = bank_coordinates()
    draws = uniform(_SEED, torch.arange(len(PATTERNS) * VERSIONS), 4).tolist()
    return torch.stack([_draw(PATTERNS[i // VERSIONS], at, *row) for i, row in enumerate(draws)]).float()


def _draw(pattern: str, at: Tensor, spacing: float, direction: float, phase_x: float, phase_y: float) -> Tensor:
    """The last four arguments are of [0, 1)."""
    wave = 2 * math.pi / (_SPACING[0] + spacing * (_SPACING[1] - _SPACING[0]))
    cos, sin = math.cos(2 * math.pi * direction), math.sin(2 * math.pi * direction)
    u = (at[..., 0] * cos + at[..., 1] * sin) * wave + 2 * math.pi * phase_x
    v = (at[..., 1] * cos - at[..., 0] * sin) * wave + 2 * math.pi * phase_y
    return _edge(_WAVES[pattern](u, v, at.norm(dim=-1) * wave + 2 * math.pi * phase_x))


def _edge(wave: Tensor) -> Tensor:
    """-1..1 to 0..1 with steep, smooth edges."""
    return torch.sigmoid(_SHARPNESS * 2 * wave)


_WAVES = {
    "stripes": lambda u, v, r: u.sin(),
    "checks": lambda u, v, r: 2 * (u / 2).sin() * (v / 2).sin(),
    "dots": lambda u, v, r: u.sin() + v.sin() - 0.7,
    "circles": lambda u, v, r: r.sin(),
    "waves": lambda u, v, r: (u + 1.8 * (v * 0.6).sin()).sin(),
}


TONES = ("warm", "cool")

# Layers from back to front. SIZES: half of the side, where the image's half is 1.
_LUMPS, _PLAIN, _COVERS = 2, 3, 1
OBJECT = _LUMPS + _PLAIN
LAYERS = OBJECT + 1 + _COVERS
_SIZES = ((0.35, 0.75),) * _LUMPS + ((0.18, 0.34),) * _PLAIN + ((0.34, 0.62),) + ((0.14, 0.28),) * _COVERS
_SHAPELESS = [*range(_LUMPS), *range(OBJECT + 1, LAYERS)]
_PLAIN_LAYERS = [*range(_LUMPS, OBJECT), *range(OBJECT + 1, LAYERS)]

_BASE_CELLS = 5
_LAYER_DRAWS = 14
_SCENE_DRAWS = 1 + 4 * _BASE_CELLS**2
_ASPECT, _HUE_SPREAD = 0.2, 1.0
_LUMINANCE, _CONTRAST, _CHROMA = (0.25, 0.75), (0.12, 0.34), (0.05, 0.16)
_OPACITY, _NOISE = (0.8, 1.0), (0.05, 0.35)
_WARM_HUE = math.pi / 6
_CHANNELS = (0.0, 2 * math.pi / 3, -2 * math.pi / 3)


@dataclass(frozen=True)
class Scenes:
    """N images of L layers, back to front.

    Attributes:
        matrices: (N, L, 2, 3) image to bank, -1 to 1.
        outlines, patterns: (N, L) int64 rows of banks.
        colours: (N, L, 2, 3) RGB of pattern values 0 and 1.
        sizes: (N, L) half sides; the image's is 1.
        opacity: (N, L).
        base: (N, 3, 5, 5) background, to be interpolated.
        noise: (N,) largest magnitude.
    """

    matrices: Tensor
    outlines: Tensor
    patterns: Tensor
    colours: Tensor
    sizes: Tensor
    opacity: Tensor
    base: Tensor
    noise: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def cue_counts(num_classes: int) -> tuple[int, int, int]:
    """Return the numbers of outlines, patterns and tones, as equal as the cues allow.

    >>> cue_counts(20), cue_counts(100)
    ((4, 3, 2), (10, 5, 2))
    """
    counts, most = [1, 1, 1], (len(OUTLINES), len(PATTERNS), len(TONES))
    while math.prod(counts) < num_classes:
        growing = min((i for i in range(3) if counts[i] < most[i]), key=lambda i: counts[i])
        counts[growing] += 1
    return counts[0], counts[1], counts[2]


def class_cues(targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outline, pattern and tone (N,) of classes (N,)."""
    outlines, patterns, _ = cue_counts(num_classes)
    return targets % outlines, targets // outlines % patterns, targets // (outlines * patterns)


def class_names(num_classes: int) -> tuple[str, ...]:
    cues = zip(*(cue.tolist() for cue in class_cues(torch.arange(num_classes), num_classes)), strict=True)
    return tuple(f"{OUTLINES[outline]} {PATTERNS[pattern]} {TONES[tone]}" for outline, pattern, tone in cues)


def make_scenes(
    seed: int, indices: Tensor, targets: Tensor, *, num_classes: int, camera: Tensor | None = None
) -> Scenes:
    """Images at `indices` (N,) int64 with objects of `targets` (N,) int64.

    `camera`: (N, 2, 3) float64 movements, or None.
    """
    draws = uniform(seed, indices, LAYERS * _LAYER_DRAWS + _SCENE_DRAWS)
    layers, rest = draws.split([LAYERS * _LAYER_DRAWS, _SCENE_DRAWS], dim=1)
    x, y, size, angle, aspect, opacity, version, *cues, hue, middle, contrast, chroma = layers.view(
        -1, LAYERS, _LAYER_DRAWS
    ).unbind(-1)
    outlines, patterns, tones = (
        (draw * count).long() for draw, count in zip(cues, cue_counts(num_classes), strict=True)
    )
    for chosen, cue in zip((outlines, patterns, tones), class_cues(targets, num_classes), strict=True):
        chosen[:, OBJECT] = cue
    outlines[:, _SHAPELESS] = len(OUTLINES) + (cues[0][:, _SHAPELESS] * BLOBS).long()
    least, most = _on(indices.device, _SIZES).unbind(1)
    sizes = least + size * (most - least)
    matrices = _matrices(_centres(x, y, sizes), sizes, angle, aspect)
    return Scenes(
        matrices=(matrices if camera is None else _after(matrices, camera[:, None])).float(),
        outlines=outlines,
        patterns=patterns * VERSIONS + (version * VERSIONS).long(),
        colours=_colours(tones, hue, middle, contrast, chroma).float(),
        sizes=sizes.float(),
        opacity=_between(_OPACITY, opacity).float(),
        base=_base(rest[:, 1:]).float(),
        noise=_between(_NOISE, rest[:, 0]).float(),
    )


def with_clutter(scenes: Scenes, share: float) -> Scenes:
    if share == 1:
        return scenes
    shares = torch.full((LAYERS,), share, dtype=scenes.opacity.dtype, device=scenes.opacity.device)
    shares[OBJECT] = 1
    return replace(scenes, opacity=scenes.opacity * shares)


@functools.lru_cache(maxsize=16)
def _on(device: torch.device, values: tuple[object, ...]) -> Tensor:
    """float64 constants, cached: a copy to a GPU would wait for its work."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def _between(limits: tuple[float, float], draws: Tensor) -> Tensor:
    return limits[0] + draws * (limits[1] - limits[0])


def _centres(x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
    centres = torch.stack((x, y), dim=-1) * 2 - 1
    centres[:, OBJECT] *= 1 - 0.9 * sizes[:, OBJECT, None]
    angle, reach = 2 * math.pi * x[:, OBJECT + 1 :, None], (0.6 + 0.4 * y[:, OBJECT + 1 :, None])
    towards = torch.cat((angle.cos(), angle.sin()), dim=-1) * reach
    centres[:, OBJECT + 1 :] = centres[:, OBJECT, None] + towards * sizes[:, OBJECT, None, None]
    return centres


def _matrices(centres: Tensor, sizes: Tensor, angle: Tensor, aspect: Tensor) -> Tensor:
    stretch = ((2 * aspect - 1) * _ASPECT).exp()
    cos, sin = (2 * math.pi * angle).cos(), (2 * math.pi * angle).sin()
    rows = torch.stack((cos * stretch, sin * stretch, -sin / stretch, cos / stretch), dim=-1).unflatten(-1, (2, 2))
    rows = rows / (sizes * EXTENT)[..., None, None]
    return torch.cat((rows, -(rows * centres[..., None, :]).sum(-1, keepdim=True)), dim=-1)


def _after(outer: Tensor, inner: Tensor) -> Tensor:
    """The affine map (..., 2, 3) of `inner`, then `outer`."""
    linear, shift = outer[..., :2], outer[..., 2:]
    moved = (linear[..., :, :, None] * inner[..., None, :, :]).sum(-2)
    return torch.cat((moved[..., :2], moved[..., 2:] + shift), dim=-1)


def _colours(tones: Tensor, hue: Tensor, middle: Tensor, contrast: Tensor, chroma: Tensor) -> Tensor:
    """Two colours of one hue by layer, (N, L, 2, 3); of plain layers the same twice."""
    angle = _WARM_HUE + math.pi * tones + (2 * hue - 1) * _HUE_SPREAD
    channels = _on(hue.device, _CHANNELS)
    tint = _between(_CHROMA, chroma)[..., None] * (angle[..., None] - channels).cos()
    half = _between(_CONTRAST, contrast) / 2
    half[:, _PLAIN_LAYERS] = 0
    steps = torch.stack((-half, half), dim=-1)
    return (_between(_LUMINANCE, middle)[..., None] + steps)[..., None] + tint[..., None, :]


def _base(draws: Tensor) -> Tensor:
    """The background's light (N, 3, 5, 5)."""
    cells = draws.view(-1, 4, _BASE_CELLS, _BASE_CELLS)
    return _between((0.3, 0.7), cells[:, :1]) + _between((-0.12, 0.12), cells[:, 1:])


DEFAULT_SHAPES = 20  # default number of classes
TRAIN_IMAGES, VAL_IMAGES = 20_000, 2_000  # default numbers of images
MEAN, STD = NORMALIZATION["shapes"]
MOVEMENT = Movement(shift=0.1, degrees=15.0, zoom=0.15, flip=True)

_FIRST_VAL = 1 << 40
_NOISE_BITS = 21
_FULL_NOISE_SIZE = 128  # a smaller image has fewer pixels to average over, and gets less noise in proportion


def shapes_data(spec: DataSpec) -> DataSet:
    num_classes = DEFAULT_SHAPES if spec.num_classes is None else spec.num_classes
    train_images = TRAIN_IMAGES if spec.train_images is None else spec.train_images
    val_images = VAL_IMAGES if spec.val_images is None else spec.val_images
    movement = MOVEMENT if spec.augment else None
    return DataSet(
        train=ShapesSplit(spec, num_classes=num_classes, count=train_images, first=0, movement=movement),
        val=ShapesSplit(spec, num_classes=num_classes, count=val_images, first=_FIRST_VAL, movement=None),
    )


class ShapesSplit(DrawnSplit):
    """Images numbered from `first`; the class is the number modulo `num_classes`.

    Args:
        movement: of the camera, or None.
    """

    def __init__(self, spec: DataSpec, *, num_classes: int, count: int, first: int, movement: Movement | None) -> None:
        super().__init__(
            labels=class_names(num_classes), preprocessing=Preprocessing.of(spec, mean=MEAN, std=STD), seed=spec.seed
        )
        self._count, self._first, self._movement, self._clutter = count, first, movement, spec.clutter

    def __len__(self) -> int:
        return self._count

    def content(self) -> tuple[str, ...]:
        return (type(self).__qualname__, *map(str, (self.seed, self.num_classes, self._first, self._clutter)))

    def draw(self, indices: Tensor, *, epoch: int | None, device: torch.device) -> Drawn:
        positions = to_device(indices, device)
        numbers, targets = positions + self._first, positions % self.num_classes
        size, camera = self.preprocessing.height_width[0], None
        if epoch is not None and self._movement is not None:
            camera = self._movement.matrices(uniform(self._noise_seed(epoch), numbers, DRAWS), size)
        scenes = make_scenes(self.seed, numbers, targets, num_classes=self.num_classes, camera=camera)
        return numbers, targets, *with_clutter(scenes, self._clutter).tensors()

    def make(self, drawn: Drawn, *, epoch: int | None, device: torch.device) -> Batch:
        numbers, targets, *fields = drawn
        scenes, size = Scenes(*fields), self.preprocessing.height_width[0]
        images = paint(scenes, size)
        strength = scenes.noise[:, None, None, None] * min(1.0, size / _FULL_NOISE_SIZE)
        images += noise(self._noise_seed(epoch), numbers, size) * strength
        return self.preprocessing.normalize(images.clamp_(0, 1)), targets

    def _noise_seed(self, epoch: int | None) -> int:
        return hash_seed(self.seed) if epoch is None or self._movement is None else hash_seed(self.seed, epoch)


def paint(scenes: Scenes, size: int) -> Tensor:
    """Scenes without noise: (N, 3, size, size) float32, mostly 0 to 1."""
    outlines, patterns = _banks(scenes.base.device)
    canvas = F.interpolate(scenes.base, size=(size, size), mode="bilinear", align_corners=True)
    for layer in range(LAYERS):
        bank = torch.stack((outlines[scenes.outlines[:, layer]], patterns[scenes.patterns[:, layer]]), dim=1)
        grid = affine_grid(scenes.matrices[:, layer], size)
        distance, pattern = F.grid_sample(bank, grid, padding_mode="border", align_corners=False).split(1, dim=1)
        pixels = scenes.sizes[:, layer, None, None, None] * (size / 2)  # in one unit of distance
        cover = (0.5 - distance * pixels).clamp_(0, 1) * scenes.opacity[:, layer, None, None, None]
        dark, light = scenes.colours[:, layer, :, :, None, None].unbind(1)
        canvas = torch.lerp(canvas, torch.lerp(dark, light, pattern), cover)
    return canvas


def noise(seed: int, numbers: Tensor, size: int) -> Tensor:
    """Uniform from -1 to 1, (N, 3, size, size) float32, for images `numbers` (N,) int64."""
    bits = random_bits(seed, numbers, size * size).view(-1, 1, size, size)
    shifts = torch.arange(3, device=bits.device).view(1, 3, 1, 1) * _NOISE_BITS
    return ((bits >> shifts) & (1 << _NOISE_BITS) - 1).float() * 2.0 ** (1 - _NOISE_BITS) - 1


@functools.lru_cache(maxsize=8)
def _banks(device: torch.device) -> tuple[Tensor, Tensor]:
    return outline_bank().to(device), pattern_bank().to(device)
