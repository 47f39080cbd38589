"""Receptive fields: pixels on which a unit depends (theoretical), and how strongly it depends on each (effective)."""

from compress.receptive_field.compression import (
    ErfDrift,
    UnproductiveLayer,
    UnproductiveLayers,
    erf_drift,
    unproductive_layers,
)
from compress.receptive_field.effective import (
    EffectiveReceptiveField,
    ErfOptions,
    effective_receptive_field,
    effective_receptive_fields,
    mean_field,
)
from compress.receptive_field.metrics import ErfMetrics, GaussianFit
from compress.receptive_field.table import ReceptiveField, ReceptiveFieldTable
from compress.receptive_field.theoretical import receptive_field

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
