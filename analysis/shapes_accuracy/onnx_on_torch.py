"""An exported ONNX file, executed by torch node by node, so that a GPU can evaluate it on many images.

It uses the integers, scales and zero points of the file alone. Where both inputs of a convolution or a matrix product
are dequantized integers, the integers are multiplied and summed (8-bit numbers are exact in TF32, and products are
summed in float32), and the scales are applied to the sum, as an integer engine does. Everything else is computed in
float32. An operation without an implementation here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor

_LIMITS = {onnx.TensorProto.INT8: (-128, 127), onnx.TensorProto.UINT8: (0, 255)}
Attributes = dict[str, Any]


@dataclass(frozen=True)
class _Integers:
    """A dequantized tensor as float32 integers and a scale that broadcasts along `axis`."""

    values: Tensor
    scale: Tensor
    axis: int

    def real(self) -> Tensor:
        return self.values * self.spread(self.values.ndim, self.axis)

    def spread(self, ndim: int, axis: int) -> Tensor:
        """Return the scale, shaped to multiply a tensor of `ndim` dimensions along `axis`."""
        return self.scale if self.scale.ndim == 0 else self.scale.view([-1 if i == axis else 1 for i in range(ndim)])


Value = Any  # a Tensor, _Integers, or None for an optional input that is missing


class OnnxOnTorch:
    """A file with one input and one output, as a function of float32 image batches (N, C, H, W) on `device`.

    Raises:
        NotImplementedError: an operation, or a form of one, that is not implemented here.
    """

    def __init__(self, path: Path | str, device: torch.device | str) -> None:
        graph = onnx.load(str(path)).graph
        self.input, self.output = graph.input[0].name, graph.output[0].name
        self.nodes = [(n.op_type, _attributes(n), list(n.input), n.output[0]) for n in graph.node]
        unknown = sorted({kind for kind, *_ in self.nodes} - _OPERATIONS.keys())
        if unknown:
            raise NotImplementedError(f"{path} holds operations that are not implemented here: {', '.join(unknown)}")
        self.types = {t.name: t.data_type for t in graph.initializer}
        self.constants = {t.name: _tensor(t).to(device) for t in graph.initializer}
        uses = [name for _, _, inputs, _ in self.nodes for name in inputs]
        self.last = {name: at for at, (_, _, inputs, _) in enumerate(self.nodes) for name in inputs if name in uses}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        values: dict[str, Value] = {**self.constants, self.input: images}
        for at, (kind, attributes, inputs, result) in enumerate(self.nodes):
            if kind == "QuantizeLinear":
                attributes = attributes | {"type": self._integer_type(attributes, inputs)}
            values[result] = _OPERATIONS[kind](attributes, [values[name] if name else None for name in inputs])
            for name in inputs:
                if self.last.get(name) == at and name not in self.constants:
                    values.pop(name, None)
        return _real(values[self.output])

    def _integer_type(self, attributes: Attributes, inputs: list[str]) -> int:
        """Return the integer type of a QuantizeLinear, from its zero point or its attribute."""
        named = self.types.get(inputs[2]) if len(inputs) > 2 else None
        return int(named or attributes.get("output_dtype") or onnx.TensorProto.UINT8)


def _attributes(node: onnx.NodeProto) -> Attributes:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _tensor(proto: onnx.TensorProto) -> Tensor:
    array = numpy_helper.to_array(proto)
    wide = array.astype(np.int64 if proto.data_type == onnx.TensorProto.INT64 else np.float32, order="C")
    return torch.from_numpy(wide)


def _real(value: Value) -> Any:
    return value.real() if isinstance(value, _Integers) else value


def _quantize(attributes: Attributes, inputs: list[Value]) -> Tensor:
    x, scale = _real(inputs[0]), inputs[1]
    if scale.ndim or attributes["type"] not in _LIMITS:
        raise NotImplementedError("QuantizeLinear along an axis, or to another type than 8-bit integers")
    zero = inputs[2] if len(inputs) > 2 and inputs[2] is not None else 0.0
    low, high = _LIMITS[attributes["type"]]
    return ((x / scale).round_() + zero).clamp_(low, high)


def _dequantize(attributes: Attributes, inputs: list[Value]) -> _Integers:
    x, scale, axis = inputs[0], inputs[1], attributes.get("axis", 1)
    integers = _Integers(x, scale, axis)
    if len(inputs) > 2 and inputs[2] is not None:
        zero = inputs[2] if inputs[2].ndim == 0 else _Integers(x, inputs[2], axis).spread(x.ndim, axis)
        integers = _Integers(x - zero, scale, axis)
    return integers


def _product(
    x: Value, weight: Value, bias: Tensor | None, channels: int, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Multiply the integers of quantized operands and apply the scales; the output's channels are dimension 1."""
    if isinstance(x, _Integers) and isinstance(weight, _Integers) and x.scale.ndim == 0:
        if weight.scale.ndim and weight.axis != channels:
            raise NotImplementedError("a weight with scales along another axis than its output channels")
        result = multiply(x.values, weight.values)
        result *= x.scale * weight.spread(result.ndim, 1)
    else:
        result = multiply(_real(x), _real(weight))
    return result if bias is None else result.add_(_real(bias).view(-1, *[1] * (result.ndim - 2)))


def _conv(attributes: Attributes, inputs: list[Value]) -> Tensor:
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise NotImplementedError("Conv with auto_pad")
    pads = _symmetric(attributes)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        strides, dilations = attributes.get("strides", [1, 1]), attributes.get("dilations", [1, 1])
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, weight, None, strides, pads, dilations, attributes.get("group", 1))

    return _product(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None, 0, multiply)


def _gemm(attributes: Attributes, inputs: list[Value]) -> Tensor:
    if attributes.get("transA", 0) or {attributes.get("alpha", 1.0), attributes.get("beta", 1.0)} != {1.0}:
        raise NotImplementedError("Gemm with transA, alpha or beta")
    turned = bool(attributes.get("transB", 0))

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return x @ (weight.T if turned else weight)

    return _product(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None, 0 if turned else 1, multiply)


def _symmetric(attributes: Attributes) -> list[int]:
    pads = list(attributes.get("pads", [0, 0, 0, 0]))
    if pads[:2] != pads[2:]:
        raise NotImplementedError(f"padding {pads} that differs between the sides")
    return pads[:2]


def _max_pool(attributes: Attributes, inputs: list[Value]) -> Tensor:
    strides, ceil = attributes.get("strides", [1, 1]), bool(attributes.get("ceil_mode", 0))
    kernel, pads = attributes["kernel_shape"], _symmetric(attributes)
    return F.max_pool2d(_real(inputs[0]), kernel, strides, pads, attributes.get("dilations", 1), ceil)


def _average_pool(attributes: Attributes, inputs: list[Value]) -> Tensor:
    if any(_symmetric(attributes)) or set(attributes.get("dilations", [1])) != {1}:
        raise NotImplementedError("AveragePool with padding or dilation")
    kernel, strides = attributes["kernel_shape"], attributes.get("strides", [1, 1])
    return F.avg_pool2d(_real(inputs[0]), kernel, strides, 0, bool(attributes.get("ceil_mode", 0)))


def _reshape(_: Attributes, inputs: list[Value]) -> Tensor:
    x, shape = _real(inputs[0]), inputs[1].tolist()
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])


def _clip(_: Attributes, inputs: list[Value]) -> Tensor:
    low, high = (*inputs[1:], None, None)[:2]
    return _real(inputs[0]).clamp(low, high)


_OPERATIONS: dict[str, Callable[[Attributes, list[Value]], Value]] = {
    "Add": lambda _, x: _real(x[0]) + _real(x[1]),
    "AveragePool": _average_pool,
    "Clip": _clip,
    "Conv": _conv,
    "DequantizeLinear": _dequantize,
    "Flatten": lambda a, x: _real(x[0]).flatten(a.get("axis", 1)),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _, x: _real(x[0]).mean((2, 3), keepdim=True),
    "Identity": lambda _, x: x[0],
    "MaxPool": _max_pool,
    "QuantizeLinear": _quantize,
    "Relu": lambda _, x: _real(x[0]).relu(),
    "Reshape": _reshape,
}
