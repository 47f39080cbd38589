"""Rooflines: bounds on the time of each layer, from its macs and bytes and from measured or specified peaks."""

from compress.roofline_model.counting import Operation, Workload, convolution, workload
from compress.roofline_model.devices import DEVICE_NAMES, PRECISIONS, TABLE, Device
from compress.roofline_model.measure import (
    Ceiling,
    Ceilings,
    Sample,
    ceilings_path,
    load_ceilings,
    measure_ceilings,
)
from compress.roofline_model.model import (
    Roofline,
    Row,
    SparseBound,
    SparseLayer,
    WhatIf,
    find_device,
    roofline,
    roofline_of,
    sparse_bound,
    what_if,
)
from compress.roofline_model.tables import ceilings_text, devices_text, rows_text, summary_text, what_if_text

__all__ = [
    "DEVICE_NAMES",
    "PRECISIONS",
    "TABLE",
    "Ceiling",
    "Ceilings",
    "Device",
    "Operation",
    "Roofline",
    "Row",
    "Sample",
    "SparseBound",
    "SparseLayer",
    "WhatIf",
    "Workload",
    "ceilings_path",
    "ceilings_text",
    "convolution",
    "devices_text",
    "find_device",
    "load_ceilings",
    "measure_ceilings",
    "roofline",
    "roofline_of",
    "rows_text",
    "sparse_bound",
    "summary_text",
    "what_if",
    "what_if_text",
    "workload",
]
