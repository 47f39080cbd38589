"""All steps but products as launches of kernels, or as operations of torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from compress.engines.cuda import reference
from compress.engines.cuda.bind.common import (
    Bindings,
    Results,
    channels_last,
    in_words,
    output_grid,
    pixel_rows,
    plain_finish,
)
from compress.engines.cuda.executor import Candidate, Tensors
from compress.engines.cuda.onnx_ops import is_read_by_the_host
from compress.engines.cuda.plan.layout import Copy, Layout
from compress.engines.cuda.plan.quantizers import Grid
from compress.engines.cuda.plan.stem import PackImage
from compress.engines.cuda.plan.steps import Attention, AveragePool, Elementwise, LayerNorm, MaxPool, Operation, Source
from compress.kernels.triton.int8_attention import attention
from compress.kernels.triton.int8_elementwise import Operand, elementwise, look_up
from compress.kernels.triton.int8_input import pack_image
from compress.kernels.triton.int8_norm import layer_norm
from compress.kernels.triton.int8_pool import average_pool, image_mean, max_pool
from compress.kernels.triton.int8_product import Geometry

_WHOLE_KEYS, _FEW_KEYS = 256, 64


def bind_pack_image(step: PackImage, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of packing the input."""
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
    """Candidates of a maximum."""
    _, _, height, width = layout.plan.tensors[step.out.codes].shape
    geometry = Geometry(*step.stride, step.padding[0][0], step.padding[1][0], *step.dilation)

    def candidate(each: int) -> Candidate:
        def run(tensors: Tensors) -> None:
            results = Results(step.out, "", tensors, 1)
            out, pitch = results.outputs.codes, results.outputs.codes_pitch
            x = channels_last(tensors[step.x.name])
            max_pool(x, out, pitch, step.kernel, geometry, (height, width), each=each)
            results.finish()

        return Candidate(f"triton max pool {each}", run)

    return [candidate(each) for each in (16, 8, 4, 32)]


def bind_average_pool(step: AveragePool, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of an average."""
    grid = step.x.grid or Grid((1.0,))
    channels = layout.plan.tensors[step.x.name].shape[1]
    whole = layout.plan.tensors[step.out.names[0]].shape
    height, width = whole[2:] if len(whole) == 4 else (1, 1)
    area = step.kernel[0] * step.kernel[1]
    factor = torch.full((channels,), grid.scale[0] / area, dtype=torch.float64)
    finish = plain_finish(step, step.out, bindings, factor=factor)
    geometry = Geometry(*step.stride, step.padding[0][0], step.padding[1][0])

    whole_image = step.kernel == tuple(layout.plan.tensors[step.x.name].shape[2:]) and step.padding == ((0, 0), (0, 0))

    def window(tensors: Tensors) -> None:
        results = Results(step.out, "", tensors, 1)
        average_pool(
            channels_last(tensors[step.x.name]),
            finish,
            results.outputs,
            step.kernel,
            geometry,
            (height, width),
            zero=grid.zero,
            counts_padding=step.counts_padding or step.padding == ((0, 0), (0, 0)),
        )
        results.finish()

    def mean(columns: int) -> Candidate:
        def run(tensors: Tensors) -> None:
            results = Results(step.out, "", tensors, 1)
            image_mean(channels_last(tensors[step.x.name]), finish, results.outputs, columns, zero=grid.zero)
            results.finish()

        return Candidate(f"triton image mean {columns}", run)

    return [Candidate("triton average pool", window), *(mean(n) for n in (32, 128) if whole_image)]


def bind_elementwise(step: Elementwise, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of an elementwise step: computed, or looked up."""

    def operand(source: Source, tensors: Tensors, shape: torch.Size) -> Operand:
        tensor = tensors[source.name].expand(shape)
        return Operand(tensor) if source.grid is None else Operand(tensor, source.grid.scale[0], source.grid.zero)

    finish = plain_finish(step, step.out, bindings, activation=step.activation)

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

    return bindings.keep((step.name, "table"), make)


def bind_layer_norm(step: LayerNorm, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of a normalization."""
    channels = layout.plan.tensors[step.x.name].shape[-1]
    one = torch.ones(channels, dtype=torch.float64)
    finish = bindings.finish(
        step,
        factor=one if step.weight is None else step.weight.double(),
        bias=0 * one if step.bias is None else step.bias.double(),
        grid=output_grid(step.out.grid) if step.out.codes else None,
        value=bool(step.out.value),
    )
    grid = step.x.grid or Grid((1.0,))

    def candidate(elements: int, warps: int) -> Candidate:
        def run(tensors: Tensors) -> None:
            x = tensors[step.x.name]
            rows = pixel_rows(x, -1)
            rows = x.reshape(-1, channels).contiguous() if rows is None else rows
            results = Results(step.out, "", tensors, -1)
            layer_norm(
                rows,
                finish,
                step.epsilon,
                results.outputs,
                scale=grid.scale[0],
                zero=grid.zero,
                elements=elements,
                warps=warps,
            )
            results.finish()

        return Candidate(f"triton layer norm {elements} w{warps}", run)

    sizes = ((2048, 4), (512, 1), (1024, 1), (2048, 8)) if channels <= 4096 else ((2048, 8),)
    return [candidate(*size) for size in sizes]


def bind_attention(step: Attention, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of attention."""
    grids = [source.grid or Grid((1.0,)) for source in (step.x, step.k, step.v)]
    factor = torch.tensor([step.probabilities.scale[0] * grids[2].scale[0]], dtype=torch.float64)
    finish = plain_finish(step, step.out, bindings, factor=factor)
    scores = grids[0].scale[0] * grids[1].scale[0] * step.scale
    p = step.probabilities

    def heads(x: Tensor) -> Tensor:
        """As (B, H, ., .): leading axes are added, or joined."""
        x = x[(None,) * max(0, 4 - x.dim())]
        return x if x.dim() == 4 else x.flatten(0, x.dim() - 4)

    lengths = layout.plan.tensors[step.x.name].shape[:-1] + layout.plan.tensors[step.k.name].shape[-1:]
    given = step.mask
    mask = None if given is None else bindings.keep((step.name, "mask"), lambda: _mask(given, lengths, bindings))

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

        return Candidate(f"triton attention {queries}x{keys} w{warps}", run)

    found = [(64, 64, 4), (128, 64, 8), (32, 64, 2)]
    whole = max(16, 1 << (lengths[-1] - 1).bit_length())
    if whole <= _WHOLE_KEYS:  # all scores of a program stay in registers
        found = [(64, whole, 4), (128, whole, 8), *found]
    if whole <= _FEW_KEYS:
        found.append((64, whole, 2))
    return [candidate(*sizes) for sizes in dict.fromkeys(found)]


def _mask(mask: Tensor, lengths: tuple[int, ...], bindings: Bindings) -> Tensor:
    mask = mask.to(bindings.device)
    repeats = mask.dim() == len(lengths) and 1 < len(mask) < lengths[0]
    return mask.expand((len(mask), *lengths[1:]) if repeats else lengths)


def bind_copy(step: Copy, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """Candidates of a copy."""
    given = step.source.to(bindings.device) if isinstance(step.source, Tensor) else step.source

    def run(tensors: Tensors) -> None:
        if step.fill is not None:
            tensors[step.whole].fill_(step.fill)
        source = given if isinstance(given, Tensor) else tensors[given]
        target, source = in_words(tensors[step.target], source)
        target.copy_(source)

    return [Candidate("torch copy", run)]


def bind_operation(step: Operation, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """An operation of torch, in the plan's floating-point type."""
    dtype = layout.plan.dtype

    def fitting(x: Tensor) -> Tensor:
        return x.to(bindings.device, dtype if x.is_floating_point() else x.dtype)

    def placed(index: int, x: Tensor) -> Tensor:
        return x.cpu() if is_read_by_the_host(step.op, index, x) else fitting(x)

    constants = bindings.keep(
        (step.name, "inputs"),
        lambda: tuple(placed(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(step.inputs)),
    )
    ready = replace(step, inputs=constants)

    def run(tensors: Tensors) -> None:
        given = {name: fitting(tensors[name]) for name in step.reads}
        for name, result in zip(step.outputs, reference.applied(ready, given), strict=False):
            if name in layout.places:
                tensors[name].copy_(result)
            else:  # torch may give a view of what it read, which lies in memory that is used again
                shared = any(
                    result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in given.values()
                )
                tensors[name] = result.clone() if shared else result

    return [Candidate("torch", run)]
