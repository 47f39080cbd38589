"""Convolutions, products, pools, normalization and resizing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.onnx_ops.arithmetic import alike, mean_of
from compress.engines.cuda.onnx_ops.shapes import Attributes, Operation, numbers
from compress.errors import EngineError
from compress.onnx_graph.window import AVERAGE_POOLS, INTERPOLATIONS, MAX_POOLS, Window, read_window


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
    """Sizes of all axes of the result of a Resize."""
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


OPERATIONS: dict[str, Operation] = {
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
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "LRN": _lrn,
    "Resize": _resize,
}
