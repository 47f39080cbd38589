"""What is done to the float graph before quantizers stand in it: folding, ReLU6 to ReLU, equalization.

All of it follows from the weights and the recipe alone, so a graph that is made again from the same recipe (to load a
saved state) has the same modules. What needs data, smoothing, is done to the float network before (`improve`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from compress.graph.fold import fold_batchnorm
from compress.quantization.equalize import Equalization, equalize, replace_relu6
from compress.quantization.moments import Moments, batchnorm_moments
from compress.quantization.spec import QuantSpec


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was done to a float graph.

    Attributes:
        relu6: names of the ReLU6 nodes that became ReLU.
        equalization: pairs and factors; None when it was not asked for.
        moments: mean and deviation of each layer's result, where a BatchNorm told them and analytic bias correction
            will read them.
    """

    relu6: tuple[str, ...] = ()
    equalization: Equalization | None = None
    moments: dict[str, Moments] = field(default_factory=dict)


def prepare_float(graph_module: fx.GraphModule, spec: QuantSpec) -> Prepared:
    """Fold, replace and equalize as `spec` says; in place.

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
