"""Images of `shapes` as numbers: an object, and clutter with the same cues apart."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from compress.data.counter import uniform
from compress.data.shapes_banks import BLOBS, EXTENT, OUTLINES, PATTERNS, VERSIONS

TONES = ("warm", "cool")

# Layers from back to front. SIZES: half of the side, where the picture's half is 1.
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
        """Return all fields, in order."""
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
    """Return the names of the classes, such as 'circle stripes warm'."""
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
    """Return the images with the opacity of all but the object times `share` (0 to 1)."""
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
    """Maps from image to bank."""
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
