"""From a graph with quantizers to the steps of a plan: which operations one kernel computes together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compress.engines.cuda.onnx_ops import axes_of
from compress.engines.cuda.plan.activation import NONE, recognize_activations
from compress.engines.cuda.plan.graph import Graph, Node, read_graph
from compress.engines.cuda.plan.products import View, match_attention, match_product
from compress.engines.cuda.plan.quantizers import MOVES, TAKES, move_quantizers, resolve_quantizers
from compress.engines.cuda.plan.steps import (
    AveragePool,
    Combination,
    Elementwise,
    FloatOperation,
    LayerNorm,
    MaxPool,
    Move,
    Output,
    Padding,
    Plan,
    PlanTensor,
    Source,
    Step,
)
from compress.onnx_graph import read_window

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
    read = {name for step in steps for name in step.reads}
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
    elif node.op == "AveragePool" and not a.get("ceil_mode", 0) and set(a.get("dilations", (1,))) == {1}:
        kernel = (int(a["kernel_shape"][0]), int(a["kernel_shape"][1]))
        strides = a.get("strides", (1, 1))
        stride = (int(strides[0]), int(strides[1]))
        padding = _window(view, node, kernel, stride)
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
    _quantize,
    _max_pool,
    _average_pool,
    _layer_norm,
    _elementwise,
    _move,
)
