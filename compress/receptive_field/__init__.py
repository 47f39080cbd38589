"""Receptive fields: what a unit of a network can see of the image (theoretical), and what it does see (effective)."""

from compress.receptive_field.table import ReceptiveField, ReceptiveFieldTable
from compress.receptive_field.theoretical import receptive_field

__all__ = ["ReceptiveField", "ReceptiveFieldTable", "receptive_field"]
