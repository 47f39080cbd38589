"""Changes to the float graph before quantizers are inserted: folding, ReLU6 to ReLU, equalization.

They follow from the weights and the recipe alone, so that a graph that is built from the same recipe to load a saved
state has the same modules. Smoothing, which needs data, changes the float network before that (`improve`).
"""

from __future__ import annotations

from torch import fx

from compress.graph.fold import fold_batchnorm
from compress.quantization.ptq.equalize import equalize, replace_relu6
from compress.quantization.ptq.moments import batchnorm_moments
from compress.quantization.report import Prepared
from compress.quantization.spec import QuantSpec


def prepare_float(graph_module: fx.GraphModule, spec: QuantSpec) -> Prepared:
    """Fold, replace and equalize as `spec` asks; in place.

    Raises:
        QuantizationError: equalization was asked for and no two layers can trade scale.
    """
    moments = batchnorm_moments(graph_module) if spec.bias_correction == "analytic" else {}
    if spec.batchnorm == "fold":
        fold_batchnorm(graph_module)
    replaced = replace_relu6(graph_module) if spec.relu6 == "relu" else ()
    equalization = equalize(graph_module) if spec.equalize else None
    for path, factor in (equalization.divided if equalization else {}).items():
        if path in moments:
            mean, deviation = moments[path]
            moments[path] = (mean / factor, deviation / factor)
    return Prepared(relu6=replaced, equalization=equalization, moments=moments)
