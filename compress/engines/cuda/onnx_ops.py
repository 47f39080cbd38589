"""ONNX operations as torch functions, also on tensors without data: element by element and reductions; layers; shapes.

What reads, moves and makes tensors; how a shape or a number is read from an input. A new operation is a function and
its row in `OPERATIONS`. Operations on codes are in `reference.py` and `bind.py`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.errors import EngineError, near_misses
from compress.onnx_graph import AVERAGE_POOLS, INTERPOLATIONS, MAX_POOLS, Window, read_window

Attributes = Mapping[str, Any]
Inputs = tuple[Tensor | None, ...]
# A function of the attributes, followed by the inputs in ONNX's order; an optional input that is left out is None.
Operation = Callable[..., Tensor | tuple[Tensor, ...]]

# Types of `onnx.TensorProto.DataType`, by their numbers.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


def given(inputs: Sequence[Tensor | None], index: int) -> Tensor | None:
    return inputs[index] if index < len(inputs) else None


def numbers(tensor: Tensor | None, *, of: str) -> list[Any]:
    """The values of a small input that decides about a shape."""
    if tensor is None:
        return []
    if tensor.is_meta:
        raise EngineError(
            f"{of} is computed from the network's input: only shapes that are fixed beforehand can be run"
        )
    return list(tensor.reshape(-1).tolist())


def axes_of(attributes: Attributes, axes: Tensor | None) -> list[int]:
    """Axes that are an attribute in older opsets and an input in newer ones; [] where there are none."""
    if "axes" in attributes:
        return [int(axis) for axis in attributes["axes"]]
    return [int(axis) for axis in numbers(axes, of="an operator's axes")]


def _shape(attributes: Attributes, x: Tensor) -> Tensor:
    sizes = list(x.shape)
    start, end = int(attributes.get("start", 0)), attributes.get("end")
    return torch.tensor(sizes[start : None if end is None else int(end)], dtype=torch.int64)


def _reshape(attributes: Attributes, x: Tensor, target: Tensor | None = None) -> Tensor:
    sizes = [int(n) for n in numbers(target, of="the target of a Reshape")]
    if not attributes.get("allowzero", 0):
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(attributes: Attributes, x: Tensor) -> Tensor:
    axis = int(attributes.get("axis", 1))
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(attributes: Attributes, x: Tensor) -> Tensor:
    return x.permute(tuple(attributes.get("perm", range(x.dim() - 1, -1, -1))))


def _squeeze(attributes: Attributes, x: Tensor, chosen: Tensor | None = None) -> Tensor:
    axes = axes_of(attributes, chosen)
    return x.squeeze(tuple(axes)) if axes else x.squeeze()


def _unsqueeze(attributes: Attributes, x: Tensor, chosen: Tensor | None = None) -> Tensor:
    axes = axes_of(attributes, chosen)
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


def _concat(attributes: Attributes, *parts: Tensor) -> Tensor:
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1 and all(part.is_floating_point() for part in parts):
        lowest = min(kinds, key=lambda dtype: dtype.itemsize)
        parts = tuple(part.to(lowest) for part in parts)
    return torch.cat(parts, int(attributes["axis"]))


def _split(attributes: Attributes, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = int(attributes.get("axis", 0))
    sizes = [int(n) for n in attributes.get("split", ())] or [
        int(n) for n in numbers(lengths, of="the sizes of a Split")
    ]
    if not sizes:
        count = int(attributes.get("num_outputs", 0) or attributes.get("outputs", 2))
        sizes = [len(part) for part in torch.arange(x.shape[axis]).chunk(count)]
    return tuple(torch.split(x, sizes, axis))


def _slice(attributes: Attributes, x: Tensor, *bounds: Tensor | None) -> Tensor:
    if "starts" in attributes:
        starts, ends = list(attributes["starts"]), list(attributes["ends"])
        axes, steps = list(attributes.get("axes", range(len(starts)))), [1] * len(starts)
    else:
        starts, ends, axes, steps = (
            [int(n) for n in numbers(given(bounds, i), of="the range of a Slice")] for i in range(4)
        )
        axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= x.dim()
        chosen = range(x.shape[axis])[slice(start, end, step)]
        if step < 0:  # a negative step counts back; an end before the first element is none
            size = x.shape[axis]
            start = min(start + size if start < 0 else start, size - 1)
            end = max(end + size if end < 0 else end, -1)
            x = x.index_select(axis, torch.arange(start, min(end, start), step, device=x.device))
        else:
            first = chosen.start if len(chosen) else 0
            x = x.narrow(axis, first, len(chosen)) if step == 1 else _strided(x, axis, chosen)
    return x


def _strided(x: Tensor, axis: int, chosen: range) -> Tensor:
    index: list[slice] = [slice(None)] * x.dim()
    index[axis] = slice(chosen.start, chosen.stop, chosen.step)
    return x[tuple(index)]


def _gather(attributes: Attributes, x: Tensor, places: Tensor) -> Tensor:
    axis = int(attributes.get("axis", 0))
    axis %= x.dim()
    if places.numel() == 1 and not places.is_meta:
        found = x.narrow(axis, int(places.item()) % x.shape[axis], 1)
        return found.squeeze(axis) if places.dim() == 0 else found
    flat = places.reshape(-1).to(x.device)
    flat = torch.where(flat < 0, flat + x.shape[axis], flat)
    found = x.index_select(axis, flat)
    return found.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])


def _gather_elements(attributes: Attributes, x: Tensor, places: Tensor) -> Tensor:
    axis = int(attributes.get("axis", 0))
    return torch.gather(x, axis, torch.where(places < 0, places + x.shape[axis], places).to(x.device))


def _gather_nd(attributes: Attributes, x: Tensor, places: Tensor) -> Tensor:
    places, shared = places.to(x.device), int(attributes.get("batch_dims", 0))
    if not shared:
        return x[tuple(places.unbind(-1))]
    rows, places = x.flatten(0, shared - 1), places.flatten(0, shared - 1)
    number = torch.arange(len(rows), device=x.device).reshape(-1, *(1,) * (places.dim() - 2))
    found = rows[(number.expand(places.shape[:-1]), *places.unbind(-1))]
    return found.reshape(*x.shape[:shared], *found.shape[1:])


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scattered(attributes: Attributes, x: Tensor, axis: int, places: Tensor, updates: Tensor) -> Tensor:
    x, places, updates = x.to(updates.device), places.to(updates.device), updates.to(x.dtype)
    how = attributes.get("reduction", "none")
    if how == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCTIONS[how])


def _scatter_elements(attributes: Attributes, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    axis = int(attributes.get("axis", 0)) % x.dim()
    return _scattered(attributes, x, axis, torch.where(places < 0, places + x.shape[axis], places), updates)


def _scatter_nd(attributes: Attributes, x: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    depth, row = places.shape[-1], torch.zeros(places.shape[:-1], dtype=torch.int64, device=places.device)
    for i, size in enumerate(x.shape[:depth]):
        row = row * size + places[..., i].remainder(size)
    width = math.prod(x.shape[depth:])
    new = updates.reshape(row.numel(), width)
    rows = x.reshape(math.prod(x.shape[:depth]), width)
    return _scattered(attributes, rows, 0, row.reshape(-1, 1).expand(new.shape), new).reshape(x.shape)


def _grid_sample(attributes: Attributes, x: Tensor, grid: Tensor) -> Tensor:
    mode = str(attributes.get("mode", "linear"))
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    if mode == "bicubic" and x.dim() > 4:
        raise EngineError("a cubic GridSample of volumes is not supported; run the file with 'onnxruntime'")
    wide = torch.promote_types(x.dtype, torch.float32)  # places of a large image need more than half precision
    edges, corners = attributes.get("padding_mode", "zeros"), bool(attributes.get("align_corners", 0))
    return F.grid_sample(x.to(wide), grid.to(wide), mode, edges, corners).to(x.dtype)


def _affine_grid(attributes: Attributes, theta: Tensor, size: Tensor) -> Tensor:
    shape = [int(n) for n in numbers(size, of="the size of an AffineGrid")]
    return F.affine_grid(theta, shape, bool(attributes.get("align_corners", 0)))


def _expand(attributes: Attributes, x: Tensor, target: Tensor | None = None) -> Tensor:
    sizes = [int(n) for n in numbers(target, of="the target of an Expand")]
    return x.expand(torch.broadcast_shapes(x.shape, tuple(sizes)))


def _tile(attributes: Attributes, x: Tensor, repeats: Tensor | None = None) -> Tensor:
    return x.repeat([int(n) for n in numbers(repeats, of="the repeats of a Tile")])


def pads_of(attributes: Attributes, inputs: Inputs, rank: int) -> list[tuple[int, int]]:
    """(before, after) of each axis of a Pad."""
    pads = [int(n) for n in attributes.get("pads", ())] or [
        int(n) for n in numbers(given(inputs, 1), of="the amounts of a Pad")
    ]
    axes = [int(n) % rank for n in numbers(given(inputs, 3), of="the axes of a Pad")] or list(range(rank))
    found = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        found[axis] = (pads[i], pads[len(axes) + i])
    return found


def _pad(attributes: Attributes, x: Tensor, *others: Tensor | None) -> Tensor:
    pairs = pads_of(attributes, (x, *others), x.dim())
    mode = attributes.get("mode", "constant")
    flat = [n for pair in reversed(pairs) for n in pair]
    if mode == "constant":
        value = given(others, 1)
        number = float(attributes.get("value", 0.0)) if value is None else value.item()
        return F.pad(x, flat, value=number)
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in names:
        raise EngineError(f"Pad of mode {mode!r} is not supported; the modes are constant, {', '.join(names)}")
    while len(flat) > 2 * (x.dim() - 2) and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    return F.pad(x, flat, mode=names[mode])


def _constant_of_shape(attributes: Attributes, target: Tensor | None = None) -> Tensor:
    value = attributes.get("value", torch.zeros(1))
    sizes = [int(n) for n in numbers(target, of="the size of a ConstantOfShape")]
    return torch.full(sizes, value.reshape(-1)[0].item(), dtype=value.dtype)


def _constant(attributes: Attributes) -> Tensor:
    for name, value in attributes.items():
        if name == "value":
            return torch.as_tensor(value)
        if name in {"value_float", "value_floats"}:
            return torch.tensor(value, dtype=torch.float32)
        if name in {"value_int", "value_ints"}:
            return torch.tensor(value, dtype=torch.int64)
    raise EngineError("a Constant of text or of a sparse tensor is not supported")


def _range(attributes: Attributes, start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype)


def _depth_to_space(attributes: Attributes, x: Tensor) -> Tensor:
    b = int(attributes["blocksize"])
    n, c, h, w = x.shape
    if attributes.get("mode", "DCR") == "CRD":
        return x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // b**2, h * b, w * b)
    return x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)


def _space_to_depth(attributes: Attributes, x: Tensor) -> Tensor:
    b = int(attributes["blocksize"])
    n, c, h, w = x.shape
    if attributes.get("mode", "DCR") != "DCR":
        raise EngineError("SpaceToDepth of another mode than DCR is not supported; run the file with 'onnxruntime'")
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b**2, h // b, w // b)


def _trilu(attributes: Attributes, x: Tensor, k: Tensor | None = None) -> Tensor:
    function = torch.triu if attributes.get("upper", 1) else torch.tril
    return function(x, 0 if k is None else int(k.item()))


def _one_hot(attributes: Attributes, places: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    hot = F.one_hot(places.long() % int(depth.item()), int(depth.item()))
    axis = int(attributes.get("axis", -1))
    found = torch.where(hot.bool(), values[1], values[0])
    return found if axis in (-1, places.dim()) else found.movedim(-1, axis)


def _eye_like(attributes: Attributes, x: Tensor) -> Tensor:
    if attributes.get("k", 0):
        raise EngineError("EyeLike off the main diagonal is not supported; run the file with 'onnxruntime'")
    dtype = DTYPES[int(attributes["dtype"])] if "dtype" in attributes else x.dtype
    return torch.eye(x.shape[0], x.shape[1], dtype=dtype)


def alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of one type: a float32 constant beside float16 activations becomes float16."""
    if x.dtype != y.dtype and x.is_floating_point() and y.is_floating_point():
        lower = x.dtype if x.element_size() <= y.element_size() else y.dtype
        return x.to(lower), y.to(lower)
    return x, y


def mean_of(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """A mean that is summed in float32 at least."""
    return x.mean(axes, keepdim=keep, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _unary(function: Callable[[Tensor], Tensor]) -> Operation:
    return lambda attributes, x, *others: function(x)


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return lambda attributes, x, y: function(*alike(x, y))


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return lambda attributes, *inputs: functools.reduce(lambda x, y: function(*alike(x, y)), inputs)


def _variadic_mean(attributes: Attributes, *inputs: Tensor) -> Tensor:
    return functools.reduce(lambda x, y: torch.add(*alike(x, y)), inputs) / len(inputs)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    """A quotient; integers are divided with truncation towards zero."""
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _modulo(attributes: Attributes, x: Tensor, y: Tensor) -> Tensor:
    function = torch.fmod if attributes.get("fmod", 0) else torch.remainder
    return function(x, y)


def _clip(attributes: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds = [attributes.get("min"), attributes.get("max")]
    for i, bound in enumerate((low, high)):
        if bound is not None:
            bounds[i] = bound.item() if not bound.is_meta else None
            if bound.is_meta and not x.is_meta:
                raise EngineError("the bounds of a Clip are computed from the network's input: they must be constants")
    return x if bounds == [None, None] else torch.clamp(x, *bounds)


def _gelu(attributes: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=attributes.get("approximate", "none"))


def _prelu(attributes: Attributes, x: Tensor, slope: Tensor) -> Tensor:
    x, slope = alike(x, slope)
    return torch.where(x < 0, x * slope, x)


def _hard_sigmoid(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.clamp(attributes.get("alpha", 0.2) * x + attributes.get("beta", 0.5), 0, 1)


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Operation:
    return lambda attributes, x: function(x, int(attributes.get("axis", -1)))


def _cast(attributes: Attributes, x: Tensor) -> Tensor:
    number = int(attributes["to"])
    if number not in DTYPES:
        raise EngineError(f"Cast to ONNX type {number} is not supported; the types are {sorted(DTYPES)}")
    return x.to(DTYPES[number])


def _where(attributes: Attributes, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition.bool(), *alike(x, y))


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operation:
    def run(attributes: Attributes, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        axes = axes_of(attributes, chosen)
        if not axes and attributes.get("noop_with_empty_axes", 0):
            return x
        return function(x, axes or list(range(x.dim())), bool(attributes.get("keepdims", 1)))

    return run


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _arg(function: Callable[..., Tensor]) -> Operation:
    def run(attributes: Attributes, x: Tensor) -> Tensor:
        axis, keep = int(attributes.get("axis", 0)), bool(attributes.get("keepdims", 1))
        if attributes.get("select_last_index", 0):
            return x.shape[axis] - 1 - function(x.flip(axis), axis, keep)
        return function(x, axis, keep)

    return run


def _cumulative_sum(attributes: Attributes, x: Tensor, axis: Tensor) -> Tensor:
    place = int(axis.item())
    x = x.flip(place) if attributes.get("reverse", 0) else x
    found = x.cumsum(place, dtype=x.dtype) - (x if attributes.get("exclusive", 0) else 0)
    return found.flip(place) if attributes.get("reverse", 0) else found


def _root_mean_square_norm(attributes: Attributes, x: Tensor, scale: Tensor) -> Tensor:
    axis = int(attributes.get("axis", -1)) % x.dim()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    power = wide.square().mean(list(range(axis, x.dim())), keepdim=True)
    x, scale = alike((wide * torch.rsqrt(power + attributes.get("epsilon", 1e-5))).to(x.dtype), scale)
    return x * scale


def _mean_variance_norm(attributes: Attributes, x: Tensor) -> Tensor:
    axes = [int(n) for n in attributes.get("axes", (0, 2, 3))]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(axes, keepdim=True)
    return (centered / (centered.square().mean(axes, keepdim=True).sqrt() + 1e-9)).to(x.dtype)


def _shrink(attributes: Attributes, x: Tensor) -> Tensor:
    bias, limit = attributes.get("bias", 0.0), attributes.get("lambd", 0.5)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, torch.zeros_like(x)))


def _hardmax(attributes: Attributes, x: Tensor) -> Tensor:
    axis = int(attributes.get("axis", -1))
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


def _is_infinite(attributes: Attributes, x: Tensor) -> Tensor:
    above, below = attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)
    return torch.isinf(x) & ((x > 0) & bool(above) | (x < 0) & bool(below))


def _top_k(attributes: Attributes, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Stable order: of equal values the first comes first."""
    axis, count = int(attributes.get("axis", -1)), int(k.item())
    largest = bool(attributes.get("largest", 1))
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count), places.narrow(axis, 0, count)


def _selu(attributes: Attributes, x: Tensor) -> Tensor:
    alpha, gamma = (
        attributes.get("alpha", 1.67326319217681884765625),
        attributes.get("gamma", 1.05070102214813232421875),
    )
    return gamma * F.elu(x, alpha)


def _padded(x: Tensor, window: Window) -> tuple[Tensor, Sequence[int]]:
    """(`x` padded where the two ends of an axis differ, the padding that is left to the operation)."""
    if window.padding is not None:
        return x, window.padding
    return F.pad(x, window.sides), [0] * len(window.pads)


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _conv(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    if rank not in _CONVOLUTIONS:
        raise EngineError(f"a convolution over {rank} axes is not supported; they may have 1, 2 or 3")
    window = read_window(attributes, x.shape[2:], weight.shape[2:])
    x, padding = _padded(x, window)
    return _CONVOLUTIONS[rank](
        x,
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        window.strides,
        padding,
        window.dilations,
        int(attributes.get("group", 1)),
    )


def _conv_transpose(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = x.dim() - 2
    if attributes.get("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in attributes or rank not in _TRANSPOSED:
        raise EngineError("a ConvTranspose with auto_pad or output_shape is not supported; export it with pads")
    pads = list(attributes.get("pads", [0] * 2 * rank))
    extra = list(attributes.get("output_padding", [0] * rank))
    crop = [pads[rank + i] - pads[i] for i in range(rank)]  # torch pads both ends alike: the rest is cut off
    if any(n < 0 for n in crop):
        raise EngineError("a ConvTranspose with more padding before than after is not supported")
    y = _TRANSPOSED[rank](
        x,
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        list(attributes.get("strides", [1] * rank)),
        pads[:rank],
        extra,
        int(attributes.get("group", 1)),
        list(attributes.get("dilations", [1] * rank)),
    )
    for i, n in enumerate(crop):
        y = y.narrow(2 + i, 0, y.shape[2 + i] - n)
    return y


def _gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.t() if attributes.get("transA", 0) else a
    b = b.t() if attributes.get("transB", 0) else b
    y = attributes.get("alpha", 1.0) * (a @ b.to(a.dtype))
    return y if c is None else y + attributes.get("beta", 1.0) * c.to(a.dtype)


def _einsum(attributes: Attributes, *inputs: Tensor) -> Tensor:
    return torch.einsum(attributes["equation"], *inputs)


def _max_pool(attributes: Attributes, x: Tensor) -> Tensor:
    window = read_window(attributes, x.shape[2:])
    padding = window.pool_padding
    if padding is None:
        lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        x, padding = F.pad(x, window.sides, value=lowest), (0,) * len(window.pads)
    pool = MAX_POOLS[len(window.kernel)]
    return pool(x, window.kernel, window.strides, padding, window.dilations, window.ceil)


def _average_pool(attributes: Attributes, x: Tensor) -> Tensor:
    window = read_window(attributes, x.shape[2:])
    if set(window.dilations) != {1}:
        raise EngineError("an AveragePool with dilation is not supported; run the file with 'onnxruntime'")
    counts, pool = bool(attributes.get("count_include_pad", 0)), AVERAGE_POOLS[len(window.kernel)]
    if window.pool_padding is not None:
        return pool(x, window.kernel, window.strides, window.pool_padding, window.ceil, counts)
    total = pool(F.pad(x, window.sides), window.kernel, window.strides, 0, window.ceil)
    if counts:
        return total
    return total / pool(F.pad(torch.ones_like(x), window.sides), window.kernel, window.strides, 0, window.ceil)


def _layer_norm(attributes: Attributes, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    axis = int(attributes.get("axis", -1)) % x.dim()
    sizes = list(x.shape[axis:])
    w, b = (None if t is None else t.to(x.dtype).expand(sizes) for t in (weight, bias))
    return F.layer_norm(x, sizes, w, b, float(attributes.get("epsilon", 1e-5)))


def _instance_norm(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(
        x, weight=weight.to(x.dtype), bias=bias.to(x.dtype), eps=float(attributes.get("epsilon", 1e-5))
    )


def _group_norm(attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups, eps = int(attributes["num_groups"]), float(attributes.get("epsilon", 1e-5))
    if weight.numel() != x.shape[1]:  # factors of groups, before opset 21
        weight, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (weight, bias))
    return F.group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype), eps)


def _batch_norm(
    attributes: Attributes, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if attributes.get("training_mode", 0):
        raise EngineError("a BatchNormalization in training mode is not supported; export the model in eval mode")
    eps = float(attributes.get("epsilon", 1e-5))
    factor = weight.double() / torch.sqrt(variance.double() + eps)
    offset = bias.double() - mean.double() * factor
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return x * factor.to(x.dtype).reshape(shape) + offset.to(x.dtype).reshape(shape)


def _lrn(attributes: Attributes, x: Tensor) -> Tensor:
    return F.local_response_norm(
        x,
        int(attributes["size"]),
        float(attributes.get("alpha", 1e-4)),
        float(attributes.get("beta", 0.75)),
        float(attributes.get("bias", 1.0)),
    )


def _resize_sizes(
    attributes: Attributes, scales: Sequence[float], sizes: Sequence[int], shape: Sequence[int]
) -> list[int]:
    axes = [int(n) % len(shape) for n in attributes.get("axes", range(len(shape)))]
    found = list(shape)
    for i, axis in enumerate(axes):
        found[axis] = sizes[i] if sizes else int(shape[axis] * scales[i])
    return found


def _resize(
    attributes: Attributes,
    x: Tensor,
    roi: Tensor | None = None,
    factors: Tensor | None = None,
    target: Tensor | None = None,
) -> Tensor:
    scales = [float(n) for n in numbers(factors, of="the scales of a Resize")]
    sizes = _resize_sizes(attributes, scales, numbers(target, of="the sizes of a Resize"), x.shape)
    mode = attributes.get("mode", "nearest")
    places = attributes.get("coordinate_transformation_mode", "half_pixel")
    if sizes[:2] != list(x.shape[:2]) or attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise EngineError("a Resize of batch or channels, or one that keeps an aspect ratio, is not supported")
    if mode == "nearest":
        if not _is_plain_nearest(attributes, places, x.shape, sizes):
            raise EngineError(f"a nearest Resize with {places!r} coordinates is not supported; run 'onnxruntime'")
        return _nearest(x, sizes)
    whole = not scales or all(n * scale == m for n, scale, m in zip(x.shape, scales, sizes, strict=False))
    plain = places in {"half_pixel", "pytorch_half_pixel", "align_corners"} and not attributes.get("antialias", 0)
    plain = plain and whole and (places == "half_pixel" or 1 not in sizes[2:])
    names = INTERPOLATIONS.get(mode, {})
    if not plain or x.dim() - 2 not in names or attributes.get("cubic_coeff_a", -0.75) != -0.75:
        raise EngineError(f"a Resize of mode {mode!r} with {places!r} coordinates is not supported; run 'onnxruntime'")
    return F.interpolate(x, sizes[2:], mode=names[x.dim() - 2], align_corners=places == "align_corners")


def _is_plain_nearest(attributes: Attributes, places: str, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """True if a nearest Resize rounds positions down, as torch does, or repeats every pixel."""
    rounding = attributes.get("nearest_mode", "round_prefer_floor")
    factors = {m // n for n, m in zip(shape, sizes, strict=True)}
    repeats = all(m % n == 0 for n, m in zip(shape, sizes, strict=True))
    if places == "asymmetric":
        return bool(rounding == "floor" or (repeats and factors <= {1, 2} and rounding == "round_prefer_floor"))
    return places == "half_pixel" and repeats and rounding in {"round_prefer_floor", "round_prefer_ceil"}


def _nearest(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Nearest neighbours, of any type; whole factors are repetitions."""
    for axis in range(2, x.dim()):
        if sizes[axis] % x.shape[axis] == 0:
            x = x.repeat_interleave(sizes[axis] // x.shape[axis], dim=axis)
        else:
            places = torch.arange(sizes[axis], device=x.device) * x.shape[axis] // sizes[axis]
            x = x.index_select(axis, places)
    return x


# Operators of ONNX's default domain, by name.
OPERATIONS: dict[str, Operation] = {
    **{
        name: _unary(getattr(torch, name.lower()))
        for name in (
            "Abs",
            "Acos",
            "Asin",
            "Atan",
            "Sinh",
            "Cosh",
            "Asinh",
            "Acosh",
            "Atanh",
            "Ceil",
            "Cos",
            "Erf",
            "Exp",
            "Floor",
            "Log",
            "Neg",
            "Reciprocal",
            "Round",
            "Sigmoid",
            "Sign",
            "Sin",
            "Sqrt",
            "Tan",
            "Tanh",
            "IsNaN",
        )
    },
    "Relu": _unary(F.relu),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Mish": _unary(F.mish),
    "HardSwish": _unary(F.hardswish),
    "Not": _unary(torch.logical_not),
    "Identity": _unary(lambda x: x),
    "Dropout": _unary(lambda x: x),
    "Gelu": _gelu,
    "PRelu": _prelu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
    "Elu": lambda a, x: F.elu(x, a.get("alpha", 1.0)),
    "Celu": lambda a, x: F.celu(x, a.get("alpha", 1.0)),
    "Selu": _selu,
    "Clip": _clip,
    "ThresholdedRelu": lambda a, x: torch.where(x > a.get("alpha", 1.0), x, torch.zeros_like(x)),
    "Shrink": _shrink,
    "Swish": lambda a, x: x * torch.sigmoid(a.get("alpha", 1.0) * x),
    "IsInf": _is_infinite,
    "Cast": _cast,
    "CastLike": lambda a, x, y: x.to(y.dtype),
    "Where": _where,
    "Add": _binary(torch.add),
    "Sub": _binary(torch.sub),
    "Mul": _binary(torch.mul),
    "Div": _binary(_divide),
    "Mod": _modulo,
    "Pow": lambda a, x, y: torch.pow(x, y).to(x.dtype),
    "And": _binary(torch.logical_and),
    "Or": _binary(torch.logical_or),
    "Xor": _binary(torch.logical_xor),
    "Equal": _binary(torch.eq),
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "Min": _variadic(torch.minimum),
    "Max": _variadic(torch.maximum),
    "Sum": _variadic(torch.add),
    "Mean": _variadic_mean,
    "BitwiseAnd": _binary(torch.bitwise_and),
    "BitwiseOr": _binary(torch.bitwise_or),
    "BitwiseXor": _binary(torch.bitwise_xor),
    "BitwiseNot": _unary(torch.bitwise_not),
    "Softmax": _softmax(lambda x, axis: F.softmax(x, axis)),
    "LogSoftmax": _softmax(lambda x, axis: F.log_softmax(x, axis)),
    "Hardmax": _hardmax,
    "ReduceMean": _reduce(mean_of),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceProd": _reduce(_product),
    "ReduceL1": _reduce(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt()),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    "ReduceLogSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    "ReduceLogSumExp": _reduce(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "CumSum": _cumulative_sum,
    "TopK": _top_k,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": lambda a, x, y: torch.matmul(*alike(x, y)),
    "Einsum": _einsum,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda a, x: mean_of(x, list(range(2, x.dim())), True),
    "GlobalMaxPool": lambda a, x: x.amax(list(range(2, x.dim())), keepdim=True),
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _root_mean_square_norm,
    "MeanVarianceNormalization": _mean_variance_norm,
    "LpNormalization": lambda a, x: F.normalize(x, a.get("p", 2), int(a.get("axis", -1)), 1e-30),
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "LRN": _lrn,
    "Resize": _resize,
    "Shape": _shape,
    "Size": lambda a, x: torch.tensor(x.numel(), dtype=torch.int64),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "GridSample": _grid_sample,
    "AffineGrid": _affine_grid,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Trilu": _trilu,
    "OneHot": _one_hot,
    "EyeLike": _eye_like,
}

_READ_BY_THE_HOST: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Split": (1,),
    "Slice": (1, 2, 3, 4),
    "Expand": (1,),
    "Tile": (1,),
    "Pad": (1, 2, 3),
    "ConstantOfShape": (0,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Clip": (1, 2),
    "CumSum": (1,),
    "TopK": (1,),
    "Range": (0, 1, 2),
    "Trilu": (1,),
    "OneHot": (1,),
    "AffineGrid": (1,),
}


def is_read_by_the_host(kind: str, index: int, value: Tensor) -> bool:
    """Return True if an operation reads input number `index` on the host; that input must not lie on a GPU."""
    if kind == "Gather":
        return index == 1 and value.numel() == 1
    return index in ((1,) if kind.startswith("Reduce") else _READ_BY_THE_HOST.get(kind, ()))


@functools.cache
def _inputs_needed(operation: Operation) -> int:
    _, *inputs = inspect.signature(operation).parameters.values()
    return sum(x.default is x.empty and x.kind is not x.VAR_POSITIONAL for x in inputs)


def apply(kind: str, attributes: Attributes, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Run one ONNX operation, such as `Softmax`; an input that is left out is None."""
    operation = OPERATIONS.get(kind)
    if operation is None:
        raise EngineError(
            f"the operator {kind} is not supported{near_misses(kind, OPERATIONS)}; run the file with 'onnxruntime'"
        )
    for index in range(_inputs_needed(operation)):
        if given(inputs, index) is None:
            raise EngineError(f"input {index} of an operator is missing: the file is not a valid ONNX model")
    result = operation(attributes, *inputs)
    return result if isinstance(result, tuple) else (result,)
