"""Receptive fields: theoretical and effective."""

from compress.receptive.compression import (
    ErfDrift,
    UnproductiveLayer,
    UnproductiveLayers,
    erf_drift,
    unproductive_layers,
)
from compress.receptive.effective import (
    EffectiveReceptiveField,
    ErfOptions,
    effective_receptive_field,
    effective_receptive_fields,
    mean_field,
)
from compress.receptive.metrics import ErfMetrics, GaussianFit
from compress.receptive.table import ReceptiveField, ReceptiveFieldTable
from compress.receptive.theoretical import receptive_field

__all__ = [
    "EffectiveReceptiveField",
    "ErfDrift",
    "ErfMetrics",
    "ErfOptions",
    "GaussianFit",
    "ReceptiveField",
    "ReceptiveFieldTable",
    "UnproductiveLayer",
    "UnproductiveLayers",
    "effective_receptive_field",
    "effective_receptive_fields",
    "erf_drift",
    "mean_field",
    "receptive_field",
    "unproductive_layers",
]
