"""From a float model to a graph with quantizers: trace, fold, place, insert."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from compress.errors import QuantizationError
from compress.graph.batches import device_of
from compress.graph.canonical import canonical_graph
from compress.graph.inputs import Inputs
from compress.graph.trace import preserve
from compress.quantization.decisions import ActivationSite, Placement
from compress.quantization.float_model import check_float_model
from compress.quantization.modules import quantized_layer
from compress.quantization.placement import place
from compress.quantization.prepare import prepare_float
from compress.quantization.quantizer import Quantizer
from compress.quantization.ranges import ensure_biases
from compress.quantization.spec import QuantSpec, check_quant_spec


def insert_quantizers(model: nn.Module, example_inputs: Inputs, spec: QuantSpec | None = None) -> fx.GraphModule:
    """A copy of `model` with quantizers where the target fuses them; ranges are unknown until `calibrate`.

    Args:
        model: any module; it is not changed.
        example_inputs: what it is called with, to trace it.
        spec: target and rules; None = `QuantSpec()`. What it says of smoothing, AdaRound and bias correction needs
            images and is done by `quantize`, or by `improve` after `calibrate`.

    Returns:
        A plain GraphModule in evaluation mode; `.placement` holds the table of decisions.

    Raises:
        ModelError: the model cannot be traced.
        QuantizationError: nothing can be quantized, a rule matches nothing, the model is quantized already or is not
            in float32.
    """
    spec = spec or QuantSpec()
    check_quant_spec(spec)
    check_float_model(model)
    graph_module = canonical_graph(model, example_inputs, fold=False)
    prepared = prepare_float(graph_module, spec)
    placement = place(graph_module, spec)
    if spec.bias_correction:
        ensure_biases(graph_module, [site.path for site in placement.weights])
    apply_placement(graph_module, placement)
    preserve(graph_module, "prepared", prepared)
    return graph_module


def apply_placement(graph_module: fx.GraphModule, placement: Placement) -> None:
    """Insert what `placement` says into the graph it was made for; in place."""
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
    preserve(graph_module, "placement", placement)


def _insert_site(graph: fx.Graph, site: ActivationSite, nodes: dict[str, fx.Node]) -> None:
    readers: dict[str, list[str]] = {}
    for tensor, reader in site.edges:
        readers.setdefault(tensor, []).append(reader)
    for tensor, names in readers.items():
        source = nodes[tensor]
        with graph.inserting_after(source):
            quantizer = graph.call_module(site.name, (source,))
        quantizer.meta.update(shape=source.meta.get("shape"), dtype=source.meta.get("dtype"))
        for name in names:
            nodes[name].replace_input_with(source, quantizer)


def quantizers(qmodel: nn.Module) -> Iterator[tuple[str, Quantizer]]:
    """All quantizers of a model by path, those of weights included."""
    for name, module in qmodel.named_modules():
        if isinstance(module, Quantizer):
            yield name, module


def placement_of(qmodel: nn.Module) -> Placement:
    """The table of decisions of a quantized model.

    Raises:
        QuantizationError: the model is not one that `quantize` or `insert_quantizers` made.
    """
    placement = getattr(qmodel, "placement", None)
    if not isinstance(placement, Placement):
        raise QuantizationError(
            f"{type(qmodel).__name__} holds no placement: it is not a model that compress quantized; call "
            "compress.quantize or compress.insert_quantizers first"
        )
    return placement
