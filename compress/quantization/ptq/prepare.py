"""Changes to the float graph before quantizers are inserted: folding, ReLU6 to ReLU, equalization.

They follow from the weights and the recipe alone, so that a graph built to load a saved state has the same modules.
"""

from __future__ import annotations

import copy

from torch import fx, nn

from compress.graph.canonical import canonical_graph
from compress.graph.compare import Reference
from compress.graph.fold import fold_batchnorm
from compress.graph.inputs import Inputs
from compress.quantization.ptq.equalize import equalize, replace_relu6
from compress.quantization.ptq.moments import batchnorm_moments
from compress.quantization.report import Prepared
from compress.quantization.spec import QuantSpec


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
    equalization = equalize(graph_module) if spec.equalize else None
    for path, factor in (equalization.divided if equalization else {}).items():
        if path in moments:
            mean, deviation = moments[path]
            moments[path] = (mean / factor, deviation / factor)
    reference.check(graph_module, "equalization" if spec.equalize else "folding BatchNorm")
    return graph_module, Prepared(relu6=replaced, equalization=equalization, moments=moments)
