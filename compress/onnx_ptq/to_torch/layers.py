"""Operators with parameters of their own, as modules at the path of the node's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.errors import QuantizationError
from compress.onnx_graph.graph import attribute
from compress.onnx_graph.window import Window, attributes_of, read_window
from compress.onnx_ptq.compounds import Compound
from compress.onnx_ptq.to_torch.builder import Builder, Place, Value

Layer = TypeVar("Layer", bound=nn.Module)

_CONVOLUTIONS: dict[int, Callable[..., Any]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, Callable[..., Any]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS: dict[int, Callable[..., Any]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCE: dict[int, Callable[..., Any]] = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


def convolution(b: Builder, node: onnx.NodeProto) -> Value:
    weight, x = constant(b, node.input[1]), b.tensor(node.input[0])
    form, groups = window(b, node, weight.shape[2:]), attribute(node, "group", 1)
    padding = form.padding
    if padding is None:
        x, padding = b.call(F.pad, x, form.sides), (0,) * len(form.pads)
    module = _CONVOLUTIONS[len(form.kernel)](
        weight.shape[1] * groups,
        weight.shape[0],
        form.kernel,
        form.strides,
        padding,
        form.dilations,
        groups,
        bias=_has(node, 2),
    )
    return b.layer(node, _filled(module, weight, _optional(b, node, 2)), x)


def transposed(b: Builder, node: onnx.NodeProto) -> Value:
    weight = constant(b, node.input[1])
    mode = attribute(node, "auto_pad", b"NOTSET").decode()
    if mode not in {"NOTSET", "VALID"}:
        raise QuantizationError(f"its auto_pad is {mode}")
    form, groups = window(b, node, weight.shape[2:]), attribute(node, "group", 1)
    if form.padding is None or attribute(node, "output_shape", None):
        raise QuantizationError("its padding differs from side to side")
    extra = attribute(node, "output_padding", [0] * len(form.kernel))
    module = _TRANSPOSED[len(form.kernel)](
        weight.shape[0],
        weight.shape[1] * groups,
        form.kernel,
        form.strides,
        form.padding,
        tuple(extra),
        groups,
        bias=_has(node, 2),
        dilation=form.dilations,
    )
    return b.layer(node, _filled(module, weight, _optional(b, node, 2)), b.tensor(node.input[0]))


def product(b: Builder, node: onnx.NodeProto) -> Value:
    """Convert Gemm and MatMul: a linear layer if one side is a matrix of constants, else a product of activations."""
    x, w = node.input[0], node.input[1]
    gemm = node.op_type == "Gemm"
    if gemm and (attribute(node, "transA", 0) or any(attribute(node, key, 1.0) != 1.0 for key in ("alpha", "beta"))):
        raise QuantizationError("it transposes its first input, or has a factor")
    matrix = w in b.index.unchanging and x not in b.index.unchanging and len(b.shapes.get(w, ())) == 2
    if matrix:
        weight, flipped = constant(b, w), not (gemm and attribute(node, "transB", 0))
        module = linear(weight.T if flipped else weight, _optional(b, node, 2))
        return b.layer(node, module, b.tensor(x), weight=Place(node=node.name, input=1, transposed=flipped))
    second = b.tensor(w)
    if gemm and attribute(node, "transB", 0):
        second = b.call("transpose", second, -2, -1)
    if _has(node, 2):
        return b.call(torch.addmm, b.tensor(node.input[2]), b.tensor(x), second)
    return b.call(torch.matmul, b.tensor(x), second)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with these parameters, (out, in) and (out,)."""
    out = weight.shape[0]
    module = nn.Linear(weight.shape[1], out, bias=bias is not None)
    return _filled(module, weight, None if bias is None else bias.reshape(-1).expand(out))


def linear_with_sum(b: Builder, found: Compound) -> Value:
    node, add = found.nodes[:2]
    place = 1 - list(add.input).index(node.output[0])
    return b.layer(
        node,
        linear(constant(b, node.input[1]).T, constant(b, add.input[place])),
        b.tensor(found.input),
        weight=Place(node=node.name, input=1, transposed=True),
        bias=Place(node=add.name, input=place),
    )


def batch_norm(b: Builder, node: onnx.NodeProto) -> Value:
    scale, shift, mean, variance = (constant(b, name) for name in node.input[1:5])
    module = _NORMS[len(b.shapes[node.input[0]])](len(scale), eps=attribute(node, "epsilon", 1e-5))
    _filled(module, scale, shift)
    module.running_mean, module.running_var = mean.clone(), variance.clone()
    return b.layer(node, module, b.tensor(node.input[0]))


def instance_norm(b: Builder, node: onnx.NodeProto) -> Value:
    scale, shift = (constant(b, name) for name in node.input[1:3])
    kind = _INSTANCE[len(b.shapes[node.input[0]])]
    module = kind(len(scale), eps=attribute(node, "epsilon", 1e-5), affine=True)
    return b.layer(node, _filled(module, scale, shift), b.tensor(node.input[0]))


def group_norm(b: Builder, node: onnx.NodeProto) -> Value:
    """Convert GroupNormalization, whose factors are of channels from opset 21 on."""
    scale, shift = (constant(b, name) for name in node.input[1:3])
    groups = attribute(node, "num_groups", 1)
    if len(scale) != b.shapes[node.input[0]][1]:
        scale, shift = (v.repeat_interleave(b.shapes[node.input[0]][1] // groups) for v in (scale, shift))
    module = nn.GroupNorm(groups, len(scale), eps=attribute(node, "epsilon", 1e-5))
    return b.layer(node, _filled(module, scale, shift), b.tensor(node.input[0]))


def layer_norm(b: Builder, node: onnx.NodeProto) -> Value:
    shape = b.shapes[node.input[0]]
    weight, bias = constant(b, node.input[1]), _optional(b, node, 2)
    axis, epsilon = attribute(node, "axis", -1), attribute(node, "epsilon", 1e-5)
    return b.layer(node, _layer_norm(shape[axis % len(shape) :], weight, bias, epsilon), b.tensor(node.input[0]))


def rms_norm(b: Builder, node: onnx.NodeProto) -> Value:
    shape, weight = b.shapes[node.input[0]], constant(b, node.input[1])
    normalized = shape[attribute(node, "axis", -1) % len(shape) :]
    module = nn.RMSNorm(normalized, eps=attribute(node, "epsilon", 1e-5))
    with torch.no_grad():
        module.weight.copy_(weight.expand(normalized))
    return b.layer(node, module, b.tensor(node.input[0]))


def written_layer_norm(b: Builder, found: Compound) -> Value:
    """Convert a LayerNorm that is written as means, a root and a quotient."""
    after = found.nodes[[part.op_type for part in found.nodes].index("Sqrt") + 2 :]
    places = {}
    for part in after:
        place = next(i for i, name in enumerate(part.input) if name in b.index.unchanging)
        places["weight" if part.op_type == "Mul" else "bias"] = Place(node=part.name, input=place)
    values = {name: constant(b, after[i].input[place.input]) for i, (name, place) in enumerate(places.items())}
    root = next(part for part in found.nodes if part.op_type == "Add" and part not in after)
    epsilon = next(number for name in root.input if (number := b.index.number(name)) is not None)
    module = _layer_norm(b.shapes[found.input][-1:], values.get("weight"), values.get("bias"), epsilon)
    return b.layer(found.nodes[0], module, b.tensor(found.input), **places)


def plain_layer_norm(b: Builder, found: Compound) -> bool:
    """Return True if a written LayerNorm is over the last axis."""
    node = found.nodes[0]
    shape = b.shapes.get(found.input)
    given = b.index.value(node.input[1]) if len(node.input) > 1 else attribute(node, "axes", None)
    return (
        shape is not None and given is not None and [int(a) % len(shape) for a in np.asarray(given)] == [len(shape) - 1]
    )


def _layer_norm(shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, epsilon: float) -> nn.LayerNorm:
    module = nn.LayerNorm(shape, eps=epsilon, elementwise_affine=weight is not None, bias=bias is not None)
    if weight is not None:
        given = [part.reshape(part.shape[-len(shape) :]).expand(shape) for part in (weight, bias) if part is not None]
        _filled(module, given[0], given[1] if len(given) > 1 else None)
    return module


def prelu(b: Builder, node: onnx.NodeProto) -> Value:
    slope = constant(b, node.input[1]).reshape(-1)
    module = nn.PReLU(len(slope))
    with torch.no_grad():
        module.weight.copy_(slope)
    return b.layer(node, module, b.tensor(node.input[0]))


def window(b: Builder, node: onnx.NodeProto, kernel: Sequence[int] | None = None) -> Window:
    return read_window(attributes_of(node), b.shapes.get(node.input[0], ())[2:], kernel)


def constant(b: Builder, name: str) -> Tensor:
    """Return the value of a constant in float32.

    Raises:
        QuantizationError: the file computes it when it runs.
    """
    value: NDArray[Any] | None = b.index.value(name) if name in b.index.unchanging else None
    if value is None:
        raise QuantizationError(f"its parameter {name!r} is computed when the file runs")
    return torch.from_numpy(np.array(value, np.float32))


def _optional(b: Builder, node: onnx.NodeProto, place: int) -> Tensor | None:
    return constant(b, node.input[place]) if _has(node, place) else None


def _has(node: onnx.NodeProto, place: int) -> bool:
    return len(node.input) > place and bool(node.input[place])


def _filled(module: Layer, weight: Tensor, bias: Tensor | None) -> Layer:
    with torch.no_grad():
        module.get_parameter("weight").copy_(weight)
        if bias is not None:
            own = module.get_parameter("bias")
            own.copy_(bias.reshape(own.shape))
    return module


LAYERS: dict[str, Callable[[Builder, onnx.NodeProto], Value]] = {
    "Conv": convolution,
    "ConvTranspose": transposed,
    "Gemm": product,
    "MatMul": product,
    "BatchNormalization": batch_norm,
    "InstanceNormalization": instance_norm,
    "GroupNormalization": group_norm,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "PRelu": prelu,
}
"""Converters of operators with parameters."""
