"""The launches of each kind of step, kernels or operations of torch, and the candidates to choose from.

Each kind of step has one function here, which returns its candidates, and one in `reference.py`, whose exact result
every candidate must have. Kernels and decisions about what is fused are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda import reference
from compress.engines.cuda.executor import FLOAT_KERNEL, Candidate, Tensors
from compress.engines.cuda.onnx_ops import is_read_by_the_host
from compress.engines.cuda.plan.activation import Activation
from compress.engines.cuda.plan.layout import Copy, Layout, PackImage
from compress.engines.cuda.plan.quantizers import Grid
from compress.engines.cuda.plan.steps import (
    NO_PADDING,
    Attention,
    AveragePool,
    Computed,
    Convolution,
    Elementwise,
    FloatOperation,
    LayerNorm,
    Linear,
    MaxPool,
    Move,
    Operation,
    Output,
    Product,
    SampledSum,
    Source,
    Step,
)
from compress.engines.cuda.tiles import (
    deep_tiles,
    depthwise_tiles,
    pointwise_tiles,
    product_tiles,
    rows_tiles,
    wide_tiles,
    window_tiles,
)
from compress.kernels.triton.int8_attention import attention, sampled_sum
from compress.kernels.triton.int8_depthwise import (
    WORD,
    DepthwiseTile,
    RowsTile,
    depthwise,
    depthwise_rows,
    pack_depthwise,
    pack_dots,
)
from compress.kernels.triton.int8_descriptors import (
    LEAST_CAPABILITY,
    WindowTile,
    deep,
    pointwise,
    window,
)
from compress.kernels.triton.int8_epilogue import Finish, Function, OutputGrid, Outputs, Residual, finish_of
from compress.kernels.triton.int8_layers import (
    Operand,
    average_pool,
    elementwise,
    image_mean,
    layer_norm,
    look_up,
    max_pool,
    pack_image,
)
from compress.kernels.triton.int8_product import (
    ALIGNED,
    Geometry,
    Tile,
    Weight,
    Workspace,
    pack_weight,
    product,
    tiles_of,
    wide,
    workspace,
)

Kept = TypeVar("Kept")


@dataclass
class Bindings:
    """The cache of steps on a device: packed weights, workspaces; programs of several batch sizes share it.

    Attributes:
        floats: products of codes may be computed in floating point where their results are values.
        workspaces: by the number of tiles and their size; of one stream, as kernels write to them.
    """

    device: torch.device
    kept: dict[tuple[str, str], Any]
    floats: bool = True
    workspaces: dict[tuple[int, int], Workspace] = field(default_factory=dict)

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (9, 0)

    @property
    def multiprocessors(self) -> int:
        if self.device.type != "cuda":
            return 4
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def keep(self, step: Step, what: str, make: Callable[[], Kept], *given: object) -> Kept:
        """Return the earlier result for an equal step and equal `given`, else what `make` returns now."""
        held: tuple[object, Kept] | None = self.kept.get((step.name, what))
        if held is None or not equal(held[0], (step, *given)):
            held = self.kept[step.name, what] = (step, *given), make()
        return held[1]

    def finish(self, **arguments: Any) -> Finish:
        return finish_of(**arguments).to(self.device)


def equal(a: object, b: object) -> bool:
    # `==` does not do for steps: they hold tensors, which are compared by their elements.
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(equal, a, b))
    if is_dataclass(a) and is_dataclass(b):
        return all(equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return a == b


def function_of(activation: Activation) -> Function:
    if activation.kind == "leaky_relu":
        return Function("leaky_relu", activation.slope)
    return Function(activation.kind, activation.lower, activation.upper)


def output_grid(grid: Grid | None) -> OutputGrid | None:
    if grid is None:
        return None
    return OutputGrid(torch.tensor(grid.scale, dtype=torch.float64), grid.zero, grid.low, grid.high)


def plain_finish(
    out: Output, bindings: Bindings, *, factor: Tensor | None = None, activation: Activation | None = None
) -> Finish:
    one = torch.ones(1, dtype=torch.float64)
    return bindings.finish(
        factor=one if factor is None else factor,
        bias=torch.zeros_like(one if factor is None else factor),
        first=Function() if activation is None else function_of(activation),
        grid=output_grid(out.grid) if out.codes else None,
        value=bool(out.value),
    )


def pixel_rows(x: Tensor, channel_axis: int) -> Tensor | None:
    """A tensor as (rows, channels), a view with neighbouring channels; None if there is no such view."""
    turned = x.movedim(channel_axis, -1)
    try:
        rows = turned.view(-1, turned.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else None


class Results:
    """The outputs of a step as rows; what does not lie evenly is written aside and copied."""

    def __init__(self, out: Output, residual: str, tensors: Tensors, axis: int) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        added = None
        if residual:
            turned = tensors[residual].movedim(axis, -1)
            added = pixel_rows(tensors[residual], axis)
            added = turned.reshape(-1, turned.shape[-1]).contiguous() if added is None else added
        codes, value = (self._rows(tensors[name], axis) if name else None for name in (out.codes, out.value))
        pitches = [0 if t is None else t.stride(0) for t in (added, codes, value)]
        self.outputs = Outputs(added, codes, value, *pitches)

    def _rows(self, target: Tensor, axis: int) -> Tensor:
        rows = pixel_rows(target, axis)
        if rows is not None:
            return rows
        turned = target.movedim(axis, -1)
        aside = torch.empty(turned.shape, dtype=target.dtype, device=target.device)
        self._copies.append((turned, aside))
        return aside.view(-1, turned.shape[-1])

    def finish(self) -> None:
        for target, aside in self._copies:
            target.copy_(aside)


def channels_last(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous(memory_format=torch.channels_last)


def in_words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape and type as elements of up to 8 bytes, where their innermost elements lie so."""
    inner = next((i for i, n in enumerate(a.shape) if n > 1 and a.stride(i) == b.stride(i) == 1), None)
    if a.dtype != b.dtype or inner is None:
        return a, b
    turned = [x.movedim(inner, -1) for x in (a, b)]
    for word in (torch.int64, torch.int32):
        count = word.itemsize // a.element_size()
        numbers = [n for x in turned for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])]
        if count > 1 and all(n % count == 0 for n in numbers):
            return turned[0].view(word), turned[1].view(word)
    return a, b


def product_finish(step: Product, bindings: Bindings) -> Finish:
    e = step.epilogue
    residual = None
    if e.residual.name:
        g = e.residual.grid
        residual = Residual(1.0, 0, False) if g is None else Residual(g.scale[0], g.zero, True)
    return bindings.finish(
        factor=e.factor,
        bias=e.bias,
        first=function_of(e.first),
        middle=output_grid(e.middle),
        residual=residual,
        second=function_of(e.second),
        grid=output_grid(e.out.grid) if e.out.codes else None,
        value=bool(e.out.value),
    )


def whole_parts(name: str, layout: Layout) -> bool:
    """True for codes whose pixels can be read 16 channels at a time."""
    place = layout.places.get(name)
    if place is None or place.dtype != torch.int8 or len(place.shape) != 4 or place.strides[1] != 1:
        return False
    aligned = all(n % ALIGNED == 0 for n in (place.offset, place.strides[0], place.strides[2], place.strides[3]))
    return aligned and place.strides[3] >= place.shape[1]


_WHOLE_KEYS, _FEW_KEYS = 256, 64
# Keys times channels of a head whose codes fit the memory of a program.
_SHARED = 1 << 15


def bind_pack_image(step: PackImage, layout: Layout, bindings: Bindings) -> list[Candidate]:
    grid = step.out.grid or Grid((1.0,))
    limits = (grid.low - grid.zero, grid.high - grid.zero)

    def run(tensors: Tensors) -> None:
        pack_image(
            tensors[step.x.name],
            tensors[step.out.codes],
            step.before,
            (step.block, step.move),
            1.0 / grid.scale[0],
            limits,
            grid.zero,
        )

    return [Candidate("triton pack", run)]


def bind_max_pool(step: MaxPool, layout: Layout, bindings: Bindings) -> list[Candidate]:
    _, _, height, width = layout.plan.tensors[step.out.codes].shape
    geometry = Geometry(*step.stride, step.padding[0][0], step.padding[1][0], *step.dilation)

    def candidate(each: int) -> Candidate:
        def launch(x: Tensor, out: Outputs) -> None:
            size = (height, width)
            max_pool(channels_last(x), out.codes, step.kernel, geometry, size, each=each)

        return _candidate(step, f"max pool {each}", launch)

    return [candidate(each) for each in (16, 8, 4, 32)]


def bind_average_pool(step: AveragePool, layout: Layout, bindings: Bindings) -> list[Candidate]:
    grid = step.x.grid or Grid((1.0,))
    channels = layout.plan.tensors[step.x.name].shape[1]
    whole = layout.plan.tensors[step.out.names[0]].shape
    height, width = whole[2:] if len(whole) == 4 else (1, 1)
    area = step.kernel[0] * step.kernel[1]
    factor = torch.full((channels,), grid.scale[0] / area, dtype=torch.float64)
    finish = plain_finish(step.out, bindings, factor=factor)
    geometry = Geometry(*step.stride, step.padding[0][0], step.padding[1][0])

    whole_image = step.kernel == tuple(layout.plan.tensors[step.x.name].shape[2:]) and step.padding == ((0, 0), (0, 0))

    def pooled(x: Tensor, outputs: Outputs) -> None:
        average_pool(
            channels_last(x),
            finish,
            outputs,
            step.kernel,
            geometry,
            (height, width),
            zero=grid.zero,
            counts_padding=step.counts_padding or step.padding == ((0, 0), (0, 0)),
        )

    def mean(columns: int) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            image_mean(channels_last(x), finish, outputs, columns, zero=grid.zero)

        return _candidate(step, f"image mean {columns}", launch)

    return [_candidate(step, "average pool", pooled), *(mean(n) for n in (32, 128) if whole_image)]


def bind_elementwise(step: Elementwise, layout: Layout, bindings: Bindings) -> list[Candidate]:
    def operand(source: Source, tensors: Tensors, shape: torch.Size) -> Operand:
        tensor = tensors[source.name].expand(shape)
        return Operand(tensor) if source.grid is None else Operand(tensor, source.grid.scale[0], source.grid.zero)

    finish = plain_finish(step.out, bindings, activation=step.activation)

    def run(tensors: Tensors) -> None:
        shape = tensors[step.x.name].shape
        x = operand(step.x, tensors, shape)
        y = operand(step.y, tensors, shape) if step.y.name else None
        codes, value = (tensors[name] if name else None for name in (step.out.codes, step.out.value))
        elementwise(x, y, step.combination, finish, codes, value)

    found = [Candidate("triton elementwise", run)]
    if step.combination == "none" and step.x.grid is not None and step.out.codes and not step.out.value:
        table = _table(step, bindings)
        found.insert(
            0 if step.activation.kind not in {"none", "clip"} else 1,
            Candidate("triton table", lambda t: look_up(t[step.x.name], table, t[step.out.codes])),
        )
    return found


def _table(step: Elementwise, bindings: Bindings) -> Tensor:
    def make() -> Tensor:
        codes = torch.arange(-128, 128, dtype=torch.int8).reshape(1, 256)
        results = reference.compute(step, {step.x.name: codes})
        return results[step.out.codes].reshape(256).to(bindings.device)

    return bindings.keep(step, "table", make)


def bind_layer_norm(step: LayerNorm, layout: Layout, bindings: Bindings) -> list[Candidate]:
    channels = layout.plan.tensors[step.x.name].shape[-1]
    one = torch.ones(channels, dtype=torch.float64)
    finish = bindings.finish(
        factor=one if step.weight is None else step.weight.double(),
        bias=0 * one if step.bias is None else step.bias.double(),
        grid=output_grid(step.out.grid) if step.out.codes else None,
        value=bool(step.out.value),
    )
    grid = step.x.grid or Grid((1.0,))

    def candidate(elements: int, warps: int) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            rows = pixel_rows(x, -1)
            layer_norm(
                x.reshape(-1, channels).contiguous() if rows is None else rows,
                finish,
                step.epsilon,
                outputs,
                scale=grid.scale[0],
                zero=grid.zero,
                elements=elements,
                warps=warps,
            )

        return _candidate(step, f"layer norm {elements} w{warps}", launch, -1)

    sizes = ((2048, 4), (512, 1), (1024, 1), (2048, 8)) if channels <= 4096 else ((2048, 8),)
    return [candidate(*size) for size in sizes]


def bind_attention(step: Attention, layout: Layout, bindings: Bindings) -> list[Candidate]:
    grids = [source.grid or Grid((1.0,)) for source in (step.x, step.k, step.v)]
    factor = torch.tensor([step.probabilities.scale[0] * grids[2].scale[0]], dtype=torch.float64)
    finish = plain_finish(step.out, bindings, factor=factor)
    scores = grids[0].scale[0] * grids[1].scale[0] * step.scale
    p = step.probabilities

    def heads(x: Tensor) -> Tensor:
        """As (B, H, ., .): leading axes are added, or joined."""
        x = x[(None,) * max(0, 4 - x.dim())]
        return x if x.dim() == 4 else x.flatten(0, x.dim() - 4)

    lengths = layout.plan.tensors[step.x.name].shape[:-1] + layout.plan.tensors[step.k.name].shape[-1:]
    given = step.mask
    mask = None if given is None else bindings.keep(step, "mask", lambda: _mask(given, lengths, bindings), lengths)

    def candidate(queries: int, keys: int, warps: int) -> Candidate:
        def run(tensors: Tensors) -> None:
            q, k, v = (heads(tensors[source.name]) for source in (step.x, step.k, step.v))
            codes, value = (heads(tensors[n]) if n else None for n in (step.out.codes, step.out.value))
            attention(
                q,
                k,
                v,
                None if mask is None else heads(mask),
                scores,
                p.scale[0],
                (p.low, p.high),
                finish,
                codes,
                value,
                queries=queries,
                keys=keys,
                warps=warps,
            )
            for name, made in ((step.out.codes, codes), (step.out.value, value)):
                if made is not None and made.data_ptr() != tensors[name].data_ptr():  # axes that no view joins
                    tensors[name].copy_(made.view(tensors[name].shape))

        return Candidate(f"triton attention {queries}x{keys} w{warps}", run)

    found = [(64, 64, 4), (128, 64, 8), (32, 64, 2)]
    whole = max(16, 1 << (lengths[-1] - 1).bit_length())
    widest = max(layout.plan.tensors[name].shape[axis] for name, axis in ((step.x.name, -1), (step.v.name, -1)))
    if whole <= _WHOLE_KEYS and whole * widest <= _SHARED:  # all scores of a program stay in registers
        found = [(64, whole, 4), (128, whole, 8), *found]
    if whole <= _FEW_KEYS:
        found.append((64, whole, 2))
    return [candidate(*sizes) for sizes in dict.fromkeys(found)]


def _mask(mask: Tensor, lengths: tuple[int, ...], bindings: Bindings) -> Tensor:
    mask = mask.to(bindings.device)
    repeats = mask.dim() == len(lengths) and 1 < len(mask) < lengths[0]
    return mask.expand((len(mask), *lengths[1:]) if repeats else lengths)


def bind_sampled_sum(step: SampledSum, layout: Layout, bindings: Bindings) -> list[Candidate]:
    finish = plain_finish(step.out, bindings)

    def candidate(queries: int, warps: int) -> Candidate:
        def run(tensors: Tensors) -> None:
            sampled_sum(
                [tensors[name] for name in step.images],
                [tensors[name] for name in step.grids],
                tensors[step.x.name],
                finish,
                *(tensors[name] if name else None for name in (step.out.codes, step.out.value)),
                aligned=step.aligned,
                queries=queries,
                warps=warps,
            )

        return Candidate(f"triton sampled sum {queries} w{warps}", run)

    return [candidate(*size) for size in ((8, 2), (4, 1), (16, 4), (32, 4))]


def bind_copy(step: Copy, layout: Layout, bindings: Bindings) -> list[Candidate]:
    given = step.source.to(bindings.device) if isinstance(step.source, Tensor) else step.source

    def run(tensors: Tensors) -> None:
        if step.fill is not None:
            tensors[step.whole].fill_(step.fill)
        source = given if isinstance(given, Tensor) else tensors[given]
        target, source = in_words(tensors[step.target], source)
        target.copy_(source)

    return [Candidate("torch copy", run)]


def bind_operation(step: Operation, layout: Layout, bindings: Bindings) -> list[Candidate]:
    dtype = reference.type_for((x for x in step.inputs if isinstance(x, Tensor)), layout.plan.dtype)

    def fitting(x: Tensor) -> Tensor:
        return x.to(bindings.device, dtype if x.is_floating_point() else x.dtype)

    def placed(index: int, x: Tensor) -> Tensor:
        return x.cpu() if is_read_by_the_host(step.op, index, x) else fitting(x)

    constants = bindings.keep(
        step, "inputs", lambda: tuple(placed(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(step.inputs))
    )
    ready = replace(step, inputs=constants)
    if step.op == "Resize" and (repeated := _repeated(step, layout)):
        return repeated

    def run(tensors: Tensors) -> None:
        given = {name: fitting(tensors[name]) for name in step.reads}
        for name, made in zip(step.outputs, reference.applied(ready, given), strict=False):
            result = made if dtype == layout.plan.dtype else reference.fitted(made, layout.plan.dtype)
            if name in layout.places:
                tensors[name].copy_(result)
            else:  # torch may give a view of what it read, which lies in memory that is used again
                shared = any(
                    result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in given.values()
                )
                tensors[name] = result.clone() if shared else result

    return [Candidate("torch", run)]


def _repeated(step: Operation, layout: Layout) -> list[Candidate]:
    # A nearest Resize of codes by whole factors: torch's copies reach 0.07 of a GPU's bandwidth.
    source, target = (layout.places.get(name) for name in (step.reads[0], step.outputs[0]))
    if source is None or target is None or {source.dtype, target.dtype} != {torch.int8} or len(target.shape) != 4:
        return []
    whole = all(m % n == 0 for n, m in zip(source.shape, target.shape, strict=True))
    if not whole or step.attributes.get("mode", "nearest") != "nearest" or pixel_rows(target.meta(), 1) is None:
        return []
    height, width = target.shape[2:]
    repeats = (height // source.shape[2], width // source.shape[3])

    def candidate(each: int) -> Candidate:
        def run(tensors: Tensors) -> None:
            x, out = channels_last(tensors[step.reads[0]]), tensors[step.outputs[0]].movedim(1, -1).flatten(0, 2)
            max_pool(x, out, (1, 1), Geometry(), (height, width), each=each, repeats=repeats)

        return Candidate(f"triton repeat {each}", run)

    return [candidate(each) for each in (16, 8, 4, 32)]


Shape = tuple[int, int, int, int]


def bind_depthwise(
    step: Convolution, layout: Layout, bindings: Bindings, shape: Shape, finish: Finish, geometry: Geometry
) -> list[Candidate]:
    """`shape` is (N, C, OH, OW) of the result."""
    rest = (step, bindings, shape, finish, geometry)
    dilated = geometry.dilation_x > 1 or geometry.dilation_y > 1
    plain = dilated or finish.vectors.inverse is not None or finish.kind.residual or shape[1] % WORD
    return (_rows(*rest) if whole_parts(step.x.name, layout) and not plain else []) or _plain(*rest)


def _plain(step: Convolution, bindings: Bindings, shape: Shape, finish: Finish, geometry: Geometry) -> list[Candidate]:
    zero = _zero(step)

    def candidate(tile: DepthwiseTile) -> Candidate:
        weight: Weight = bindings.keep(
            step,
            f"weight {tile.floats}",
            lambda: pack_depthwise(step.weight, zero, floats=tile.floats, device=bindings.device),
        )

        def launch(x: Tensor, outputs: Outputs) -> None:
            size = (shape[2], shape[3])
            depthwise(channels_last(x), weight, finish, outputs, shape[1], geometry, size, tile, zero=zero)

        text = f"{tile.positions}x{tile.channels} strip {tile.strip} w{tile.warps}{' f32' if tile.floats else ''}"
        return _candidate(step, f"depthwise {text}", launch)

    return [candidate(tile) for tile in depthwise_tiles(shape, _taps(step), step.stride)]


def _candidate(
    step: Product | Computed, text: str, launch: Callable[[Tensor, Outputs], None], axis: int = 1
) -> Candidate:
    if isinstance(step, Product):
        out, residual = step.epilogue.out, step.epilogue.residual.name
    else:
        out, residual = step.out, ""

    def run(tensors: Tensors) -> None:
        results = Results(out, residual, tensors, axis)
        launch(tensors[step.x.name], results.outputs)
        results.finish()

    return Candidate(f"triton {text}", run)


def _zero(step: Product) -> int:
    return step.x.grid.zero if step.x.grid else 0


def _taps(step: Convolution) -> tuple[int, int]:
    return step.weight.shape[2], step.weight.shape[3]


def _rows(step: Convolution, bindings: Bindings, shape: Shape, finish: Finish, geometry: Geometry) -> list[Candidate]:
    zero = _zero(step)
    weight: Weight = bindings.keep(step, "words", lambda: pack_dots(step.weight, zero, device=bindings.device))

    def candidate(tile: RowsTile) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            size = (shape[2], shape[3])
            depthwise_rows(x, weight, finish, outputs, shape[1], geometry, size, tile, zero=zero)

        text = f"depthwise rows {tile.high}x{tile.strip} chunk {tile.chunk} w{tile.warps}"
        return _candidate(step, text, launch)

    return [candidate(tile) for tile in rows_tiles(shape, _taps(step), step.stride, weight.codes.shape[-1])]


def _product(
    step: Product,
    bindings: Bindings,
    weight: Weight,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
    read: Callable[[Tensor], Tensor],
    axis: int,
) -> list[Candidate]:
    finish, zero = product_finish(step, bindings), _zero(step)
    images, columns, *size = shape
    rows = images * size[0] * size[1]

    def candidate(tile: Tile) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            space = None
            if tile.splits > 1:
                count = weight.groups * tiles_of(rows, columns // weight.groups, tile)
                key = (count, tile.rows * tile.columns)
                if key not in bindings.workspaces:
                    bindings.workspaces[key] = workspace(bindings.device, *key)
                space = bindings.workspaces[key]
            product(
                read(x),
                weight,
                finish,
                outputs,
                columns,
                geometry,
                (size[0], size[1]),
                tile,
                zero=zero,
                space=space,
            )

        return _candidate(step, f"product {tile_text(tile)}", launch, axis)

    channels = weight.codes.shape[-1]
    taps = weight.codes.shape[1] * weight.codes.shape[2]
    tiles = product_tiles(rows, channels, columns // weight.groups, taps, weight.groups)
    return [candidate(tile) for tile in tiles]


def _of_rows(
    step: Product, layout: Layout, bindings: Bindings, weight: Weight, columns: int, axes: tuple[int, int]
) -> list[Candidate]:
    """Candidates for products of rows that lie evenly: by descriptors, or holding the whole weight."""
    e, channels = step.epilogue, weight.codes.shape[-1]
    finish, zero = product_finish(step, bindings), _zero(step)
    even = _even_rows(step.x.name, layout, axes[0])
    if even is None or weight.groups > 1 or even[1] < channels:
        return []
    count, pitch = even
    described = bindings.capability >= LEAST_CAPABILITY
    names = [name for name in (e.residual.name, *e.out.names) if name]
    codes = not e.out.value and not (e.residual.name and e.residual.grid is None)
    all_even = codes and None not in [_even_rows(name, layout, axes[1]) for name in names]

    def candidate(text: str, run: Callable[..., None], tile: object, *processors: int) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            rows = x.as_strided((count, channels), (pitch, 1))
            run(rows, weight, finish, outputs, columns, tile, *processors, zero=zero)

        return _candidate(step, text, launch, axes[1])

    found = []
    # the copy engine would write to the end of the last 16 bytes, where another tensor may begin
    if described and all_even and columns % ALIGNED == 0:
        for point in pointwise_tiles(count, channels, columns):
            text = f"{point.rows}x{point.columns}x{point.depth} s{point.stages} w{point.warps} x{point.programs}"
            found.append(candidate(f"pointwise {text}", pointwise, point, bindings.multiprocessors))
    if described:
        found += [candidate(f"deep {tile_text(t)}", deep, t) for t in deep_tiles(count, channels, columns)]
    # rows of results that begin anywhere are stored in small parts: 3 to 4 times as long
    if columns % ALIGNED == 0 and finish.vectors.inverse is None:
        for tile in wide_tiles(count, channels, columns):
            text = f"{tile.rows}x{'+'.join(map(str, tile.widths))}x{tile.depth} s{tile.stages} w{tile.warps}"
            found.append(candidate(f"wide {text} x{tile.programs}", wide, tile, bindings.multiprocessors))
    return found


def _window(
    step: Convolution,
    layout: Layout,
    bindings: Bindings,
    weight: Weight,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
) -> list[Candidate]:
    e, zero, finish = step.epilogue, _zero(step), product_finish(step, bindings)
    taps = step.weight.shape[2] * step.weight.shape[3]
    names = [name for name in (e.residual.name, *e.out.names) if name]
    even = whole_parts(step.x.name, layout) and None not in [_even_rows(name, layout, 1) for name in names]
    moves = (geometry.stride_y, geometry.stride_x) != (1, 1)
    if bindings.capability < LEAST_CAPABILITY or weight.groups > 1 or moves or zero or not even or e.out.value:
        return []  # the copy engine fills in zeros, and moves by one
    if shape[1] % ALIGNED or finish.vectors.inverse is not None or finish.kind.residual == 2:
        return []

    def candidate(tile: WindowTile) -> Candidate:
        def launch(x: Tensor, outputs: Outputs) -> None:
            window(x, weight, finish, outputs, shape[1], geometry, (shape[2], shape[3]), tile)

        text = f"{tile.images}x{tile.high}x{tile.wide}x{tile.columns}x{tile.depth} s{tile.stages} w{tile.warps}"
        return _candidate(step, f"window {text}", launch)

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
    images, columns, height, width = layout.plan.tensors[step.epilogue.out.names[0]].shape
    shape = (images, columns, height, width)
    geometry = Geometry(*step.stride, step.padding[0][0], step.padding[1][0], *step.dilation)
    if step.weight.shape[1] == 1 and step.weight.shape[0] == step.groups > 1:
        return bind_depthwise(step, layout, bindings, shape, product_finish(step, bindings), geometry)
    weight: Weight = bindings.keep(
        step, "weight", lambda: pack_weight(step.weight, _zero(step), step.groups, bindings.device)
    )
    room = (weight.groups - 1) * weight.step + weight.codes.shape[-1]
    taps = step.weight.shape[2] * step.weight.shape[3]

    def read(x: Tensor) -> Tensor:
        return _readable(x, room)

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
    shape = layout.plan.tensors[step.epilogue.out.names[0]].shape
    weight: Weight = bindings.keep(step, "weight", lambda: pack_weight(step.weight, _zero(step), 1, bindings.device))
    room = weight.codes.shape[-1]

    def read(x: Tensor) -> Tensor:
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
    zero = _zero(step)

    def make() -> tuple[Tensor, Tensor]:
        factor = e.factor.expand(len(step.weight)).reshape(-1, *[1] * (step.weight.dim() - 1))
        weight = (step.weight.double() * factor).to(bindings.device, dtype)
        last = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
        return weight.contiguous(memory_format=last), e.bias.to(bindings.device, dtype)

    weight, bias = bindings.keep(step, "floats", make)

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


_KINDS: dict[type[Step], Callable[..., list[Candidate]]] = {
    PackImage: bind_pack_image,
    Copy: bind_copy,
    Convolution: bind_convolution,
    Linear: bind_linear,
    MaxPool: bind_max_pool,
    AveragePool: bind_average_pool,
    Elementwise: bind_elementwise,
    LayerNorm: bind_layer_norm,
    Attention: bind_attention,
    SampledSum: bind_sampled_sum,
    Move: bind_operation,
    FloatOperation: bind_operation,
}


def candidates(step: Step, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """All ways to compute a step; the first is the guess."""
    found = _KINDS[type(step)](step, layout, bindings)
    return found + (float_product(step, layout, bindings) if isinstance(step, (Convolution, Linear)) else [])
