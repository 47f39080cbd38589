"""The files of a run folder as types."""

from compress.records.files import RunData, read_run
from compress.records.rows import Breakdown, BuiltRow, EngineRow, Histogram, LayerRow, OperationRow
from compress.records.summary import (
    SUMMARY_COLUMNS,
    SummaryRow,
    summary_columns,
    summary_notes,
    summary_table,
    unavailable_engines,
)

__all__ = [
    "SUMMARY_COLUMNS",
    "Breakdown",
    "BuiltRow",
    "EngineRow",
    "Histogram",
    "LayerRow",
    "OperationRow",
    "RunData",
    "SummaryRow",
    "read_run",
    "summary_columns",
    "summary_notes",
    "summary_table",
    "unavailable_engines",
]
