"""Effective receptive fields: measured, and their sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor, fx, nn

from compress.errors import ModelError, ReceptiveFieldError, near_misses
from compress.graph.canonical import preserve_input
from compress.graph.compare import alone, fresh, own_copy
from compress.graph.inputs import batch_inputs, flat_tensors, hooked
from compress.graph.ops import WEIGHTED
from compress.graph.trace import trace
from compress.receptive.theoretical import ReceptiveField, ReceptiveFieldTable, graph_receptive_field, receptive_field
from compress.support.progress import NoProgress, Progress

# Luo et al.: a pixel counts if its influence is above 4.55 % of the centre's (two sigma contain 95.45 %).
THRESHOLD = 1 - 0.9545

SHARES = (0.2, 0.3, 0.5, 0.99)  # shares of the influence for which RepLKNet (arXiv 2203.06717, table 7) gives areas

_FIT_SIDE = 192  # limit of the rows and columns that a fit samples


@dataclass(frozen=True, kw_only=True)
class GaussianFit:
    """The axis-aligned Gaussian nearest to a map, by least squares; pixels.

    Attributes:
        sigma: standard deviation along (rows, columns).
        amplitude: its maximum over the map's largest value.
        r_squared: share of the map's variance that it explains.
    """

    sigma: tuple[float, float]
    centre: tuple[float, float]
    amplitude: float
    r_squared: float


@dataclass(frozen=True, kw_only=True)
class ErfMetrics:
    """Sizes of one effective receptive field, pixels.

    Attributes:
        count: pixels above `THRESHOLD` of the largest value.
        size: square root of the count (Luo et al.).
        radius_50, radius_95: radii around the unit's centre that contain half, and 95 %, of the influence.
        areas: for each of `SHARES`, the share of the image in the smallest square around the unit's centre that
            contains it (RepLKNet).
        theoretical_share: `size` over the theoretical side (geometric mean of the axes); None if that is not known.
    """

    count: int
    size: float
    gaussian: GaussianFit
    radius_50: float
    radius_95: float
    areas: tuple[float, ...]
    theoretical_share: float | None


def erf_metrics(
    heat: Tensor, centre: Sequence[float], *, theoretical: Sequence[int | None] | None = None
) -> ErfMetrics:
    """All sizes of a map with a positive sum; `centre` is the unit's (row, column)."""
    count = above_threshold(heat)
    known = [size for size in theoretical or () if size]
    share = math.sqrt(count) / math.sqrt(math.prod(known)) if len(known) == 2 else None
    return ErfMetrics(
        count=count,
        size=math.sqrt(count),
        gaussian=gaussian_fit(heat),
        radius_50=mass_radius(heat, 0.5, centre),
        radius_95=mass_radius(heat, 0.95, centre),
        areas=tuple(contribution_area(heat, share, centre) for share in SHARES),
        theoretical_share=share,
    )


def above_threshold(heat: Tensor, threshold: float = THRESHOLD) -> int:
    """The number of pixels above `threshold` times the largest value (Luo et al., section 3)."""
    return int((heat > threshold * heat.amax()).sum())


def second_moment(heat: Tensor) -> tuple[float, float]:
    """The standard deviation of the influence along (rows, columns), pixels, from its second moment."""
    found = []
    for axis in range(2):
        profile = heat.double().sum(1 - axis)
        position = torch.arange(len(profile), dtype=torch.float64, device=heat.device)
        mean = (profile * position).sum() / profile.sum()
        found.append(float(((profile * (position - mean) ** 2).sum() / profile.sum()).sqrt()))
    return found[0], found[1]


def gaussian_fit(heat: Tensor) -> GaussianFit:
    """Fit amplitude, centre and sigma by least squares, from the moments on, without an offset."""
    peak = float(heat.amax())
    image = (heat.detach().double().cpu() / peak).numpy()
    height, width = image.shape
    rows, columns = (torch.arange(0, n, max(1, n // _FIT_SIDE), dtype=torch.float64).numpy() for n in (height, width))
    sample = image[rows.astype(int)][:, columns.astype(int)]
    sigma = second_moment(heat)
    mass = image.sum()
    start = [
        1.0,
        float((image.sum(1) * range(height)).sum() / mass),
        float((image.sum(0) * range(width)).sum() / mass),
        max(sigma[0], 0.3),
        max(sigma[1], 0.3),
    ]

    def shape(p: Any) -> NDArray[np.float64]:
        vertical = (-0.5 * ((rows - p[1]) / p[3]) ** 2)[:, None]
        return p[0] * math.e ** (vertical + (-0.5 * ((columns - p[2]) / p[4]) ** 2)[None])

    limits = ([0.0, -height, -width, 0.05, 0.05], [10.0, 2.0 * height, 2.0 * width, 10.0 * height, 10.0 * width])
    found = least_squares(lambda p: (shape(p) - sample).ravel(), start, bounds=limits, max_nfev=60).x
    left = float(((shape(found) - sample) ** 2).sum())
    total = float(((sample - sample.mean()) ** 2).sum())
    return GaussianFit(
        sigma=(float(found[3]), float(found[4])),
        centre=(float(found[1]), float(found[2])),
        amplitude=float(found[0]),
        r_squared=1.0 - left / total if total > 0 else 1.0,
    )


def distances(shape: Sequence[int], centre: Sequence[float]) -> Tensor:
    rows = torch.arange(shape[0], dtype=torch.float64) - centre[0]
    columns = torch.arange(shape[1], dtype=torch.float64) - centre[1]
    return (rows[:, None] ** 2 + columns[None] ** 2).sqrt()


def radial_profile(heat: Tensor, centre: Sequence[float], *, width: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return each ring's radius in pixels, and share of influence."""
    ring = (distances(heat.shape, centre) / width).long()
    mass = torch.zeros(int(ring.max()) + 1, dtype=torch.float64)
    mass.index_add_(0, ring.flatten(), heat.double().cpu().flatten())
    return (torch.arange(len(mass)) + 0.5) * width, mass / mass.sum()


def mass_radius(heat: Tensor, share: float, centre: Sequence[float]) -> float:
    """The radius of the smallest disc that contains `share`, pixels."""
    distance, order = distances(heat.shape, centre).flatten().sort()
    mass = heat.double().cpu().flatten()[order].cumsum(0)
    index = int(torch.searchsorted(mass, share * mass[-1] * (1 - 1e-12)))
    return float(distance[min(index, len(distance) - 1)])


def contribution_area(heat: Tensor, share: float, centre: Sequence[float] | None = None) -> float:
    """The share of the image in the smallest square that contains `share` (RepLKNet, table 7).

    Its side is odd, its centre the pixel nearest to `centre` (None: the image's middle).
    """
    height, width = heat.shape
    row, column = (height // 2, width // 2) if centre is None else (round(centre[0]), round(centre[1]))
    table = torch.zeros(height + 1, width + 1, dtype=torch.float64)
    table[1:, 1:] = heat.double().cpu().cumsum(0).cumsum(1)
    total = float(table[-1, -1])
    for reach in range(max(height, width)):
        top, bottom = max(0, row - reach), min(height, row + reach + 1)
        left, right = max(0, column - reach), min(width, column + reach + 1)
        inside = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
        if float(inside) >= share * total * (1 - 1e-12):
            return (bottom - top) * (right - left) / (height * width)
    return 1.0


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The positions of a tensor's units.

    Attributes:
        units: number of (rows, columns).
        dims: of rows and columns; the same if they are merged into tokens.
        prefix: tokens before the first one with a position.
    """

    units: tuple[int, int]
    dims: tuple[int, int]
    prefix: int = 0

    def take(self, tensor: Tensor, unit: tuple[int, int]) -> Tensor:
        if self.dims[0] == self.dims[1]:
            return tensor.select(self.dims[0], self.prefix + unit[0] * self.units[1] + unit[1])
        first, second = sorted(zip(self.dims, unit, strict=True), reverse=True)
        return tensor.select(*first).select(*second)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A tensor to measure, its units' positions and theoretical field (None = unknown)."""

    name: str
    grid: Grid
    row: ReceptiveField | None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A model that returns a tensor for each of some points; see `EffectiveReceptiveField`."""

    points: tuple[Point, ...]
    run: Callable[[Tensor], tuple[Tensor, ...]]
    method: str
    table: ReceptiveFieldTable | None


def make_probe(model: nn.Module, image: Tensor, layers: Sequence[str | None]) -> Probe:
    """A probe for modules, blocks or fx nodes by name; None is the last layer on a grid.

    The image is (1, C, height, width) in the model's type.
    """
    try:
        graph_module = trace(model, image)
        table = graph_receptive_field(graph_module, [image], name=type(model).__name__)
        rows = [_last(table, image) if name is None else table.row(name) for name in layers]
    except (ModelError, ReceptiveFieldError) as error:
        if not _reachable(model, image, layers, error):
            raise
        return _hooked(model, image, layers, str(error))
    points = tuple(
        Point(name=name or row.path or row.name, grid=_grid(row.shape, image, row), row=row)
        for name, row in zip(layers, rows, strict=True)
    )
    cut = _cut(graph_module, [row.name for row in rows])
    return Probe(points=points, run=cut, method="graph", table=table)


def grids(table: ReceptiveFieldTable, image: Tensor) -> list[ReceptiveField]:
    """The rows whose units lie on a grid of at least 2 x 2."""
    found = []
    for row in table:
        grid = find_grid(row.shape, image, row)
        if grid is not None and min(grid.units) > 1 and row.kind != "input":
            found.append(row)
    return found


def _last(table: ReceptiveFieldTable, image: Tensor) -> ReceptiveField:
    rows = grids(table, image)
    if not rows:
        raise ReceptiveFieldError(
            f"no layer of {table.model} has units on a grid at image size {tuple(image.shape[2:])}; name a layer, or "
            "use a larger image"
        )
    return rows[-1]


def find_grid(shape: Sequence[int] | None, image: Tensor, row: ReceptiveField | None = None) -> Grid | None:
    """The positions of the units of a tensor of `shape`; None = unknown.

    Without followed axes (`row`), the image's proportions distinguish (N, C, h, w), (N, h, w, C) and (N, tokens, C).
    """
    if shape is None or len(shape) not in (3, 4) or shape[0] != 1:
        return None
    if row is not None and row.located:
        first, second = row.dims
        return Grid(units=(shape[first], shape[second]), dims=(first, second))  # type: ignore[index, arg-type]
    height, width = image.shape[2:]
    if len(shape) == 4:
        for dims in ((2, 3), (1, 2)):
            if shape[dims[0]] * width == shape[dims[1]] * height:
                return Grid(units=(shape[dims[0]], shape[dims[1]]), dims=dims)
        return None
    for prefix in range(9):
        rows = round(((shape[1] - prefix) * height / width) ** 0.5) if shape[1] > prefix else 0
        columns = (shape[1] - prefix) // rows if rows else 0
        if rows and rows * columns == shape[1] - prefix and rows * width == columns * height:
            return Grid(units=(rows, columns), dims=(1, 1), prefix=prefix)
    return None


def _grid(shape: Sequence[int] | None, image: Tensor, row: ReceptiveField | None = None, name: str = "") -> Grid:
    grid = find_grid(shape, image, row)
    if grid is None:
        raise ReceptiveFieldError(
            f"the units of {row.name if row else name} have no position in the image: its shape is "
            f"{tuple(shape) if shape is not None else 'none'}, without recognizable rows and columns; name a layer "
            "that returns (N, C, h, w), (N, h, w, C) or (N, tokens, C)"
        )
    return grid


def _cut(graph_module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    graph, wanted = fx.Graph(), set(names)
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        copied[node] = graph.node_copy(node, lambda n: copied[n])
        if node.users:  # else its only effect is to overwrite the input
            preserve_input(graph_module, copied[node])
        wanted.discard(node.name)
        if not wanted:
            break
    by_name = {node.name: twin for node, twin in copied.items()}
    graph.output(tuple(by_name[name] for name in names))
    cut = fx.GraphModule(graph_module, graph).eval()
    return cut.requires_grad_(False)


def _reachable(model: nn.Module, image: Tensor, layers: Sequence[str | None], error: Exception) -> bool:
    """True if hooks can serve: the model runs, and every layer is a module."""
    if isinstance(error, ReceptiveFieldError):
        modules = dict(model.named_modules())
        return any(layers) and all(name in modules for name in layers if name)
    try:
        with torch.no_grad():
            fresh(model)(image)
    except Exception:  # the model itself fails, and the first error has the better message
        return False
    return True


def _hooked(model: nn.Module, image: Tensor, layers: Sequence[str | None], reason: str) -> Probe:
    twin = own_copy(model).requires_grad_(False)
    modules = dict(twin.named_modules())
    for name in layers:
        if name and name not in modules:
            raise ReceptiveFieldError(
                f"the model has no module {name!r}{near_misses(name, modules)}; torch.fx cannot trace it, so only "
                "modules can be measured"
            )
    with torch.no_grad(), _hooks(twin, list(modules)) as seen:
        twin(image)
    shapes = {name: tuple(value.shape) for name, value in seen.items()}
    on_grid = [name for name, shape in shapes.items() if (g := find_grid(shape, image)) and min(g.units) > 1]
    if None in layers and not on_grid:
        raise ReceptiveFieldError(f"no module of {type(model).__name__} has units on a grid; name one")
    names = [name or on_grid[-1] for name in layers]
    points = tuple(Point(name=n, grid=_grid(shapes.get(n), image, name=n), row=None) for n in names)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with _hooks(twin, names) as found:
            twin(images)
        return tuple(found[n] for n in names)

    return Probe(points=points, run=run, method=f"hooks ({reason})", table=None)


@contextmanager
def _hooks(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def collect(name: str, _module: nn.Module, _inputs: Any, output: Any) -> Tensor | None:
        tensors = flat_tensors(output)
        if tensors:
            seen.pop(name, None)
            seen[name] = tensors[0]
        return output.clone() if isinstance(output, Tensor) else None  # later operations may overwrite it

    with hooked({name: module for name, module in model.named_modules() if name and name in names}, collect):
        yield seen


def layers_to_show(model: nn.Module, image: Tensor, *, count: int = 8) -> list[str | None]:
    """Up to `count` layers whose units lie on a grid, in order, including the last one.

    The image is (1, C, height, width). A model that cannot be traced gives [None], its last layer.
    """
    own = next((t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), torch.zeros(()))
    try:
        table = receptive_field(model, image.to(own))
    except ModelError:
        return [None]
    rows = grids(table, image)
    ends = _block_ends(table, rows, count)
    if len(ends) < min(count, 4):
        kinds = {"conv", "max_pool", "avg_pool", "add", "concat", "attention"}
        ends = [(row, row.path or row.name) for row in rows if row.kind in kinds]
    if rows and (not ends or ends[-1][0] is not rows[-1]):
        ends.append((rows[-1], rows[-1].path or rows[-1].name))
    return [name for _, name in spread(ends, count)]


def _block_ends(
    table: ReceptiveFieldTable, rows: Sequence[ReceptiveField], count: int
) -> list[tuple[ReceptiveField, str]]:
    """(last row, path) of the blocks at the outermost level with `count` blocks, else with the most."""
    levels: dict[int, list[tuple[ReceptiveField, str]]] = {}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        after = set(following.scopes) if following is not None else set()
        for scope in row.scopes:
            if scope and scope not in after and scope != row.path and table.row(scope) is row:
                levels.setdefault(scope.count("."), []).append((row, scope))
    enough = [ends for _, ends in sorted(levels.items()) if len(ends) >= count]
    return enough[0] if enough else max(levels.values(), key=len, default=[])


def spread(rows: list[T], count: int) -> list[T]:
    """`count` of some items, evenly spread, including the last."""
    if len(rows) <= count:
        return rows
    if count <= 1:
        return rows[-1:]
    indices = sorted({round(i * (len(rows) - 1) / (count - 1)) for i in range(count)})
    return [rows[index] for index in indices]


Upstream = Literal["ones", "random"]
Average = Literal["absolute", "positive", "rms", "signed"]


@dataclass(frozen=True, kw_only=True)
class ErfOptions:
    """Options of the measurement of an effective receptive field.

    Attributes:
        unit: (row, column); None = (rows // 2, columns // 2).
        upstream: gradient at the unit's channels: `random` normal weights for each image, which measure the norm of
            all channels' gradients; `ones` uses their sum, in which opposite signs cancel (nearly all after a
            LayerNorm).
        average: mean over images of each gradient's `absolute` value, its `positive` part (RepLKNet), its square
            (`rms`, with the root at the end), or itself (`signed`, with the magnitude at the end; needs `ones`).
    """

    unit: tuple[int, int] | None = None
    upstream: Upstream = "random"
    average: Average = "absolute"
    batch_size: int = 8
    double: bool = False
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {"upstream": ("ones", "random"), "average": ("absolute", "positive", "rms", "signed")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ReceptiveFieldError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(values)}")
        if self.average == "signed" and self.upstream == "random":
            raise ReceptiveFieldError("average 'signed' needs upstream 'ones': random weights average to zero")
        if self.batch_size < 1:
            raise ReceptiveFieldError(f"batch_size is {self.batch_size}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EffectiveReceptiveField:
    """The effective receptive field of one unit of one layer.

    Attributes:
        heat: (height, width) float64 on the CPU: mean influence of each pixel, summed over the image's channels.
        unit: (row, column) in the layer's grid.
        centre: (row, column) of the unit's centre in the image, pixels.
        dead_images: number of images whose gradient was zero everywhere.
        method: `graph`, or `hooks` with the reason.
    """

    model: str
    layer: str
    heat: Tensor
    unit: tuple[int, int]
    grid: tuple[int, int]
    centre: tuple[float, float]
    images: int
    dead_images: int
    upstream: Upstream
    average: Average
    method: str
    theoretical: ReceptiveField | None
    metrics: ErfMetrics

    @property
    def normalized(self) -> Tensor:
        return self.heat / self.heat.amax()


def effective_receptive_field(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layer: str | None = None,
    options: ErfOptions | None = None,
    progress: Progress | None = None,
) -> EffectiveReceptiveField:
    """Return the effective receptive field of the central unit of one layer (arXiv 1701.04128).

    The arguments and errors are those of `effective_receptive_fields`, which measures several layers in one pass. The
    map is (height, width); its sizes are in pixels (`.metrics`).

    Examples:
        >>> field = compress.effective_receptive_field(model, images, layer="0")
        >>> field.metrics.size <= 3.0
        True
    """
    return effective_receptive_fields(model, images, layers=[layer], options=options, progress=progress)[0]


@alone
def effective_receptive_fields(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layers: Sequence[str | None],
    options: ErfOptions | None = None,
    progress: Progress | None = None,
) -> tuple[EffectiveReceptiveField, ...]:
    """The effective receptive fields of several layers, from one forward pass for each batch.

    The gradient of a unit's channels, weighted by `upstream`, is averaged over images (Luo et al., "Understanding the
    Effective Receptive Field in Deep Convolutional Neural Networks", arXiv 1701.04128).

    Args:
        model: its first input is an image; it is not changed.
        images: (N, C, height, width), or an iterable of such batches or of (batch, target) pairs, of one size.
        layers: paths of modules or of blocks (`layer4` is its result), or names of fx nodes; None = the last layer
            whose units lie on a grid, which in a vision transformer are its tokens.
        options: None = `ErfOptions()`.
        progress: counts images.
    """
    options, progress = options or ErfOptions(), progress or NoProgress()
    batches = _batches(images, options.batch_size)
    first = next(batches, None)
    if first is None:
        raise ReceptiveFieldError("no images were given")
    probe, form = _prepare(model, first, layers, options)
    sums = [_Sum(point, options) for point in probe.points]
    generator = torch.Generator().manual_seed(options.seed)
    total = sum(len(batch_inputs(one)[0]) for one in images) if isinstance(images, (list, tuple)) else 0
    total = len(images) if isinstance(images, Tensor) else total
    progress.start("receptive field", total)
    for batch in itertools.chain([first], batches):
        if batch.shape[1:] != first.shape[1:]:
            raise ReceptiveFieldError(f"images differ in size: {tuple(first.shape[1:])}, then {tuple(batch.shape[1:])}")
        _accumulate(probe, batch.to(**form), sums, generator, options)
        progress.advance("receptive field", len(batch))
    progress.finish("receptive field")
    return tuple(s.result(type(model).__name__, probe.method) for s in sums)


def _prepare(
    model: nn.Module, first: Tensor, layers: Sequence[str | None], options: ErfOptions
) -> tuple[Probe, dict[str, Any]]:
    if first.ndim != 4 or 0 in first.shape:
        raise ReceptiveFieldError(f"images must be (N, C, height, width), got a tensor of shape {tuple(first.shape)}")
    own = next((t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point()), first)
    form: dict[str, Any] = {"device": own.device, "dtype": own.dtype}
    if options.double or options.device is not None:
        form["device"] = torch.device(options.device or own.device)
        form["dtype"] = torch.float64 if options.double else own.dtype
        model = own_copy(model).to(**form)
    return make_probe(model, first[:1].to(**form), layers), form


def _batches(images: Tensor | Iterable[Any], size: int) -> Iterator[Tensor]:
    for item in [images] if isinstance(images, Tensor) else images:
        yield from (part for part in batch_inputs(item)[0].split(size) if len(part))


class _Sum:
    def __init__(self, point: Point, options: ErfOptions) -> None:
        rows, columns = point.grid.units
        self.point, self.options = point, options
        self.unit = options.unit if options.unit is not None else (rows // 2, columns // 2)
        if not (0 <= self.unit[0] < rows and 0 <= self.unit[1] < columns):
            raise ReceptiveFieldError(f"unit {self.unit} is not in {point.name}, which has {rows} x {columns} units")
        self.total: Tensor | None = None
        self.images = self.dead = 0

    def add(self, gradient: Tensor) -> None:
        if not bool(gradient.isfinite().all()):
            raise ReceptiveFieldError(
                f"the gradient of {self.point.name} is not finite (images {self.images} to "
                f"{self.images + len(gradient) - 1}): the model overflows on them"
            )
        self.dead += int((gradient == 0).flatten(1).all(1).sum())
        self.images += len(gradient)
        change = {"absolute": Tensor.abs, "positive": Tensor.relu, "rms": Tensor.square}.get(self.options.average)
        part = gradient.sum(0) if change is None else change(gradient).sum((0, 1))
        self.total = part.double().cpu() if self.total is None else self.total + part.double().cpu()

    def heat(self) -> Tensor:
        mean = torch.zeros(1) if self.total is None else self.total / self.images
        if self.options.average == "rms":
            mean = mean.sqrt()
        elif self.options.average == "signed":
            mean = mean.abs().sum(0)
        if not bool(mean.amax() > 0):
            raise ReceptiveFieldError(
                f"the gradient of unit {self.unit} of {self.point.name} is zero for all {self.images} images: its "
                "activations are dead there (an inactive ReLU, a saturated or rounded value), or its channels cancel "
                "(try upstream='random'), or its field lies outside of the image; choose another unit or layer, or "
                "other images"
            )
        return mean

    def result(self, model: str, method: str) -> EffectiveReceptiveField:
        heat, row, grid = self.heat(), self.point.row, self.point.grid.units
        centre = unit_centre(row, self.unit, grid, tuple(heat.shape))
        return EffectiveReceptiveField(
            model=model,
            layer=self.point.name,
            heat=heat,
            unit=self.unit,
            grid=grid,
            centre=centre,
            images=self.images,
            dead_images=self.dead,
            upstream=self.options.upstream,
            average=self.options.average,
            method=method,
            theoretical=row,
            metrics=erf_metrics(
                heat,
                centre,
                theoretical=row.local_size if row is not None and row.status == "exact" and not row.reason else None,
            ),
        )


def unit_centre(
    row: ReceptiveField | None, unit: Sequence[int], grid: Sequence[int], image: Sequence[int]
) -> tuple[float, float]:
    """(row, column) of the unit's window, else of its cell in a grid over the image."""
    found = []
    for axis in range(2):
        centre = row.centre(unit, axis) if row is not None and row.located else None
        found.append((unit[axis] + 0.5) * image[axis] / grid[axis] - 0.5 if centre is None else centre)
    return found[0], found[1]


def _accumulate(
    probe: Probe, batch: Tensor, sums: Sequence[_Sum], generator: torch.Generator, options: ErfOptions
) -> None:
    images = batch.detach().clone().requires_grad_()
    with torch.enable_grad():
        outputs = probe.run(images)
        for position, (total, output) in enumerate(zip(sums, outputs, strict=True)):
            value = total.point.grid.take(output, total.unit)
            if options.upstream == "random":
                weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                value = value * weights.to(value)
            elif value.shape[1] > 1 and bool((value.sum(1).abs() < 1e-5 * value.abs().sum(1)).all()):
                raise ReceptiveFieldError(
                    f"the channels of {total.point.name} sum to zero, as after a LayerNorm: the gradient of their sum "
                    "is rounding noise; use upstream='random' or an earlier layer"
                )
            total.add(_gradient(value, images, total.point.name, keep=position + 1 < len(sums)))


def _gradient(value: Tensor, images: Tensor, name: str, *, keep: bool) -> Tensor:
    found = None
    if value.requires_grad:
        try:
            (found,) = torch.autograd.grad(value.sum(), images, retain_graph=keep, allow_unused=True)
        except RuntimeError as error:
            raise ReceptiveFieldError(f"the gradient from {name} to the image fails: {error}") from error
    if found is None:
        raise ReceptiveFieldError(
            f"no gradient leads from {name} to the image: it does not depend on the image, or through an operation "
            "without a derivative (detach, a comparison, integers)"
        )
    return found


SOURCES = ("photographs", "noise")
_MEAN = (0.485, 0.456, 0.406)  # of ImageNet, on which torchvision's and most of timm's models were trained
_STD = (0.229, 0.224, 0.225)


def probe_images(source: str, count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Images, (count, 3, height, width) float32, normalized with ImageNet's mean and standard deviation.

    `source` is `photographs` (crops of scikit-learn's two) or `noise` (standard normal); the seed is of either.
    """
    if count < 1 or min(size) < 1:
        raise ReceptiveFieldError(f"{count} images of {size[0]} x {size[1]} pixels were asked for")
    if source == "photographs":
        return photograph_crops(count, size, seed=seed)
    if source == "noise":
        return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    raise ReceptiveFieldError(f"image source {source!r}{near_misses(source, SOURCES)} ({', '.join(SOURCES)})")


def photograph_crops(count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    from sklearn.datasets import load_sample_images  # lazy: it takes seconds, and only photographs need it

    photographs = [torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)
    mean, std = torch.tensor(_MEAN).view(3, 1, 1), torch.tensor(_STD).view(3, 1, 1)
    crops = [_crop(photographs[i % len(photographs)], size, generator) for i in range(count)]
    return torch.stack([(crop - mean) / std for crop in crops])


def _crop(photograph: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A resized crop with the proportions of `size`, at least half of the largest."""
    _, height, width = photograph.shape
    largest = min(height / size[0], width / size[1])
    scale = largest * (0.5 + 0.5 * float(torch.rand((), generator=generator)))
    rows, columns = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
    top = int(torch.randint(0, height - rows + 1, (), generator=generator))
    left = int(torch.randint(0, width - columns + 1, (), generator=generator))
    crop = photograph[:, top : top + rows, left : left + columns]
    if bool(torch.rand((), generator=generator) < 0.5):
        crop = crop.flip(-1)
    return torch.nn.functional.interpolate(crop[None], size, mode="bilinear", antialias=True)[0]


@dataclass(frozen=True, kw_only=True)
class ErfDrift:
    """The change of an effective receptive field.

    Attributes:
        total_variation: share of the influence that lies on other pixels, 0 to 1.
        moved_px: Wasserstein distance of the distributions of the radius around the unit's centre, pixels.
        radius_change_px: mean radius after minus before, pixels.
        size_ratio: `metrics.size` after over before.
    """

    before: EffectiveReceptiveField
    after: EffectiveReceptiveField
    total_variation: float
    moved_px: float
    radius_change_px: float
    size_ratio: float


def erf_drift(before: EffectiveReceptiveField, after: EffectiveReceptiveField) -> ErfDrift:
    """The drift from one network's effective receptive field to another's, both over the same images."""
    if before.heat.shape != after.heat.shape:
        raise ReceptiveFieldError(
            f"the maps differ in size: {tuple(before.heat.shape)} and {tuple(after.heat.shape)}; use images of one size"
        )
    left, right = (f.heat / f.heat.sum() for f in (before, after))
    radius = distances(before.heat.shape, before.centre)
    return ErfDrift(
        before=before,
        after=after,
        total_variation=float((left - right).abs().sum() / 2),
        moved_px=radial_distance(left, right, radius),
        radius_change_px=float((radius * (right - left)).sum()),
        size_ratio=after.metrics.size / before.metrics.size,
    )


def radial_distance(left: Tensor, right: Tensor, radius: Tensor) -> float:
    """The Wasserstein-1 distance of `radius` under two maps of sum 1."""
    ordered, order = radius.flatten().sort()
    gap = (left - right).flatten()[order].cumsum(0).abs()
    return float((gap[:-1] * ordered.diff()).sum())


@dataclass(frozen=True, kw_only=True)
class UnproductiveLayer:
    """A convolution that cannot widen the receptive field.

    Attributes:
        input_size: field of its input along the widest path, pixels, without global operations.
        input_smallest: along the narrowest path.
        certain: True if every path to its input covers the whole image.
        macs: at the table's image size, batch 1; None = unknown.
        share: of the network's known macs; None = unknown.
    """

    path: str
    input_size: tuple[int, ...]
    input_smallest: tuple[int, ...]
    certain: bool
    macs: int | None
    share: float | None


@dataclass(frozen=True, kw_only=True)
class UnproductiveLayers:
    """The convolutions of a network whose input field covers the image, (height, width).

    `macs` are those of all convolutions and linear layers; `unknown` are weighted layers whose field is unknown.
    """

    image_size: tuple[int, ...]
    layers: tuple[UnproductiveLayer, ...]
    macs: int
    unknown: tuple[str, ...]

    @property
    def share(self) -> float:
        return sum(layer.share or 0.0 for layer in self.layers)

    @property
    def certain_share(self) -> float:
        return sum(layer.share or 0.0 for layer in self.layers if layer.certain)


def unproductive_layers(table: ReceptiveFieldTable, image_size: Sequence[int] | None = None) -> UnproductiveLayers:
    """The convolutions whose input already covers the whole image (Richter et al., arXiv 2106.12307).

    A linear layer over the channels of a map is a 1 x 1 convolution; one after the map is not judged. `image_size` is
    (height, width), None = the table's; macs are at the table's size.
    """
    size = tuple(image_size) if image_size is not None else table.image_size
    if len(size) != len(table.image_size) or min(size) < 1:
        raise ReceptiveFieldError(f"image_size is {size}; the table's images have {len(table.image_size)} axes")
    weighted = [row for row in table if row.kind in WEIGHTED]
    macs = sum(row.macs or 0 for row in weighted)
    judged = [row for row in weighted if row.kind != "linear" or (row.located and None not in row.local_size)]
    found = [row for row in judged if _covers(row.input_size, size)]
    return UnproductiveLayers(
        image_size=size,
        layers=tuple(
            UnproductiveLayer(
                path=row.path or row.name,
                input_size=tuple(s or 0 for s in row.input_size),
                input_smallest=tuple(s or 0 for s in row.input_smallest),
                certain=_covers(row.input_smallest, size),
                macs=row.macs,
                share=row.macs / macs if row.macs is not None and macs else None,
            )
            for row in found
        ),
        macs=macs,
        unknown=tuple(row.path or row.name for row in weighted if row.status == "unknown"),
    )


def _covers(sizes: Sequence[int | None], image: Sequence[int]) -> bool:
    """True if the input's field is larger than the image (Richter et al.)."""
    return all(s is not None and s > n for s, n in zip(sizes, image, strict=True))
