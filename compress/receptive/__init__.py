"""Receptive fields: theoretical and effective."""

from compress.receptive.effective import (
    EffectiveReceptiveField,
    ErfDrift,
    ErfMetrics,
    ErfOptions,
    GaussianFit,
    UnproductiveLayer,
    UnproductiveLayers,
    effective_receptive_field,
    effective_receptive_fields,
    erf_drift,
    unproductive_layers,
)
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
    "receptive_field",
    "unproductive_layers",
]
