"""From a float model to a graph with quantizers: trace, fold, read, place, insert."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn

from compress.graph.canonical import canonical_graph, check_float_model
from compress.graph.compare import Reference, alone
from compress.graph.fold import fold_batchnorm, fold_constants
from compress.graph.inputs import Inputs, as_inputs, bound_to_size, device_of
from compress.graph.ops import WEIGHTED, altered, node_kind, node_module
from compress.graph.report import Leaf, attach_report, leaves_of, report_of
from compress.quantization import QuantSpec, check_quant_spec
from compress.quantization.placement.decisions import ActivationSite, Placement
from compress.quantization.placement.place import place, scaled_layers
from compress.quantization.placement.targets import TABLES
from compress.quantization.placement.view import GraphView, Node, Parameters, mask_in
from compress.quantization.ptq.rescaling import (
    batchnorm_moments,
    ensure_biases,
    equalize,
    multiply_inputs,
    replace_activations,
)
from compress.quantization.quantizer import Quantizer, can_quantize, quantized_layer, weight_axis
from compress.quantization.report import Prepared, QuantizationReport, QuantizedModule


def read_fx(graph_module: fx.GraphModule) -> GraphView:
    leaves = leaves_of(graph_module)
    by_path = {leaf.path: leaf for leaf in leaves}
    nodes: dict[fx.Node, Node] = {}
    for source in graph_module.graph.nodes:
        node = nodes[source] = _node(source, by_path)
        node.inputs = tuple(nodes[value] for value in source.all_input_nodes)
    for source, node in nodes.items():
        node.consumers = [nodes[user] for user in source.users]
    return GraphView(nodes=tuple(nodes.values()), leaves=leaves)


def _node(source: fx.Node, leaves: dict[str, Leaf]) -> Node:
    kind, dtype = node_kind(source), source.meta.get("dtype")
    module: Any = node_module(source) if source.op == "call_module" else None
    path, note = str(source.target) if module is not None else "", str(source.meta.get("whole", ""))
    note = note or (altered(module) if module is not None else "")
    node = Node(
        name=source.name,
        kind=kind,
        path=path,
        shape=source.meta.get("shape"),
        floating=dtype is not None and dtype.is_floating_point and dtype != torch.float64,  # ONNX quantizes no double
        note=note,
        leaf=leaves.get(path),
    )
    if kind in WEIGHTED:
        function = f"is a function that cannot become a layer: {note or 'its weight is of no module'}"
        node.refusal = (can_quantize(module) or mask_in(module.bias)) if module is not None else function
    if module is not None and kind in WEIGHTED | {"batch_norm"}:
        node.parameters = Parameters(
            weight=partial(getattr, module, "weight"),
            bias=partial(getattr, module, "bias"),
            mean=partial(getattr, module, "running_mean", None),
            axis=weight_axis(module),
            groups=getattr(module, "groups", 1),
        )
    _read_arguments(source, module, node)
    if kind == "pad" and _pads_convolutions(source, module):
        node.kind = "zero_pad"
    if _is_neutral(source, node):
        node.kind = "identity"
    node.converts = node.kind == "identity" and any(
        n.meta.get("dtype", dtype) != dtype for n in source.all_input_nodes[:1]
    )
    return node


def _is_neutral(source: fx.Node, node: Node) -> bool:
    """Return True for x + 0 and x * 1, as Python's `sum` begins; exporters leave them out."""
    neutral = {"add": 0.0, "mul": 1.0}.get(node.kind)
    one = len(source.all_input_nodes) == 1 and len(source.args) == 2 and not source.kwargs
    return one and node.numbers == (neutral,) and source.all_input_nodes[0].meta.get("dtype") == source.meta["dtype"]


def _pads_convolutions(source: fx.Node, module: Any) -> bool:
    """True if an operation pads images with zeros for convolutions alone: the export moves it into them."""
    amounts = getattr(module, "padding", None) if module is not None else _argument(source, 1, "pad")
    mode = "constant" if module is not None else _argument(source, 2, "mode") or "constant"
    filling = getattr(module, "value", 0) if module is not None else _argument(source, 3, "value")
    zeros = module is None or type(module).__name__.startswith(("ZeroPad", "ConstantPad"))
    shape = source.meta.get("shape")
    if (
        not zeros
        or mode != "constant"
        or (filling or 0) != 0
        or shape is None
        or not isinstance(amounts, (tuple, list))
    ):
        return False
    numbers = [amount for amount in amounts if isinstance(amount, int) and amount >= 0]
    spatial = len(numbers) == len(amounts) <= 2 * (len(shape) - 2)
    return spatial and bool(source.users) and all(_is_padding_convolution(user) for user in source.users)


def _is_padding_convolution(node: fx.Node) -> bool:
    if node.op != "call_module" or node_kind(node) != "conv":
        return False
    module: Any = node_module(node)
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _read_arguments(source: fx.Node, module: Any, node: Node) -> None:
    if node.traits.category == "arithmetic":
        operands = (*source.args, *source.kwargs.values())  # alpha of torch.add is one
        node.numbers = tuple(float(value) for value in operands if isinstance(value, (int, float)))
    elif node.kind == "clamp":
        low = getattr(module, "min_val", None) if module is not None else _argument(source, 1, "min", "min_val")
        node.low = float(low) if isinstance(low, (int, float)) else node.low
    elif node.kind == "resize":
        node.mode = str(getattr(module, "mode", "") if module is not None else _argument(source, 3, "mode"))
    elif node.kind.endswith(("pool", "conv", "conv_transpose")):
        size = getattr(module, "kernel_size", 0) if module is not None else _argument(source, 1, "kernel_size")
        node.window = max(size) if isinstance(size, (tuple, list)) else size if isinstance(size, int) else 0
    elif node.kind == "mean":
        dims = _argument(source, 1, "dim")
        shape = source.all_input_nodes[0].meta.get("shape")
        node.axes = frozenset(d % len(shape) for d in dims) if shape and isinstance(dims, (list, tuple)) else None
    elif node.kind == "pad":
        filling = getattr(module, "value", None) if module is not None else _argument(source, 3, "value")
        node.filling = float(filling or 0) if isinstance(filling, (int, float, type(None))) else float("nan")
    elif source.op == "call_method" and source.target == "float":
        node.cast = "float32"


def _argument(node: fx.Node, position: int, *names: str) -> object:
    found = [node.kwargs[name] for name in names if name in node.kwargs]
    return found[0] if found else node.args[position] if len(node.args) > position else None


def float_graph(model: nn.Module, example_inputs: Inputs, spec: QuantSpec) -> tuple[fx.GraphModule, Prepared]:
    """The float graph of a copy of a model in which quantizers are placed: fold, replace and equalize.

    It is compared with the model, in which ReLU already replaces ReLU6 if the recipe asks for that.
    """
    graph_module = canonical_graph(model, example_inputs, fold=False)
    replaced = replace_activations(graph_module, "relu6") if spec.relu6 == "relu" else ()
    reference = Reference.of(copy.deepcopy(graph_module) if replaced else model, example_inputs)
    moments = batchnorm_moments(graph_module) if spec.bias_correction == "analytic" else {}
    if spec.batchnorm == "fold":
        fold_batchnorm(graph_module)
        fold_constants(graph_module, trained=True)
    equalization = equalize(graph_module) if spec.equalize else None
    for path, factor in (equalization.divided if equalization else {}).items():
        if path in moments:
            mean, deviation = moments[path]
            moments[path] = (mean / factor, deviation / factor)
    reference.check(graph_module, "equalization" if spec.equalize else "folding BatchNorm")
    return graph_module, Prepared(relu6=replaced, equalization=equalization, moments=moments)


@alone
def insert_quantizers(model: nn.Module, example_inputs: Inputs, spec: QuantSpec | None = None) -> QuantizedModule:
    """A copy of `model` with quantizers where the target fuses them; they have no ranges until `calibrate`.

    Args:
        model: any module; it is not changed.
        example_inputs: for the trace.
        spec: None = `QuantSpec()`. Smoothing, AdaRound and bias correction need images: see `quantize` and `improve`.

    Returns:
        A plain GraphModule in evaluation mode; `.placement` is the table of decisions.

    Raises:
        ModelError: the model cannot be traced, or its graph computes something else.
        QuantizationError: nothing can be quantized, a rule matches nothing, the model is quantized already or is not
            in float32.

    Examples:
        >>> qmodel = compress.insert_quantizers(model, images[:1], compress.QuantSpec(target="tensorrt"))
        >>> [site.path for site in qmodel.placement.weights]
        ['0', '5']
    """
    chosen = spec or QuantSpec()
    check_quant_spec(chosen)
    check_float_model(model)
    made = float_graph(_with_factors(model, example_inputs, chosen), example_inputs, chosen)
    return insert_placed(made, example_inputs, chosen, lambda graph: place(read_fx(graph), chosen))


def _with_factors(model: nn.Module, example_inputs: Inputs, spec: QuantSpec) -> nn.Module:
    """A copy of a model with factors of one before layers that rules name (`Rule.channel_scales`)."""
    if not any(rule.channel_scales for rule in spec.rules):
        return model
    graph_module, paths = canonical_graph(model, example_inputs, fold=False), dict[str, list[str]]()
    for node in scaled_layers(read_fx(graph_module), spec):
        paths.setdefault(node.inputs[0].name, []).append(node.path)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    for tensor, layers in paths.items():
        width = nodes[tensor].meta["shape"][-1]
        multiply_inputs(graph_module, nodes[tensor], layers, torch.ones(width, device=device_of(graph_module)))
    return graph_module


def insert_placed(
    made: tuple[fx.GraphModule, Prepared],
    example_inputs: Inputs,
    spec: QuantSpec,
    placed: Callable[[fx.GraphModule], Placement],
) -> QuantizedModule:
    """Insert quantizers into a float graph, in place, with the placement that a function decides on."""
    graph_module, prepared = made
    for kind in TABLES[spec.only_target].opened:
        replace_activations(graph_module, kind)
    placement = placed(graph_module)
    if spec.bias_correction in ("analytic", "empirical"):
        ensure_biases(graph_module, [site.path for site in placement.weights])
    bound = bound_to_size(graph_module, as_inputs(example_inputs))
    attach_report(graph_module, replace(report_of(graph_module), bound=bound))
    apply_placement(graph_module, placement, prepared)
    return cast("QuantizedModule", graph_module)


def apply_placement(graph_module: fx.GraphModule, placement: Placement, prepared: Prepared | None = None) -> None:
    """Insert the quantizers of a placement into the graph it was made for, and attach the report; in place."""
    for weight in placement.weights:
        layer = quantized_layer(graph_module.get_submodule(weight.path), weight.format, name=weight.path)
        graph_module.set_submodule(weight.path, layer)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    device = device_of(graph_module)
    for site in placement.activations:
        graph_module.add_submodule(site.name, Quantizer(site.format, name=site.name).to(device))
        _insert_site(graph_module.graph, site, nodes)
    graph_module.graph.lint()
    graph_module.recompile()
    own = report_of(graph_module)
    report = QuantizationReport(
        leaves=own.leaves, training=own.training, bound=own.bound, placement=placement, prepared=prepared
    )
    attach_report(graph_module, report)


def _insert_site(graph: fx.Graph, site: ActivationSite, nodes: dict[str, fx.Node]) -> None:
    consumers: dict[str, list[str]] = {}
    for tensor, consumer in site.edges:
        consumers.setdefault(tensor, []).append(consumer)
    for tensor, names in consumers.items():
        source = nodes[tensor]
        with graph.inserting_after(source):
            quantizer = graph.call_module(site.name, (source,))
        quantizer.meta.update(shape=source.meta.get("shape"), dtype=source.meta.get("dtype"))
        for name in names:
            nodes[name].replace_input_with(source, quantizer)
