"""Rooflines: bounds on the time of each layer, from its macs and bytes and from measured or specified peaks."""

from compress.roofline_model.ceilings import Ceiling, Ceilings, Sample, ceilings_path, load_ceilings
from compress.roofline_model.counting import Operation, Workload, convolution, workload
from compress.roofline_model.device_table import DEVICE_NAMES, TABLE
from compress.roofline_model.devices import PRECISIONS, Device
from compress.roofline_model.measure import measure_ceilings, measure_torch_times
from compress.roofline_model.model import Roofline, Row, find_device, roofline, roofline_of
from compress.roofline_model.sparse import SparseBound, SparseLayer, sparse_bound
from compress.roofline_model.tables import ceilings_text, devices_text, rows_text, summary_text, what_if_text
from compress.roofline_model.what_if import WhatIf, what_if

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
    "measure_torch_times",
    "roofline",
    "roofline_of",
    "rows_text",
    "sparse_bound",
    "summary_text",
    "what_if",
    "what_if_text",
    "workload",
]
