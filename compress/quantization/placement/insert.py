"""From a float model to a graph with quantizers: trace, fold, place, insert."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from torch import fx, nn

from compress.graph.canonical import canonical_graph
from compress.graph.compare import Reference
from compress.graph.float_model import check_float_model
from compress.graph.fold import fold_batchnorm, fold_constants
from compress.graph.inputs import Inputs, as_inputs, bound_to_size, device_of
from compress.graph.isolation import alone
from compress.graph.report import attach_report, report_of
from compress.quantization.placement.decisions import ActivationSite, Placement
from compress.quantization.placement.place import place
from compress.quantization.placement.read_fx import read_fx
from compress.quantization.ptq.equalize import equalize, replace_relu6
from compress.quantization.ptq.moments import batchnorm_moments
from compress.quantization.ptq.ranges import ensure_biases
from compress.quantization.quantizer import Quantizer, quantized_layer
from compress.quantization.report import Prepared, QuantizationReport, QuantizedModule
from compress.quantization.spec import QuantSpec, check_quant_spec


def float_graph(model: nn.Module, example_inputs: Inputs, spec: QuantSpec) -> tuple[fx.GraphModule, Prepared]:
    """The float graph of a copy of a model in which quantizers are placed: fold, replace and equalize.

    It is compared with the model, in which ReLU already replaces ReLU6 if the recipe asks for that.

    Raises:
        ModelError: the model cannot be traced, or the graph computes something else than the model.
        QuantizationError: no two layers can be equalized.
    """
    graph_module = canonical_graph(model, example_inputs, fold=False)
    replaced = replace_relu6(graph_module) if spec.relu6 == "relu" else ()
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
    return insert_placed(model, example_inputs, chosen, lambda graph: place(read_fx(graph), chosen))


def insert_placed(
    model: nn.Module, example_inputs: Inputs, spec: QuantSpec, placed: Callable[[fx.GraphModule], Placement]
) -> QuantizedModule:
    """Do what `insert_quantizers` does, with the placement that a function decides on for the float graph."""
    check_quant_spec(spec)
    check_float_model(model)
    graph_module, prepared = float_graph(model, example_inputs, spec)
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
