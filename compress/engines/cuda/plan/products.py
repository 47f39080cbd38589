"""Convolutions and matrix products of codes, with all that their kernels compute on the way out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.engines.cuda.plan.activation import NONE, Activation
from compress.engines.cuda.plan.graph import Node
from compress.engines.cuda.plan.moving import padding_of
from compress.engines.cuda.plan.quantizers import Grid, QuantizedConstant
from compress.engines.cuda.plan.steps import NOTHING, Convolution, Epilogue, Linear, Padding, Product, Source
from compress.engines.cuda.plan.view import View, number_of
from compress.onnx_graph.graph import read_window

_ALONE = frozenset({"Quantize", "Dequantize", "Activation"})


def match_product(view: View, node: Node) -> tuple[Product, int] | None:
    """The step of a convolution or product whose inputs are integers, and the place of its last node; else None."""
    if node.op not in {"Conv", "MatMul", "Gemm"}:
        return None
    x = view.codes(node.inputs[0])
    weight = view.weights.get(node.inputs[1])
    if x is None or x.grid is None or weight is None:
        return None
    bias = _bias(view, node, weight)
    if bias is None:
        return None
    base = _convolution(view, node, x, weight) if node.op == "Conv" else _linear(node, x, weight)
    if base is None:
        return None
    outputs = base.weight.shape[0]
    factor = x.grid.scale[0] * (weight.scale if weight.axis is not None else weight.scale.expand(outputs))
    chain = _follow(view, node, _Chain(node.outputs[0], 1 if node.op == "Conv" else -1, factor.clone(), bias))
    epilogue = Epilogue(
        factor=chain.factor,
        bias=chain.bias,
        first=chain.first,
        middle=chain.middle,
        residual=chain.residual,
        second=chain.second,
        out=view.output(chain.name, channels=True),
    )
    nodes = [node, *chain.nodes]
    origins = tuple(o for n in nodes for o in n.origins)
    if isinstance(base, Linear):
        base = replace(base, axis=chain.axis)
    return replace(base, epilogue=epilogue, origins=origins), max(view.index[n.name] for n in nodes)


def _bias(view: View, node: Node, weight: QuantizedConstant) -> Tensor | None:
    """The constant bias, float64; zeros where there is none, None where it does not fit."""
    outputs = weight.codes.shape[0]
    if node.op == "MatMul" or (node.op == "Gemm" and not node.attributes.get("transB", 0)):
        outputs = weight.codes.shape[-1]
    name = node.given(2)
    if not name:
        return torch.zeros(outputs, dtype=torch.float64)
    constant = view.constant(name)
    if constant is None or constant.numel() not in (1, outputs):
        return None
    return constant.double().reshape(-1).expand(outputs).clone() * float(node.attributes.get("beta", 1.0))


_EMPTY = Epilogue(factor=torch.empty(0), bias=torch.empty(0))


def _convolution(view: View, node: Node, x: Source, weight: QuantizedConstant) -> Convolution | None:
    a = node.attributes
    if weight.codes.dim() != 4 or weight.axis not in (None, 0):
        return None
    window = read_window(a, view.shape(node.inputs[0])[2:], weight.codes.shape[2:])
    padding: Padding = (window.pads[0], window.pads[1])
    x, padding = _without_pad(view, node, x, padding)
    return Convolution(
        name=node.name,
        x=x,
        weight=weight.codes,
        stride=(window.strides[0], window.strides[1]),
        dilation=(window.dilations[0], window.dilations[1]),
        padding=padding,
        groups=int(a.get("group", 1)),
        epilogue=_EMPTY,
    )


def _without_pad(view: View, node: Node, x: Source, padding: Padding) -> tuple[Source, Padding]:
    pad = view.producers.get(x.name)
    before = view.producers[node.inputs[0]]
    alone = view.only_consumer(x.name) is before and view.only_consumer(node.inputs[0]) is node
    if pad is None or pad.op != "Pad" or not alone:
        return x, padding
    amounts = padding_of(view.graph, pad)
    if any(n < 0 for pair in amounts for n in pair) or amounts[0] != (0, 0) or amounts[1] != (0, 0):
        return x, padding
    view.absorbed.add(pad.name)
    rows, columns = ((old[0] + new[0], old[1] + new[1]) for old, new in zip(padding, amounts[2:], strict=True))
    return Source(pad.inputs[0], x.grid), (rows, columns)


def _linear(node: Node, x: Source, weight: QuantizedConstant) -> Linear | None:
    a, codes = node.attributes, weight.codes
    if codes.dim() != 2 or a.get("transA", 0) or a.get("alpha", 1.0) != 1.0:
        return None
    turned = bool(a.get("transB", 0))  # (O, K) already
    if weight.axis not in (None, 0 if turned else 1):
        return None
    codes = codes if turned else codes.t().contiguous()
    return Linear(name=node.name, x=x, weight=codes, epilogue=_EMPTY)


# What follows a product ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chain:
    """The extent of an epilogue: the tensor that it has computed, and its operations (see `Epilogue`)."""

    name: str
    axis: int
    factor: Tensor
    bias: Tensor
    first: Activation = NONE
    middle: Grid | None = None
    residual: Source = NOTHING
    second: Activation = NONE
    nodes: tuple[Node, ...] = ()

    def past(self, *nodes: Node, **changes: Any) -> _Chain:
        return replace(self, name=nodes[-1].outputs[0], nodes=(*self.nodes, *nodes), **changes)


def _follow(view: View, product: Node, chain: _Chain) -> _Chain:
    """Take along what only reads the product's result, as long as an epilogue can compute it."""
    while True:
        reader = view.only_consumer(chain.name)
        if reader is None or reader.name in view.absorbed:
            return chain
        longer = (
            _affine(view, chain, reader)
            or _activated(chain, reader)
            or _turned(view, product, chain, reader)
            or _added(view, product, chain, reader)
            or _rounded(view, product, chain, reader)
        )
        if longer is None:
            return chain
        view.absorbed.update(node.name for node in longer.nodes)
        chain = longer


def _affine(view: View, chain: _Chain, reader: Node) -> _Chain | None:
    if reader.op not in {"Add", "Sub", "Mul", "Div"} or chain.first != NONE or chain.residual.name:
        return None
    shape = view.shape(reader.outputs[0])
    if shape != view.shape(chain.name):
        return None
    place = reader.inputs.index(chain.name)
    vector = view.channel_vector(reader.inputs[1 - place], shape, chain.axis % len(shape))
    if vector is None or (reader.op == "Div" and (place == 1 or bool((vector == 0).any()))):
        return None
    if reader.op in {"Mul", "Div"}:
        vector = vector if reader.op == "Mul" else 1 / vector
        return chain.past(reader, factor=chain.factor * vector, bias=chain.bias * vector)
    if reader.op == "Add":
        return chain.past(reader, bias=chain.bias + vector)
    sign = 1 if place == 0 else -1
    return chain.past(reader, factor=chain.factor * sign, bias=sign * (chain.bias - vector))


def _activated(chain: _Chain, reader: Node) -> _Chain | None:
    if reader.op != "Activation":
        return None
    activation = reader.attributes["activation"]
    if not chain.residual.name and chain.middle is None and chain.first == NONE:
        return chain.past(reader, first=activation)
    return chain.past(reader, second=activation) if chain.second == NONE else None


def _turned(view: View, product: Node, chain: _Chain, reader: Node) -> _Chain | None:
    """A Transpose from (N, H, W, C) to (N, C, H, W) after a matrix product."""
    image = len(view.shape(chain.name)) == 4 and tuple(reader.attributes.get("perm", ())) == (0, 3, 1, 2)
    if reader.op != "Transpose" or product.op == "Conv" or chain.axis != -1 or chain.residual.name or not image:
        return None
    return chain.past(reader, axis=1)


def _added(view: View, product: Node, chain: _Chain, reader: Node) -> _Chain | None:
    other = _other(view, chain, reader)
    if other is None:
        return None
    if view.source(other).grid is None and _root(view, other) > view.index[product.name]:
        return None
    return chain.past(reader, residual=view.source(other))


def _rounded(view: View, product: Node, chain: _Chain, reader: Node) -> _Chain | None:
    if reader.op != "Quantize" or chain.middle is not None or len(reader.attributes["grid"].scale) != 1:
        return None
    back = view.only_consumer(reader.outputs[0])
    added = view.only_consumer(back.outputs[0]) if back is not None and back.op == "Dequantize" else None
    if back is None or added is None or back.attributes["grid"].scale != reader.attributes["grid"].scale:
        return None
    rounded = replace(chain, name=back.outputs[0])
    other = _other(view, rounded, added)
    if other is None or view.codes(other) is None or _root(view, other) > view.index[product.name]:
        return None
    return chain.past(reader, back, added, middle=reader.attributes["grid"], residual=view.source(other))


def _other(view: View, chain: _Chain, reader: Node) -> str | None:
    if reader.op != "Add" or chain.residual.name or chain.second != NONE or reader.inputs[0] == reader.inputs[1]:
        return None
    other = reader.inputs[1 - reader.inputs.index(chain.name)]
    source = view.source(other)
    per_tensor = source.grid is None or len(source.grid.scale) == 1
    alike = view.shape(other) == view.shape(chain.name) == view.shape(reader.outputs[0])
    floats = view.graph.dtypes[other].is_floating_point
    return other if alike and per_tensor and floats and not view.is_constant(other) else None


def _root(view: View, name: str) -> int:
    """Place of the node that computes a tensor; -1 for an input."""
    node = view.producers.get(name)
    while node is not None and node.op in _ALONE and node.inputs[0] in view.producers:
        node = view.producers[node.inputs[0]]
    products = node is not None and node.op in {"Conv", "MatMul", "Gemm"}
    return view.index[node.name] if node is not None and products else -1


def scalar(view: View, name: str) -> float | None:
    """The one number that a constant holds; None if it is no such constant."""
    return number_of(view.graph.constants.get(name))
