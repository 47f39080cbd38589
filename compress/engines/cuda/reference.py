"""The steps of a plan in exact integer arithmetic and float64, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.onnx_ops import apply, is_read_by_the_host
from compress.engines.cuda.plan.layout import Copy, PackImage, packed_image
from compress.engines.cuda.plan.quantizers import Grid
from compress.engines.cuda.plan.steps import (
    Attention,
    AveragePool,
    Convolution,
    Elementwise,
    Epilogue,
    FloatOperation,
    LayerNorm,
    Linear,
    MaxPool,
    Move,
    Operation,
    Output,
    Padding,
    SampledSum,
    Source,
    Step,
)
from compress.errors import EngineError

Tensors = Mapping[str, Tensor]
Results = dict[str, Tensor]


def compute(step: Step, tensors: Tensors) -> Results:
    """The results of a step, by name: codes int8, values float64 (float32 of an operation in floating point)."""
    for kind, function in _FUNCTIONS.items():
        if isinstance(step, kind):
            return function(step, tensors)
    raise EngineError(f"{step.name}: the reference knows no step of the kind {type(step).__name__}")


def steps_of(y: Tensor, grid: Grid, axis: int) -> Tensor:
    """In steps of a grid along `axis`, not rounded; float64."""
    return y / _along(torch.tensor(grid.scale, dtype=torch.float64, device=y.device), axis, y.dim())


def quantized(y: Tensor, grid: Grid, axis: int = 1) -> Tensor:
    return (steps_of(y, grid, axis).round() + grid.zero).clamp(grid.low, grid.high).to(torch.int8)


def real(source: Source, tensors: Tensors) -> Tensor:
    x = tensors[source.name].double()
    return x if source.grid is None else (x - source.grid.zero) * source.grid.scale[0]


def finished(sums: Tensor, epilogue: Epilogue, tensors: Tensors, axis: int) -> Tensor:
    e = epilogue
    factor, bias = (_along(t.to(sums.device), axis, sums.dim()) for t in (e.factor, e.bias))
    y = e.first(sums * factor + bias)
    if e.middle is not None:
        y = (quantized(y, e.middle, axis).double() - e.middle.zero) * e.middle.scale[0]
    if e.residual.name:
        y = y + real(e.residual, tensors)
    return e.second(y)


def written(y: Tensor, out: Output, axis: int = 1) -> Results:
    results: Results = {}
    if out.codes and out.grid is not None:
        results[out.codes] = quantized(y, out.grid, axis)
    if out.value:
        results[out.value] = y
    return results


def _along(vector: Tensor, axis: int, rank: int) -> Tensor:
    axis %= rank
    return vector if vector.numel() == 1 else vector.reshape([-1 if i == axis else 1 for i in range(rank)])


def _padded(x: Tensor, padding: Padding, value: float) -> Tensor:
    (above, below), (left, right) = padding
    return F.pad(x, (left, right, above, below), value=value)


def _convolution(step: Convolution, tensors: Tensors) -> Results:
    zero = step.x.grid.zero if step.x.grid else 0
    x = _padded(tensors[step.x.name].double() - zero, step.padding, 0.0)
    weight = step.weight.double().to(x.device)
    sums = F.conv2d(x, weight, None, step.stride, 0, step.dilation, step.groups)
    return written(finished(sums, step.epilogue, tensors, 1), step.epilogue.out, 1)


def _linear(step: Linear, tensors: Tensors) -> Results:
    zero = step.x.grid.zero if step.x.grid else 0
    sums = (tensors[step.x.name].double() - zero) @ step.weight.double().t().to(tensors[step.x.name].device)
    sums = sums.movedim(-1, step.axis)
    return written(finished(sums, step.epilogue, tensors, step.axis), step.epilogue.out, step.axis)


def _max_pool(step: MaxPool, tensors: Tensors) -> Results:
    x = _padded(tensors[step.x.name].double(), step.padding, -128.0)
    y = F.max_pool2d(x, step.kernel, step.stride, 0, step.dilation)
    return {step.out.codes: y.to(torch.int8)}


def _average_pool(step: AveragePool, tensors: Tensors) -> Results:
    x = real(step.x, tensors)
    padded = _padded(x, step.padding, 0.0)
    y = F.avg_pool2d(padded, step.kernel, step.stride)
    if not step.counts_padding:
        y = y / F.avg_pool2d(_padded(torch.ones_like(x), step.padding, 0.0), step.kernel, step.stride)
    found = written(y, step.out)
    return {
        name: value.reshape(tensors[name].shape) for name, value in found.items()
    }  # a mean may drop the image's axes


def _elementwise(step: Elementwise, tensors: Tensors) -> Results:
    y = real(step.x, tensors)
    if step.combination != "none":
        other = real(step.y, tensors)
        y = y + other if step.combination == "add" else y - other if step.combination == "sub" else y * other
    return written(step.activation(y), step.out)


def _layer_norm(step: LayerNorm, tensors: Tensors) -> Results:
    x = real(step.x, tensors)
    weight, bias = (None if t is None else t.double().to(x.device) for t in (step.weight, step.bias))
    return written(F.layer_norm(x, x.shape[-1:], weight, bias, step.epsilon), step.out, -1)


def _attention(step: Attention, tensors: Tensors) -> Results:
    q, k, v = (real(source, tensors) for source in (step.x, step.k, step.v))
    scores = (q @ k) * step.scale
    if step.mask is not None:
        mask = step.mask.double().to(q.device)
        repeats = len(scores) // len(mask) if mask.dim() == scores.dim() and len(mask) > 1 else 1
        scores = scores + mask.repeat(repeats, *[1] * (mask.dim() - 1))
    probabilities = quantized(torch.softmax(scores, -1), step.probabilities, -1).double()
    return written(probabilities * step.probabilities.scale[0] @ v, step.out, -1)


def _sampled_sum(step: SampledSum, tensors: Tensors) -> Results:
    parts = [
        F.grid_sample(tensors[image].double(), tensors[grid].double(), align_corners=step.aligned)
        for image, grid in zip(step.images, step.grids, strict=True)
    ]
    return written((torch.cat(parts, -1) * real(step.x, tensors)).sum(-1), step.out)


def _move(step: Move, tensors: Tensors) -> Results:
    return dict(zip(step.outputs, applied(step, tensors), strict=False))


def _pack_image(step: PackImage, tensors: Tensors) -> Results:
    grid = step.out.grid or Grid((1.0,))
    codes = quantized(real(step.x, tensors), grid)
    return {step.out.codes: packed_image(codes, step, tuple(tensors[step.out.codes].shape), grid.zero)}


def _copy(step: Copy, tensors: Tensors) -> Results:
    source = tensors[step.source] if isinstance(step.source, str) else step.source
    results = {step.target: source}
    return results if step.fill is None else {step.whole: torch.full_like(tensors[step.whole], step.fill), **results}


def _float_operation(step: FloatOperation, tensors: Tensors) -> Results:
    results = applied(step, {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    return dict(zip(step.outputs, results, strict=False))


def type_for(constants: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 where it does not hold the constants."""
    limits = torch.finfo(dtype)
    for value in constants:
        sizes = value.abs()[value.isfinite()] if value.is_floating_point() else value.new_zeros(0)
        if sizes.numel() and (sizes.max() > limits.max or 0 < sizes.max() < limits.tiny):
            return torch.float32
    return dtype


def fitted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dtype`, where numbers beyond its largest become that."""
    if not value.is_floating_point() or value.dtype == dtype:
        return value
    largest = torch.finfo(dtype).max
    return torch.where(value.isfinite(), value.clamp(-largest, largest), value).to(dtype)


def applied(step: Operation, tensors: Tensors) -> tuple[Tensor, ...]:
    """The result of an operation in torch, in the types of `tensors`; constants are taken to where those are."""
    given = [tensors[name] for name in step.reads]

    def placed(index: int, x: str | Tensor | None) -> Tensor | None:
        if isinstance(x, str):
            return tensors[x]
        moves = x is not None and given and not is_read_by_the_host(step.op, index, x)
        return x.to(given[0].device) if x is not None and moves else x

    inputs = [placed(index, x) for index, x in enumerate(step.inputs)]
    if step.op == "Activation":
        return (step.attributes["activation"](inputs[0]),)
    return apply(step.op, step.attributes, inputs)


_FUNCTIONS: dict[type[Step], Callable[..., Results]] = {
    PackImage: _pack_image,
    Copy: _copy,
    Convolution: _convolution,
    Linear: _linear,
    MaxPool: _max_pool,
    AveragePool: _average_pool,
    Elementwise: _elementwise,
    LayerNorm: _layer_norm,
    Attention: _attention,
    SampledSum: _sampled_sum,
    Move: _move,
    FloatOperation: _float_operation,
}
