"""From a graph with quantizers to the steps of a plan: which operations one kernel computes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.engines.cuda.onnx_ops import axes_of
from compress.engines.cuda.plan.activation import NONE, recognize_activations
from compress.engines.cuda.plan.graph import Graph, Node, read_graph
from compress.engines.cuda.plan.quantizers import (
    MOVES,
    TAKES,
    QuantizedConstant,
    QuantizedGraph,
    move_quantizers,
    padding_of,
    real_weight,
    resolve_quantizers,
)
from compress.engines.cuda.plan.steps import (
    Attention,
    AveragePool,
    Combination,
    Convolution,
    Elementwise,
    Epilogue,
    FloatOperation,
    LayerNorm,
    Linear,
    MaxPool,
    Move,
    Output,
    Padding,
    Plan,
    PlanTensor,
    Product,
    SampledSum,
    Source,
    Step,
)
from compress.onnx_graph import read_window


@dataclass
class View:
    """A quantized graph, and the names of its nodes that are part of a step already."""

    graph: Graph
    weights: Mapping[str, QuantizedConstant]
    producers: Mapping[str, Node]
    consumers: Mapping[str, list[Node]]
    index: Mapping[str, int]
    absorbed: set[str] = field(default_factory=set)

    @staticmethod
    def of(quantized: QuantizedGraph) -> View:
        graph = quantized.graph
        return View(
            graph,
            quantized.weights,
            graph.producers(),
            graph.consumers(),
            {node.name: i for i, node in enumerate(graph.nodes)},
        )

    def source(self, name: str) -> Source:
        node = self.producers.get(name)
        if node is not None and node.op == "Dequantize":
            return Source(node.inputs[0], node.attributes["grid"])
        return Source(name)

    def codes(self, name: str) -> Source | None:
        """The codes of a tensor, on one grid; None if there are none."""
        found = self.source(name)
        return found if found.grid is not None and len(found.grid.scale) == 1 else None

    def only_consumer(self, name: str) -> Node | None:
        """None where several read it, or the network returns it."""
        found = self.consumers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.graph.outputs else None

    def constant(self, name: str) -> Tensor | None:
        if name in self.graph.constants:
            return self.graph.constants[name]
        return real_weight(self.weights[name]) if name in self.weights else None

    def is_constant(self, name: str) -> bool:
        return name in self.graph.constants or name in self.weights

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.shapes[name]

    def channel_vector(self, name: str, shape: tuple[int, ...], axis: int) -> Tensor | None:
        """A constant as one float64 number for each index along `axis` of `shape`; None for others."""
        constant = self.graph.constants.get(name)
        if constant is None or not constant.is_floating_point() or constant.dim() > len(shape):
            return None
        sizes = [1] * (len(shape) - constant.dim()) + list(constant.shape)
        if any(n != 1 and (i != axis or n != shape[axis]) for i, n in enumerate(sizes)):
            return None
        return constant.double().reshape(-1).expand(shape[axis]).clone()

    def output(self, name: str, *, channels: bool = False) -> Output:
        """The outputs of a step whose consumers want codes, values, or both; absorbs a Quantize."""
        readers = self.consumers.get(name, [])
        fitting = [r for r in readers if r.op == "Quantize" and (channels or len(r.attributes["grid"].scale) == 1)]
        value = name if name in self.graph.outputs or not readers or len(fitting) < len(readers) else ""
        if not fitting:
            return Output(value=name)
        first = fitting[0]
        self.absorbed.add(first.name)
        rest = any(r is not first for r in fitting)  # another grid: quantized from the values, by a step of its own
        return Output(codes=first.outputs[0], grid=first.attributes["grid"], value=name if rest else value)


def number_of(tensor: Tensor | None) -> float | None:
    return float(tensor.reshape(-1)[0]) if tensor is not None and tensor.numel() == 1 else None


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
    begun = Epilogue(factor=factor.clone(), bias=bias)
    chain = _follow(view, node, _Chain(node.outputs[0], 1 if node.op == "Conv" else -1, begun))
    epilogue = replace(chain.epilogue, out=view.output(chain.name, channels=True))
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
    """How far an epilogue reaches: the tensor that it has computed, the axis of its channels, and its operations."""

    name: str
    axis: int
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()

    def past(self, *nodes: Node, axis: int | None = None, **changes: Any) -> _Chain:
        return _Chain(
            name=nodes[-1].outputs[0],
            axis=self.axis if axis is None else axis,
            epilogue=replace(self.epilogue, **changes),
            nodes=(*self.nodes, *nodes),
        )


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
    if reader.op not in {"Add", "Sub", "Mul", "Div"} or chain.epilogue.first != NONE or chain.epilogue.residual.name:
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
        return chain.past(reader, factor=chain.epilogue.factor * vector, bias=chain.epilogue.bias * vector)
    if reader.op == "Add":
        return chain.past(reader, bias=chain.epilogue.bias + vector)
    sign = 1 if place == 0 else -1
    return chain.past(reader, factor=chain.epilogue.factor * sign, bias=sign * (chain.epilogue.bias - vector))


def _activated(chain: _Chain, reader: Node) -> _Chain | None:
    if reader.op != "Activation":
        return None
    activation = reader.attributes["activation"]
    if not chain.epilogue.residual.name and chain.epilogue.middle is None and chain.epilogue.first == NONE:
        return chain.past(reader, first=activation)
    return chain.past(reader, second=activation) if chain.epilogue.second == NONE else None


def _turned(view: View, product: Node, chain: _Chain, reader: Node) -> _Chain | None:
    """A Transpose from (N, H, W, C) to (N, C, H, W) after a matrix product."""
    image = len(view.shape(chain.name)) == 4 and tuple(reader.attributes.get("perm", ())) == (0, 3, 1, 2)
    if (
        reader.op != "Transpose"
        or product.op == "Conv"
        or chain.axis != -1
        or chain.epilogue.residual.name
        or not image
    ):
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
    if reader.op != "Quantize" or chain.epilogue.middle is not None or len(reader.attributes["grid"].scale) != 1:
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
    if (
        reader.op != "Add"
        or chain.epilogue.residual.name
        or chain.epilogue.second != NONE
        or reader.inputs[0] == reader.inputs[1]
    ):
        return None
    other = reader.inputs[1 - reader.inputs.index(chain.name)]
    source = view.source(other)
    per_tensor = source.grid is None or len(source.grid.scale) == 1
    alike = view.shape(other) == view.shape(chain.name) == view.shape(reader.outputs[0])
    floats = view.graph.dtypes[other].is_floating_point
    return other if alike and per_tensor and floats and not view.is_constant(other) else None


def _root(view: View, name: str) -> int:
    node = view.producers.get(name)
    while node is not None and node.op in _ALONE and node.inputs[0] in view.producers:
        node = view.producers[node.inputs[0]]
    products = node is not None and node.op in {"Conv", "MatMul", "Gemm"}
    return view.index[node.name] if node is not None and products else -1


def match_attention(view: View, node: Node) -> tuple[Attention, int] | None:
    """The step that begins with the product of queries and keys, and the place of its last node; else None."""
    if node.op != "MatMul":
        return None
    q, k = (_symmetric(view, name) or _values(view, name) for name in node.inputs)
    alike = q is not None and k is not None and (q.grid is None) == (k.grid is None)
    scores = _Scores([node], 1.0, None) if alike else None
    while scores is not None:
        reader = view.only_consumer(scores.nodes[-1].outputs[0])
        if reader is not None and reader.op == "Softmax":
            same = view.shape(reader.outputs[0]) == view.shape(node.outputs[0])
            nodes = [*scores.nodes, reader]
            return _from_softmax(view, q, k, nodes, scores.scale, scores.mask) if q and k and same else None
        scores = None if reader is None else _followed(view, scores, reader)
    return None


class _Scores(NamedTuple):
    nodes: list[Node]
    scale: float
    mask: Tensor | None


def _followed(view: View, scores: _Scores, node: Node) -> _Scores | None:
    """The scores after one more node: a factor, a constant that is added, windows apart from images, or joined."""
    current, nodes, mask = scores.nodes[-1].outputs[0], [*scores.nodes, node], scores.mask
    before, after = view.shape(current), view.shape(node.outputs[0])
    if node.op == "Reshape" and node.inputs[0] == current:
        if mask is None:
            return scores._replace(nodes=nodes) if before[-2:] == after[-2:] else None
        mask = _regrouped(mask, before, after)
        return None if mask is None else scores._replace(nodes=nodes, mask=mask)
    if node.op not in {"Mul", "Div", "Add"} or before != after:
        return None
    constant = view.graph.constants.get(node.inputs[1 - node.inputs.index(current)])
    number = number_of(constant)
    if node.op == "Add":
        mask = None if constant is None else _mask_sum(mask, constant.float(), len(before))
        return None if mask is None else scores._replace(nodes=nodes, mask=mask)
    if number is None or mask is not None or (node.op == "Div" and node.inputs[1] == current):
        return None
    return scores._replace(nodes=nodes, scale=scores.scale * (number if node.op == "Mul" else 1 / number))


def _mask_sum(mask: Tensor | None, constant: Tensor, rank: int) -> Tensor | None:
    constant = constant.reshape([1] * (rank - constant.dim()) + list(constant.shape))
    if mask is None:
        return constant
    return mask + constant if len({len(mask), len(constant)} - {1}) < 2 else None


def _regrouped(mask: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor | None:
    """A mask after a reshape that splits the first axis (windows) into (images, windows), or joins these."""
    if len(after) == len(before) + 1 and after[2:] == before[1:]:
        return mask[None] if len(mask) in (1, after[1]) else None
    if len(after) == len(before) - 1 == 4 and before[2:] == after[1:]:
        return mask[0] if len(mask) == 1 else None
    return None


# Channels of a head that the kernel holds at once; attention over channels has as many as an image has pixels.
_WIDEST_HEAD = 256


def _from_softmax(
    view: View, q: Source, k: Source, nodes: list[Node], scale: float, mask: Tensor | None
) -> tuple[Attention, int] | None:
    softmax = nodes[-1]
    rank = len(view.shape(softmax.outputs[0]))
    quantize = view.only_consumer(softmax.outputs[0])
    back = view.only_consumer(quantize.outputs[0]) if quantize is not None and quantize.op == "Quantize" else None
    product = view.only_consumer(back.outputs[0]) if back is not None and back.op == "Dequantize" else None
    if quantize is None or back is None or product is None or product.op != "MatMul":
        return None
    v = _symmetric(view, product.inputs[1])
    grid = quantize.attributes["grid"]
    over_keys = int(softmax.attributes.get("axis", -1)) % rank == rank - 1
    if (
        v is None
        or product.inputs[0] != back.outputs[0]
        or not over_keys
        or grid.scale != back.attributes["grid"].scale
    ):
        return None
    shapes = [view.shape(source.name) for source in (q, k, v)]
    if any(len(shape) != rank or shape[:-2] != shapes[0][:-2] for shape in shapes) or grid.zero != 0:
        return None
    if max(shapes[0][-1], shapes[2][-1]) > _WIDEST_HEAD:
        return None
    nodes = [*nodes, quantize, back, product]
    view.absorbed.update(n.name for n in nodes[1:])
    step = Attention(
        name=product.name,
        origins=tuple(o for n in nodes for o in n.origins),
        x=q,
        k=k,
        v=v,
        scale=scale,
        mask=mask,
        probabilities=grid,
        out=view.output(product.outputs[0]),
    )
    return step, view.index[product.name]


def _symmetric(view: View, name: str) -> Source | None:
    """The codes of a tensor, on a grid around 0."""
    found = view.codes(name)
    return found if found is not None and found.grid is not None and found.grid.zero == 0 else None


def _values(view: View, name: str) -> Source | None:
    """A tensor of floating-point numbers without codes."""
    values = view.graph.dtypes[name].is_floating_point and name not in view.weights
    return Source(name) if values and view.source(name).grid is None else None


def match_sampled_sum(view: View, node: Node) -> tuple[SampledSum, int] | None:
    """The step that ends in a sum over the points that grids sample from images, each times a weight; else None."""
    if node.op != "ReduceSum":
        return None
    shape = view.shape(node.inputs[0])
    axes = axes_of(node.attributes, view.graph.constants.get(node.given(1)))
    product = view.producers.get(node.inputs[0]) if len(shape) == 4 and [axis % 4 for axis in axes] == [3] else None
    if product is None or product.op != "Mul" or node.attributes.get("keepdims", 1):
        return None
    for samples, weights in (product.inputs, product.inputs[::-1]):
        found = _samples(view, samples, shape)
        if found and view.shape(weights) == (shape[0], 1, *shape[2:]) and _values(view, weights):
            break
    else:
        return None
    inner, grids = [product, *found[0]], found[1]
    if any(view.only_consumer(n.outputs[0]) is None for n in [*inner, *grids]):
        return None
    nodes = [*inner, *grids, node]
    view.absorbed.update(n.name for n in nodes if n is not node)
    step = SampledSum(
        name=node.name,
        origins=tuple(o for n in nodes for o in n.origins),
        x=Source(weights),
        images=tuple(n.inputs[0] for n in grids),
        grids=tuple(n.inputs[1] for n in grids),
        aligned=bool(grids[0].attributes.get("align_corners", 0)),
        out=view.output(node.outputs[0]),
    )
    return step, view.index[node.name]


def _samples(view: View, name: str, shape: tuple[int, ...]) -> tuple[list[Node], list[Node]] | None:
    """The nodes between GridSamples and a tensor (N, C, L, points) that joins their results, and the GridSamples."""
    inner: list[Node] = []
    node = view.producers.get(name)
    if node is not None and node.op == "Reshape" and view.shape(node.inputs[0])[:3] == shape[:3]:
        inner, node = [node], view.producers.get(node.inputs[0])  # what torch.stack has joined
    if node is None or node.op not in {"Concat", "GridSample"}:
        return None
    rank = len(view.shape(node.outputs[0]))
    if node.op == "Concat" and int(node.attributes["axis"]) % rank != 3:
        return None
    grids = []
    for part in (node.outputs[0],) if node.op == "GridSample" else node.inputs:
        maker = view.producers.get(part)
        if maker is not None and maker.op == "Unsqueeze" and rank == 5:
            inner.append(maker)
            maker = view.producers.get(maker.inputs[0])
        if maker is None or maker.op != "GridSample" or len(view.shape(maker.outputs[0])) != 4:
            return None
        grids.append(maker)
    attributes = [n.attributes for n in grids]
    linear = all(a.get("mode", "linear") in {"linear", "bilinear"} for a in attributes)
    zeros = all(a.get("padding_mode", "zeros") == "zeros" for a in attributes)
    aligned = len({bool(a.get("align_corners", 0)) for a in attributes}) == 1
    values = all(_values(view, name) for n in grids for name in n.inputs)
    joined = [node] if node.op == "Concat" else []
    fits = linear and zeros and aligned and values and len(grids) <= _MOST_IMAGES
    return ([*inner, *joined], grids) if fits else None


# Images of one sum: levels of a pyramid.
_MOST_IMAGES = 8

Found = tuple[Step, int]


def make_plan(
    path: Path | str,
    sizes: Mapping[str, Sequence[int]] | None = None,
    *,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Plan:
    """Plan an ONNX file's steps for one set of input shapes; `dtype` is of what is not quantized (see `read_graph`)."""
    return lower(read_graph(path, sizes, batch_size=batch_size), dtype)


def lower(graph: Graph, dtype: torch.dtype = torch.float16) -> Plan:
    quantized = resolve_quantizers(recognize_activations(graph))
    view = View.of(replace(quantized, graph=move_quantizers(quantized.graph)))
    by_node: dict[str, Found] = {}
    for node in view.graph.nodes:
        if node.name not in view.absorbed and node.op != "Dequantize":
            by_node[node.name] = _step_of(view, node)
    found = [step for name, step in by_node.items() if name not in view.absorbed]
    found += _dequantized(view, [step for step, _ in found])
    steps = tuple(_with_quantizer(view, step) for step, _ in sorted(found, key=lambda pair: pair[1]))
    read = {*graph.outputs, *(name for step in steps for name in step.reads)}
    return Plan(
        steps=steps,
        tensors=_tensors(view, steps, dtype),
        inputs=graph.inputs,
        outputs={name: name for name in graph.outputs},
        dtype=dtype,
        constants={name: value for name, value in view.graph.constants.items() if name in read},
    )


def _with_quantizer(view: View, step: Step) -> Step:
    made = [view.producers[name] for name in step.writes if name in view.producers]
    added = [o for node in made if node.op == "Quantize" for o in node.origins if o not in step.origins]
    return replace(step, origins=(*step.origins, *added)) if added else step


def _step_of(view: View, node: Node) -> Found:
    for match in _MATCHES:
        found = match(view, node)
        if found is not None:
            return found
    step = FloatOperation(
        name=node.name,
        origins=node.origins,
        op=node.op,
        inputs=_inputs(view, node),
        outputs=node.outputs,
        attributes=node.attributes,
    )
    return step, view.index[node.name]


def _tensors(view: View, steps: Sequence[Step], dtype: torch.dtype) -> dict[str, PlanTensor]:
    border = {*view.graph.inputs, *view.graph.outputs}
    names = [name for step in steps for name in (*step.reads, *step.writes)]
    names += [name for name in view.graph.outputs if name in view.graph.constants]
    found = {}
    for name in dict.fromkeys((*view.graph.inputs, *names)):
        own = view.graph.dtypes[name]
        kept = name in border or not own.is_floating_point
        found[name] = PlanTensor(shape=view.graph.shapes[name], dtype=own if kept else dtype)
    return found


def _dequantized(view: View, steps: Sequence[Step]) -> list[Found]:
    written = {name for step in steps for name in step.writes} | set(view.graph.inputs)
    wanted = {name for step in steps for name in step.reads} | set(view.graph.outputs)
    found: list[Found] = []
    for node in view.graph.nodes:
        name = node.outputs[0]
        if node.op == "Dequantize" and name in wanted and name not in written:
            step = Elementwise(name=node.name, origins=node.origins, x=view.source(name), out=Output(value=name))
            found.append((step, view.index[node.name]))
    return found


# Matches, each of one kind of step ------------------------------------------------------------------------------------


def _quantize(view: View, node: Node) -> Found | None:
    if node.op != "Quantize":
        return None
    out = Output(codes=node.outputs[0], grid=node.attributes["grid"])
    step = Elementwise(name=node.name, origins=node.origins, x=view.source(node.inputs[0]), out=out)
    return step, view.index[node.name]


def _max_pool(view: View, node: Node) -> Found | None:
    if node.op != "MaxPool" or view.graph.dtypes[node.inputs[0]] != torch.int8 or len(view.shape(node.inputs[0])) != 4:
        return None
    a = node.attributes
    kernel, stride, dilation = (
        (int(pair[0]), int(pair[1]))
        for pair in (a["kernel_shape"], a.get("strides", (1, 1)), a.get("dilations", (1, 1)))
    )
    padding = _window(view, node, kernel, stride, dilation)
    step = MaxPool(
        name=node.name,
        origins=node.origins,
        x=Source(node.inputs[0]),
        out=Output(codes=node.outputs[0]),
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        padding=padding,
    )
    return step, view.index[node.name]


def _window(
    view: View, node: Node, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int] = (1, 1)
) -> Padding:
    """Padding of a pool; as much below and on the right as its result needs (`ceil_mode`)."""
    shape, out = view.shape(node.inputs[0])[2:], view.shape(node.outputs[0])[2:]
    pads = read_window(node.attributes, shape, kernel).pads
    found = []
    for n, o, k, s, d, (before, after) in zip(shape, out, kernel, stride, dilation, pads, strict=True):
        needed = (o - 1) * s + d * (k - 1) + 1 - n - before
        found.append((before, max(after, needed)))
    return found[0], found[1]


def _average_pool(view: View, node: Node) -> Found | None:
    x = view.codes(node.inputs[0]) if node.inputs else None
    if x is None or len(view.shape(node.inputs[0])) != 4:
        return None
    height, width = view.shape(node.inputs[0])[2:]
    a = node.attributes
    if node.op == "GlobalAveragePool" or (node.op == "ReduceMean" and _over_image(view, node)):
        kernel, stride, padding = (height, width), (1, 1), ((0, 0), (0, 0))
    elif node.op == "AveragePool" and set(a.get("dilations", (1,))) == {1}:
        kernel = (int(a["kernel_shape"][0]), int(a["kernel_shape"][1]))
        strides = a.get("strides", (1, 1))
        stride = (int(strides[0]), int(strides[1]))
        padding = _window(view, node, kernel, stride)
        if a.get("ceil_mode", 0) and padding != read_window(a, (height, width), kernel).pads:
            return None  # its last windows reach beyond the padding
    else:
        return None
    step = AveragePool(
        name=node.name,
        origins=node.origins,
        x=x,
        kernel=kernel,
        stride=stride,
        padding=padding,
        counts_padding=bool(a.get("count_include_pad", 0)),
        out=view.output(node.outputs[0]),
    )
    return step, view.index[node.name]


def _over_image(view: View, node: Node) -> bool:
    axes = axes_of(node.attributes, view.graph.constants.get(node.given(1)))
    return sorted(axis % 4 for axis in axes) == [2, 3]


def _layer_norm(view: View, node: Node) -> Found | None:
    if node.op != "LayerNormalization" or len([name for name in node.outputs if name]) != 1:
        return None
    shape = view.shape(node.inputs[0])
    weight, bias = (view.constant(node.given(i)) if node.given(i) else None for i in (1, 2))
    last = int(node.attributes.get("axis", -1)) % len(shape) == len(shape) - 1
    constant = all(not node.given(i) or view.is_constant(node.given(i)) for i in (1, 2))
    if not last or not constant:
        return None
    step = LayerNorm(
        name=node.name,
        origins=node.origins,
        x=view.source(node.inputs[0]),
        out=view.output(node.outputs[0]),
        weight=None if weight is None else weight.float().expand(shape[-1]).contiguous(),
        bias=None if bias is None else bias.float().expand(shape[-1]).contiguous(),
        epsilon=float(node.attributes.get("epsilon", 1e-5)),
    )
    return step, view.index[node.name]


_COMBINATIONS: dict[str, Combination] = {"Add": "add", "Sub": "sub", "Mul": "mul"}


def _elementwise(view: View, node: Node) -> Found | None:
    if node.op not in {*_COMBINATIONS, "Activation"} or not view.graph.dtypes[node.outputs[0]].is_floating_point:
        return None
    shape, names = view.shape(node.outputs[0]), list(node.inputs)
    if node.op in {"Add", "Mul"} and view.shape(names[0]) != shape:
        names.reverse()  # the operand that broadcasts comes second
    if view.is_constant(names[0]) and not view.is_constant(names[-1]) and node.op in {"Add", "Mul"}:
        names.reverse()
    if view.is_constant(names[0]) or names[-1] in view.weights or view.shape(names[0]) != shape or len(shape) > 4:
        return None
    nodes, operands = [node], [view.source(name) for name in names]
    if any(source.grid is not None and len(source.grid.scale) != 1 for source in operands):
        return None
    activation = node.attributes["activation"] if node.op == "Activation" else NONE
    reader = view.only_consumer(node.outputs[0])
    if node.op != "Activation" and reader is not None and reader.op == "Activation":
        nodes.append(reader)
        activation = reader.attributes["activation"]
        view.absorbed.add(reader.name)
    step = Elementwise(
        name=node.name,
        origins=tuple(o for n in nodes for o in n.origins),
        x=operands[0],
        y=operands[1] if len(operands) > 1 else Source(),
        combination=_COMBINATIONS.get(node.op, "none"),
        activation=activation,
        out=view.output(nodes[-1].outputs[0]),
    )
    return step, max(view.index[n.name] for n in nodes)


def _move(view: View, node: Node) -> Found | None:
    data = node.inputs if node.op == "Concat" else node.inputs[:1]
    numbers = node.inputs[len(data) :]
    if any(name and name not in view.graph.constants for name in numbers) or not data:
        return None
    codes = view.graph.dtypes[data[0]] == torch.int8
    if node.op not in MOVES | TAKES | {"Concat"} and not (codes and node.op in {"Pad", "Resize"}):
        return None
    if len([name for name in node.outputs if name]) != len(node.outputs) or all(map(view.is_constant, data)):
        return None
    step = Move(
        name=node.name,
        origins=node.origins,
        op=node.op,
        inputs=_inputs(view, node),
        outputs=node.outputs,
        attributes=node.attributes,
    )
    return step, view.index[node.name]


def _inputs(view: View, node: Node) -> tuple[str | Tensor | None, ...]:
    return tuple(
        None if not name else name if (constant := view.constant(name)) is None else constant for name in node.inputs
    )


_MATCHES: tuple[Callable[[View, Node], Found | None], ...] = (
    match_product,
    match_attention,
    match_sampled_sum,
    _quantize,
    _max_pool,
    _average_pool,
    _layer_norm,
    _elementwise,
    _move,
)
