"""Receptive fields: theoretical and effective."""

from compress.receptive.effective import (
    EffectiveReceptiveField,
    ErfDrift,
    ErfOptions,
    UnproductiveLayer,
    UnproductiveLayers,
    effective_receptive_field,
    effective_receptive_fields,
    erf_drift,
    mean_field,
    unproductive_layers,
)
from compress.receptive.metrics import ErfMetrics, GaussianFit
from compress.receptive.theoretical import ReceptiveField, ReceptiveFieldTable, receptive_field

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
