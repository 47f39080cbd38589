"""Rooflines: bounds on the time of each layer, from its macs and bytes and from measured or specified peaks."""

from compress.roofline.ceilings import Ceiling, Ceilings, Sample, ceilings_path, load_ceilings
from compress.roofline.counting import Operation, Workload, convolution, workload
from compress.roofline.device_table import DEVICE_NAMES, TABLE
from compress.roofline.devices import PRECISIONS, Device
from compress.roofline.measure import measure_ceilings
from compress.roofline.model import Roofline, Row, find_device, roofline, roofline_of
from compress.roofline.sparse import SparseBound, SparseLayer, sparse_bound
from compress.roofline.tables import ceilings_text, devices_text, rows_text, summary_text, what_if_text
from compress.roofline.timing import measure_torch_times
from compress.roofline.what_if import WhatIf, what_if

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
