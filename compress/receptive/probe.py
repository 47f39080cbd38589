"""Access to tensors inside a copy of a model, with their gradients: by its graph, else by forward hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from compress.errors import ModelError, ReceptiveFieldError, near_misses
from compress.graph.canonical import preserve_input
from compress.graph.inputs import flat_tensors
from compress.graph.trace import trace
from compress.receptive.theoretical import ReceptiveField, ReceptiveFieldTable, graph_receptive_field, receptive_field

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
        """The channels of one unit, (N, C)."""
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

    Raises:
        ReceptiveFieldError: a layer does not exist (similar names are listed), or its units have no position.
        ModelError: the model fails on the image.
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
    """The graph up to the last of some nodes, its outputs."""
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
            copy.deepcopy(model).eval()(image)
    except Exception:  # the model itself fails, and the first error has the better message
        return False
    return True


def _hooked(model: nn.Module, image: Tensor, layers: Sequence[str | None], reason: str) -> Probe:
    twin = copy.deepcopy(model).eval().requires_grad_(False)
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
    """Collect modules' results (the first tensor of the last call), as they finish."""
    seen: dict[str, Tensor] = {}

    def collect(name: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Tensor | None:
            tensors = flat_tensors(output)
            if tensors:
                seen.pop(name, None)
                seen[name] = tensors[0]
            return output.clone() if isinstance(output, Tensor) else None  # later operations may overwrite it

        return hook

    handles = [module.register_forward_hook(collect(n)) for n, module in model.named_modules() if n in set(names) and n]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


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
